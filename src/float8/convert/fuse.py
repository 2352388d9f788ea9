"""Feed-forwards of other people's classes, computed by `swiglu_feed_forward`.

A class is known by what its forward computes, not by its name. Its code must have no branches and
read nothing but its submodules and torch's silu: so it computes one expression, always, and does
nothing else. Run once on symbols, it says which; that must be `down(silu(gate(x)) * up(x))`. What
is not proven so is left alone. No tensor is touched, and no library imported.
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

_NOT_FUSED = "_float8_not_fused"
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_NO_PLAIN_FUNCTION = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


class Parts(NamedTuple):
    """Which submodules of a feed-forward do what, by their names."""

    gate: str
    up: str
    down: str
    activation: str | None = None
    """None: `torch.nn.functional.silu`."""

    activation_class: type[nn.Module] | None = None


class FusedFeedForward(nn.Module):
    """What a feed-forward becomes an instance of, beside its own class."""

    source_class: ClassVar[type[nn.Module]]
    parts: ClassVar[Parts]
    known_forward: ClassVar[Any]
    """That of the source class, when it was recognised."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the forward of its own class computes; runs that one where something changed."""
        if len(args) != 1 or kwargs or _changed(self) is not None:
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return, misc]
        gate, up, down = (getattr(self, name) for name in self.parts[:3])
        return swiglu_feed_forward(args[0], gate, up, down)

    def _get_name(self) -> str:
        return f"Fused[{super()._get_name()}]"


def fuse_modules(model: nn.Module) -> None:
    """Fuse the feed-forwards of `model` that can be, in place; note on the others why not."""
    for module in model.modules():
        if isinstance(module, FusedFeedForward):
            continue
        parts = _parts(module)
        reason = _looks_like_one(module) if parts is None else _why_not(module, parts)
        module.__dict__.pop(_NOT_FUSED, None)
        if reason is not None:
            module.__dict__[_NOT_FUSED] = reason
        elif parts is not None:
            module.__class__ = _fused_class(type(module), parts)


def unfuse_modules(model: nn.Module) -> None:
    """Give fused modules their own classes back, and forget why others are not fused."""
    for module in model.modules():
        module.__dict__.pop(_NOT_FUSED, None)
        if isinstance(module, FusedFeedForward) and "source_class" in vars(type(module)):
            module.__class__ = module.source_class


def fusing(module: nn.Module) -> tuple[bool, str | None]:
    """Whether `fuse_modules` saw a feed-forward in `module`, and why that is not fused as it is now."""
    if isinstance(module, FusedFeedForward):
        changed = "it has a `forward` of its own" if "forward" in module.__dict__ else None
        return True, changed or _changed(module) or _why_layers_are_not(module, module.parts)
    reason = module.__dict__.get(_NOT_FUSED)
    return reason is not None, reason


def _changed(module: FusedFeedForward) -> str | None:
    """What is not as it was when `module` was recognised."""
    cls, parts = type(module), module.parts
    if cls.source_class.forward is not cls.known_forward:
        return "its class has another forward now"
    if parts.activation is None:
        return None
    activation = getattr(module, parts.activation)
    if type(activation) is not parts.activation_class:
        return "its activation is another one now"
    if has_hooks(activation) or "forward" in activation.__dict__:
        return "its activation has hooks, or a `forward` of its own"
    return None


def _why_not(module: nn.Module, parts: Parts) -> str | None:
    """Why a feed-forward that was recognised is left alone."""
    if "forward" in module.__dict__:
        return "it has a `forward` of its own"
    if hasattr(type(module), "reshard"):
        return "it is sharded: convert, then fully_shard"
    if parts.activation is not None:
        activation = getattr(module, parts.activation)
        if not _is_silu(activation):
            return f"its activation is a {type(activation).__name__}, not SiLU"
    return _why_layers_are_not(module, parts)


def _why_layers_are_not(module: nn.Module, parts: Parts) -> str | None:
    return why_not_fused(*(getattr(module, name) for name in parts[:3]))


def _looks_like_one(module: nn.Module) -> str | None:
    """Why a module with the layers of a feed-forward is none; None: it has no such layers."""
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    shapes = [(linear.in_features, linear.out_features) for linear in linears]
    if any(a != b and shapes.count((a, b)) > 1 and (b, a) in shapes for a, b in shapes):
        return f"{type(module).__name__}.forward is not known to be down(silu(gate(x)) * up(x))"
    return None


# ---------------------------------------------------------------- classes


@functools.cache
def _fused_class(source: type[nn.Module], parts: Parts) -> Any:
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
    bases = (FusedFeedForward, source)
    return types.new_class(source.__name__, bases, exec_body=lambda body: body.update(members))


def _reduce(module: Any, protocol: int) -> Any:
    """The class cannot be imported, but what it is made of can."""
    cls = type(module)
    made = nn.Module.__reduce_ex__(module, protocol)
    if "source_class" not in vars(cls):  # made of this one by somebody else
        return made
    return _new, (cls.source_class, cls.parts), *made[2:]


def _new(source: type[nn.Module], parts: Parts) -> Any:
    cls = _fused_class(source, parts)
    return cls.__new__(cls)


# ---------------------------------------------------------------- what a forward computes


class _Symbol:
    """What a forward makes of its input: an expression of nested tuples."""

    def __init__(self, *expression: Any) -> None:
        self.expression = expression

    def __mul__(self, other: Any) -> "_Symbol":
        return _Symbol("product", self.expression, other.expression)

    def __bool__(self) -> bool:
        raise TypeError("a symbol has no value")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> "_Symbol":
        if func is not F.silu or len(args) != 1 or any((kwargs or {}).values()):
            raise TypeError(f"{func} is not known")
        return _Symbol("call", F.silu, args[0].expression)


def _expression(module: nn.Module) -> tuple[Any, int]:
    """What `module` computes of its input, if that is certain, and how many submodules it calls."""
    calls: list[str] = []

    def child(name: str) -> Any:
        def call(x: _Symbol) -> _Symbol:
            calls.append(name)
            return _Symbol("call", name, x.expression)

        return call

    forward = type(module).forward
    children = {x for x, found in module._modules.items() if getattr(module, x, None) is found}
    if not isinstance(forward, types.FunctionType) or not _reads_only(forward, children):
        return None, 0
    try:
        made: Any = forward(types.SimpleNamespace(**{x: child(x) for x in children}), _Symbol("x"))
    except Exception:  # whatever symbols cannot do
        return None, 0
    return (made.expression if isinstance(made, _Symbol) else None), len(calls)


def _reads_only(forward: types.FunctionType, attributes: set[str]) -> bool:
    """Whether `forward(self, x)` is without branches, and reads `attributes` and silu only."""
    code = forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & _NO_PLAIN_FUNCTION:
        return False
    if code.co_freevars or any(isinstance(x, types.CodeType) for x in code.co_consts):
        return False
    if getattr(code, "co_exceptiontable", b""):  # of `with` and `try`, from Python 3.11 on
        return False
    known = attributes | {"torch", "nn", "functional", "silu"}
    for each in dis.get_instructions(code):
        if each.opname.startswith("LOAD_GLOBAL"):
            value = forward.__globals__.get(each.argval)
            if all(value is not x for x in (torch, nn, F, F.silu)):
                return False
            known.add(each.argval)
        if each.opcode in _JUMPS or each.opname.startswith(("IMPORT_", "DELETE_")):
            return False
        if each.opname.startswith("STORE_") and not each.opname.startswith("STORE_FAST"):
            return False
    return known.issuperset(code.co_names)


def _parts(module: nn.Module) -> Parts | None:
    """The parts of a module that computes `down(activation(gate(x)) * up(x))` and nothing else."""
    match _expression(module):
        case ("call", str(down), ("product", first, second)), calls:
            for gated, other in ((first, second), (second, first)):
                match gated, other:
                    case ("call", of, ("call", str(gate), ("x",))), ("call", str(up), ("x",)):
                        if of is F.silu and calls == 3:
                            return Parts(gate, up, down)
                        if isinstance(of, str) and calls == 4:
                            return Parts(gate, up, down, of, type(getattr(module, of)))
    return None


def _is_silu(module: nn.Module) -> bool:
    """Whether calling `module` computes silu and nothing else."""
    if has_hooks(module) or "forward" in module.__dict__:
        return False
    return type(module) is nn.SiLU or _expression(module)[0] == ("call", F.silu, ("x",))
