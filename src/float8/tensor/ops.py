"""Handlers of the aten ops that have a meaning for a `Float8Tensor`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from float8.config import Granularity
from float8.formats import E4M3, E5M2, FLOAT8_MAX
from float8.gemm import Gemm, matmul
from float8.quantize.quantize import padded
from float8.quantize.spec import Operand
from float8.tensor.float8_tensor import CURE, OP_HANDLERS, VIEW, Float8Tensor, dequantise
from float8.tensor.wrapper import as_inference_as, instances, mapped

aten = torch.ops.aten
Handler = Callable[[Any, Any, dict[str, Any]], Any]


def implements(*ops: Any) -> Callable[[Handler], Handler]:
    """Register a handler for some aten ops."""

    def register(handler: Handler) -> Handler:
        OP_HANDLERS.update(dict.fromkeys(ops, handler))
        return handler

    return register


# ---------------------------------------------------------------- views


@implements(VIEW, aten._unsafe_view.default, aten.constant_pad_nd.default)
def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do ops that move no values on the data, and on scales that lie over them."""
    x, *rest = args
    if func is aten.constant_pad_nd.default and any((*rest[1:], *kwargs.values())):
        raise ValueError(
            f"{func}: got a padding other than 0, which has no bytes under a scale of other "
            f"values; call .to_original_precision() first"
        )
    with as_inference_as(x):
        data = func(x._data, *rest, **kwargs)
        parts = [data] if isinstance(data, Tensor) else data
        scales = _scales_of_parts(func, x, parts, rest, kwargs)
        views = [x._like(*each) for each in zip(parts, scales, strict=True)]
    return views[0] if isinstance(data, Tensor) else views


def _scales_of_parts(
    func: Any, x: Float8Tensor, parts: Any, rest: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the scales of the parts that `func` made of the data of `x`."""
    if x._granularity.one_scale:
        return [x._scale] * len(parts)
    if x._has_row_scales and func is aten.constant_pad_nd.default and not any(rest[0][:2]):
        return [func(x._scale, rest[0], 1.0)]
    if x._granularity.by_rows and _keeps_rows(func, x.dim(), rest):
        # Scales go where the elements go over which they are spread.
        size = x.shape[-2 if x._has_column_scales else -1]
        try:
            spread = func(x._scale.expand(x.shape), *rest, **kwargs)
        except RuntimeError:  # no view of them: it would cut rows, and join the pieces
            spread = []
        found = [_gathered(s, size) for s in ([spread] if isinstance(spread, Tensor) else spread)]
        if found and all(scale is not None for scale in found):
            return found
    elif (parts[0].shape, parts[0].stride()) == (x.shape, x.stride()):
        return [x._scale]
    raise ValueError(
        f"{func}: got a Float8Tensor under {x._scaling}, expected TENSORWISE: a part of the data "
        f"does not have all of the scales; {CURE}"
    )


def _keeps_rows(func: Any, dims: int, rest: list[Any]) -> bool:
    """Whether an op moves whole rows, or whole columns, and all dims before them stay in order."""
    if func is aten.transpose.int:
        return dims == 2 or {dim % dims for dim in rest} == {dims - 2, dims - 1}
    if func is aten.permute.default:
        return dims == 2
    return func not in (
        aten.alias.default, aten.detach.default, aten.as_strided.default, aten.expand.default
    )  # fmt: skip


def _gathered(spread: Tensor, size: int) -> Tensor | None:
    """Return scales that are spread over `size` elements each as one for each; None: over others.

    Along the last dim, or the one before it.
    """
    for dim in (-1, -2) if spread.dim() > 1 else ():
        if spread.shape[dim] == size and (size == 1 or spread.stride(dim) == 0):
            return spread.narrow(dim, 0, 1)
    return None


# ---------------------------------------------------------------- copies


@implements(aten.clone.default, aten.empty_like.default, aten._to_copy.default)
def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy, maybe to another device, or make room for a copy; dequantise to another dtype."""
    (x,) = args
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, x._orig_dtype):
        return func(dequantise(x), dtype=dtype, **kwargs)
    rest = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return x._like(
        *[func(part, **(kwargs if part is x._data else rest)) for part in x._inside().values()]
    )


def _require_alike(op: str, a: Any, b: Any, *, scale: bool) -> None:
    """Raise a `ValueError` if `a`, a Float8Tensor, cannot take what `b` holds."""
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor):
        raise ValueError(
            f"{op}: got a Float8Tensor and a high-precision tensor, expected all of one kind; "
            f"call .to_original_precision() or Float8Tensor.from_high_precision() first"
        )
    got, other = (
        f"{x._data.dtype} {'' if op == 'copy_' else f'for {x._orig_dtype} '}under {x._scaling}"
        for x in (a, b)
    )
    if got != other:
        raise ValueError(f"{op}: got Float8Tensors of {got} and of {other}, expected equal")
    # Pieces of one tensor share the scale object; only others cost a look at the values.
    if scale and a._scale is not b._scale and not torch.equal(a._scale, b._scale):
        raise ValueError(
            f"{op}: got Float8Tensors with different scales, expected one scale for all, or for "
            f"all parts of one; call .to_original_precision() first, or cast all with one scale"
        )


@implements(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    pieces, *rest = args
    first: Any = pieces[0]
    rows = isinstance(first, Float8Tensor) and first._has_row_scales
    for piece in pieces:
        _require_alike("cat", first, piece, scale=not rows)
    rows = rows and (*rest, *kwargs.values(), 0)[0] % first.dim() != first.dim() - 1
    if not rows and not first._granularity.one_scale:
        raise ValueError(
            f"cat: got Float8Tensors under {first._scaling}, expected TENSORWISE, or whole "
            f"rows under AXISWISE; call .to_original_precision() first"
        )
    data = func([piece._data for piece in pieces], *rest, **kwargs)
    if rows:
        return first._like(data, func([piece._scale for piece in pieces], *rest, **kwargs))
    whole = first._like(data, first._scale.clone())  # a write in place reaches it, too
    amaxes = [piece._amax for piece in pieces]
    if any(amax is not amaxes[0] for amax in amaxes):
        # To be recorded of the whole is the largest; unknown, if that of a piece is.
        whole._amax = None if any(a is None for a in amaxes) else torch.stack(amaxes).amax()
    return whole


def _is_whole(x: Float8Tensor) -> bool:
    """Whether no other tensor can share its scale, as parts do."""
    return x._data.nbytes == x._data.untyped_storage().nbytes()


@implements(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source, *rest = args
    if not isinstance(target, Float8Tensor):
        return target.copy_(dequantise(source), *rest)
    whole = _is_whole(target)
    _require_alike("copy_", target, source, scale=not whole)
    if target.shape != source.shape or (target._amax is None) != (source._amax is None):
        got, expected = (
            f"shape {tuple(x.shape)}, with{'out' * (x._amax is None)} an amax to record"
            for x in (source, target)
        )
        raise ValueError(f"copy_: got {got}, expected {expected}; clone the source instead")
    for name, part in target._inside().items():
        if whole or name == "_data":
            part.copy_(getattr(source, name), *rest)
    return target


# torch.distributed.checkpoint asks.
implements(aten.is_pinned.default)(lambda func, args, kwargs: func(args[0]._data, *args[1:]))


@implements(aten._foreach_lerp_.Scalar)
def _foreach_lerp_(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Average the tensors of whole models: equal float8 tensors stay as they are."""
    targets, sources, weight = args
    others = []
    for target, source in zip(targets, sources, strict=True):
        if not instances(Float8Tensor, (target, source)):
            others.append((target, source))
            continue
        _require_alike(str(func), target, source, scale=True)
        if not torch.equal(target._data.view(torch.uint8), source._data.view(torch.uint8)):
            raise ValueError(
                f"{func}: got Float8Tensors of different values, expected equal ones, as of frozen "
                f"weights: the average has no bytes under their scale; average them in high "
                f"precision, for a whole model after convert_to_high_precision(model)"
            )
    if others:
        func(*map(list, zip(*others, strict=True)), weight, **kwargs)


# ---------------------------------------------------------------- values


@implements(
    aten.equal.default,
    aten.is_same_size.default,
    aten.zeros_like.default,
    aten.ones_like.default,
)
def _of_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op on the values: a new tensor is plain, as its values may be any."""
    return func(*mapped(dequantise, Float8Tensor, args), **kwargs)


@implements(aten.mm.default, aten.addmm.default)
def _product(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute `a @ b`, [M, K] x [K, N], of two by a scaled GEMM; `addmm` adds a bias."""
    *bias, a, b = args
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor):
        return _of_values(func, args, kwargs)
    if a._orig_dtype != b._orig_dtype:
        raise ValueError(
            f"mm: got Float8Tensors of original dtypes {a._orig_dtype} and {b._orig_dtype}, "
            f"expected equal"
        )
    if a._data.dtype == b._data.dtype == E5M2:
        raise ValueError(
            f"mm: got two Float8Tensors of {E5M2}, expected at least one {E4M3}: tensor cores have "
            f"no e5m2 x e5m2; call .to_original_precision() on one of them"
        )
    # What the GEMM sums over must have one scale.
    fits_b = b._has_column_scales or (b._has_row_scales and b.numel() == 1)
    if not (a._granularity.one_scale or a._has_row_scales) or not (
        b._granularity.one_scale or fits_b
    ):
        raise ValueError(
            f"mm: got Float8Tensors under {a._scaling} and under {b._scaling}, expected "
            f"TENSORWISE, or AXISWISE by rows and by columns, which leaves one scale for what "
            f"is summed up; call .to_original_precision() first, or float8.linear"
        )
    product = matmul(
        _operand(a._data, a._scale, a._granularity),
        _operand(b._data.t(), b._scale.t() if b._has_column_scales else b._scale, b._granularity),
        (a.shape[0], b.shape[1]),
        gemm=Gemm(granularities=(a._granularity, b._granularity)),
        out_dtype=a._orig_dtype,
    )
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if not bias:
        return product
    # As in torch, a NaN in the bias counts for nothing if beta is 0.
    (bias,) = mapped(dequantise, Float8Tensor, bias)
    return torch.add(product * alpha, bias, alpha=beta) if beta else product * alpha


def _operand(data: Tensor, scale: Tensor, granularity: Granularity) -> Operand:
    operand = padded(Operand(data, scale), granularity)
    return Operand(operand.data.contiguous(), operand.scale)


# ---------------------------------------------------------------- ranks


def _send(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a functional collective that changes no values, and wait where compilers look for it."""
    x, *rest = args
    rows = x._has_row_scales and func.name().endswith("into_tensor")
    if not rows and not x._granularity.one_scale:
        raise ValueError(
            f"{func}: got a Float8Tensor under {x._scaling}, expected TENSORWISE, or an "
            f"all-gather of rows under AXISWISE: its scales would stay here; call "
            f".to_original_precision() first"
        )
    data = x._data.view(torch.uint8) if x._data.is_cpu else x._data  # Gloo knows no float8
    data, scale = (
        functional.wait_tensor(func(part, *rest, **kwargs)) if sent else part
        for part, sent in ((data, True), (x._scale, rows))
    )
    return x._like(data.view(x._data.dtype), scale)


def _exchange(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a collective of `torch.distributed` that moves whole tensors, each with its own scale.

    One after the other: bytes, scales, and amaxes where there are some, on all ranks alike.
    """
    tensors, written = instances(Tensor, (args, kwargs)), instances(Float8Tensor, args[0])
    first = next(x for x in tensors if isinstance(x, Float8Tensor))
    for x in tensors:
        _require_alike(str(func), first, x, scale=False)
        if (x._amax is None) != (first._amax is None):
            raise ValueError(
                f"{func}: got Float8Tensors with and without an amax to record, expected all alike"
            )
    if not all(map(_is_whole, written)) or len({id(x._scale) for x in written}) < len(written):
        raise ValueError(
            f"{func}: got parts of a Float8Tensor to write into, expected tensors with scales of "
            f"their own, as others come with theirs; clone() them first"
        )
    # NCCL makes no work to wait for unless it is asked to; torch waits for that of the last.
    at = [argument.name for argument in func._schema.arguments].index("async_op")
    if len(args) > at:
        args = (*args[:at], True, *args[at + 1 :])
    work: Any = None
    for name in first._inside():

        def inside(x: Any, name: str = name) -> Tensor:
            inner: Tensor = getattr(x, name)
            return inner.view(torch.uint8) if inner.dtype in FLOAT8_MAX else inner

        if work is not None:
            work.wait()
        result = func(*mapped(inside, Float8Tensor, args), **kwargs)
        work = result[1] if isinstance(result, tuple) else result
    return (args[0], work) if isinstance(result, tuple) else work


if torch.distributed.is_available():
    implements(
        torch.ops.c10d.broadcast_.default,
        torch.ops.c10d.scatter_.default,
        torch.ops.c10d.gather_.default,
        torch.ops.c10d.allgather_.default,
        torch.ops.c10d.alltoall_.default,
    )(_exchange)
    # DTensors gather with these.
    functional = torch.ops._c10d_functional
    implements(functional.all_gather_into_tensor.default, functional.all_to_all_single.default)(
        _send
    )
    # The last is made when DTensor is imported; torch waits with it when the result is used.
    implements(functional.wait_tensor.default, "_c10d_functional::_wrap_tensor_autograd")(
        lambda func, args, kwargs: args[0]
    )
