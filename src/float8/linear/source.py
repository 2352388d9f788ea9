"""Check whether a layer can become a `Float8Linear`, and create the class of converted layers."""

import copy
import functools
import types
from collections.abc import Callable, Collection
from inspect import getattr_static, signature
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from float8.config import Float8LinearConfig
from float8.formats import HIGH_PRECISION_DTYPES, lacks_float8_gemm
from float8.linear.base import Float8Module, our_names

_PICKLING = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__slots__")
REFUSALS: list[Callable[[Any, Float8LinearConfig], TypeError | ValueError | None]] = []
"""Functions that return an error if `layer` cannot get `config`, or None; see `float8.wings`."""
_REGISTRIES = {name for name, x in vars(nn.Module()).items() if isinstance(x, dict | set)}
"""The attributes in which `nn.Module` keeps Parameters, buffers, submodules and hooks."""

PUBLIC = ("config", "from_float")
"""Public names that float8 layers add, unless the user's class has attributes of these names."""


def shallow_copy(mod: nn.Module, cls: Any) -> Any:
    """Return a new instance of `cls` that shares the attributes of `mod`.

    The containers of Parameters, buffers, submodules and hooks are copied, not shared. An attribute
    `forward` or a compiled call, which are bound to `mod`, are left out.
    """
    new = cls.__new__(cls)
    for name, value in vars(mod).items():
        if name not in ("forward", "_compiled_call_impl"):  # bound to `mod`, not to `new`
            new.__dict__[name] = copy.copy(value) if name in _REGISTRIES else value
    return new


def become(mod: nn.Module, new: nn.Module) -> None:
    """Turn `mod` in place into `new`, its converted copy; hooks registered on `mod` stay."""
    for name in vars(mod).keys() - vars(new).keys() - {"_compiled_call_impl"}:
        del mod.__dict__[name]  # such as a `forward`, or other libraries' marks of float8 layers
    mod.__dict__.update({name: x for name, x in vars(new).items() if "_hooks" not in name})
    mod.__class__ = type(new)


def class_with_forward(cls: type) -> type:
    """Return the first class in the MRO of `cls` that defines `forward` or `__call__`."""
    return next(base for base in cls.__mro__ if {"forward", "__call__"} & vars(base).keys())


def replaced_forward(mod: nn.Module) -> bool:
    """Return whether `mod` has an attribute `forward` of its own, not the method of its class."""
    forward: Any = vars(mod).get("forward")  # accelerate leaves the method itself
    return forward is not None and forward != types.MethodType(type(mod).forward, mod)


ABOUT_FORWARD = "convert before accelerate, or whoever else gives it one; load without a tp_plan"
"""Advice in errors about a `forward` that is an attribute of the instance."""


def problem(
    mod: Any, base: Any, config: Float8LinearConfig, linear_classes: Collection[type]
) -> TypeError | ValueError | None:
    """Return an error if `mod` cannot be converted to the class `base` with `config`, or None.

    `linear_classes`: subclasses of `nn.Linear` that override its forward, but compute the same.
    """
    path = f"{type(mod).__module__}.{type(mod).__qualname__}"
    if reason := _computes_something_else(mod, linear_classes):
        return TypeError(f"got a {path}, {reason}")
    if reason := _cannot_be_both(mod, base, config):
        return ValueError(f"got a {path} {reason}")
    weight = mod.weight
    if replaced_forward(mod):  # an attribute would override the forward of `base`
        got = "got a layer with a `forward` of its own as attribute, expected nn.Linear's"
        return ValueError(f"{got}; {ABOUT_FORWARD}")
    if reason := not_in_high_precision(weight):
        return TypeError(f"got a {reason}")
    if 0 in weight.shape:
        got = f"got weight of shape {tuple(weight.shape)}, expected no empty dim"
        if hasattr(weight, "ds_shape"):
            got += ": DeepSpeed's zero.Init has taken it apart; convert layers one by one, within "
            got += "deepspeed.zero.GatheredParameters([layer.weight])"
        return ValueError(got)
    for refusal_of in REFUSALS:  # see `float8.wings`
        if refusal := refusal_of(mod, config):
            return refusal
    if (reason := lacks_float8_gemm(weight.device, only=config.only_on)) and not config.emulate:
        return ValueError(f"{reason}; set emulate=True to compute in high precision instead")
    return None


def _computes_something_else(mod: nn.Module, linear_classes: Collection[type]) -> str | None:
    """Return why `mod` may not compute the same as `nn.Linear` and `linear_classes`, or None."""
    forward_of = class_with_forward(type(mod))
    if is_parametrized(mod):
        return "whose weight is computed, expected an nn.Linear with a weight of its own"
    if isinstance(mod, LazyModuleMixin):
        return "whose shape is not known yet, expected an nn.Linear: run a forward first"
    if isinstance(mod, NonDynamicallyQuantizableLinear):
        return "expected an nn.Linear: nn.MultiheadAttention reads the weight of this one itself"
    if forward_of.__module__.startswith("torchao."):
        return "which torchao converted already, expected an nn.Linear: convert the plain model"
    if forward_of is nn.Linear or isinstance(mod, (*linear_classes, Float8Module)):
        return None
    if reason := not_in_high_precision(getattr(mod, "weight", None)):  # a more specific reason
        return f"with a {reason}"
    return (
        f"whose forward is not nn.Linear's, expected an nn.Linear or a subclass without a "
        f"forward; if it computes the same, convert_to_float8_training(..., "
        f"linear_classes=[{type(mod).__name__}]) replaces it"
    )


def not_in_high_precision(weight: Any) -> str | None:
    """Return what `weight` is if it is quantised, or not float32, bfloat16 or float16; or None."""
    cls, dtype = type(weight), getattr(weight, "dtype", None)
    if cls.__module__.split(".")[0] in ("bitsandbytes", "torchao"):
        return f"weight of class {cls.__name__}, which is quantised, expected one in high precision"
    if dtype not in HIGH_PRECISION_DTYPES:
        expected = ", ".join(map(str, HIGH_PRECISION_DTYPES))
        return f"weight of dtype {dtype}, expected one of {expected}"
    return None


def _cannot_be_both(mod: Any, base: Any, config: Float8LinearConfig) -> str | None:
    """Return why the class of `mod` cannot derive from the float8 class `base`, too; or None.

    `mod` has an attribute that `base` needs, pickles in its own way, or has another memory layout.
    """
    cls: Any = type(mod)
    is_ours = isinstance(mod, Float8Module)
    reserved = base._float8_buffer_names(config)  # names that `mod` must not have
    if is_ours:
        reserved -= mod._float8_state().keys()  # these buffers are replaced
    else:
        reserved |= our_names(base)
        # The class method `from_float` would hide a tensor or module registered under this name.
        reserved |= {"from_float"} & {*mod._parameters, *mod._buffers, *mod._modules}
    if taken := reserved & {*dir(mod)}:
        return f"with an attribute {min(taken)!r}, expected one without: {base.__name__} has one"
    if is_ours:  # its class derives from `base` and from the user's class already
        return None
    for parent in (x for x in cls.__mro__ if x not in (nn.Linear, nn.Module, object)):
        if name := next((x for x in _PICKLING if vars(parent).get(x)), ""):  # empty slots are OK
            got = f"with {name!r}, expected one without"
            return f"{got}: {base.__name__} has a way of its own to copy and pickle layers"
    try:
        class_of(base, cls)  # raises if no class can have both as bases
    except Exception as error:
        return f"which cannot be a {base.__name__}, too: {error}"
    return None


@functools.cache
def class_of(base: Any, source: Any) -> Any:
    """Return the class that layers of class `source` get when converted to the float8 class `base`.

    For `nn.Linear` this is `base`, for its subclasses a class that inherits from `base` and
    `source`. Its forward is that of `base`; methods of `base` that call `super` reach those of
    `source`. Layers can be pickled if those of `source` can. The constructor takes the arguments of
    `source` and a `config`; if `source` takes a `config` itself, new layers have dynamic tensorwise
    scaling.
    """
    if issubclass(base, source):
        return base
    name = f"{base.__name__}[{source.__qualname__}]"
    members = {"__init__": _init, "_float8_source_class": source}
    # Attributes that the user's class has under these names take precedence over those of `base`.
    members |= {x: getattr_static(source, x) for x in PUBLIC if hasattr(source, x)}
    return new_class(name, (base, source), class_of, (base, source), **members)


def _init(layer: Any, *args: Any, **kwargs: Any) -> None:
    init = layer._float8_source_class.__init__
    # A `config` that the user's class takes is not ours: pass it on, and use the default recipe.
    config = None if "config" in signature(init).parameters else kwargs.pop("config", None)
    init(layer, *args, **kwargs)
    layer._float8_begin(config)


def new_class(
    name: str, bases: tuple[type, type], make: Any, made_of: tuple[Any, ...], **members: Any
) -> Any:
    """Return a new class `name` of `bases` (float8 class, user's class) with attributes `members`.

    Layers of class `bases[1]` can get it as `__class__`; raises a `TypeError` if memory layouts
    differ. Instances can be pickled: unpickling calls `make(*made_of)`, which must return the
    class, since a class that is made at run time cannot be imported.
    """

    def reduce(module: Any, protocol: int) -> Any:
        reduced = nn.Module.__reduce_ex__(module, protocol)
        if type(module) is not cls:  # a subclass of `cls`, which pickle imports
            return reduced
        return _instance, (make, *made_of), *reduced[2:]  # `reduced[2]` is the state

    members = {"__module__": bases[0].__module__, "__doc__": bases[0].__doc__} | members
    members["__reduce_ex__"] = reduce
    cls = types.new_class(name, bases, exec_body=lambda body: body.update(members))
    object.__setattr__(object.__new__(bases[1]), "__class__", cls)  # raises if layouts differ
    return cls


def _instance(make: Any, *made_of: Any) -> Any:
    cls = make(*made_of)
    return cls.__new__(cls)
