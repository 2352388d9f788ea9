"""Handlers of the aten ops that have a meaning for a `Float8Tensor`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from float8.config import Granularity
from float8.formats import E4M3, E5M2
from float8.gemm import Gemm, matmul
from float8.quantize import padded
from float8.scales import Operand
from float8.tensor.float8_tensor import CURE, OP_HANDLERS, Float8Tensor, dequantise
from float8.tensor.wrapper import as_inference_as

aten = torch.ops.aten
Handler = Callable[[Any, Any, dict[str, Any]], Any]


def implements(*ops: Any) -> Callable[[Handler], Handler]:
    """Register a handler for some aten ops."""

    def register(handler: Handler) -> Handler:
        OP_HANDLERS.update(dict.fromkeys(ops, handler))
        return handler

    return register


@implements(
    aten.view.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.as_strided.default,
    aten.alias.default,
    aten.detach.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.chunk.default,
    aten.constant_pad_nd.default,
)
def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do ops that move no values on the data; one scale covers all of them."""
    x, *rest = args
    if func is aten.constant_pad_nd.default and any((*rest[1:], *kwargs.values())):
        raise ValueError(
            f"{func}: got a padding other than 0, which has no bytes under a scale of other "
            f"values; call .to_original_precision() first"
        )
    with as_inference_as(x):
        data = func(x._data, *rest, **kwargs)
        scale = x._scale
        if not x._granularity.one_scale:
            scale = _scale_of_view(func, x, data, rest, kwargs)
        if not isinstance(scale, Tensor):
            return [x._like(*piece) for piece in zip(data, scale, strict=True)]
        if not isinstance(data, Tensor):
            return [x._like(piece, scale) for piece in data]
        return x._like(data, scale)


_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


def _scale_of_view(func: Any, x: Any, data: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the scales of `data`, which `func` made of that of `x`: a list if it made pieces."""
    if x._granularity.by_rows and func in _TURNS and _turns_the_last(func, x.dim(), rest):
        return func(x._scale, *rest, **kwargs)
    if x._has_row_scales and func is aten.constant_pad_nd.default and not any(rest[0][:2]):
        return func(x._scale, rest[0], 1.0)
    if x._granularity.by_rows and func in _ALONG_A_DIM:
        at = _ALONG_A_DIM[func]
        dim = (rest[at] if len(rest) > at else kwargs.get("dim", 0)) % x.dim()
        covered = x.dim() - (2 if x._has_column_scales else 1)  # the dim that one scale covers
        if dim != covered and all(part.dim() > 1 for part in tree_leaves(data)):
            return func(x._scale, *rest, **kwargs)
    scales = [_scales_of_part(func, x, part) for part in tree_leaves(data)]
    return scales[0] if isinstance(data, Tensor) else scales


_ALONG_A_DIM = {
    aten.slice.Tensor: 0,
    aten.select.int: 0,
    aten.split.Tensor: 1,
    aten.split_with_sizes.default: 1,
    aten.unbind.int: 0,
    aten.chunk.default: 1,
}
"""Ops that take parts of a tensor along one dim, and at which place its arguments name it."""


def _turns_the_last(func: Any, dims: int, rest: list[Any]) -> bool:
    """Whether a turn leaves all dims but the last two where they are."""
    if dims == 2:
        return True
    last = {dims - 2, dims - 1}
    return func is aten.transpose.int and {dim % dims for dim in rest} == last


def _scales_of_part(func: Any, x: Any, part: Tensor) -> Any:
    """Return all scales of `x` for a view of it as it is, or those of rows of which it is made."""
    if (part.shape, part.stride()) == (x.shape, x.stride()):
        return x._scale
    whole_rows = part.dim() > 1 and part.shape[-1] == x.shape[-1] and part.is_contiguous()
    if not x._has_row_scales or not whole_rows or not x.is_contiguous():
        raise ValueError(
            f"{func}: got a Float8Tensor under {x._scaling}, expected TENSORWISE: a part "
            f"of the data does not have all of the scales; {CURE}"
        )
    first = (part.storage_offset() - x._data.storage_offset()) // x.shape[-1]
    rows = part.numel() // x.shape[-1]
    return x._scale.reshape(-1)[first : first + rows].view(*part.shape[:-1], 1)


@implements(aten.clone.default, aten.empty_like.default, aten._to_copy.default)
def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy, maybe to another device, or make room for a copy; dequantise to another dtype."""
    (x,) = args
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, x._orig_dtype):
        return func(dequantise(x), dtype=dtype, **kwargs)
    rest = {k: v for k, v in kwargs.items() if k != "memory_format"}
    amax = None if x._amax is None else func(x._amax, **rest)
    return x._like(func(x._data, **kwargs), func(x._scale, **rest), amax)


def _require_alike(op: str, a: Any, b: Any, *, scale: bool) -> None:
    """Raise a `ValueError` if `a`, a Float8Tensor, cannot take what `b` holds."""
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor):
        raise ValueError(
            f"{op}: got a Float8Tensor and a high-precision tensor, expected all of one kind; "
            f"call .to_original_precision() or Float8Tensor.from_high_precision() first"
        )
    same_dtype = op == "copy_" or a._orig_dtype == b._orig_dtype
    same_dtype = same_dtype and a._scaling == b._scaling
    if a._data.dtype != b._data.dtype or not same_dtype:
        got, other = (f"{x._data.dtype} for {x._orig_dtype}, {x._scaling}" for x in (a, b))
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


@implements(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source, *rest = args
    if not isinstance(target, Float8Tensor):
        return target.copy_(dequantise(source), *rest)
    # Views share the scale: another one would change the values of what is not written.
    whole = target._data.nbytes == target._data.untyped_storage().nbytes()
    _require_alike("copy_", target, source, scale=not whole)
    if target.shape != source.shape or (target._amax is None) != (source._amax is None):
        got, expected = (
            f"shape {tuple(x.shape)}, with{'out' * (x._amax is None)} an amax to record"
            for x in (source, target)
        )
        raise ValueError(f"copy_: got {got}, expected {expected}; clone the source instead")
    for name in target.__tensor_flatten__()[0] if whole else ["_data"]:
        getattr(target, name).copy_(getattr(source, name), *rest)
    return target


# torch.distributed.checkpoint asks.
implements(aten.is_pinned.default)(lambda func, args, kwargs: func(args[0]._data, *args[1:]))


@implements(aten.new_zeros.default)
def _new_zeros(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        f"Float8Tensor: got {func}, as fully_shard calls it, expected one of the ops that have a "
        f"float8 meaning: a weight that is in float8 only cannot be sharded; leave it out with "
        f"fully_shard(..., ignored_params={{weight}})"
    )


@implements(aten._foreach_lerp_.Scalar)
def _foreach_lerp_(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Average the tensors of whole models: equal float8 tensors stay as they are."""
    targets, sources, weight = args
    others: list[Any] = []
    for target, source in zip(targets, sources, strict=True):
        if not any(isinstance(x, Float8Tensor) for x in (target, source)):
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


@implements(aten.mm.default, aten.addmm.default)
def _product(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    *bias, a, b = args
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor):
        return _of_values(func, args, kwargs)
    product = _float8_mm(a, b)
    if not bias:
        return product
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    # As in torch, a NaN in the bias counts for nothing if beta is 0.
    return torch.add(product * alpha, *_dequantised(bias), alpha=beta) if beta else product * alpha


@implements(
    aten.equal.default,
    aten.is_same_size.default,
    aten.zeros_like.default,
    aten.ones_like.default,
)
def _of_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op on the values: a new tensor is plain, as its values may be any."""
    return func(*_dequantised(args), **kwargs)


def _dequantised(args: Any) -> Any:
    return tree_map_only(Float8Tensor, dequantise, args)


def _send(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a functional collective that changes no values.

    It is waited for at once, where compilers know to look for it.
    """
    x, *rest = args
    rows = x._has_row_scales and func.name().endswith("into_tensor")
    if not rows and not x._granularity.one_scale:
        raise ValueError(
            f"{func}: got a Float8Tensor under {x._scaling}, expected TENSORWISE, or an "
            f"all-gather of rows under AXISWISE: its scales would stay here; call "
            f".to_original_precision() first"
        )

    def sent(field: Tensor) -> Tensor:
        received: Tensor = functional.wait_tensor(func(field, *rest, **kwargs))
        return received

    data = x._data.view(torch.uint8) if x._data.is_cpu else x._data  # Gloo knows no float8
    data = sent(data).view(x._data.dtype)
    return x._like(data, sent(x._scale) if rows else None)


def _exchange(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a collective of `torch.distributed` that moves whole tensors, each with its own scale.

    Field by field: bytes, scales, and amaxes where there are some. All ranks must give alike ones.
    """
    tensors: list[Any] = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    first = next(x for x in tensors if isinstance(x, Float8Tensor))
    names = first.__tensor_flatten__()[0]
    for x in tensors:
        _require_alike(str(func), first, x, scale=False)
        if x.__tensor_flatten__()[0] != names:
            raise ValueError(
                f"{func}: got Float8Tensors with and without an amax to record, expected all alike"
            )
    written = tree_leaves(args[0])
    parts = [x for x in written if x._data.nbytes != x._data.untyped_storage().nbytes()]
    if parts or len({id(x._scale) for x in written}) < len(written):
        raise ValueError(
            f"{func}: got parts of a Float8Tensor to write into, expected tensors with scales of "
            f"their own, as others come with theirs; clone() them first"
        )
    # NCCL makes no work to wait for unless it is asked to; torch waits for that of the last field.
    at = [argument.name for argument in func._schema.arguments].index("async_op")
    if len(args) > at:
        args = (*args[:at], True, *args[at + 1 :])
    done: Any = None
    for name in names:
        if done is not None:
            done.wait()

        def field(x: Any, name: str = name) -> Tensor:
            inner: Tensor = getattr(x, name)
            return inner.view(torch.uint8) if name == "_data" else inner

        result = func(*tree_map_only(Float8Tensor, field, args), **kwargs)
        done = result[1] if isinstance(result, tuple) else result
    return (args[0], done) if isinstance(result, tuple) else done


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


def _float8_mm(a: Float8Tensor, b: Float8Tensor) -> Tensor:
    """Return `a @ b`, [M, K] x [K, N]: a scaled GEMM on data laid out along K, padded to 16."""
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
    fits_a = a._granularity.one_scale or a._has_row_scales
    fits_b = (
        b._granularity.one_scale or b._has_column_scales or (b._has_row_scales and b.numel() == 1)
    )
    if not fits_a or not fits_b:
        raise ValueError(
            f"mm: got Float8Tensors under {a._scaling} and under {b._scaling}, expected "
            f"TENSORWISE, or AXISWISE by rows and by columns, which leaves one scale for what "
            f"is summed up; call .to_original_precision() first, or float8.linear"
        )
    return matmul(
        _operand(a._data, a._scale, a._granularity),
        _operand(b._data.t(), b._scale.t() if b._has_column_scales else b._scale, b._granularity),
        (a.shape[0], b.shape[1]),
        gemm=Gemm(granularities=(a._granularity, b._granularity)),
        out_dtype=a._orig_dtype,
    )


def _operand(data: Tensor, scale: Tensor, granularity: Granularity) -> Operand:
    operand = padded(Operand(data, scale), granularity)
    return Operand(operand.data.contiguous(), operand.scale)
