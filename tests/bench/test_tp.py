"""Blocks under tensor parallel as `float8 bench tp` measures them, on two CPU ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from float8.convert.measure import WrongResultError
from float8_lab.bench import tp
from float8_lab.bench.block import StackSize
from float8_lab.bench.tp import check_scales, require_shares
from float8_lab.errors import ConfigError
from float8_lab.models.presets import preset
from support.limits import HANGS


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    words = ["--model", "tiny", "--seq-len", "64", "--mode", "eager", "--ranks", "2"]
    words += ["--device", "cpu", "--rounds", "1", "--recipe", "tensorwise,delayed,rowwise"]
    command = [sys.executable, "-m", "float8_lab.cli.main", "bench", "tp", *words, "-o", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "1 tiny block(s), 1 x 64 tokens, tensor and sequence parallel on 2 ranks" in out
    rows = {row["recipe"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["bf16", "tensorwise", "delayed", "rowwise"]
    tokens = 64 * preset("tiny").model.dim  # elements that are gathered, in 4 places
    for recipe, row in rows.items():
        size = 2 if recipe == "bf16" else 1
        scales = 4 * 64 * 4 if recipe == "rowwise" else 0  # of rows
        assert row["traffic"]["gathered"] == 4 * size * tokens + scales, recipe
        assert row["traffic"]["reduce_scattered"] == 4 * 2 * tokens
        assert row["tokens_per_s"] == pytest.approx(64 / row["ms"] * 1e3, rel=1e-3)
        assert (row["more_noise_db"] is None) == (recipe == "bf16")
        assert (row["same_scales"] is None) == (recipe in ("bf16", "rowwise"))
    # Of 4 weights and 3 weights at once; and of the sync, or of 11 other tensors.
    assert rows["bf16"]["all_reduces"] == 0
    assert rows["delayed"]["all_reduces"] == 3
    assert rows["tensorwise"]["all_reduces"] == 13


def test_ranks_that_cannot_share_a_block() -> None:
    require_shares(StackSize("tiny", 1, 64), 2)
    for ranks, words in ((1, "at least 2"), (4, "got 4, .*divisor of the 2 key/value heads")):
        with pytest.raises(ConfigError, match=words):
            require_shares(StackSize("tiny", 1, 64), ranks)
    with pytest.raises(ConfigError, match=r"got 2, .*divisor of the 63 tokens"):
        require_shares(StackSize("tiny", 1, 63), 2)


def test_wrong_scales_and_more_noise_end_it(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        one, two = torch.tensor(1.0), torch.tensor(2.0)
        right = [(one, one), (one, two), (two, one), (one, one)]
        assert check_scales("x:", right, right, 2) == 1.0
        other = [(two, one), (one, two), (two, two), (one, one)]
        assert check_scales("x:", right, other, 2) == 0.75
        with pytest.raises(WrongResultError, match=r"scales of weights \[1.0, 1.0\]"):
            check_scales("x:", right, [right[0], (one, one), *right[2:]], 2)
        assert check_scales("x:", [(torch.ones(3), one)], [], 1) is None
        base = {"a": torch.randn(64, 64), "b": torch.ones(64)}
        one = {"a": base["a"] * 1.1, "b": base["b"] * 0.9}
        assert tp.check_noise("x:", base, one, one) == 0.0
        assert 0 < tp.check_noise("x:", base, one, {**one, "a": base["a"] * 1.11}) < 1
        with pytest.raises(WrongResultError, match=r"x: a: SQNR 1.6 dB lower than on one device"):
            tp.check_noise("x:", base, one, {**one, "a": base["a"] * 1.12})
    finally:
        dist.destroy_process_group()
