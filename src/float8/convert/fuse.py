"""Modules of other people's classes, computed by fused functions.

A class is known by what its forward computes, not by its name: see `symbols`. That is compared with
what a fused function computes. What is not proven so is left alone. No library is imported.
"""

import functools
import types
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.convert.symbols import Symbol, expression_of
from float8.fused import swiglu_feed_forward, why_not_fused
from float8.fused.reasons import has_hooks, why_norm_weight_not_read
from float8.linear import replaced_forward
from float8.linear.functional import autocast_dtype
from float8.linear.held import PLAIN
from float8.tensor import is_fsdp_module

_NOT_FUSED = "_float8_not_fused"


@dataclass(frozen=True)
class FeedForward:
    """Which submodules of `down(silu(gate(x)) * up(x))` do what, by their names."""

    gate: str
    up: str
    down: str
    activation: str | None = None
    """None: `torch.nn.functional.silu`."""

    activation_class: type[nn.Module] | None = None

    def compute(self, module: Any, x: Tensor) -> Tensor | None:
        """[..., K] to [..., K], layer by layer where `why_not_fused` says so."""
        gate, up = getattr(module, self.gate), getattr(module, self.up)
        return swiglu_feed_forward(x, gate, up, getattr(module, self.down))

    def why_not(self, module: Any) -> str | None:
        """Why it is not fused as it is now."""
        layers = (getattr(module, name) for name in (self.gate, self.up, self.down))
        return self.changed(module) or why_not_fused(*layers)

    def changed(self, module: Any) -> str | None:
        """Why the activation may be another than the one that was recognised."""
        if self.activation is None:
            return None
        activation = getattr(module, self.activation)
        if type(activation) is not self.activation_class:
            return "its activation is another one now"
        if has_hooks(activation) or "forward" in activation.__dict__:
            return "its activation has hooks, or a `forward` of its own"
        return None


@dataclass(frozen=True)
class Norm:
    """The RMSNorm of `weight` [K] that `_rms_norm` computes, in one kernel in eager mode."""

    eps: str
    """The name of the attribute."""

    def compute(self, module: Any, x: Tensor) -> Tensor | None:
        """[..., K] to [..., K] of the same dtype; None where operations promote it to another."""
        weight = module.weight
        if x.layout is not torch.strided or x.is_nested:
            return None
        if torch.compiler.is_compiling() or type(weight) not in PLAIN or x.dtype != weight.dtype:
            return None
        autocast = autocast_dtype(x.device) is not None
        if x.shape[-1:] != weight.shape or (autocast and x.dtype != torch.float32):
            return None
        return F.rms_norm(x, weight.shape, weight, getattr(module, self.eps))

    def why_not(self, module: Any) -> str | None:
        """Why it is not fused as it is now, whatever the input."""
        return why_norm_weight_not_read(module.weight)

    def changed(self, module: Any) -> str | None:
        """Nothing that a module could change without its class."""
        return None


class Known(NamedTuple):
    """A class that was recognised."""

    source: Any
    forward: Any
    """That of `source` then."""

    parts: FeedForward | Norm

    def changed(self) -> str | None:
        """Why the class may be another than the one that was recognised."""
        same = self.source.forward is self.forward
        return None if same else "its class has another forward now"


class Fused(nn.Module):
    """What a module becomes an instance of, beside its own class."""

    _float8_known: ClassVar[Known]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the forward of its own class computes; runs that one where it cannot be fused."""
        known = self._float8_known
        changed = known.changed() or known.parts.changed(self)
        argument = known.forward.__code__.co_varnames[1]  # besides `self`
        one = len(args) + len(kwargs) == 1 and kwargs.keys() <= {argument}
        if one and changed is None:
            y = known.parts.compute(self, *args, *kwargs.values())
            if y is not None:
                return y
        return super().forward(*args, **kwargs)  # type: ignore[no-any-return]

    def __setstate__(self, state: Any) -> None:
        """Trust no parts that were pickled with another version of the class."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        known = vars(type(self)).get("_float8_known")
        if known is not None and recognised(self, known.forward) != known.parts:
            self.__class__ = known.source

    def _get_name(self) -> str:
        return f"Fused[{type(self).__name__}]"


def fuse_modules(model: nn.Module) -> None:
    """Fuse the modules of `model` that can be, in place; note on the others why not."""
    for module in model.modules():
        if isinstance(module, Fused):
            if module._float8_known.changed() is None:
                continue
            _unfuse(module)
        source = type(module)
        parts, reason = _seen(module)
        module.__dict__.pop(_NOT_FUSED, None)
        refused = ""
        if parts is not None and reason is None:
            try:
                module.__class__ = fused_class(Known(source, source.forward, parts))
            except TypeError as error:
                refused = f"{source.__name__} takes no subclass: {error}"
        if reason or refused:
            module.__dict__[_NOT_FUSED] = refused  # other reasons may change


def unfuse_modules(model: nn.Module) -> None:
    """Give fused modules their own classes back, and forget why others are not fused."""
    for module in model.modules():
        module.__dict__.pop(_NOT_FUSED, None)
        _unfuse(module)


def _unfuse(module: nn.Module) -> None:
    """Give a module its own class back, if it is fused."""
    if isinstance(module, Fused) and "_float8_known" in vars(type(module)):
        if not replaced_forward(module):
            module.__dict__.pop("forward", None)  # its own, left behind by accelerate
        module.__class__ = module._float8_known.source


def fusing(module: nn.Module) -> tuple[bool, str | None]:
    """Whether `fuse_modules` looked at `module`, and why that is not fused as it is now."""
    if isinstance(module, Fused):
        known = module._float8_known
        return True, _own_forward(module) or known.changed() or known.parts.why_not(module)
    if _NOT_FUSED not in module.__dict__:
        return False, None
    parts, reason = _seen(module)
    could = None if parts is None else "convert again with fuse=True"
    return True, reason or module.__dict__[_NOT_FUSED] or could


def _seen(module: nn.Module) -> tuple[FeedForward | Norm | None, str | None]:
    """What a module not yet fused computes, and why it is not to be fused; nothing for others."""
    parts = recognised(module, type(module).forward)
    return parts, _looks_like_one(module) if parts is None else _why_left_alone(module, parts)


def recognised(module: nn.Module, forward: Any) -> FeedForward | Norm | None:
    """The parts of `module`, by what the `forward` of its class computes."""
    return _feed_forward(module, forward) or _norm(module, forward)


def _own_forward(module: nn.Module) -> str | None:
    """Why the forward of the class may not run; what prepares inputs for that runs it."""
    own: Any = module.__dict__.get("forward")
    runs = own is None or getattr(own, "runs_class_forward", False)
    return None if runs else "it has a `forward` of its own"


def _why_left_alone(module: nn.Module, parts: FeedForward | Norm) -> str | None:
    """Why a module that was recognised is not fused."""
    if own := _own_forward(module):
        return own
    if is_fsdp_module(module):
        return "it is sharded: convert, then fully_shard"
    cls: Any = parts.activation_class if isinstance(parts, FeedForward) else None
    if cls is not None and not _is_silu(cls):
        return f"its activation is a {cls.__name__}, not SiLU"
    return parts.why_not(module)


def _looks_like_one(module: nn.Module) -> str | None:
    """Why a module that is made as a feed-forward or a norm is none; None: it is not made so."""
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
    of_torch = type(module).forward.__module__.startswith("torch.nn.")
    if only_weight and has_eps and not of_torch:
        what = "an RMSNorm"
    return None if what is None else f"{type(module).__name__}.forward is not known to be {what}"


# ---------------------------------------------------------------- classes


@functools.cache
def fused_class(known: Known) -> Any:
    """A subclass of what was recognised under the same name, by which libraries find modules."""
    source = known.source
    members = {
        "__module__": source.__module__,
        "__qualname__": source.__qualname__,
        "__doc__": source.__doc__,
        "__reduce_ex__": _reduce,
        "_float8_known": known,
    }
    bases = (Fused, source)
    return types.new_class(source.__name__, bases, exec_body=lambda body: body.update(members))


def _reduce(module: Any, protocol: int) -> Any:
    """The class cannot be imported, but what it is made of can."""
    known = vars(type(module)).get("_float8_known")
    made = nn.Module.__reduce_ex__(module, protocol)
    if known is None:  # made of this one by somebody else
        return made
    return _new, (known.source, known.parts), *made[2:]


def _new(source: Any, parts: FeedForward | Norm) -> Any:
    cls = fused_class(Known(source, source.forward, parts))
    return cls.__new__(cls)


# ---------------------------------------------------------------- what a module computes


def _feed_forward(module: nn.Module, forward: Any) -> FeedForward | None:
    """The parts of a module that computes `down(activation(gate(x)) * up(x))` and nothing else."""
    children = {x for x, found in module._modules.items() if getattr(module, x, None) is found}
    match expression_of(forward, children):
        case ("call", ("self", down), ("product", first, second)), read:
            for gated, other in ((first, second), (second, first)):
                match gated, other, len(read):  # as many reads: nothing else is called
                    case (
                        ("call", function, ("call", ("self", gate), ("x",))),
                        ("call", ("self", up), ("x",)),
                        3,
                    ) if function is F.silu:
                        return FeedForward(gate, up, down)
                    case (
                        ("call", ("self", name), ("call", ("self", gate), ("x",))),
                        ("call", ("self", up), ("x",)),
                        4,
                    ):
                        return FeedForward(gate, up, down, name, type(getattr(module, name)))
    return None


def _is_silu(cls: Any) -> bool:
    """Whether the forward of `cls` computes silu and nothing else."""
    if cls is nn.SiLU:
        return True
    computes: Any = expression_of(cls.forward, set())[0]
    return computes == ("call", F.silu, ("x",)) and cls.__call__ is nn.Module.__call__


def _rms_norm(x: Any, weight: Any, eps: Any) -> Any:
    """As the norms of transformers compute it: rounded before it is multiplied by the weight."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _norm(module: nn.Module, forward: Any) -> Norm | None:
    """The parts of a module that computes `_rms_norm` and nothing else."""
    if set(module._parameters) != {"weight"}:
        return None
    for eps in ("variance_epsilon", "eps"):
        wanted = _rms_norm(Symbol("x"), Symbol("self", "weight"), Symbol("self", eps))
        if expression_of(forward, {"weight", eps})[0] == wanted.expression:
            return Norm(eps)
    return None
