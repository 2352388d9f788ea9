"""Another library, here played by modules of our own."""

import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from float8_lab.bench.variants import make_variants, peer_version


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """torchao is installed; which layers its conversion takes."""
    taken: list[tuple[str, bool]] = []

    class Config:
        def __init__(self, enable_fsdp_float8_all_gather: bool) -> None: ...

        @staticmethod
        def from_recipe_name(name: str) -> object:
            if name != "tensorwise":
                raise ValueError(name)
            return object()

    def convert(model: nn.Module, config: object, module_filter_fn) -> nn.Module:
        taken.extend((name, module_filter_fn(model, name)) for name in ("w1", "lm_head"))
        return model

    torchao = ModuleType("torchao.float8")
    torchao.Float8LinearConfig = Config
    torchao.convert_to_float8_training = convert
    torchao.precompute_float8_dynamic_scale_for_fsdp = lambda model: taken.append((model, True))
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.0 of {name}")
    return taken


def test_an_installed_peer_becomes_variants(asked: list[tuple[str, bool]]) -> None:
    assert peer_version("torchao") == "1.0 of torchao"
    recipes = ["tensorwise", "tensorwise+held", "delayed"]
    variants = make_variants(recipes, ["eager", "compiled"], ["torchao"], keep=["nothing"])
    assert [variant.name for variant in variants] == [
        f"{recipe}, {mode}, nothing kept"
        for mode in ("eager", "compiled")
        for recipe in ("bf16", *recipes, "torchao tensorwise")  # it has no delayed scaling
    ]
    variants[-1].convert(nn.Linear(2, 2))
    assert asked == [("w1", True), ("lm_head", True)]
    make_variants(recipes, ["eager"], ["torchao"], all_layers=False)[-1].convert(nn.Linear(2, 2))
    assert asked[2:] == [("w1", True), ("lm_head", False)]  # as ours


def test_each_gather_is_a_variant_and_torchao_has_its_own(asked: list[tuple[str, bool]]) -> None:
    variants = make_variants(["tensorwise", "delayed"], ["compiled"], ["torchao"], sharded=True)
    assert [variant.name for variant in variants] == [
        "bf16, compiled, bf16 gather",
        "tensorwise, compiled, bf16 gather",
        "tensorwise, compiled, float8 gather",
        "delayed, compiled, bf16 gather",
        "delayed, compiled, float8 gather",
        "torchao tensorwise, compiled, float8 gather",
    ]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    variants[-1].attach(model, optimizer)
    optimizer.step()
    assert asked == [(model, True)]


def test_missing_and_unknown_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    variants = make_variants(["tensorwise"], ["eager"], ["torchao"])
    assert [variant.recipe for variant in variants] == ["bf16", "tensorwise"]
    with pytest.raises(ValueError, match="peers: got 'apex', expected torchao"):
        peer_version("apex")
