"""The layer that a `Float8Linear` is made of: which ones can be, and what they hand over."""

import copy
import functools
import types
import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from float8.config import Float8LinearConfig, Float8Weights
from float8.formats import HIGH_PRECISION_DTYPES, lacks_float8_gemm
from float8.linear.classes import class_of, computes_something_else, path
from float8.linear.delayed import StatefulLayer, delayed_sites

_PICKLING = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__slots__")


@functools.cache
def own_names(base: type) -> frozenset[str]:
    """The names that layers of class `base` use and `nn.Linear` does not."""
    return frozenset({"config", "plan", *dir(base)} - {*dir(nn.Linear)})


def copied_from(old: nn.Module, cls: Any) -> Any:
    """An instance of `cls` with all that `old` has; what is registered later is of one alone."""
    new = cls.__new__(cls)
    new.__dict__.update(old.__dict__)
    new.__dict__.update(_own_containers(old))
    new.__dict__.pop("forward", None)  # that of the class of `old`, else there was a problem
    _rebind_hooks(old, new)
    return new


def replaced_forward(mod: nn.Module) -> bool:
    """Whether an attribute hides the forward of the class; accelerate leaves it as one behind."""
    own: Any = vars(mod).get("forward")
    of_class = getattr(own, "__func__", None) is type(mod).forward and own.__self__ is mod
    return own is not None and not of_class


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hand the hooks of `old`, and the handles that remove them, to its replacement `new`."""
    # A handle removes its hook from the dict it was registered in: `new` takes these very dicts.
    for name, copied in _own_containers(old).items():
        if "_hooks" in name:
            new.__dict__[name] = old.__dict__[name]
            old.__dict__[name] = copied
    _rebind_hooks(old, new)
    pre_hooks: dict[int, Any] = new._load_state_dict_pre_hooks
    for hook in pre_hooks.values():
        if getattr(hook.hook, "__self__", None) is old:
            hook.hook = types.MethodType(hook.hook.__func__, new)
        if hook.with_module:  # it holds a weak reference to its module
            hook.module = weakref.ref(new)


def _own_containers(mod: nn.Module) -> dict[str, Any]:
    """Copies of the dicts and sets in which `nn.Module` keeps Parameters, buffers and hooks."""
    names = [name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)]
    return {name: copy.copy(mod.__dict__[name]) for name in names}


def _rebind_hooks(old: nn.Module, new: nn.Module) -> None:
    """Make hooks that are methods of `old` methods of `new`."""
    for name, hooks in new.__dict__.items():
        if "_hooks" in name and isinstance(hooks, dict):
            for key, hook in hooks.items():
                if getattr(hook, "__self__", None) is old:
                    hooks[key] = types.MethodType(hook.__func__, new)


def problem(
    mod: Any,
    base: type[StatefulLayer],
    config: Float8LinearConfig,
    linear_classes: Collection[type],
) -> TypeError | ValueError | None:
    """Why `mod` cannot become a layer of class `base`; None: it can. See `unsupported`."""
    # What is converted is one of ours, whatever it was made of; a parametrized one is not.
    if reason := computes_something_else(mod, (*linear_classes, StatefulLayer)):
        return TypeError(reason)
    if reason := (
        _name_taken(mod, base, config)
        or _cannot_be_both(type(mod), base)
        or _needs_whole_weight(mod, base, config)
    ):
        return ValueError(reason)
    if replaced_forward(mod):  # it would win over ours
        return ValueError(
            "got a layer with a `forward` of its own as attribute, expected nn.Linear's; convert "
            "before accelerate, or whoever else gives it one, dispatches the model"
        )
    if mod._compiled_call_impl is not None:  # bound to the layer it was made for
        return ValueError(
            "got a layer after `.compile()`, expected one before; convert first, then compile"
        )
    weight = mod.weight
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
    if config.float8_weights is Float8Weights.ONLY and (weight.requires_grad or base.transposed):
        what = "a Conv1D" if base.transposed else "a weight with requires_grad=True"
        return ValueError(
            f"got {what} with float8_weights=ONLY, expected an nn.Linear whose weight is frozen; "
            f"call weight.requires_grad_(False) first, or convert it with another config"
        )
    reason = lacks_float8_gemm(weight.device, config.scales_by_blocks)
    if not config.emulate and reason is not None:
        return ValueError(f"{reason}; set emulate=True to compute in high precision instead")
    return None


def _needs_whole_weight(
    mod: Any, base: type[StatefulLayer], config: Float8LinearConfig
) -> str | None:
    """Why a layer whose weight is a part, though no DTensor, cannot take `config`, or None."""
    if not (base.holds_part or (isinstance(mod, StatefulLayer) and mod.holds_part)):
        return None
    if config.enable_fsdp_float8_all_gather:
        return (
            "got enable_fsdp_float8_all_gather=True, expected False: FSDP does not know that other "
            "ranks hold parts of the weight, too"
        )
    if config.float8_weights is Float8Weights.ONLY:
        return (
            "got float8_weights=ONLY for a weight of which other ranks hold parts, expected "
            "ON_THE_FLY: each rank would cast its part under a scale of its own"
        )
    return None


def _name_taken(mod: Any, base: type, config: Float8LinearConfig) -> str | None:
    """Which name that `mod` needs as a `base` is something else's, or None."""
    names = {name for site in delayed_sites(config) for name in site.buffers}
    if isinstance(mod, StatefulLayer):
        names -= {name for site in mod.delayed for name in site.buffers}
    else:
        names |= own_names(base)
    if taken := names & {*dir(mod)}:
        return (
            f"got a {path(type(mod))} with an attribute {min(taken)!r}, expected one without: "
            f"{base.__name__} has one of that name"
        )
    return None


def _cannot_be_both(cls: type, base: type) -> str | None:
    """Why layers of `cls` and `base` do not go together, or None."""
    if issubclass(cls, StatefulLayer):
        return None
    theirs = (vars(each) for each in cls.__mro__ if each not in (nn.Linear, nn.Module, object))
    for members in theirs:
        if own := [name for name in _PICKLING if members.get(name)]:  # `__slots__` may be empty
            return (
                f"got a {path(cls)} with {own[0]!r}, expected one without: {base.__name__} has a "
                f"way of its own to copy and pickle layers"
            )
    try:
        class_of(base, cls)
    except Exception as error:
        return f"got a {path(cls)}, which cannot be a {base.__name__}, too: {error}"
    return None
