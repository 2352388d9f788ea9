"""Read by torch.fx what the forward of somebody's class computes."""

import dis
import inspect
import operator
import types
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from float8.fused import swiglu_feed_forward, why_not_fused
from float8.fused.reasons import why_norm_weight_not_read
from float8.linear.functional import autocast_dtype
from float8.tensor.held_weights import PLAIN

_FUNCTIONAL = types.SimpleNamespace(silu=F.silu)
_NN = types.SimpleNamespace(functional=_FUNCTIONAL)
_TORCH = types.SimpleNamespace(nn=_NN, rsqrt=torch.rsqrt, float32=torch.float32)
_GLOBALS = ((torch, _TORCH), (nn, _NN), (F, _FUNCTIONAL), (F.silu, F.silu))
"""The modules and functions that a forward may reach, each with what it is given instead."""

_PURE = {"nn", "functional", "silu", "rsqrt", "float32"}
_UNRECORDED = {*dir(fx.Proxy), "node", "tracer"}
"""Attributes that a Proxy has itself."""

_HIDDEN = {dis.opname[jump] for jump in (*dis.hasjrel, *dis.hasjabs)}
_HIDDEN |= {"STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL", "IS_OP"}
_HIDDEN |= {"GEN_START", "RETURN_GENERATOR"}
"""Operations of which a graph does not tell."""


@dataclass(frozen=True)
class SwiGLU:
    """A feed-forward `down(silu(gate(x)) * up(x))`: the names of the submodules that do what.

    Raises:
        TypeError: a name is no str.
    """

    gate: str
    up: str
    down: str

    def __post_init__(self) -> None:
        for role, name in vars(self).items():
            if not isinstance(name, str):
                raise TypeError(f"SwiGLU: got {role}={name!r}, expected the name of a submodule")

    def compute(self, module: Any, x: Tensor) -> Tensor | None:
        """Compute [..., K] of [..., K], layer by layer where `why_not_fused` says so."""
        gate, up = getattr(module, self.gate), getattr(module, self.up)
        return swiglu_feed_forward(x, gate, up, getattr(module, self.down))

    def why_not(self, module: Any) -> str | None:
        """Say why it is not fused as it is now, or return None."""
        return why_not_fused(*(getattr(module, name) for name in (self.gate, self.up, self.down)))


@dataclass(frozen=True)
class Norm:
    """The RMSNorm of `weight` [K] that `_rms_norm` computes, in one kernel in eager mode."""

    eps: str
    """The name of the attribute."""

    def compute(self, module: Any, x: Tensor) -> Tensor | None:
        """Compute [..., K] of the dtype of x [..., K]; None where operations promote it."""
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
        """Say why it is not fused as it is now, whatever the input, or return None."""
        return why_norm_weight_not_read(module.weight)


def computed_by(forward: Any) -> tuple[SwiGLU | Norm, str | None] | None:
    """Return what `forward` computes, and the name of its activation module; None: unknown."""
    expression = expression_of(forward)
    if expression is None:
        return None
    for eps in ("variance_epsilon", "eps"):
        norm = _recorded(lambda this, x, eps=eps: _rms_norm(x, this.weight, getattr(this, eps)))
        if expression == norm:
            return Norm(eps), None
    match expression:
        case (str(down), "self", (operator.mul, first, second)):
            for gated, other in ((first, second), (second, first)):
                match gated, other:
                    case (F.silu, (str(gate), "self", "x")), (str(up), "self", "x"):
                        return SwiGLU(gate, up, down), None
                    case (str(act), "self", (str(gate), "self", "x")), (str(up), "self", "x"):
                        return SwiGLU(gate, up, down), act
    return None


def is_silu(cls: Any) -> bool:
    """Whether modules of class `cls` compute silu and nothing else."""
    known = cls.forward is nn.SiLU.forward or expression_of(cls.forward) == (F.silu, "x")
    return known and cls.__call__ is nn.Module.__call__


def _rms_norm(x: Any, weight: Any, eps: Any) -> Any:
    """Compute a norm as transformers does: rounded before it is multiplied by the weight."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def expression_of(forward: Any) -> Any:
    """Return all that `forward(self, x)` does, as the expression that it computes; None: unknown.

    Expressions are nested tuples: `("w1", "self", "x")` is `self.w1(x)`, `(F.silu, "x")` is
    `F.silu(x)`. Both arguments are Proxies of torch.fx, so submodules are leaves, and neither the
    module nor a tensor is touched.

    A graph alone proves nothing: tracing takes one of two branches for good, and what is done to
    anything but a Proxy is not in it. So the code is run where there is nothing but Proxies and a
    few pure functions: with globals of its own, and without builtins. What else it reads raises,
    and so does what asks a Proxy for its value. Code that goes on nevertheless, or does to a Proxy
    what is not recorded, is not run at all: jumps (`if`, loops, `assert`), `try` and `with`,
    functions within, assignments to attributes, to globals and in place, `is`, and attributes that
    a Proxy has itself. Last, the result must depend on all calls, and all names that the code reads
    must be in the graph, since a property may do something, too.
    """
    code = getattr(forward, "__code__", None)
    if code is None or (code.co_argcount, code.co_kwonlyargcount) != (2, 0) or _hides(code):
        return None
    given = {
        name: instead
        for name in code.co_names
        for value, instead in _GLOBALS
        if forward.__globals__.get(name) is value
    }
    alone = types.FunctionType(code, {"__builtins__": {}, **given})
    try:
        return _recorded(alone, {*code.co_names} - given.keys() - _PURE)
    except Exception:  # whatever it reads that is not there, and whatever Proxies cannot do
        return None


def _hides(code: types.CodeType) -> bool:
    """Whether `code` may do something that no graph shows."""
    if code.co_freevars or any(inspect.iscode(x) for x in code.co_consts):
        return True
    if getattr(code, "co_exceptiontable", b""):  # of `with` and `try`, from Python 3.11 on
        return True
    return not _UNRECORDED.isdisjoint(code.co_names) or any(
        each.opname in _HIDDEN
        or each.opname.startswith("INPLACE_")  # `BINARY_OP` from Python 3.11 on
        or (each.opname == "BINARY_OP" and each.argrepr.endswith("="))
        for each in dis.get_instructions(code)
    )


def _recorded(function: Any, names: Collection[str] = ()) -> Any:
    """Return the expression of `function(self, x)`, if all its graph and `names` are in it."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    made = function(*(fx.Proxy(graph.placeholder(name), tracer) for name in ("self", "x")))
    read = {each for node in graph.nodes for each in (node.target, *node.args)}
    used = all(node.users or node.op == "placeholder" or node is made.node for node in graph.nodes)
    return _expression(made.node) if used and read.issuperset(names) else None


def _expression(x: Any) -> Any:
    if not isinstance(x, fx.Node):
        return x
    if x.op == "placeholder":
        return x.target
    asked = ((name, value) for name, value in sorted(x.kwargs.items()) if value)
    return (x.target, *map(_expression, x.args), *asked)
