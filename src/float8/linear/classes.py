"""Which classes compute what `nn.Linear` does, and the class of a layer made of one of them."""

import functools
import types
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from float8.tensor import is_fsdp_module


def path(cls: type) -> str:
    """The class with its module, as one imports it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_conv1d(mod: nn.Module) -> bool:
    """Whether `mod` is the `Conv1D` of transformers (GPT2), a linear layer with weight [K, N].

    Told by its name: transformers is not imported for it.
    """
    cls = _class_with_forward(type(mod))
    return cls.__name__ == "Conv1D" and cls.__module__.split(".")[0] == "transformers"


def computes_something_else(mod: nn.Module, linear_classes: Collection[type]) -> str | None:
    """Say why `mod` may not compute what `nn.Linear` does when it is called, or return None.

    Args:
        mod: an `nn.Linear` of any subclass, or a `Conv1D`.
        linear_classes: classes that do, by what their user says.
    """
    cls = type(mod)
    got = f"got a {path(cls)}"
    if is_parametrized(mod):
        return f"{got}, whose weight is computed, expected an nn.Linear with a weight of its own"
    if isinstance(mod, LazyModuleMixin):
        return f"{got}, whose shape is not known yet, expected an nn.Linear: run a forward first"
    if isinstance(mod, NonDynamicallyQuantizableLinear):
        return (
            f"{got}, expected an nn.Linear that is called: nn.MultiheadAttention reads the weight "
            f"of this one itself"
        )
    if is_fsdp_module(mod):
        return f"{got}, which is sharded, expected an nn.Linear: convert, then fully_shard"
    if _class_with_forward(cls) is nn.Linear or is_conv1d(mod):
        return None
    if isinstance(mod, tuple(linear_classes)):
        return None
    return (
        f"{got}, whose forward is not nn.Linear's, expected an nn.Linear or a subclass without a "
        f"forward; if it computes the same, convert_to_float8_training(..., "
        f"linear_classes=[{cls.__name__}]) replaces it"
    )


def _class_with_forward(cls: type) -> type:
    return next(each for each in cls.__mro__ if {"forward", "__call__"} & vars(each).keys())


def class_of(base: Any, source: Any) -> Any:
    """`base`, which is `Float8Linear` or a subclass, for layers that were a `source`.

    Where `source` is a subclass of `nn.Linear`, a subclass of both: `isinstance` holds and the
    methods, properties and class attributes of `source` stay; forward is that of `base`. Its layers
    are pickled as long as `source` can be. It is called as `source`, and with a `config`.
    """
    return base if issubclass(base, source) else _class_of_both(base, source)


@functools.cache
def _class_of_both(base: type, source: type) -> Any:
    members = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__init__": _init,
        "__reduce_ex__": _reduce,
        "base_class": base,
        "source_class": source,
    }
    name = f"{base.__name__}[{source.__qualname__}]"
    return types.new_class(name, (base, source), exec_body=lambda body: body.update(members))


def _init(layer: Any, *args: Any, config: Any = None, **more: Any) -> None:
    layer.source_class.__init__(layer, *args, **more)
    layer.begin(config)


def _reduce(layer: Any, protocol: int) -> Any:
    """The class cannot be imported, but what it is made of can."""
    cls = type(layer)
    if "source_class" not in vars(cls):  # made of this one by somebody else
        return nn.Module.__reduce_ex__(layer, protocol)
    return _new, (cls.base_class, cls.source_class), layer.__getstate__()


def _new(base: type, source: type) -> Any:
    cls = class_of(base, source)
    return cls.__new__(cls)
