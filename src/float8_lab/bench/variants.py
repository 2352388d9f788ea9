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
BF16, FLOAT8 = "bf16", "float8"  # in what the weights of a sharded model are gathered
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
    gather: str = ""  # in what weights of a sharded model are gathered, `bf16` or `float8`
    checkpointing: str = ""  # of `step.CHECKPOINTING`; "": blocks are not checkpointed
    attach: Callable[[nn.Module, torch.optim.Optimizer], object] = attach_to_optimizer
    cast_shards: Callable[[nn.Module], object] = precompute_float8_dynamic_scale_for_fsdp

    @property
    def columns(self) -> dict[str, Any]:
        """Return columns of a row that tell it from others."""
        names = "recipe", "mode", "gather", "checkpointing"
        return {name: getattr(self, name) or None for name in names}

    @property
    def name(self) -> str:
        """The same in words."""
        of = self.columns
        more = (f"{key} {of[key]}" for key in ("gather", "checkpointing") if of[key])
        return ", ".join([self.recipe, self.mode, *more])

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
    gathers: Sequence[str] = ("",),
    all_layers: bool = True,
    tokens: int = DEFAULT_TOKENS,
    checkpointing: Sequence[str] = ("",),
) -> list[Variant]:
    """Return high precision, each recipe and each installed peer's, in every mode.

    Args:
        recipes: as for `recipe_config`; peers take those nearest to them.
        modes: of `MODES`.
        peers: of `PEERS`.
        gathers: what FSDP2 gathers: each recipe once for each; peers by the last, only tensorwise.
        all_layers: else `convert_to_float8_training` chooses, and peers leave the head.
        tokens: of a forward, for which it chooses.
        checkpointing: how blocks are checkpointed: all variants once for each.
    """
    last = gathers[-1]
    nearest = ["tensorwise"] if last else list(dict.fromkeys(r.split("+")[0] for r in recipes))
    installed = [peer for peer in peers if peer_version(peer) is not None]
    variants: list[Variant] = []
    for mode in modes:
        found: list[Variant | None] = [Variant(HIGH_PRECISION, mode, gather=last and BF16)]
        found += [_ours(r, mode, gather, all_layers, tokens) for r in recipes for gather in gathers]
        found += [_torchao(p, r, mode, last, all_layers) for p in installed for r in nearest]
        for how in checkpointing:
            variants += [replace(each, checkpointing=how) for each in found if each is not None]
    return variants


def _ours(recipe: str, mode: str, gather: str, all_layers: bool, tokens: int) -> Variant:
    config = recipe_config(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gather == FLOAT8)
    if gather == BF16:  # gone after each use: nothing of it can be held
        config = replace(config, float8_weights=Float8Weights.ON_THE_FLY)
    chosen: Any = {"module_filter_fn": all_linears if all_layers else None, "config": config}
    if not all_layers:
        chosen |= {"tokens_per_step": tokens, "cuda_graphs": mode == GRAPHED}
    convert = functools.partial(convert_to_float8_training, **chosen)
    return Variant(recipe, mode, convert, config=config, gather=gather)


def peer_version(peer: str) -> str | None:
    """Return the version of an installed peer; None if it is not installed."""
    if peer not in PEERS:
        raise ValueError(f"peers: got {peer!r}, expected {' or '.join(PEERS)}")
    package, _, _ = peer.partition("+")
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else None


def _torchao(peer: str, recipe: str, mode: str, gather: str, all_layers: bool) -> Variant | None:
    """Return torchao's recipe of that name; None if it has none such, or no filter for it."""
    torchao = importlib.import_module("torchao.float8")  # need not be there
    try:
        if gather:
            config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        else:
            config = torchao.Float8LinearConfig.from_recipe_name(recipe)
        gains = torchao._auto_filter_for_recipe(recipe, []) if peer == FILTERED else all_linears
    except (ValueError, AssertionError, NotImplementedError):  # it asserts that it knows the name
        return None

    def cast_shards(model: nn.Module) -> None:
        if gather:
            torchao.precompute_float8_dynamic_scale_for_fsdp(model)

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        return optimizer.register_step_post_hook(lambda *_: cast_shards(model))

    def takes(module: nn.Module, name: str) -> bool:
        return gains(module, name) and (all_layers or reason_by_name(name) is None)

    chosen = {"config": config, "module_filter_fn": takes}
    convert = functools.partial(torchao.convert_to_float8_training, **chosen)
    hooks: Any = {"attach": attach, "cast_shards": cast_shards}
    return Variant(f"{peer} {recipe}", mode, convert, gather=gather, **hooks)
