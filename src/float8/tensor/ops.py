"""What each aten op does to a `Float8Tensor`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from float8.formats import E4M3, E5M2, GEMM_ALIGNMENT
from float8.gemm import scaled_mm
from float8.tensor.float8_tensor import OP_HANDLERS, Float8Tensor, dequantise
from float8.tensor.wrapper import as_inference_as

aten = torch.ops.aten
Handler = Callable[[Any, Any, dict[str, Any]], Any]


def implements(*ops: Any) -> Callable[[Handler], Handler]:
    """Register a handler for some aten ops."""

    def register(handler: Handler) -> Handler:
        for op in ops:
            OP_HANDLERS[op] = handler
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
)
def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> Float8Tensor:
    """Ops that move no values: done on the data; one scale covers all of them."""
    x, *rest = args
    with as_inference_as(x):
        return x._like(func(x._data, *rest, **kwargs))  # type: ignore[no-any-return]


@implements(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default)
def _split(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Float8Tensor]:
    x, *rest = args
    with as_inference_as(x):
        return [x._like(piece) for piece in func(x._data, *rest, **kwargs)]


@implements(aten.clone.default)
def _clone(func: Any, args: Any, kwargs: dict[str, Any]) -> Float8Tensor:
    (x,) = args
    return x._like(func(x._data, **kwargs), torch.clone)  # type: ignore[no-any-return]


@implements(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: dict[str, Any]) -> Float8Tensor:
    pieces, *rest = args
    first = pieces[0]
    for piece in pieces:
        if not isinstance(piece, Float8Tensor):
            raise ValueError(
                "cat: got a Float8Tensor and a high-precision tensor, expected all of one kind; "
                "call .to_original_precision() or Float8Tensor.from_high_precision() first"
            )
        kinds = [(p._data.dtype, p._orig_dtype) for p in (first, piece)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"cat: got Float8Tensors of {kinds[0]} and {kinds[1]}, expected equal")
        if not _same_scale(first._scale, piece._scale):
            raise ValueError(
                "cat: got Float8Tensors with different scales, expected one scale for all; call "
                ".to_original_precision() first, or cast all pieces with one scale"
            )
    whole = first._like(func([piece._data for piece in pieces], *rest, **kwargs))
    if any(piece._amax is not first._amax for piece in pieces):
        # To be recorded of the whole is the largest; unknown, if that of a piece is.
        amaxes = [piece._amax for piece in pieces]
        whole._amax = None if any(a is None for a in amaxes) else torch.stack(amaxes).amax()
    return whole  # type: ignore[no-any-return]


def _same_scale(a: Tensor, b: Tensor) -> bool:
    # Pieces of one tensor share the scale object; only others cost a look at the values.
    return a is b or torch.equal(a, b)


@implements(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    target, source, *rest = args
    if not isinstance(target, Float8Tensor):
        target.copy_(dequantise(source), *rest)
        return target  # type: ignore[no-any-return]
    if not isinstance(source, Float8Tensor):
        raise ValueError(
            "copy_: got a high-precision source for a Float8Tensor, whose scale views of it may "
            "share; expected a Float8Tensor: cast it with Float8Tensor.from_high_precision()"
        )
    if target._data.dtype != source._data.dtype or target.shape != source.shape:
        raise ValueError(
            f"copy_: got {source._data.dtype} of shape {tuple(source.shape)} for "
            f"{target._data.dtype} of shape {tuple(target.shape)}, expected equal"
        )
    if (target._amax is None) != (source._amax is None):
        raise ValueError(
            "copy_: got two Float8Tensors of which one has an amax to record, expected both or "
            "none; clone the source instead"
        )
    whole = target._data.nbytes == target._data.untyped_storage().nbytes()
    if whole:
        target._scale.copy_(source._scale, *rest)
        if target._amax is not None and source._amax is not None:
            target._amax.copy_(source._amax, *rest)
    elif not _same_scale(target._scale, source._scale):
        raise ValueError(
            "copy_: got a source with another scale than the tensor that the target is a part "
            "of, expected the same scale; cast the source with the target's scale"
        )
    target._data.copy_(source._data, *rest)
    return target


@implements(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """`.to(device)` keeps float8; `.to(dtype)` dequantises, like any change of dtype."""
    x = args[0]
    dtype = kwargs.pop("dtype", None)
    if dtype is not None and dtype != x._orig_dtype:
        return func(dequantise(x), dtype=dtype, **kwargs)  # type: ignore[no-any-return]
    scale_kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return x._like(func(x._data, **kwargs), lambda field: func(field, **scale_kwargs))  # type: ignore[no-any-return]


@implements(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default)
def _new_like(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """A plain tensor of the original dtype: what is to be written there need not fit the scale."""
    x = args[0]
    if kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": x._orig_dtype}
    return func(x._data, **kwargs)  # type: ignore[no-any-return]


@implements(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the values are equal, however they are held."""
    return bool(func(*_high_precision(args)))


@implements(aten.is_same_size.default)
def _is_same_size(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


@implements(aten.mm.default)
def _mm(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    a, b = args
    if isinstance(a, Float8Tensor) and isinstance(b, Float8Tensor):
        return _float8_mm(a, b)
    return func(*_high_precision(args))  # type: ignore[no-any-return]


@implements(aten.addmm.default)
def _addmm(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    bias, a, b = args
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if isinstance(a, Float8Tensor) and isinstance(b, Float8Tensor):
        product = _float8_mm(a, b)
        if beta == 0:  # as in torch, a NaN in the bias then counts for nothing
            return torch.mul(product, alpha)
        bias = dequantise(bias) if isinstance(bias, Float8Tensor) else bias
        return torch.add(product * alpha, bias, alpha=beta)
    return func(*_high_precision(args), **kwargs)  # type: ignore[no-any-return]


def _high_precision(args: Any) -> Any:
    return tree_map_only(Float8Tensor, dequantise, args)


def _float8_mm(a: Float8Tensor, b: Float8Tensor) -> Tensor:
    """`a @ b` [M, K] x [K, N] as a scaled GEMM on data laid out along K and padded to 16."""
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
    columns = b.shape[1]
    product = scaled_mm(
        _gemm_layout(a._data),
        a._scale,
        _gemm_layout(b._data.t(), pad_rows=True),
        b._scale,
        out_dtype=a._orig_dtype,
    )
    return product if product.shape[1] == columns else product[:, :columns]


def _gemm_layout(data: Tensor, pad_rows: bool = False) -> Tensor:
    """[R, C] float8 -> contiguous along C, C (and R if `pad_rows`) padded with zeros to 16."""
    rows, columns = data.shape
    pad_bottom = -rows % GEMM_ALIGNMENT if pad_rows else 0
    pad_right = -columns % GEMM_ALIGNMENT
    if pad_bottom or pad_right:
        bytes_ = torch.nn.functional.pad(data.view(torch.uint8), (0, pad_right, 0, pad_bottom))
        data = bytes_.view(data.dtype)
    return data.contiguous()
