"""`benchmarks/plain.py`: models that only call `convert_to_float8_training`."""

import sys
from pathlib import Path

import pytest
import torch

from float8 import Float8Linear, conversion_report
from support.scripts import load_script


def test_plain_models_are_compared_as_users_convert_them() -> None:
    script = load_script("plain")
    size, device = script.SHAPES["tiny"], torch.device("cpu")
    variants = [("bf16", "eager"), ("tensorwise", "eager"), ("tensorwise@fused", "eager")]
    shape = (size.batch, size.seq, size.dim)
    rows = script.compared(
        "tiny", lambda: script.plain_llama(size, device), shape, variants, device, 1, True
    )
    assert [(row["what"], row["recipe"], row["mode"]) for row in rows] == [
        ("tiny", "bf16", "eager"),
        ("tiny", "tensorwise", "eager"),
        ("tiny", "tensorwise@fused", "eager"),
    ]
    assert [row["sqnr_db"] is None for row in rows] == [True, False, False]
    assert rows[1]["speedup"] == rows[0]["ms"] / rows[1]["ms"]
    for recipe in ("tensorwise", "tensorwise@fused"):
        variant = script.plain_variant(recipe, "eager", True)
        converted = script.plain_step(
            variant, lambda: script.plain_llama(size, device), shape, device
        ).model
        assert sum(isinstance(module, Float8Linear) for module in converted.modules()) == 7 * 2
        fused = [each.reason for each in conversion_report(converted).fused]
        assert fused == ([None] * 2 if recipe.endswith("@fused") else [])


def test_a_tiny_stack_is_not_called_one_of_8b(monkeypatch: pytest.MonkeyPatch) -> None:
    script, titles = load_script("plain"), []
    monkeypatch.setattr(script, "compared", lambda title, *_, **__: titles.append(title) or [])
    monkeypatch.setattr(sys, "argv", ["plain.py", "--what", "stack,70b,small", "--tiny"])
    script.main()
    assert titles == ["tiny stack", "tiny stack", "tiny, every layer"]


def test_an_unknown_benchmark_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load_script("plain")
    monkeypatch.setattr(sys, "argv", ["plain.py", "--what", "fast"])
    with pytest.raises(SystemExit, match="--what: got 'fast', expected some of stack"):
        script.main()
