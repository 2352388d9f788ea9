"""`Float8Tensor`: float8 data and their scale as one tensor, and a handler for each aten op."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from float8.autograd import new_alias
from float8.config import CastConfig, Granularity, ScalingGranularity
from float8.formats import E4M3, FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.kernels.dequantize import dequantised_by_kernel
from float8.kernels.runtime.private import warn
from float8.quantize import Cast, quantize
from float8.scales import Operand
from float8.tensor.ranks import amax_over, dtensor_like, is_dtensor, sharding_groups
from float8.tensor.wrapper import Wrapper, as_inference_as

aten = torch.ops.aten

_REMEDY = (  # ends the errors of ops that are not defined on float8 data
    "call .to_original_precision(); if it is a weight in float8 only, call "
    "convert_to_high_precision(model) first, as before merge_and_unload() (save_float8_checkpoint "
    "merges adapters of PEFT itself, one layer at a time), or leave it out of "
    "fully_shard, by ignored_params; if FSDP2 gathers it, convert its layer again before "
    "fully_shard, by a module_filter_fn, with enable_fsdp_float8_all_gather=False"
)


class Float8Tensor(Wrapper):
    """A tensor stored as float8 data and a scale, which reports its original dtype.

    The values are `data.to(float32) * scale`. Data and scale pass as one tensor through autograd,
    FSDP and DTensor to GEMMs of float8 layers. Other products (`@`, `bmm`, `einsum`, `F.linear`)
    dequantize and warn. Ops not defined on float8 raise errors that name a remedy, such as
    `.to_original_precision()`.

    Args:
        data: e4m3fn or e5m2. With one scale for all elements, any shape and strides; else
            [..., R, C], contiguous or with the last two dims transposed.
        scale: float32, with one element under `ScalingGranularity.TENSORWISE`, [..., R, 1] (or by
            columns [..., 1, C]) under `AXISWISE`, [..., ceil(R / h), ceil(C / w)] under
            `BLOCK_{h}x{w}` (if h > 1, last dim padded to a multiple of 4; transposed if `data` is).
        orig_dtype: the dtype that the tensor reports: float32, bfloat16 or float16.
        granularity: which elements share one scale. All allow transposes and copies (of transposed
            blocks with equal strides), `AXISWISE` whole rows, `TENSORWISE` all but `view(dtype)`.
        amax: the amax before the cast, 0-dim float32, or None. Layers with delayed scaling record
            it each time they read the tensor with grad mode on.
        requires_grad: if given and `data` is a `Float8Tensor`, return `nn.Parameter(data,
            requires_grad)` and ignore other arguments; accelerate moves weights by such a call.

    Raises:
        TypeError: a dtype is not one of those named above, or `scale` is missing.
        ValueError: shape or strides are not as above; compiled code does not check finer scales.
    """

    _data: Tensor
    _scale: Tensor
    _amax: Tensor | None
    _orig_dtype: torch.dtype
    _granularity: Granularity
    _has_column_scales: bool  # scale [..., 1, C], only under `AXISWISE`
    _tensor_names = "_data", "_scale", "_amax"
    _context = "_orig_dtype", "_granularity"

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor | Any = None,
        orig_dtype: torch.dtype | Any = None,
        granularity: Granularity = ScalingGranularity.TENSORWISE,
        amax: Tensor | None = None,
        requires_grad: bool | None = None,
    ) -> "Float8Tensor":
        """Check dtypes and shapes; return a `Float8Tensor` over `data` and `scale`, not copied."""
        if requires_grad is not None and isinstance(data, Float8Tensor):
            return nn.Parameter(data, requires_grad)  # type: ignore[return-value]
        if scale is None:
            expected = "one, or a Float8Tensor as data; model.load_state_dict casts other values"
            raise TypeError(f"scale: got none for data of {data.dtype}, expected {expected}")
        _require_dtype("data: got dtype", data.dtype, FLOAT8_MAX)
        if scale.dtype != torch.float32:
            raise TypeError(f"scale: got dtype {scale.dtype}, expected torch.float32")
        _require_dtype("orig_dtype: got", orig_dtype, HIGH_PRECISION_DTYPES)
        contiguous = data.dim() > 1 and (data.is_contiguous() or data.mT.is_contiguous())
        if not (granularity.one_scale or contiguous):
            got = f"shape {tuple(data.shape)} with strides {data.stride()}"
            raise ValueError(f"data: got {got}, expected a contiguous matrix under {granularity}")
        self = cls._unchecked(data, scale, orig_dtype, granularity, amax)
        if self._has_column_scales:  # check [..., C, R] with scales [..., C, 1]
            data, scale = data.mT, scale.mT
        if granularity.one_scale:
            fits, expected = scale.numel() == 1, "one element"
        elif torch.compiler.is_compiling():  # comparing sizes would add guards
            return self
        else:
            shape = granularity.scales(tuple(data.shape))
            fits, expected = tuple(scale.shape) == shape, f"shape {shape}"
            # Data and scales of blocks may also be permuted, in the same way.
            fits = fits or (granularity.by_blocks and self._contiguous_order() is not None)
        if not fits:
            got = f"shape {tuple(scale.shape)} for data of {tuple(data.shape)}"
            raise ValueError(f"scale: got {got}, expected {expected} under {granularity}")
        return self

    @classmethod
    def _unchecked(
        cls, data: Tensor, scale: Tensor, dtype: torch.dtype, granularity: Granularity, amax: Any
    ) -> "Float8Tensor":
        """Return a `Float8Tensor` of these fields, not checked, that reports `dtype`."""
        self: Float8Tensor = cls._wrap(data, dtype)
        self._data, self._scale, self._amax = data, scale, amax
        self._orig_dtype, self._granularity = dtype, granularity
        # Dynamo guards on each size that is compared. Compare the number of features (-1) first, as
        # that of tokens (-2) changes. A [1, 1] scale of a [1, 1] matrix is taken for a row's.
        has_columns = granularity.by_rows and data.dim() == scale.dim() > 1
        has_columns = has_columns and scale.shape[-1] == data.shape[-1] and scale.shape[-2] == 1
        self._has_column_scales = has_columns and data.shape[-2:] != (1, 1)
        return self

    def _like(self, data: Tensor, scale: Tensor, amax: Tensor | None = None) -> "Float8Tensor":
        """Return a tensor like `self` with other data, scale and amax (None: that of `self`)."""
        amax = self._amax if amax is None else amax
        return self._unchecked(data, scale, self._orig_dtype, self._granularity, amax)

    @staticmethod
    def from_high_precision(
        x: Tensor,
        dtype: torch.dtype = E4M3,
        *,
        scale: Tensor | None = None,
        round_scales_to_power_of_2: bool = False,
    ) -> "Float8Tensor":
        """Quantize `x` with one scale; the gradient of the result passes to `x` unchanged.

        Args:
            x: float32, bfloat16 or float16, any shape, no `Float8Tensor`. If `x` is a DTensor, all
                ranks must call this, and the result is a DTensor with one scale for all ranks.
            dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
            scale: float32 with one element, or None to compute it from the amax of `x`.
            round_scales_to_power_of_2: round a computed scale up to a power of two.

        Raises:
            TypeError: the dtype of `x`, or `dtype`, is not one of those named above.
            ValueError: `x` is `Partial`, or `scale` not one float32 element on the device of `x`.
        """
        _require_dtype("from_high_precision: got dtype", dtype, FLOAT8_MAX)
        cast_config = CastConfig(target_dtype=dtype, power_of_2=round_scales_to_power_of_2)
        if not is_dtensor(x):
            return to_float8(x, Cast(cast_config, scale=scale))
        whole: Any = x
        if any(placement.is_partial() for placement in whole.placements):
            raise ValueError(
                f"from_high_precision: got a DTensor placed {whole.placements}, expected no "
                f"Partial, whose values are still to be summed up; redistribute it first"
            )
        cast = Cast(cast_config, scale=scale, reduce=amax_over(sharding_groups(whole)))
        return dtensor_like(to_float8(whole.to_local(), cast), whole)  # type: ignore[no-any-return]

    def to_original_precision(self) -> Tensor:
        """Return `data * scale` in the original dtype; the gradient passes through unchanged."""
        return _StraightThrough.apply(self, dequantise)  # type: ignore[no-any-return, no-untyped-call]

    def storage(self, **_: Any) -> Any:
        """Raise a `RuntimeError`: safetensors and accelerate would store data without scale."""
        raise RuntimeError(
            "Float8Tensor: got a request for its storage, as by safetensors or to offload it to "
            "the disk, expected tensors in high precision, from .to_original_precision(); give "
            "save_pretrained state_dict=high_precision_state_dict(model); offload to the CPU, or "
            "call convert_to_high_precision(model) first"
        )

    numpy = storage

    def data_ptr(self) -> int:
        """Return the address of the float8 data, which accelerate compares to find tied weights."""
        return self._data.data_ptr()

    def element_size(self) -> int:
        """Return the size in bytes of one element of the float8 data, which is 1."""
        return self._data.element_size()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Size in bytes of the data, the scales and the amax."""
        return sum(x.nbytes for x in self._tensors().values())

    @property
    def _has_row_scales(self) -> bool:
        return self._granularity.by_rows and self._scale.shape == (*self.shape[:-1], 1)

    @property
    def _scaling(self) -> str:
        """The granularity as text for errors; notes scales by columns and transposed blocks."""
        layout = " by columns" if self._has_column_scales else " transposed"
        return f"{self._granularity}{layout * self._is_transposed}"

    @property
    def _is_transposed(self) -> bool:
        """Whether scales are by columns, [..., 1, C], or dims were permuted under blocks."""
        if not self._granularity.by_blocks:
            return self._has_column_scales
        as_cast = self._scale.shape == self._granularity.scales(tuple(self.shape))
        return not (as_cast and self._data.is_contiguous())

    def _contiguous_order(self) -> tuple[int, ...] | None:
        """Return the order of dims in which data are contiguous, scales as from a cast; or None."""
        if self.dim() < 2:
            return None
        for order in itertools.permutations(range(self.dim())):
            data, scale = self._data.permute(order), self._scale.permute(order)
            if data.is_contiguous() and scale.shape == self._granularity.scales(tuple(data.shape)):
                return order
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op `func` by its handler in this module, by decomposition, or as a view.

        Parts of decomposed ops are dispatched here. An op with none raises `NotImplementedError`.
        """
        kwargs = kwargs or {}
        if handler := _HANDLERS.get(func.name()):
            return handler(func, args, kwargs)
        # In inference mode compound ops arrive whole; their parts are dispatched here again.
        if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
            return result
        if func.is_view:
            return _view(func, args, kwargs)
        raise NotImplementedError(
            f"Float8Tensor: got {func}, expected an op that is defined on float8 data "
            f"(views, copies, cat, mm); {_REMEDY}"
        )


def _require_dtype(got: str, dtype: Any, allowed: Iterable[torch.dtype]) -> None:
    if dtype not in allowed:
        raise TypeError(f"{got} {dtype}, expected one of {tuple(allowed)}")


def to_float8(x: Tensor, cast: Cast) -> Float8Tensor:
    """Quantize `x` with one scale or, if >= 2-D, one per row; gradients pass to `x` unchanged.

    `cast` has the format, the granularity (not blocks) and the origin of scales. If that is
    `cast.source` (delayed scaling), layers that read the result record the amax of `x`.
    """
    granularity, amax = cast.config.scaling_granularity, None
    if cast.source is not None:
        source = cast.source.with_new_amax()  # same scale; `quantize` writes the new amax
        cast, amax = cast._replace(source=source), source.amax
    with torch.no_grad():  # not in `_StraightThrough`, where torch 2.11 loses recompute tags
        rows = x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)
        data, scale = quantize(rows, cast, row=True).row
        if data.shape != rows.shape:  # padded for a GEMM
            data = data[:, : rows.shape[1]].clone(memory_format=torch.contiguous_format)
        scale = scale.reshape(*x.shape[:-1], 1) if granularity.by_rows else scale
    fields = data.reshape(x.shape), scale, x.dtype, granularity, amax
    return _StraightThrough.apply(x, Float8Tensor, *fields)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """`apply(x, f, *args)` returns `f(*args or [x])`; its gradient passes to `x` unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.without_gradient = 1 + len(args)  # `function` and `args`
        return function(*args) if args else function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *[None] * ctx.without_gradient)


def dequantise(x: Float8Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `data * scale` in float32, rounded to `dtype` (None: `x.dtype`), without gradient."""
    operand, dtype = Operand(x._data, x._scale), dtype or x._orig_dtype
    if not (x._granularity.by_blocks and x._is_transposed):
        return dequantised_by_kernel(operand, x._granularity, dtype)
    order: Any = x._contiguous_order()
    as_cast = Operand(*(inner.permute(order) for inner in operand))
    values = dequantised_by_kernel(as_cast, x._granularity, dtype)
    return new_alias(values.permute([order.index(dim) for dim in range(x.dim())]))


def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return `Float8Tensor`(s) viewed or padded by `func`; to expand finer scales, dequantize."""
    x, *rest = args
    expands = func is aten.expand.default and [*x.shape] != [*rest[0]]  # rest[0]: the new shape
    if expands and not x._granularity.one_scale:  # `torch.matmul` expands before `bmm`
        return _multiply_dequantized(func, args, kwargs)
    if func is aten.constant_pad_nd.default and any(rest[1:]):  # rest[1], if there: the value
        raise ValueError(
            f"{func}: got a padding other than 0, which float8 data cannot hold exactly under "
            f"their scale; call .to_original_precision() first"
        )
    with as_inference_as(x):
        result = func(x._data, *rest, **kwargs)
        views = [result] if isinstance(result, Tensor) else result
        scales = _scales_of_views(func, x, views, rest)
        tensors = [x._like(*pair) for pair in zip(views, scales, strict=True)]
    return tensors[0] if isinstance(result, Tensor) else tensors


def _scales_of_views(func: Any, x: Float8Tensor, views: list[Tensor], args: Any) -> list[Tensor]:
    """Return scales for `views = func(x._data, *args)`; raise if none fit, as for cut blocks."""
    if x._granularity.one_scale:
        return [x._scale] * len(views)
    op, scales = func.overloadpacket, list[Tensor]()
    if op in (aten.t, aten.transpose, aten.permute):
        return [func(x._scale, *args)]
    if op is aten.constant_pad_nd and x._has_row_scales and not any(args[0][:2]):
        return [func(x._scale, args[0], 1.0)]  # only rows are added; they get the scale 1
    if op in _RESHAPING_OPS:
        scales = _reshaped_scale(x, views[0])
    elif op in _DIM_ARG and views[0].dim() > 1:
        position = _DIM_ARG[op]
        dim = args[position] if position < len(args) else 0  # torch leaves default arguments out
        # Dims, counted from the last, along which elements share scales; only others can be cut.
        shared = (-2, -1) if x._granularity.by_blocks else (-2,) if x._has_column_scales else (-1,)
        if dim % x.dim() - x.dim() not in shared and x._scale.shape[dim] == x.shape[dim]:
            parts = func(x._scale, *args)
            scales = [parts] if isinstance(parts, Tensor) else [*parts]
    # To dequantize blocks, there must be an order of dims in which the data are contiguous.
    if scales and (x._granularity.by_rows or x._like(views[0], scales[0])._contiguous_order()):
        return scales
    layout = x.shape, x.stride(), x.storage_offset()
    if all((view.shape, view.stride(), view.storage_offset()) == layout for view in views):
        return [x._scale] * len(views)  # views of all elements, such as of `detach`
    raise _refusal(func, x, "TENSORWISE: the result would cut what one scale covers")


_RESHAPING_OPS = aten.view, aten._unsafe_view, aten._reshape_alias, aten.unsqueeze, aten.squeeze
_DIM_ARG = {aten.slice: 0, aten.select: 0, aten.unbind: 0, aten.split: 1, aten.split_with_sizes: 1}
"""Ops that return parts of a tensor -> index of their `dim` among the arguments after `self`."""


def _reshaped_scale(x: Float8Tensor, view: Tensor) -> list[Tensor]:
    """Return [scale] for `view`, `x` reshaped; [] if a dim whose elements share scales changes."""
    # A dim of `x` is one of the view if its size and the product of all sizes before are equal.
    dims_of_view = [(size, math.prod(view.shape[:dim])) for dim, size in enumerate(view.shape)]
    scale_shape = [*view.shape]
    for dim, (size, scales) in enumerate(zip(x.shape, x._scale.shape, strict=True)):
        if size != scales:  # elements along this dim share scales, so the view must have it, too
            dim_of_x = size, math.prod(x.shape[:dim])
            if dim_of_x not in dims_of_view:
                return []
            scale_shape[dims_of_view.index(dim_of_x)] = scales
    return [x._scale.reshape(scale_shape)]


def _refusal(op: Any, x: Float8Tensor, wanted: str) -> ValueError:
    return ValueError(f"{op}: got a Float8Tensor under {x._scaling}, expected {wanted}; {_REMEDY}")


def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy (or run `empty_like` on) data, scale, amax; in another dtype, return a plain tensor."""
    (x,) = args
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, x._orig_dtype):
        return func(dequantise(x), dtype=dtype, **kwargs)
    data, *others = x._tensors().values()  # `memory_format` is for the data only
    rest = {name: value for name, value in kwargs.items() if name != "memory_format"}
    copy = x._like(func(data, **kwargs), *[func(other, **rest) for other in others])
    if x._granularity.by_blocks and copy.stride() != x.stride() and x._is_transposed:
        raise _refusal(func, x, "TENSORWISE for a copy with other strides")
    return copy


def _require_same_kind(op: str, *tensors: Any, same_scale: bool = False) -> None:
    """Raise `ValueError`, which begins with `op`, unless `tensors` are `Float8Tensor`s of one kind.

    Tensors of one kind have the same float8 dtype, granularity, and original dtype (unless `op` is
    "copy_"); all or none are transposed (`_is_transposed`), and all or none have an amax. If
    `same_scale`, they also have equal scales.
    """

    def kind(x: Any) -> str:
        if not isinstance(x, Float8Tensor):
            return "a high-precision tensor"
        dtype = "" if op == "copy_" else f"for {x._orig_dtype} "
        amax = "without an amax" if x._amax is None else "with an amax"
        return f"a Float8Tensor of {x._data.dtype} {dtype}under {x._scaling} {amax} to record"

    if len(kinds := dict.fromkeys(map(kind, tensors))) > 1:
        fix = "call .to_original_precision() or Float8Tensor.from_high_precision() first"
        raise ValueError(f"{op}: got {' and '.join(kinds)}, expected tensors of one kind; {fix}")
    # `is` first, true for views of one tensor: to compare values waits for the GPU.
    first, *others = (x._scale for x in tensors)
    if same_scale and not all(scale is first or torch.equal(scale, first) for scale in others):
        raise ValueError(
            f"{op}: got Float8Tensors with different scales, expected one scale for all, or for "
            f"all parts of one; call .to_original_precision() first, or cast all with one scale"
        )


def _cat(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Concatenate data that share one scale, or whole rows with a scale each; else raise."""
    pieces, *rest = args
    first, dim = pieces[0], rest[0] if rest else 0  # `first` may be in high precision
    joins_rows = getattr(first, "_has_row_scales", False) and dim % first.dim() != first.dim() - 1
    _require_same_kind("cat", *pieces, same_scale=not joins_rows)
    if not joins_rows and not first._granularity.one_scale:
        raise _refusal("cat", first, "TENSORWISE, or whole rows under AXISWISE")
    data = func([piece._data for piece in pieces], *rest, **kwargs)
    if joins_rows:
        return first._like(data, func([piece._scale for piece in pieces], *rest, **kwargs))
    whole = first._like(data, first._scale.clone())  # a clone, since `copy_` may write it
    if first._amax is not None:
        whole._amax = torch.stack([piece._amax for piece in pieces]).amax()
    return whole


def _is_whole(x: Float8Tensor) -> bool:
    return x._data.nbytes == x._data.untyped_storage().nbytes()


def _copy_(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `aten.copy_` from a `Float8Tensor` into another or, dequantized, into a plain tensor.

    Raises `ValueError` if the source of a `Float8Tensor` is plain, or differs in shape, float8
    dtype, granularity, transposition or having an amax; or, into a part of a storage, in scale.
    """
    target, source, *rest = args
    if not isinstance(target, Float8Tensor):
        return target.copy_(dequantise(source), *rest)
    whole = _is_whole(target)
    _require_same_kind("copy_", target, source, same_scale=not whole)
    if target.shape != source.shape:
        got, expected = tuple(source.shape), tuple(target.shape)
        raise ValueError(f"copy_: got shape {got}, expected shape {expected}")
    for name, inner in target._tensors().items():
        if whole or name == "_data":  # scales of parts are equal, as checked above
            inner.copy_(getattr(source, name), *rest)
    return target


def _run_dequantized(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*[dequantise(x) if isinstance(x, Float8Tensor) else x for x in args], **kwargs)


def _multiply_dequantized(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Warn; run `func`, a product or the `expand` of `matmul` before it, on dequantized `args`."""
    sizes = [tuple(x.shape) for x in args if isinstance(x, Float8Tensor)]
    warn(
        f"float8: {func} outside of float8 layers takes values of {sizes} that are rounded to "
        f"float8, in high precision; call .to_original_precision() if that is meant; else convert "
        f"the layer, or have its weight gathered in high precision"
    )
    return _run_dequantized(func, args, kwargs)


def _gather_or_exchange(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """All-gather data (and scales, if one per row), or all-to-all data under one scale; wait."""
    x, *rest = args
    gathers_rows = x._has_row_scales and func.name().endswith("all_gather_into_tensor")
    if not gathers_rows and not x._granularity.one_scale:
        raise _refusal(func, x, "TENSORWISE, or an all-gather of rows under AXISWISE")
    wait, scale = torch.ops._c10d_functional.wait_tensor, x._scale
    data = x._data.view(torch.uint8) if x._data.is_cpu else x._data  # Gloo cannot send float8
    data = wait(func(data, *rest, **kwargs)).view(x._data.dtype)
    return x._like(data, wait(func(scale, *rest, **kwargs)) if gathers_rows else scale)


def _broadcast_or_scatter(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `c10d::broadcast_` or `scatter_` on each inner tensor; return (args[0], last `Work`)."""
    (written,), sources = args[:2]  # of a broadcast, `sources` is the process group
    sent = sources[0] if isinstance(sources, list) and sources else []  # [] on ranks that send none
    _require_same_kind(str(func), written, *sent)
    if not _is_whole(written):
        raise ValueError(
            f"{func}: got a part of a Float8Tensor to write into, expected a tensor whose scale "
            f"covers nothing else, since the scale is overwritten, too; clone() it first"
        )
    work: Any = None
    for name in written._tensors():
        if work is not None:  # the caller waits for the last one only
            work.wait()
        inner = [getattr(x, name) for x in (written, *sent)]
        out, *parts = [x.view(torch.uint8) if name == "_data" else x for x in inner]
        # True replaces args[4], `async_op`, without which NCCL returns no work to wait for.
        _, work = func([out], [parts] if sent else sources, *args[2:4], True, *args[5:])
    return args[0], work


_PRODUCTS = "mm addmm bmm baddbmm addbmm _grouped_mm mv addmv dot vdot"
_OPS: dict[Any, str] = {
    _view: "aten::_unsafe_view aten::constant_pad_nd",  # and all with `func.is_view`
    _copy: "aten::clone aten::empty_like aten::_to_copy",
    _cat: "aten::cat",
    _copy_: "aten::copy_",
    _run_dequantized: "aten::equal aten::is_same_size aten::zeros_like aten::ones_like",
    _multiply_dequantized: "".join(f"aten::{name} " for name in _PRODUCTS.split()),
    lambda func, args, kwargs: func(args[0]._data, *args[1:]): "aten::is_pinned",  # DCP calls it
    lambda func, args, kwargs: args[0].storage(): "aten::view.dtype",
    _broadcast_or_scatter: "c10d::broadcast_ c10d::scatter_",  # `distribute_tensor` calls these
    # `redistribute` and `full_tensor` of DTensors call these.
    _gather_or_exchange: (
        "_c10d_functional::all_gather_into_tensor _c10d_functional::all_to_all_single"
    ),
    lambda func, args, kwargs: args[0]: (
        "_c10d_functional::wait_tensor _c10d_functional::_wrap_tensor_autograd"
    ),
}
_HANDLERS = {name: handler for handler, names in _OPS.items() for name in names.split()}
"""Name of an op -> handler(func, args, kwargs), which returns its result."""

_AS_IN_0_2 = ScalingGranularity, "float8.config.casting.ScalingGranularity"  # its former name
torch.serialization.add_safe_globals([Float8Tensor, ScalingGranularity, _AS_IN_0_2])
