"""The variants of a model that are held against each other: bf16, our recipes, peers' recipes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from float8.config import Float8GemmConfig, Float8LinearConfig
from float8.convert import all_linears, convert_to_float8_training
from float8.weight_cache import cached_weights
from float8_lab.bench.peers import find_peer, peer_version

HIGH_PRECISION = "bf16"
_FAST_ACCUM = "fast_accum"
EAGER, COMPILED = "eager", "compiled"
MODES = {"eager": (EAGER,), "compiled": (COMPILED,), "both": (EAGER, COMPILED)}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Attributes:
        recipe: What its linear layers do, as in `bf16`, `tensorwise`, `torchao tensorwise`.
        mode: `eager` or `compiled`.
        convert: Swaps the linear layers of a model; returns the model.
        around: Makes the context that every forward runs in.
        config: How the layers run, if it is this library.
        cached: Whether all microbatches of a step share one cast of each weight.
    """

    recipe: str
    mode: str
    convert: Callable[[nn.Module], nn.Module]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    config: Float8LinearConfig | None = None
    cached: bool = False

    @property
    def name(self) -> str:
        """Recipe and mode."""
        return f"{self.recipe}, {self.mode}"

    @property
    def ours(self) -> bool:
        """Whether it is this library."""
        return self.config is not None

    @property
    def is_reference(self) -> bool:
        """Whether it is high precision, which the others are checked and held against."""
        return self.recipe == HIGH_PRECISION

    def caching(self, model: nn.Module) -> AbstractContextManager[None]:
        """The context that all microbatches of a step of `model` run in."""
        return cached_weights(model) if self.cached else contextlib.nullcontext()

    def compile(self, module: nn.Module) -> None:
        """Compile `module` in place, if this variant is compiled.

        Without graph breaks where the code is ours: they would go unnoticed in a time.
        """
        if self.mode == COMPILED:
            # Compiled by its own method, which keeps the module's type and names.
            module.compile(fullgraph=self.ours or self.is_reference, dynamic=False)


def make_variants(
    recipes: Sequence[str], modes: Sequence[str], peers: Sequence[str], *, cached: bool = False
) -> list[Variant]:
    """High precision, each recipe and each installed peer's, in every mode that they run in.

    Args:
        recipes: Of this library, as for `recipe_config`; peers take those nearest to them.
        modes: `eager`, `compiled` or both.
        peers: Names of other libraries; those not installed are left out.
        cached: Whether each recipe runs once more, with cached weights.

    Raises:
        ValueError: No recipe, no switch or no peer has such a name.
    """
    configs = {recipe: recipe_config(recipe) for recipe in recipes}
    installed = [peer for peer in peers if peer_version(peer) is not None]
    variants = []
    for mode in modes:
        variants.append(Variant(HIGH_PRECISION, mode, _unchanged))
        for recipe, config in configs.items():
            variant = Variant(recipe, mode, converter(config), config=config)
            variants.append(variant)
            if cached:
                name = f"{recipe}, cached weights"
                variants.append(dataclasses.replace(variant, recipe=name, cached=True))
        for name in installed:
            for recipe in dict.fromkeys(recipe.split("+")[0] for recipe in recipes):
                peer = find_peer(name, recipe)
                if peer is not None and (peer.compiles or mode == EAGER):
                    variants.append(Variant(peer.name, mode, peer.convert, peer.around))
    return variants


def many_compilations() -> AbstractContextManager[Any]:
    """Room for all variants: past the limit, `torch.compile` would fall back to eager mode."""
    patch: AbstractContextManager[Any] = torch._dynamo.config.patch(recompile_limit=256)
    return patch


def _unchanged(model: nn.Module) -> nn.Module:
    return model


def recipe_config(recipe: str) -> Float8LinearConfig:
    """The configuration of a recipe with switches, as in `delayed+fast_accum`.

    Args:
        recipe: A recipe's name, and after it, each behind a `+`, bool fields of
            `Float8LinearConfig` that are set (all but that of the gather), or `fast_accum` for all
            three GEMMs.

    Raises:
        ValueError: No recipe or switch has such a name, or they exclude each other.
    """
    name, *switches = recipe.split("+")
    config = Float8LinearConfig.from_recipe_name(name)
    off = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) is False]
    off.remove("enable_fsdp_float8_all_gather")  # `bench fsdp` has a variant of its own for it
    fields: dict[str, Any] = {}
    for switch in switches:
        if switch == _FAST_ACCUM:
            fast = Float8GemmConfig(use_fast_accum=True)
            fields |= {f"gemm_config_{gemm}": fast for gemm in config.float8_gemms}
        elif switch in off:
            fields[switch] = True
        else:
            raise ValueError(
                f"recipe: got {recipe!r} with the switch {switch!r}, expected one of "
                f"{', '.join([*off, _FAST_ACCUM])}"
            )
    return dataclasses.replace(config, **fields)


def converter(config: Float8LinearConfig) -> Callable[[nn.Module], nn.Module]:
    """What converts all linear layers of a model."""

    def convert(model: nn.Module) -> nn.Module:
        return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)

    return convert
