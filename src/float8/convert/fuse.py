"""Compute modules of other people's classes by fused functions.

A class is known by what its forward computes, not by its name: see `recognise`; or because the user
says so. What is not known is left alone. No library is imported.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from float8.convert.filters import LEFT_ALONE
from float8.convert.recognise import Norm, SwiGLU, computed_by, is_silu
from float8.fused.reasons import has_hooks
from float8.linear.source import class_like, replaced_forward
from float8.tensor import is_fsdp_module

Named = Mapping[type[nn.Module], SwiGLU]
"""Classes of which the user says what they compute."""


class Known(NamedTuple):
    """A class, and what its forward computes."""

    source: Any
    parts: SwiGLU | Norm
    activation: tuple[str, type[nn.Module]] | None
    """The name of a submodule and its class; None: `torch.nn.functional.silu`."""

    by_user: bool
    forward: Any
    """That of `source` then."""

    def changed(self, module: Any) -> str | None:
        """Say why the class or its activation may compute something else now, or return None."""
        if self.source.forward is not self.forward:
            return "its class has another forward now"
        if self.activation is None:
            return None
        name, cls = self.activation
        activation = getattr(module, name)
        if type(activation) is not cls:
            return "its activation is another one now"
        if has_hooks(activation) or "forward" in activation.__dict__:
            return "its activation has hooks, or a `forward` of its own"
        return None


class Fused(nn.Module):
    """The base, beside its own class, of a module that is fused."""

    _float8_known: ClassVar[Known]
    _float8_argument: ClassVar[str | None]
    """The name of the argument of forward besides `self`."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute what its own class does, by the forward of that where it cannot be fused."""
        known = self._float8_known
        one = len(args) + len(kwargs) == 1 and kwargs.keys() <= {self._float8_argument}
        if one and known.changed(self) is None:
            y = known.parts.compute(self, *args, *kwargs.values())
            if y is not None:
                return y
        return super().forward(*args, **kwargs)  # type: ignore[no-any-return]

    def _get_name(self) -> str:
        return f"Fused[{type(self).__name__}]"


@functools.cache
def fused_class(known: Known) -> Any:
    """Make a subclass of `known.source` whose modules are fused."""
    source, *of, forward = known
    argument = [*inspect.signature(forward).parameters, None, None][1]
    members = {"_float8_known": known, "_float8_argument": argument}
    return class_like(source, Fused, _unpickled, (source, *of), **members)


def _unpickled(source: Any, parts: Any, activation: Any, by_user: bool) -> Any:
    """Return the class of what was pickled: its own, if that computes something else now."""
    if not by_user and computed_by(source.forward) != (parts, activation and activation[0]):
        return source
    return fused_class(Known(source, parts, activation, by_user, source.forward))


# ---------------------------------------------------------------- which modules


def as_named(fuse: Any, model: nn.Module) -> Named:
    """Return the classes that `fuse` names: True names none. Raise if one is wrong."""
    if fuse is True:
        return {}
    example = 'a dict such as {LlamaMLP: SwiGLU("gate_proj", "up_proj", "down_proj")}'
    if not isinstance(fuse, Mapping):
        raise TypeError(f"fuse: got {fuse!r}, expected True, False or {example}")
    for cls, parts in fuse.items():
        is_class = isinstance(cls, type) and issubclass(cls, nn.Module)
        if not is_class or not isinstance(parts, SwiGLU):
            raise TypeError(f"fuse: got {cls!r} and {parts!r}, expected {example}")
    for module in model.modules():
        parts = _by_user(module, fuse)
        for role, name in vars(parts).items() if parts else ():
            if name not in module._modules:
                raise ValueError(
                    f"fuse: got {role}={name!r} for a {type(module).__name__}, expected one of its "
                    f"submodules: {', '.join(module._modules)}"
                )
    return fuse


def fuse_modules(model: nn.Module, named: Named) -> None:
    """Fuse the modules of `model` that can be, in place; note on the others why not."""
    for module in model.modules():
        if isinstance(module, Fused) and module._float8_known.changed(module) is None:
            continue
        unfuse(module)
        said = _by_user(module, named)
        known = _known(module, said)
        if _why_not(module, known):
            module.__dict__[LEFT_ALONE] = said
        elif known is not None:
            module.__class__ = fused_class(known)


def unfuse(module: nn.Module) -> None:
    """Give a fused module its own class back, or forget why another one is not fused."""
    module.__dict__.pop(LEFT_ALONE, None)
    if isinstance(module, Fused) and "_float8_known" in vars(type(module)):
        if not replaced_forward(module):
            module.__dict__.pop("forward", None)  # its own, left behind by accelerate
        module.__class__ = module._float8_known.source


def was_looked_at(module: nn.Module) -> bool:
    """Whether `fuse_modules` fused `module`, which is no linear layer, or left it alone."""
    return isinstance(module, Fused) or LEFT_ALONE in module.__dict__


def why_not_now(module: nn.Module) -> str | None:
    """Say why a module that `fuse_modules` looked at is not fused as it is now, or return None."""
    if isinstance(module, Fused):
        return _why_not(module, module._float8_known)
    known = _known(module, module.__dict__[LEFT_ALONE])
    return _why_not(module, known) or "convert again with fuse=True"


def _by_user(module: nn.Module, named: Named) -> SwiGLU | None:
    """Return what the user says of the class of `module`, or of one with the same forward."""
    for cls, parts in named.items():
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return parts
    return None


def _known(module: Any, said: SwiGLU | None) -> Known | None:
    """Return what the class of `module`, which is not fused, computes; None: unknown."""
    source = type(module)
    if said is not None:
        return Known(source, said, None, True, source.forward)
    parts, name = computed_by(source.forward) or (None, None)
    if isinstance(parts, SwiGLU):
        children = {*vars(parts).values(), name or parts.gate}
        there = all(getattr(module, x, None) is module._modules.get(x, module) for x in children)
    else:
        there = module._parameters.keys() == {"weight"}
    if parts is None or not there:
        return None
    activation = (name, type(getattr(module, name))) if name else None
    return Known(source, parts, activation, False, source.forward)


def _why_not(module: nn.Module, known: Known | None) -> str | None:
    """Say why a module is not fused, or should not be; None: it may be, or is none of ours."""
    if known is None:
        return _looks_like_one(module)
    if not isinstance(module, Fused):
        if is_fsdp_module(module):
            return "it is sharded: convert, then fully_shard"
        try:
            fused_class(known)
        except TypeError as error:
            return f"{known.source.__name__} takes no subclass: {error}"
    if known.activation is not None and not is_silu(cls := known.activation[1]):
        return f"its activation is a {cls.__name__}, not SiLU"
    if reason := known.changed(module) or known.parts.why_not(module):
        return reason
    return "it has a `forward` of its own" if replaced_forward(module) else None


def _looks_like_one(module: nn.Module) -> str | None:
    """Say why a module made like a feed-forward or a norm is none; None: it is not made so."""
    what = None
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    shapes = [(linear.in_features, linear.out_features) for linear in linears]
    for dim, width in shapes:
        # As many layers and no more: attention may have the same shapes.
        apart = len(shapes) == 3 and shapes.count((dim, width)) == 2 and (width, dim) in shapes
        packed = len(shapes) == 2 and width % 2 == 0 and (width // 2, dim) in shapes
        if (apart and dim != width) or (packed and 2 * dim != width):
            what = "down(silu(gate(x)) * up(x))"
    weight = module._parameters.get("weight")
    only_weight = len(module._parameters) == 1 and weight is not None and weight.dim() == 1
    has_eps = hasattr(module, "eps") or hasattr(module, "variance_epsilon")
    if only_weight and has_eps and not type(module).forward.__module__.startswith("torch.nn."):
        what = "an RMSNorm"
    return None if what is None else f"{type(module).__name__}.forward is not known to be {what}"
