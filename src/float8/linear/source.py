"""The layer that a `Float8Linear` is made of: which ones can be, and what they hand over."""

import copy
import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from float8.config import Float8LinearConfig, Float8Weights
from float8.formats import HIGH_PRECISION_DTYPES, lacks_float8_gemm
from float8.linear.classes import computes_something_else, is_conv1d, path
from float8.linear.delayed import StatefulLinear

OWN_ATTRIBUTES = frozenset({"config", "plan", *dir(StatefulLinear)}) - {*dir(nn.Linear)}
"""Names that a `Float8Linear` uses and `nn.Linear` does not."""


def unsupported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> str | None:
    """Say why `mod` cannot become a `Float8Linear` of this configuration, or return None.

    Args:
        mod: an `nn.Linear` of any subclass, also a `Float8Linear`, or a `Conv1D`.
        config: the configuration.
        linear_classes: subclasses of `nn.Linear` whose forward may be replaced.
    """
    problem = _problem(mod, config, linear_classes)
    return None if problem is None else str(problem)


def require_supported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> None:
    """Raise what `unsupported` says."""
    if not isinstance(mod, nn.Linear):
        raise TypeError(f"Float8Linear: got a {type(mod).__name__}, expected an nn.Linear")
    if not isinstance(config, Float8LinearConfig):
        raise TypeError(
            f"Float8Linear: got a config of type {type(config).__name__}, expected a "
            f"Float8LinearConfig, for example Float8LinearConfig.from_recipe_name('tensorwise')"
        )
    problem = _problem(mod, config, linear_classes)
    if problem is not None:
        raise type(problem)(f"Float8Linear: {problem}")


def own_containers(mod: nn.Module) -> dict[str, Any]:
    """Copies of the dicts and sets in which `nn.Module` keeps Parameters, buffers and hooks."""
    names = [name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)]
    return {name: copy.copy(mod.__dict__[name]) for name in names}


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hand the hooks of `old`, and the handles that remove them, to its replacement `new`."""
    # A handle removes its hook from the dict it was registered in: `new` takes these very dicts.
    for name, copied in own_containers(old).items():
        if "_hooks" in name:
            new.__dict__[name] = old.__dict__[name]
            old.__dict__[name] = copied
    pre_hooks: dict[int, Any] = new._load_state_dict_pre_hooks
    for hook in pre_hooks.values():
        if getattr(hook, "with_module", False):  # it holds a weak reference to its module
            hook.module = weakref.ref(new)


def _problem(
    mod: Any, config: Float8LinearConfig, linear_classes: Collection[type]
) -> TypeError | ValueError | None:
    # A Float8Linear is one of ours, whatever it was made of; a parametrized one is somebody else's.
    if reason := computes_something_else(mod, (*linear_classes, StatefulLinear)):
        return TypeError(reason)
    taken = OWN_ATTRIBUTES & {*vars(mod), *dir(type(mod))}
    if taken and not isinstance(mod, StatefulLinear):
        return ValueError(
            f"got a {path(type(mod))} with an attribute {min(taken)!r}, expected one without: "
            f"Float8Linear has one of that name"
        )
    if "forward" in mod.__dict__:  # it would win over ours
        return ValueError(
            "got a layer with a `forward` of its own as attribute, expected nn.Linear's"
        )
    if mod._compiled_call_impl is not None:  # bound to the layer it was made for
        return ValueError(
            "got a layer after `.compile()`, expected one before; convert first, then compile"
        )
    weight = mod.weight
    if is_conv1d(mod) and type(weight) is not nn.Parameter:
        return ValueError(
            f"got a Conv1D whose weight is a {type(weight).__name__}, expected an nn.Parameter: "
            f"convert before weights are sharded or quantised"
        )
    if type(weight).__module__.startswith("torchao."):
        return TypeError(
            f"got a weight of class {type(weight).__name__}, expected a tensor in high precision: "
            f"a quantised weight stays as it is"
        )
    if weight.dtype not in HIGH_PRECISION_DTYPES:
        expected = ", ".join(map(str, HIGH_PRECISION_DTYPES))
        return TypeError(f"got weight of dtype {weight.dtype}, expected one of {expected}")
    shape = tuple(weight.shape)
    if 0 in shape:
        return ValueError(f"got weight of shape {shape}, expected no empty dim")
    if not config.pad_inner_dim and any(dim % config.alignment for dim in shape):
        return ValueError(
            f"got weight of shape {shape}, expected dims divisible by {config.alignment}; set "
            f"pad_inner_dim=True to have them padded"
        )
    if config.float8_weights is Float8Weights.ONLY and (weight.requires_grad or is_conv1d(mod)):
        what = "a Conv1D" if is_conv1d(mod) else "a weight with requires_grad=True"
        return ValueError(
            f"got {what} with float8_weights=ONLY, expected an nn.Linear whose weight is frozen; "
            f"call weight.requires_grad_(False) first, or convert it with another config"
        )
    reason = lacks_float8_gemm(weight.device, config.scales_by_blocks)
    if not config.emulate and reason is not None:
        return ValueError(f"{reason}; set emulate=True to compute in high precision instead")
    return None
