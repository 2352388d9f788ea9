"""Modules of other people's classes, computed by fused functions.

A class is known by what its forward computes, not by its name. Its code must have no branches and
read nothing but attributes of the module and a few pure functions of torch: so it computes one
expression, always, and does nothing else. Run once on symbols, it says which; that is compared
with what a fused function computes. What is not proven so is left alone. No tensor is touched, and
no library imported.
"""

import dis
import functools
import inspect
import types
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.fused import swiglu_feed_forward, why_not_fused
from float8.fused.layers import has_hooks
from float8.linear.held import PLAIN

_NOT_FUSED = "_float8_not_fused"
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_PURE = {"torch", "nn", "functional", "silu", "float32", "dtype", "to", "pow", "mean", "rsqrt"}
"""Names that a forward may read of torch and of tensors, besides attributes of its own."""

_NO_PLAIN_FUNCTION = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


class FeedForward(NamedTuple):
    """Which submodules of a feed-forward do what, by their names."""

    gate: str
    up: str
    down: str
    activation: str | None = None
    """None: `torch.nn.functional.silu`."""

    activation_class: type[nn.Module] | None = None


class Norm(NamedTuple):
    """An RMSNorm of `weight` [K]."""

    eps: str
    """The name of the attribute."""


class Fused(nn.Module):
    """What a module becomes an instance of, beside its own class."""

    source_class: ClassVar[type[nn.Module]]
    known_forward: ClassVar[Any]
    """That of the source class, when it was recognised."""

    parts: ClassVar[Any]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the forward of its own class computes; runs that one where it cannot be fused."""
        if len(args) == 1 and not kwargs and self.changed() is None:
            y = self.fused(args[0])
            if y is not None:
                return y
        return super().forward(*args, **kwargs)  # type: ignore[no-any-return]

    def fused(self, x: Tensor) -> Tensor | None:
        """What forward computes of x, or None."""
        raise NotImplementedError

    def changed(self) -> str | None:
        """Say what is not as it was when the module was recognised, or return None."""
        cls = type(self)
        changed = cls.source_class.forward is not cls.known_forward
        return "its class has another forward now" if changed else None

    def _get_name(self) -> str:
        return f"Fused[{type(self).__name__}]"


class FusedFeedForward(Fused):
    """`down(silu(gate(x)) * up(x))`, by `swiglu_feed_forward`."""

    parts: ClassVar[FeedForward]

    def fused(self, x: Tensor) -> Tensor:
        """[..., K] to [..., K], layer by layer where `why_not_fused` says so."""
        gate, up, down = (getattr(self, name) for name in self.parts[:3])
        return swiglu_feed_forward(x, gate, up, down)

    def changed(self) -> str | None:
        """Also whether the activation is the one that was recognised."""
        if self.parts.activation is not None:
            activation = getattr(self, self.parts.activation)
            if type(activation) is not self.parts.activation_class:
                return "its activation is another one now"
            if _is_changed(activation):
                return "its activation has hooks, or a `forward` of its own"
        return super().changed()


class FusedNorm(Fused):
    """An RMSNorm that is written as many operations, in one kernel in eager mode."""

    parts: ClassVar[Norm]

    def fused(self, x: Tensor) -> Tensor | None:
        """[..., K] to [..., K] of the same dtype; None where operations promote it to another."""
        weight: Any = self.weight
        if torch.compiler.is_compiling() or type(weight) not in PLAIN or x.dtype != weight.dtype:
            return None
        if x.shape[-1:] != weight.shape or (
            x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type)
        ):
            return None
        return F.rms_norm(x, weight.shape, weight, getattr(self, self.parts.eps))


def fuse_modules(model: nn.Module) -> None:
    """Fuse the modules of `model` that can be, in place; note on the others why not."""
    for module in model.modules():
        if isinstance(module, Fused):
            continue
        parts = _feed_forward(module) or _norm(module)
        reason = _looks_like_one(module) if parts is None else _why_not(module, parts)
        module.__dict__.pop(_NOT_FUSED, None)
        if reason is not None:
            module.__dict__[_NOT_FUSED] = reason
        elif parts is not None:
            source: Any = type(module)
            module.__class__ = fused_class(source, parts)


def unfuse_modules(model: nn.Module) -> None:
    """Give fused modules their own classes back, and forget why others are not fused."""
    for module in model.modules():
        module.__dict__.pop(_NOT_FUSED, None)
        if isinstance(module, Fused) and "source_class" in vars(type(module)):
            module.__class__ = module.source_class  # type: ignore[assignment]


def fusing(module: nn.Module) -> tuple[bool, str | None]:
    """Whether `fuse_modules` looked at `module`, and why that is not fused as it is now."""
    if isinstance(module, Fused):
        own = "it has a `forward` of its own" if "forward" in module.__dict__ else None
        return True, own or module.changed() or _why_layers_are_not(module, module.parts)
    reason = module.__dict__.get(_NOT_FUSED)
    return reason is not None, reason


def _why_not(module: nn.Module, parts: FeedForward | Norm) -> str | None:
    """Why a module that was recognised is left alone."""
    if "forward" in module.__dict__:
        return "it has a `forward` of its own"
    if hasattr(type(module), "reshard"):
        return "it is sharded: convert, then fully_shard"
    if isinstance(parts, FeedForward) and parts.activation is not None:
        activation = getattr(module, parts.activation)
        if _is_changed(activation):
            return "its activation has hooks, or a `forward` of its own"
        if not _is_silu(activation):
            return f"its activation is a {type(activation).__name__}, not SiLU"
    return _why_layers_are_not(module, parts)


def _why_layers_are_not(module: nn.Module, parts: FeedForward | Norm) -> str | None:
    if isinstance(parts, Norm):
        return None
    return why_not_fused(*(getattr(module, name) for name in parts[:3]))


def _is_changed(activation: nn.Module) -> bool:
    """Whether calling `activation` does something else than the forward of its class."""
    return has_hooks(activation) or "forward" in activation.__dict__


def _looks_like_one(module: nn.Module) -> str | None:
    """Why a module with the layers of a feed-forward is none; None: it has no such layers."""
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    shapes = [(linear.in_features, linear.out_features) for linear in linears]
    if any(a != b and shapes.count((a, b)) > 1 and (b, a) in shapes for a, b in shapes):
        return f"{type(module).__name__}.forward is not known to be down(silu(gate(x)) * up(x))"
    return None


# ---------------------------------------------------------------- classes


@functools.cache
def fused_class(source: Any, parts: FeedForward | Norm) -> Any:
    """A subclass of `source` under the same name, by which libraries find modules."""
    members = {
        "__module__": source.__module__,
        "__qualname__": source.__qualname__,
        "__doc__": source.__doc__,
        "__reduce_ex__": _reduce,
        "source_class": source,
        "parts": parts,
        "known_forward": staticmethod(source.forward),
    }
    bases = (FusedFeedForward if isinstance(parts, FeedForward) else FusedNorm, source)
    return types.new_class(source.__name__, bases, exec_body=lambda body: body.update(members))


def _reduce(module: Any, protocol: int) -> Any:
    """The class cannot be imported, but what it is made of can."""
    cls = type(module)
    made = nn.Module.__reduce_ex__(module, protocol)
    if "source_class" not in vars(cls):  # made of this one by somebody else
        return made
    return _new, (cls.source_class, cls.parts), *made[2:]


def _new(source: Any, parts: FeedForward | Norm) -> Any:
    cls = fused_class(source, parts)
    return cls.__new__(cls)


# ---------------------------------------------------------------- what a forward computes


class _Symbol:
    """What a forward makes of its input: an expression of nested tuples."""

    def __init__(self, *expression: Any) -> None:
        self.expression = expression

    def __getattr__(self, name: str) -> "_Symbol":
        return _Symbol("attribute", self.expression, name)

    def __call__(self, *args: Any, **kwargs: Any) -> "_Symbol":
        return _Symbol("call", self.expression, *_plain(args), *sorted(kwargs.items()))

    def __mul__(self, other: Any) -> "_Symbol":
        return _Symbol("product", self.expression, *_plain([other]))

    def __add__(self, other: Any) -> "_Symbol":
        return _Symbol("sum", self.expression, *_plain([other]))

    def __bool__(self) -> bool:
        raise TypeError("a symbol has no value")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> "_Symbol":
        asked = sorted((name, value) for name, value in (kwargs or {}).items() if value)
        return _Symbol("call", func, *_plain(args), *asked)


def _plain(values: Any) -> list[Any]:
    return [value.expression if isinstance(value, _Symbol) else value for value in values]


def _expression(module: nn.Module, attributes: set[str]) -> tuple[Any, list[str]]:
    """What `module` computes of its input, if that is certain, and which `attributes` it reads."""
    forward: Any = type(module).forward
    read = _attributes_read(forward, attributes)
    if read is None:
        return None, []
    this = types.SimpleNamespace(**{name: _Symbol("self", name) for name in attributes})
    try:
        made = forward(this, _Symbol("x"))
    except Exception:  # whatever symbols cannot do
        return None, []
    return (made.expression if isinstance(made, _Symbol) else None), read


def _attributes_read(forward: Any, attributes: set[str]) -> list[str] | None:
    """All reads of `attributes` in `forward(self, x)`; None if it branches or knows other names."""
    code = getattr(forward, "__code__", None)
    if code is None or code.co_argcount != 2 or code.co_kwonlyargcount or code.co_freevars:
        return None
    if code.co_flags & _NO_PLAIN_FUNCTION or any(inspect.iscode(x) for x in code.co_consts):
        return None
    if getattr(code, "co_exceptiontable", b""):  # of `with` and `try`, from Python 3.11 on
        return None
    known, read = attributes | _PURE, []
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            value = forward.__globals__.get(each.argval)
            if all(value is not x for x in (torch, nn, F, F.silu)):
                return None
            known.add(each.argval)
        if each.opcode in _JUMPS or each.opname.startswith(("IMPORT_", "DELETE_")):
            return None
        if each.opname.startswith("STORE_") and not each.opname.startswith("STORE_FAST"):
            return None
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in attributes:
            read.append(each.argval)
    return read if known.issuperset(code.co_names) else None


def _feed_forward(module: nn.Module) -> FeedForward | None:
    """The parts of a module that computes `down(activation(gate(x)) * up(x))` and nothing else."""
    children = {x for x, found in module._modules.items() if getattr(module, x, None) is found}
    match _expression(module, children):
        case ("call", ("self", down), ("product", first, second)), read:
            for gated, other in ((first, second), (second, first)):
                match gated, other:
                    case (
                        ("call", of, ("call", ("self", gate), ("x",))),
                        ("call", ("self", up), ("x",)),
                    ):
                        if of is F.silu and len(read) == 3:
                            return FeedForward(gate, up, down)
                        if of is not F.silu and len(read) == 4:
                            return FeedForward(gate, up, down, of[1], type(getattr(module, of[1])))
    return None


def _is_silu(module: nn.Module) -> bool:
    return type(module) is nn.SiLU or _expression(module, set())[0] == ("call", F.silu, ("x",))


def _rms_norm(x: Any, weight: Any, eps: Any) -> Any:
    """As the norms of transformers compute it: rounded before it is multiplied by the weight."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _norm(module: nn.Module) -> Norm | None:
    """The parts of a module that computes `_rms_norm` and nothing else."""
    if set(module._parameters) != {"weight"}:
        return None
    for eps in ("variance_epsilon", "eps"):
        wanted = _rms_norm(_Symbol("x"), _Symbol("self", "weight"), _Symbol("self", eps))
        if _expression(module, {"weight", eps})[0] == wanted.expression:
            return Norm(eps)
    return None
