"""torchtitan's own training program with our converter, on the CPU; see `support.titan_trainer`."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.limits import HANGS

pytest.importorskip("torchtitan")
PROGRAM = Path(__file__).parents[1] / "support" / "titan_trainer.py"


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A tokenizer and documents of random words."""
    words = [f"w{index}" for index in range(500)]
    vocabulary = {word: index for index, word in enumerate(["<unknown>", "<eos>", *words])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"},
    }
    folder = tmp_path / "assets"
    (folder / "data").mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    choice = random.Random(0)
    texts = (" ".join(choice.choices(words, k=100)) for _ in range(64))
    (folder / "data" / "texts.json").write_text("\n".join(json.dumps({"text": x}) for x in texts))
    return folder


def losses(assets: Path, out: Path, config: str, *flags: object) -> list[float]:
    """Return those of all steps of a run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = [sys.executable, PROGRAM, assets, "--module", "titan_trainer", "--config", config]
    own = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "OMP_NUM_THREADS": 1}
    own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    done = subprocess.run(
        [*map(str, (*program, "--dump_folder", out, *flags))],
        env=os.environ | {name: str(value) for name, value in own.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return [float(loss) for loss in re.findall(r"loss: +([0-9.]+)", done.stdout)]


def state(out: Path, step: int, tmp_path: Path) -> dict[str, Tensor]:
    dcp_to_torch_save(out / "checkpoint" / f"step-{step}", tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=False)
    return {name: x for name, x in saved.items() if isinstance(x, Tensor)}


def test_a_run_is_resumed_bit_by_bit(assets: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    first = losses(assets, whole, "delayed", "--training.steps", 4)
    assert len(first) == 4
    shutil.copytree(whole / "checkpoint" / "step-2", rest / "checkpoint" / "step-2")
    assert losses(assets, rest, "delayed", "--training.steps", 4) == first[2:]
    wanted, got = state(whole, 4, tmp_path), state(rest, 4, tmp_path)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(x, got[name]) for name, x in wanted.items())
    histories = [x for name, x in wanted.items() if "fp8_amax_history" in name]
    assert len(histories) == 60
    assert all((x > 0).sum() == 4 for x in histories)


def test_experts_train(assets: Path, tmp_path: Path) -> None:
    """As in high precision, their load balanced, and saved under their own names."""
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    wanted = losses(assets, plain, "plain_experts", "--training.steps", 4)
    got = losses(assets, ours, "experts", "--training.steps", 4)
    assert got == pytest.approx(wanted, abs=0.01)
    assert got != wanted
    saved = state(ours, 4, tmp_path)
    assert saved.keys() == state(plain, 4, tmp_path).keys()
    assert saved["layers.1.moe.expert_bias_E"].any()
