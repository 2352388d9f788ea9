"""The variants of a model that are held against each other: bf16, our recipes, torchao's."""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from float8.config import Float8LinearConfig, Float8Weights
from float8.convert.choice import DEFAULT_TOKENS, all_linears, reason_by_name
from float8.convert.convert import convert_to_float8_training
from float8.fsdp.weights import precompute_float8_dynamic_scale_for_fsdp
from float8.step import attach_to_optimizer
from float8_lab.trainer.recipes import recipe_config

HIGH_PRECISION = "bf16"
EAGER, COMPILED, GRAPHED = "eager", "compiled", "graphed"  # the last is replayed: CUDA graphs
MODES: dict[str, tuple[str, ...]] = {mode: (mode,) for mode in (EAGER, COMPILED, GRAPHED)}
MODES |= {"both": (EAGER, COMPILED), "all": (EAGER, COMPILED, GRAPHED)}
FILTERED = "torchao+auto_filter"
# Other libraries, measured where they are installed; torchao with a filter of its own, too.
PEERS = ("torchao", FILTERED)


@dataclass(frozen=True)
class Variant:
    """One way to run a model."""

    recipe: str  # what its linear layers do, as in `bf16`, `tensorwise`, `torchao tensorwise`
    mode: str  # `eager`, `compiled` or `graphed`
    convert: Callable[[nn.Module], nn.Module] = lambda model: model  # swaps the linear layers
    config: Float8LinearConfig | None = None  # how the layers run, if it is this library
    sharded: bool = False  # FSDP2 gathers its weights, in float8 where there are such layers
    checkpointing: str = ""  # of `step.CHECKPOINTING`; "": blocks are not checkpointed
    attach: Callable[[nn.Module, torch.optim.Optimizer], object] = attach_to_optimizer
    cast_shards: Callable[[nn.Module], object] = precompute_float8_dynamic_scale_for_fsdp

    @property
    def columns(self) -> dict[str, Any]:
        """Return columns of a row that tell it from others."""
        return {n: getattr(self, n) or None for n in ("recipe", "mode", "checkpointing")}

    @property
    def name(self) -> str:
        """The same in words."""
        return ", ".join(filter(None, self.columns.values()))

    @property
    def ours(self) -> bool:
        """Return whether it is this library."""
        return self.config is not None

    @property
    def has_state(self) -> bool:
        """Return whether something is due after a step; under dynamic scaling nothing is."""
        held = self.config and self.config.float8_weights is Float8Weights.HELD
        return bool(self.config and (self.config.delayed_sites or held))

    @property
    def is_reference(self) -> bool:
        """Return whether it is high precision, which the others are held against."""
        return self.recipe == HIGH_PRECISION


def make_variants(
    recipes: Sequence[str],
    modes: Sequence[str],
    peers: Sequence[str] = (),
    *,
    sharded: bool = False,
    all_layers: bool = True,
    tokens: int = DEFAULT_TOKENS,
    checkpointing: Sequence[str] = ("",),
) -> list[Variant]:
    """Return high precision, each recipe and each installed peer's, in every mode.

    Args:
        recipes: as for `recipe_config`, also with `+head`; peers take those nearest to them.
        modes: of `MODES`.
        peers: of `PEERS`.
        sharded: whether FSDP2 gathers weights, in float8 where it can; peers only tensorwise.
        all_layers: else `convert_to_float8_training` chooses, and peers leave the head.
        tokens: of a forward, for which it chooses.
        checkpointing: how blocks are checkpointed: all variants once for each.
    """
    nearest = ["tensorwise"] if sharded else list(dict.fromkeys(r.split("+")[0] for r in recipes))
    installed = [peer for peer in peers if peer_version(peer) is not None]
    variants: list[Variant] = []
    for mode in modes:
        found: list[Variant | None] = [Variant(HIGH_PRECISION, mode, sharded=sharded)]
        found += [_ours(r, mode, sharded, all_layers, tokens) for r in recipes]
        found += [_torchao(p, r, mode, sharded, all_layers) for p in installed for r in nearest]
        for how in checkpointing:
            variants += [replace(each, checkpointing=how) for each in found if each is not None]
    return variants


def _ours(recipe: str, mode: str, sharded: bool, all_layers: bool, tokens: int) -> Variant:
    switches = [switch for switch in recipe.split("+") if switch != "head"]
    config = replace(recipe_config("+".join(switches)), enable_fsdp_float8_all_gather=sharded)
    by_times = {"tokens_per_step": tokens, "cuda_graphs": mode == GRAPHED}
    chosen: Any = {"module_filter_fn": all_linears} if all_layers else by_times
    chosen |= {"config": config, "head": "head" in recipe.split("+")}
    convert = functools.partial(convert_to_float8_training, **chosen)
    return Variant(recipe, mode, convert, config=config, sharded=sharded)


def peer_version(peer: str) -> str | None:
    """Return the version of an installed peer; None if it is not installed."""
    if peer not in PEERS:
        raise ValueError(f"peers: got {peer!r}, expected {' or '.join(PEERS)}")
    package, _, _ = peer.partition("+")
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else None


def _torchao(peer: str, recipe: str, mode: str, sharded: bool, all_layers: bool) -> Variant | None:
    """Return torchao's recipe of that name; None if it has none such, or no filter for it."""
    torchao = importlib.import_module("torchao.float8")  # need not be there
    try:
        if sharded:
            config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        else:
            config = torchao.Float8LinearConfig.from_recipe_name(recipe)
        gains = torchao._auto_filter_for_recipe(recipe, []) if peer == FILTERED else all_linears
    except (ValueError, AssertionError, NotImplementedError):  # it asserts that it knows the name
        return None

    def cast_shards(model: nn.Module) -> None:
        if sharded:
            torchao.precompute_float8_dynamic_scale_for_fsdp(model)

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        return optimizer.register_step_post_hook(lambda *_: cast_shards(model))

    def takes(module: nn.Module, name: str) -> bool:
        return gains(module, name) and (all_layers or reason_by_name(name) is None)

    chosen = {"config": config, "module_filter_fn": takes}
    convert = functools.partial(torchao.convert_to_float8_training, **chosen)
    hooks: Any = {"attach": attach, "cast_shards": cast_shards}
    return Variant(f"{peer} {recipe}", mode, convert, sharded=sharded, **hooks)
