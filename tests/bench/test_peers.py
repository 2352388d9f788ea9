"""Other libraries, here played by modules of our own."""

import contextlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from float8_lab.bench.variants import find_peer, make_variants, peer_version


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao and TransformerEngine are installed."""
    torchao = ModuleType("torchao.float8")
    torchao.Float8LinearConfig = SimpleNamespace(from_recipe_name=known_recipe)
    torchao.convert_to_float8_training = lambda model, config: model
    te = ModuleType("transformer_engine.pytorch")
    te.Linear = TeLinear
    te.autocast = lambda enabled, recipe: contextlib.nullcontext()
    recipes = ModuleType("transformer_engine.common.recipe")
    recipes.Float8CurrentScaling = recipes.DelayedScaling = object
    for module in (torchao, te, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("torchao", "transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.0 of {name}")


def known_recipe(name: str) -> object:
    if name != "tensorwise":
        raise ValueError(name)
    return object()


class TeLinear(nn.Linear):
    def __init__(self, in_features, out_features, *, bias, params_dtype, device) -> None:
        super().__init__(in_features, out_features, bias, device, params_dtype)


@pytest.mark.usefixtures("peers")
def test_installed_peers_become_variants() -> None:
    assert peer_version("te") == "1.0 of transformer_engine"
    modes = ["eager", "compiled"]
    names = [v.name for v in make_variants(["tensorwise", "delayed"], modes, ["torchao", "te"])]
    assert names == [
        "bf16, eager",
        "tensorwise, eager",
        "delayed, eager",
        "torchao tensorwise, eager",  # it has no delayed scaling
        "te tensorwise, eager",
        "te delayed, eager",
        "bf16, compiled",
        "tensorwise, compiled",
        "delayed, compiled",
        "torchao tensorwise, compiled",  # TransformerEngine is not meant to be compiled
    ]


@pytest.mark.usefixtures("peers")
def test_transformer_engine_layers_take_over_the_weights() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 2, bias=False)))
    x = torch.randn(3, 8)
    expected = model(x)
    peer = find_peer("te", "delayed", "eager")
    assert peer is not None
    converted = peer.convert(model)
    assert [type(m) for m in converted.modules() if isinstance(m, nn.Linear)] == [TeLinear] * 2
    with peer.around():
        assert torch.equal(converted(x), expected)


def test_missing_peers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peer_version("torchao") is None
    variants = make_variants(["tensorwise"], ["eager"], ["torchao", "te"])
    assert [variant.recipe for variant in variants] == ["bf16", "tensorwise"]


def test_unknown_peers_are_refused() -> None:
    with pytest.raises(ValueError, match="peer: got 'apex', expected one of torchao, te"):
        peer_version("apex")
