"""Other libraries to be measured beside ours, where they are installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

_MODULES = {"torchao": "torchao", "te": "transformer_engine"}
_TE_RECIPES = {"tensorwise": "Float8CurrentScaling", "delayed": "DelayedScaling"}


@dataclass(frozen=True)
class Peer:
    """Another library's way to run the linear layers of a model in float8.

    Attributes:
        name: For tables, as in `torchao tensorwise`.
        convert: Swaps the linear layers of a model; returns the model.
        around: Makes the context that every forward runs in.
        compiles: Whether it is meant to be run under `torch.compile`.
    """

    name: str
    convert: Callable[[nn.Module], nn.Module]
    around: Callable[[], AbstractContextManager[Any]]
    compiles: bool


def peer_version(peer: str) -> str | None:
    """Version of an installed peer, `"torchao"` or `"te"`; None if it is not installed.

    Raises:
        ValueError: No peer has this name.
    """
    if peer not in _MODULES:
        raise ValueError(f"peer: got {peer!r}, expected one of {', '.join(_MODULES)}")
    if importlib.util.find_spec(_MODULES[peer]) is None:
        return None
    return importlib.metadata.version(_MODULES[peer])


def find_peer(peer: str, recipe: str) -> Peer | None:
    """An installed peer with the recipe nearest to ours; None if it has none such."""
    return _torchao(recipe) if peer == "torchao" else _transformer_engine(recipe)


# Imported inside functions: these packages need not be there.


def _torchao(recipe: str) -> Peer | None:
    torchao = importlib.import_module("torchao.float8")
    try:
        config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    except (ValueError, AssertionError):  # it asserts that the name is one of its own
        return None

    def convert(model: nn.Module) -> nn.Module:
        converted: nn.Module = torchao.convert_to_float8_training(model, config=config)
        return converted

    return Peer(f"torchao {recipe}", convert, contextlib.nullcontext, compiles=True)


def torchao_float8_gather() -> tuple[Peer, Callable[[nn.Module], None]]:
    """Installed torchao, tensorwise, with its float8 all-gather.

    Returns:
        The peer; and what it wants called after each optimizer step.
    """
    torchao = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)

    def convert(model: nn.Module) -> nn.Module:
        converted: nn.Module = torchao.convert_to_float8_training(model, config=config)
        return converted

    peer = Peer("torchao tensorwise", convert, contextlib.nullcontext, compiles=True)
    return peer, torchao.precompute_float8_dynamic_scale_for_fsdp


def _transformer_engine(recipe: str) -> Peer | None:
    if recipe not in _TE_RECIPES:
        return None
    te = importlib.import_module("transformer_engine.pytorch")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    scaling = getattr(recipes, _TE_RECIPES[recipe])()

    def around() -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any]
        if hasattr(te, "autocast"):  # the name since TransformerEngine 2.8
            context = te.autocast(enabled=True, recipe=scaling)
        else:
            context = te.fp8_autocast(enabled=True, fp8_recipe=scaling)
        return context

    def swap(linear: nn.Linear) -> nn.Module:
        new: nn.Module = te.Linear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        new.load_state_dict(linear.state_dict(), strict=False)
        return new

    def convert(model: nn.Module) -> nn.Module:
        if isinstance(model, nn.Linear):
            return swap(model)
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.Linear):
                    setattr(parent, name, swap(child))
        return model

    return Peer(f"te {recipe}", convert, around, compiles=False)
