"""The trainer where it is meant to be used: compiled, in bfloat16, on a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from float8_lab.device import BF16_PEAK
from float8_lab.models.presets import preset
from float8_lab.trainer.compare import SLOW, compare
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import read_metrics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True])
def test_recipes_agree_with_high_precision(
    make_config: Callable[..., TrainConfig], compiled: bool
) -> None:
    config = make_config(
        device="cuda", compile=compiled, steps=60, accumulate=2, eval_interval=30, log_interval=20
    )
    assert config.dtype == "bfloat16"
    rows = compare(config, ["tensorwise", "delayed"])
    assert [row["status"] for row in rows] == ["finished"] * 3, rows
    for row in rows:
        losses = [r.loss for r in read_metrics(Path(config.output) / row["metrics"]).train]
        assert losses[-1] < losses[0] - 1.5
        assert abs(row["val_gap_percent"]) < 5
        assert row["peak_memory_bytes"]
        assert row["tokens_per_s"]
        last = read_metrics(Path(config.output) / row["metrics"]).train[-1]
        flops = 1e12 * (last.tflops_per_gpu or 0) * last.seconds
        expected = preset(config.model).model.flops_per_token(config.seq_len)
        assert flops == pytest.approx(last.tokens * expected)
        assert (last.mfu is None) == (torch.cuda.get_device_name() not in BF16_PEAK)
    assert SLOW not in (Path(config.output) / "report.md").read_text()
