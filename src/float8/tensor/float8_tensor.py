"""`Float8Tensor`, float8 data and their scale as one tensor, and what each aten op does to it."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from float8.autograd import another
from float8.config import CastConfig, Granularity, ScalingGranularity
from float8.formats import E4M3, FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.kernels.dequantise import dequantised_by_kernel
from float8.kernels.runtime.private import warn
from float8.quantize import Cast, quantize
from float8.scales import Operand
from float8.tensor.ranks import amax_over, dtensor_like, is_dtensor, sharding_groups
from float8.tensor.wrapper import Wrapper, as_inference_as

aten = torch.ops.aten

CURE = (  # for an op that has no float8 meaning
    "call .to_original_precision(); if it is a weight in float8 only, call "
    "convert_to_high_precision(model) first, as before merge_and_unload(), or leave it out of "
    "fully_shard, by ignored_params; if FSDP2 gathers it, convert its layer again before "
    "fully_shard, by a module_filter_fn, with enable_fsdp_float8_all_gather=False"
)


class Float8Tensor(Wrapper):
    """A tensor held as float8 data and a scale, which reports its original dtype.

    `x ~= data.to(float32) * scale`. It carries float8 where autograd, FSDP or DTensor must see
    one tensor. Layers pass data and scale to a float8 GEMM; products outside layers (`@`, `bmm`,
    `einsum`, `F.linear`) dequantise first, and warn. Ops without a meaning for float8 data raise
    and name `.to_original_precision()`.

    Args:
        data: float8, any shape and strides. Under finer scales [..., R, C], contiguous, or with
            the last two dims transposed.
        scale: float32, the decode scales: one element, [..., R, 1] by rows, or one for each block;
            those of transposed data are transposed, [..., 1, C] under `AXISWISE`.
        orig_dtype: the dtype the tensor reports: float32, bfloat16 or float16.
        granularity: what one scale covers. All allow copies, dequantising and transposing;
            `AXISWISE` also slicing the dim that has scales; `TENSORWISE` all views.
        amax: 0-dim float32, which delayed scaling records at each use in training; else None.
        requires_grad: given with a `Float8Tensor` as `data` and nothing else, as accelerate does
            where it moves weights: returns that as an `nn.Parameter`.

    Raises:
        TypeError: a dtype is not one of those named above, or `data` have no scale.
        ValueError: `data` or `scale` has another shape, or `data` has other strides.
    """

    _data: Tensor
    _scale: Tensor
    _amax: Tensor | None
    _orig_dtype: torch.dtype
    _granularity: Granularity
    _has_row_scales: bool  # under `AXISWISE`: whether each row has one, or each column
    _has_column_scales: bool
    _tensors_inside = "_data", "_scale", "_amax"
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
        """See the class."""
        if requires_grad is not None and isinstance(data, Float8Tensor):
            return nn.Parameter(data, requires_grad)  # type: ignore[return-value]
        if scale is None:
            expected = "one, or a Float8Tensor as data; model.load_state_dict casts other values"
            raise TypeError(f"scale: got none for data of {data.dtype}, expected {expected}")
        if data.dtype not in FLOAT8_MAX:
            raise TypeError(f"data: got dtype {data.dtype}, expected one of {tuple(FLOAT8_MAX)}")
        if scale.dtype != torch.float32:
            raise TypeError(f"scale: got dtype {scale.dtype}, expected torch.float32")
        if orig_dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"orig_dtype: got {orig_dtype}, expected one of {HIGH_PRECISION_DTYPES}"
            )
        lies = data.dim() > 1 and (data.is_contiguous() or data.mT.is_contiguous())
        if not (granularity.one_scale or lies):
            raise ValueError(
                f"data: got shape {tuple(data.shape)} with strides {data.stride()}, expected a "
                f"contiguous matrix under {granularity}"
            )
        self = cls._unchecked(data, scale, orig_dtype, granularity, amax)
        lying, of = (scale.mT, data.mT) if self._has_column_scales else (scale, data)
        if granularity.one_scale:
            fits, expected = scale.numel() == 1, "one element"
        elif not (fits := torch.compiler.is_compiling()):  # which asks nothing of symbolic sizes
            wanted = granularity.scales(tuple(of.shape))
            fits, expected = tuple(lying.shape) == wanted, f"shape {wanted}"
            fits = fits or (granularity.by_blocks and self._order_of_cast() is not None)
        if not fits:
            got = f"shape {tuple(lying.shape)} for data of {tuple(of.shape)}"
            raise ValueError(f"scale: got {got}, expected {expected} under {granularity}")
        return self

    @classmethod
    def _unchecked(
        cls, data: Tensor, scale: Tensor, dtype: torch.dtype, granularity: Granularity, amax: Any
    ) -> "Float8Tensor":
        self: Float8Tensor = cls._around(data, dtype)
        self._data, self._scale, self._amax = data, scale, amax
        self._orig_dtype, self._granularity = dtype, granularity
        # In this order: a compiler is then asked about the features, not about the tokens. Those of
        # one element are rows.
        alike = granularity.by_rows and data.dim() == scale.dim() > 1
        alike = alike and scale.shape[-1] == data.shape[-1] and scale.shape[-2] == 1
        self._has_column_scales = alike and data.shape[-2:] != (1, 1)
        self._has_row_scales = granularity.by_rows and not self._has_column_scales
        return self

    def _like(self, data: Tensor, scale: Tensor, amax: Tensor | None = None) -> "Float8Tensor":
        """Return `data` under `scale`, with the other fields of this tensor."""
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
        """Cast `x`; differentiable, the gradient passes through unchanged.

        Args:
            x: float32, bfloat16 or float16, any shape; or a DTensor of them, which becomes a
                DTensor of `Float8Tensor`s under the scale of the whole: all ranks must call then.
            dtype: float8 format.
            scale: float32 with one element; None: from the amax of `x`.
            round_scales_to_power_of_2: round a scale from the amax up to a power of two.

        Raises:
            TypeError: a dtype is not one of those named above.
            ValueError: a DTensor is a sum still to be made.
        """
        if dtype not in FLOAT8_MAX:
            expected = " or ".join(map(str, FLOAT8_MAX))
            raise TypeError(f"from_high_precision: dtype is {dtype}; expected {expected}")
        how = CastConfig(target_dtype=dtype, power_of_2=round_scales_to_power_of_2)
        if not is_dtensor(x):
            return to_float8(x, Cast(how, scale=scale))
        whole: Any = x
        if any(placement.is_partial() for placement in whole.placements):
            raise ValueError(
                f"from_high_precision: got a DTensor placed {whole.placements}, expected no "
                f"Partial: its values are still to be summed up; redistribute it first"
            )
        cast = Cast(how, scale=scale, reduce=amax_over(sharding_groups(whole)))
        return dtensor_like(to_float8(whole.to_local(), cast), whole)  # type: ignore[no-any-return]

    def to_original_precision(self) -> Tensor:
        """Dequantise; differentiable, the gradient passes through unchanged."""
        return _Straight.apply(self, dequantise)  # type: ignore[no-any-return, no-untyped-call]

    def storage(self, **_: Any) -> Any:
        """Refuse to be one array in memory, as safetensors and accelerate's `disk_offload` want."""
        raise RuntimeError(
            "Float8Tensor: got a request for its storage, as by safetensors or to offload it to "
            "the disk, expected tensors in high precision, from .to_original_precision(); give "
            "save_pretrained state_dict=high_precision_state_dict(model); offload to the CPU, or "
            "call convert_to_high_precision(model) first"
        )

    numpy = storage

    def data_ptr(self) -> int:
        """Return the address of the data, by which accelerate tells tied weights."""
        return self._data.data_ptr()

    def element_size(self) -> int:
        """Return the bytes of an element in memory, without scales: 1."""
        return self._data.element_size()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the bytes of the data and of all scales."""
        return sum(x.nbytes for x in self._inside().values())

    @property
    def _scaling(self) -> str:
        """Describe the granularity for messages, and the dim of the scales if that differs."""
        differs = " by columns" if self._has_column_scales else " transposed"
        return f"{self._granularity}{differs * self._is_transposed}"

    @property
    def _is_transposed(self) -> bool:
        """Whether finer scales are not of [..., R, C], the dims in the order of the cast."""
        if not self._granularity.by_blocks:
            return self._has_column_scales
        as_cast = self._scale.shape == self._granularity.scales(tuple(self.shape))
        return not (as_cast and self._data.is_contiguous())

    def _order_of_cast(self) -> tuple[int, ...] | None:
        """Return the dims of data under blocks in the order of the cast; None: of a part."""
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
        kwargs = kwargs or {}
        if handler := _HANDLERS.get(func.name()):
            return handler(func, args, kwargs)
        # In inference mode nobody has taken compound ops apart.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func.is_view:
            return _view(func, args, kwargs)
        raise NotImplementedError(
            f"Float8Tensor: got {func}, expected one of the ops that have a float8 meaning "
            f"(views, copies, cat, mm); {CURE}"
        )


# ---------------------------------------------------------------- casts


def to_float8(x: Tensor, cast: Cast) -> Float8Tensor:
    """Cast `x`, of any shape, under one scale or one for each row; differentiable.

    What delayed scaling has to record goes along with the result, for those who use it.
    """
    granularity, amax = cast.how.scaling_granularity, None
    if cast.state is not None:
        state = cast.state.apart()
        cast, amax = cast._replace(state=state, record=True), state.amax
    with torch.no_grad():  # before the autograd function: see `autograd.computed_before`
        rows = x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)
        data, scale = quantize(rows, cast, row=True).row
        if data.shape != rows.shape:  # padded for a GEMM
            data = data[:, : rows.shape[1]].clone(memory_format=torch.contiguous_format)
        scale = scale.reshape(*x.shape[:-1], 1) if granularity.by_rows else scale
    made = data.reshape(x.shape), scale, x.dtype, granularity, amax
    return _Straight.apply(x, Float8Tensor, *made)  # type: ignore[no-any-return, no-untyped-call]


class _Straight(torch.autograd.Function):
    """Return what `make` makes of `x`; the gradient of that is the gradient of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[..., Tensor], *made: Any) -> Tensor:
        ctx.others = 1 + len(made)
        return make(*made) if made else make(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *[None] * ctx.others)


def dequantise(x: Float8Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `data * scale` in float32, rounded to `dtype` or the original one; no autograd."""
    operand, dtype = Operand(x._data, x._scale), dtype or x._orig_dtype
    if not (x._granularity.by_blocks and x._is_transposed):
        return dequantised_by_kernel(operand, x._granularity, dtype)
    order: Any = x._order_of_cast()
    as_cast = Operand(*(inner.permute(order) for inner in operand))
    values = dequantised_by_kernel(as_cast, x._granularity, dtype)
    return another(values.permute([order.index(dim) for dim in range(x.dim())]))


# ---------------------------------------------------------------- views


def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do ops that move no values on the data, and on scales that lie over them."""
    x, *rest = args
    expands = func is aten.expand.default and [*x.shape] != [*rest[0]]  # as `matmul` does
    if expands and not x._granularity.one_scale:
        return _of_values(func, args, kwargs)
    if func is aten.constant_pad_nd.default and any((*rest[1:], *kwargs.values())):
        raise ValueError(
            f"{func}: got a padding other than 0, which has no bytes under a scale of other "
            f"values; call .to_original_precision() first"
        )
    with as_inference_as(x):
        data = func(x._data, *rest, **kwargs)
        pieces = [data] if isinstance(data, Tensor) else data
        scales = _scales_of_pieces(func, x, pieces, rest, kwargs)
        views = [x._like(*each) for each in zip(pieces, scales, strict=True)]
    return views[0] if isinstance(data, Tensor) else views


def _scales_of_pieces(
    func: Any, x: Float8Tensor, pieces: Any, rest: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the scales of the parts that `func` made of the data of `x`."""
    if x._granularity.one_scale:
        return [x._scale] * len(pieces)
    if (moved := _moved_scale(func, x, pieces[0], rest)) is not None:
        return [moved]
    if x._has_row_scales and func is aten.constant_pad_nd.default and not any(rest[0][:2]):
        return [func(x._scale, rest[0], 1.0)]
    if x._granularity.by_rows and func is not aten.as_strided.default:
        size = x.shape[-2 if x._has_column_scales else -1]
        try:  # scales go where the elements go over which they are spread
            spread = func(x._scale.expand(x.shape), *rest, **kwargs)
        except RuntimeError:  # no view of them: it would cut rows, and join the pieces
            spread = []
        found = [_of_rows(s, size) for s in ([spread] if isinstance(spread, Tensor) else spread)]
        if found and all(scale is not None for scale in found):
            return found
    elif (pieces[0].shape, pieces[0].stride()) == (x.shape, x.stride()):
        return [x._scale]
    raise _refused(func, x, ": a part of the data does not have all of the scales")


def _moved_scale(func: Any, x: Float8Tensor, data: Tensor, rest: list[Any]) -> Tensor | None:
    """Return the finer scales of `x` with the dims that an op gave its data, or None."""
    scale: Tensor = x._scale
    of_expert = func is aten.select.int and x.dim() == 3 and rest[0] == 0
    if func in _PERMUTE or (of_expert and x.stride(0) == x.shape[1] * x.shape[2]):
        return func(scale, *rest)  # type: ignore[no-any-return]
    if func not in _RESHAPE:
        return None
    sizes, before = [*data.shape], 1
    for n, scales in zip(x.shape, scale.shape, strict=True):
        if n != scales:  # of parts of this dim, which must be a dim of `data`, too
            at = [i for i, m in enumerate(data.shape) if m == n]
            at = [i for i in at if math.prod(data.shape[:i]) == before]
            if not at:
                return None
            sizes[at[0]] = scales
        before *= n
    scale = scale.reshape(sizes)
    whole = x._granularity.by_rows or x._like(data, scale)._order_of_cast() is not None
    return scale if whole else None


_PERMUTE = aten.t.default, aten.transpose.int, aten.permute.default
_RESHAPE = (
    *(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)


def _refused(op: Any, x: Float8Tensor, but_for: str) -> ValueError:
    got = f"{op}: got a Float8Tensor under {x._scaling}"
    return ValueError(f"{got}, expected TENSORWISE{but_for}; {CURE}")


def _of_rows(spread: Tensor, size: int) -> Tensor | None:
    """Return scales that are spread over rows, or columns, of a size as one for each, or None."""
    for dim in (-1, -2) if spread.dim() > 1 else ():
        order = [*spread.stride()]
        one = order.pop(dim) == 0 or size == 1
        if one and spread.shape[dim] == size and order == sorted(order, reverse=True):
            return spread.narrow(dim, 0, 1)
    return None


# ---------------------------------------------------------------- copies


def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy, maybe to another device, or make room for a copy; dequantise to another dtype."""
    (x,) = args
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, x._orig_dtype):
        return func(dequantise(x), dtype=dtype, **kwargs)
    rest = {k: v for k, v in kwargs.items() if k != "memory_format"}
    inside = x._inside().values()
    copy = x._like(*[func(each, **(kwargs if each is x._data else rest)) for each in inside])
    if x._granularity.by_blocks and copy.stride() != x.stride() and x._is_transposed:
        raise _refused(func, x, " for a copy with other strides")
    return copy


def _require_alike(op: str, *tensors: Any, scale: bool = False) -> None:
    """Refuse other than `Float8Tensor`s of one kind; `scale`: of one scale."""
    if not all(isinstance(x, Float8Tensor) for x in tensors):
        raise ValueError(
            f"{op}: got a Float8Tensor and a high-precision tensor, expected all of one kind; "
            f"call .to_original_precision() or Float8Tensor.from_high_precision() first"
        )
    kinds = {}
    for x in tensors:
        dtype = "" if op == "copy_" else f"for {x._orig_dtype} "
        records = f"with{'out' * (x._amax is None)} an amax to record"
        kinds[f"{x._data.dtype} {dtype}under {x._scaling} {records}"] = x
    if len(kinds) > 1:
        got = " and of ".join(kinds)
        do = "call .to_original_precision() first"
        raise ValueError(f"{op}: got Float8Tensors of {got}, expected equal ones; {do}")
    # Pieces of one tensor share the scale object; only others cost a look at the values.
    first, *others = (x._scale for x in tensors)
    if scale and not all(other is first or torch.equal(other, first) for other in others):
        raise ValueError(
            f"{op}: got Float8Tensors with different scales, expected one scale for all, or for "
            f"all parts of one; call .to_original_precision() first, or cast all with one scale"
        )


def _cat(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    pieces, *rest = args
    first, dim = pieces[0], (*rest, *kwargs.values(), 0)[0]
    rows = isinstance(first, Float8Tensor) and first._has_row_scales
    rows = rows and dim % first.dim() != first.dim() - 1
    _require_alike("cat", *pieces, scale=not rows)
    if not rows and not first._granularity.one_scale:
        raise _refused("cat", first, ", or whole rows under AXISWISE")
    data = func([piece._data for piece in pieces], *rest, **kwargs)
    if rows:
        return first._like(data, func([piece._scale for piece in pieces], *rest, **kwargs))
    whole = first._like(data, first._scale.clone())  # a write in place reaches it, too
    if first._amax is not None:
        whole._amax = torch.stack([piece._amax for piece in pieces]).amax()
    return whole


def _is_whole(x: Float8Tensor) -> bool:
    """Whether it is no part of a tensor, of which others have the same scale."""
    return x._data.nbytes == x._data.untyped_storage().nbytes()


def _copy_(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source, *rest = args
    if not isinstance(target, Float8Tensor):
        return target.copy_(dequantise(source), *rest)
    whole = _is_whole(target)
    _require_alike("copy_", target, source, scale=not whole)
    if target.shape != source.shape:
        got, expected = tuple(source.shape), tuple(target.shape)
        raise ValueError(f"copy_: got shape {got}, expected shape {expected}")
    for name, inner in target._inside().items():
        if whole or name == "_data":
            inner.copy_(getattr(source, name), *rest)
    return target


def _of_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op on the values: a new tensor is plain, as its values may be any."""
    plain = [dequantise(x) if isinstance(x, Float8Tensor) else x for x in args]
    if func.name() in _PRODUCTS or func is aten.expand.default:
        sizes = [tuple(x.shape) for x in args if isinstance(x, Float8Tensor)]
        warn(
            f"float8: {func} outside of float8 layers takes values of {sizes} that are "
            f"rounded to float8, in high precision; call .to_original_precision() if that is "
            f"meant; else convert the layer, or have its weight gathered in high precision"
        )
    return func(*plain, **kwargs)


# ---------------------------------------------------------------- ranks


def _send(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a functional collective that changes no values, and wait where compilers look for it."""
    x, *rest = args
    rows = x._has_row_scales and func.name().endswith("into_tensor")
    if not rows and not x._granularity.one_scale:
        raise _refused(func, x, ", or an all-gather of rows under AXISWISE")
    wait, scale = torch.ops._c10d_functional.wait_tensor, x._scale
    data = x._data.view(torch.uint8) if x._data.is_cpu else x._data  # Gloo knows no float8
    data = wait(func(data, *rest, **kwargs)).view(x._data.dtype)
    return x._like(data, wait(func(scale, *rest, **kwargs)) if rows else scale)


def _exchange(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a collective of `torch.distributed` on whole tensors: bytes, then scales, then amaxes."""
    tensors, written = _tensors_in(args), _tensors_in(args[0])
    _require_alike(str(func), *tensors)
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
    for name in tensors[0]._inside():
        if work is not None:
            work.wait()
        result = func(*_sent(name, args), **kwargs)
        work = result[1] if isinstance(result, tuple) else result
    return (args[0], work) if isinstance(result, tuple) else work


def _tensors_in(tree: Any) -> list[Any]:
    if isinstance(tree, list | tuple):
        return [x for each in tree for x in _tensors_in(each)]
    return [tree] if isinstance(tree, Tensor) else []


def _sent(name: str, tree: Any) -> Any:
    """Return arguments of an op with a tensor inside of each `Float8Tensor`, float8 as bytes."""
    if isinstance(tree, list | tuple):
        return [_sent(name, each) for each in tree]
    inner = getattr(tree, name) if isinstance(tree, Float8Tensor) else tree
    return inner.view(torch.uint8) if name == "_data" and isinstance(inner, Tensor) else inner


_PRODUCTS = [f"aten::{x}mm" for x in ("", "add", "b", "baddb", "addb", "_grouped_")]
_PRODUCTS += "aten::mv", "aten::addmv", "aten::dot", "aten::vdot"

_OPS: dict[Any, tuple[str, ...]] = {
    _view: ("aten::_unsafe_view", "aten::constant_pad_nd"),  # and all that are views
    _copy: ("aten::clone", "aten::empty_like", "aten::_to_copy"),
    _cat: ("aten::cat",),
    _copy_: ("aten::copy_",),
    _of_values: (
        *(f"aten::{name}" for name in ("equal", "is_same_size", "zeros_like", "ones_like")),
        *_PRODUCTS,
    ),
    # torch.distributed.checkpoint asks.
    lambda func, args, kwargs: func(args[0]._data, *args[1:]): ("aten::is_pinned",),
    lambda func, args, kwargs: args[0].storage(): ("aten::view.dtype",),
    _exchange: tuple(
        f"c10d::{name}_" for name in ("broadcast", "scatter", "gather", "allgather", "alltoall")
    ),
    # DTensors gather with these, and wait for what has arrived by then.
    _send: ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_to_all_single"),
    lambda func, args, kwargs: args[0]: (
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    ),
}
_HANDLERS = {name: handler for handler, names in _OPS.items() for name in names}
"""Name of an op -> handler(func, args, kwargs)."""

# The second name is that of 0.2.0.
torch.serialization.add_safe_globals(
    [
        Float8Tensor,
        ScalingGranularity,
        (ScalingGranularity, "float8.config.casting.ScalingGranularity"),
    ]
)
