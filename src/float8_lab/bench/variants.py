"""The variants of a model that are held against each other: bf16, our recipes, peers' recipes."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from float8.config import Float8GemmConfig, Float8LinearConfig, Float8Weights
from float8.convert import all_linears, convert_to_float8_training
from float8.sync import attach_to_optimizer

HIGH_PRECISION = "bf16"
EAGER, COMPILED = "eager", "compiled"
MODES = {"eager": (EAGER,), "compiled": (COMPILED,), "both": (EAGER, COMPILED)}
BF16, FLOAT8 = "bf16", "float8"  # in what the weights of a sharded model are gathered

# Other libraries, measured where they are installed: name and module.
PEERS = {"torchao": "torchao", "te": "transformer_engine"}
_TE_RECIPES = {"tensorwise": "Float8CurrentScaling", "delayed": "DelayedScaling"}
_FAST_ACCUM, _HELD = "fast_accum", "held"

Convert = Callable[[nn.Module], nn.Module]
Attach = Callable[[nn.Module, torch.optim.Optimizer], object]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a model."""

    recipe: str  # what its linear layers do, as in `bf16`, `tensorwise`, `torchao tensorwise`
    mode: str  # `eager` or `compiled`
    convert: Convert = lambda model: model  # swaps the linear layers; returns the model
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # of every forward
    config: Float8LinearConfig | None = None  # how the layers run, if it is this library
    gather: str = ""  # in what weights of a sharded model are gathered, `bf16` or `float8`
    attach: Attach = attach_to_optimizer  # has scaling done at every step of an optimizer

    @property
    def name(self) -> str:
        """Recipe, mode and gather."""
        return f"{self.recipe}, {self.mode}" + (f", {self.gather} gather" if self.gather else "")

    @property
    def ours(self) -> bool:
        """Whether it is this library."""
        return self.config is not None

    @property
    def is_reference(self) -> bool:
        """Whether it is high precision, which the others are checked and held against."""
        return self.recipe == HIGH_PRECISION


def make_variants(
    recipes: Sequence[str],
    modes: Sequence[str],
    peers: Sequence[str] = (),
    *,
    held: bool = False,
    sharded: bool = False,
) -> list[Variant]:
    """High precision, each recipe and each installed peer's, in every mode that they run in.

    Args:
        recipes: Of this library, as for `recipe_config`; peers take those nearest to them.
        modes: `eager`, `compiled` or both.
        peers: Names of other libraries; those not installed are left out.
        held: Whether each recipe runs once more, with its weights held in float8.
        sharded: Whether each recipe runs once more, with a float8 all-gather; of peers torchao's
            tensorwise with it.
    """
    installed = [peer for peer in peers if peer_version(peer) is not None]
    nearest = ["tensorwise"] if sharded else list(dict.fromkeys(r.split("+")[0] for r in recipes))
    gather = BF16 if sharded else ""
    variants: list[Variant | None] = []
    for mode in modes:
        variants.append(Variant(HIGH_PRECISION, mode, gather=gather))
        for recipe in recipes:
            variants.append(_ours(recipe, mode, gather))
            if held:
                variants.append(_ours(f"{recipe}+{_HELD}", mode, gather))
            if sharded:
                variants.append(_ours(recipe, mode, FLOAT8))
        variants += [find_peer(peer, r, mode, sharded) for peer in installed for r in nearest]
    return [variant for variant in variants if variant is not None]


def many_compilations() -> Any:
    """Room for all variants: past the limit, `torch.compile` would fall back to eager mode."""
    return torch._dynamo.config.patch(recompile_limit=256)


def recipe_config(recipe: str) -> Float8LinearConfig:
    """The configuration of a recipe with switches behind a `+`, as in `delayed+fast_accum`.

    Switches are bool fields of `Float8LinearConfig` (but that of the gather), which are set,
    `fast_accum` for all three GEMMs, and `held` for weights that are held in float8.
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
        elif switch == _HELD:
            fields["float8_weights"] = Float8Weights.HELD
        elif switch in off:
            fields[switch] = True
        else:
            raise ValueError(
                f"recipe: got {recipe!r} with the switch {switch!r}, expected one of "
                f"{', '.join([*off, _FAST_ACCUM, _HELD])}"
            )
    return dataclasses.replace(config, **fields)


def _ours(recipe: str, mode: str, gather: str) -> Variant:
    config = recipe_config(recipe)
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=gather == FLOAT8)
    if gather == BF16:  # gone after each use: nothing of it can be held
        config = dataclasses.replace(config, float8_weights=Float8Weights.ON_THE_FLY)
    convert = functools.partial(
        convert_to_float8_training, config=config, module_filter_fn=all_linears
    )
    return Variant(recipe, mode, convert, config=config, gather=gather)


def peer_version(peer: str) -> str | None:
    """Version of an installed peer, `"torchao"` or `"te"`; None if it is not installed."""
    if peer not in PEERS:
        raise ValueError(f"peer: got {peer!r}, expected one of {', '.join(PEERS)}")
    installed = importlib.util.find_spec(PEERS[peer]) is not None
    return importlib.metadata.version(PEERS[peer]) if installed else None


def find_peer(peer: str, recipe: str, mode: str, sharded: bool = False) -> Variant | None:
    """An installed peer with the recipe nearest to ours; None if it has none such in this mode."""
    if peer == "torchao":
        return _torchao(recipe, mode, sharded)
    known = recipe in _TE_RECIPES and mode == EAGER and not sharded
    return _transformer_engine(recipe) if known else None


# Imported inside functions: these packages need not be there.


def _torchao(recipe: str, mode: str, sharded: bool) -> Variant | None:
    torchao = importlib.import_module("torchao.float8")
    try:
        if sharded:
            config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        else:
            config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    except (ValueError, AssertionError):  # it asserts that the name is one of its own
        return None

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        precompute = torchao.precompute_float8_dynamic_scale_for_fsdp
        return optimizer.register_step_post_hook(lambda *_: precompute(model))

    convert = functools.partial(torchao.convert_to_float8_training, config=config)
    gather = FLOAT8 if sharded else ""
    return Variant(f"torchao {recipe}", mode, convert, gather=gather, attach=attach)


def _transformer_engine(recipe: str) -> Variant:
    te = importlib.import_module("transformer_engine.pytorch")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    scaling = getattr(recipes, _TE_RECIPES[recipe])()

    if hasattr(te, "autocast"):  # the name since TransformerEngine 2.8
        around = functools.partial(te.autocast, enabled=True, recipe=scaling)
    else:
        around = functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=scaling)

    def convert(model: nn.Module) -> nn.Module:
        for name, linear in list(model.named_modules()):
            if isinstance(linear, nn.Linear):
                like = {"params_dtype": linear.weight.dtype, "device": linear.weight.device}
                sizes = (linear.in_features, linear.out_features)
                new = te.Linear(*sizes, bias=linear.bias is not None, **like)
                new.load_state_dict(linear.state_dict(), strict=False)
                model.set_submodule(name, new)
        return model

    return Variant(f"te {recipe}", EAGER, convert, around)
