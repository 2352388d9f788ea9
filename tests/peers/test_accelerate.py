"""Accelerate prepares a model before or after its conversion, and saves and loads its state."""

import importlib
from pathlib import Path

import pytest

from sqnr import same_bits
from support.fresh import in_fresh_process

pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")
accelerated = importlib.import_module("support.accelerated")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_order_of_prepare_and_conversion_changes_no_bit(precision: str, tmp_path: Path) -> None:
    first, second = (
        accelerated.run(tmp_path / order, order, range(4), precision=precision)
        for order in ("before", "after")
    )
    assert first.keys() == second.keys()
    assert all(same_bits(x, second[name]) for name, x in first.items())
    histories = [x for name, x in first.items() if "history" in name]
    assert len(histories) == 18
    assert all((x > 0).sum() == 4 for x in histories)  # one of each step, not microbatch
    saved = safetensors.load_file(tmp_path / "before" / "model.safetensors")
    assert saved.keys() == first.keys()


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_run_is_resumed_bit_by_bit_in_a_fresh_process(order: str, tmp_path: Path) -> None:
    whole = accelerated.run(tmp_path, order, range(4))
    rest = in_fresh_process(accelerated.run, tmp_path, order, range(2, 4), 1)
    assert all(same_bits(x, rest[name]) for name, x in whole.items())
