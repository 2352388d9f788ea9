"""`Float8GatherWeight`: a high-precision weight that FSDP2 all-gathers in float8."""

import ctypes
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.config import CastConfig, ScalingType
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.runtime.private import warn
from float8.quantize import Cast, quantize
from float8.tensor.float8_tensor import Float8Tensor
from float8.tensor.ranks import amax_over, local_tensor, sharding_groups
from float8.tensor.wrapper import Wrapper, as_inference_as

aten = torch.ops.aten


class GatherInfo(NamedTuple):
    """Metadata that a hook passes to `fsdp_post_all_gather`: the weight's shape, scale and amax."""

    size: torch.Size  # of the whole weight
    scale: Tensor | None = None  # equal on all ranks; None if sent with data or not in float8
    amax: Tensor | None = None  # of the shard, under delayed scaling, for layers to record
    on_gather_stream: bool = True  # whether FSDP2's stream for gathers computed scale and amax


class CastAhead(NamedTuple):
    """The scale of a weight's shard, and its float8 data or None, computed before an all-gather."""

    scale: Tensor
    data: Tensor | Any = None  # float8, contiguous, in the shape of the shard; None: only the scale


class Float8GatherWeight(Wrapper):
    """Wrapper of a high-precision tensor `inner` that FSDP2 all-gathers in float8.

    Each rank quantizes its shard, and sends bytes. Other ops run on `inner`, which is not copied.
    Views, copies, `empty_like`, `new_zeros` and `new_empty` of a wrapper, in float32, bfloat16 or
    float16, are wrappers; other ops, unless in place, return plain tensors. Eager writes to a
    wrapper, its views of the same dtype, and plain tensors of `high_precision` raise the version of
    `write_counter`, a plain tensor over the same memory, which ends what `keep` stored.

    Scales finer than one per tensor are gathered with the data, which FSDP2 allows only if shards
    have one size. Otherwise, or if shards split a row or block, weights with such scales are
    gathered in high precision.
    """

    _inner: Tensor
    how: CastConfig  # of the cast before the all-gather; pickled under this name
    write_counter: Tensor
    param_dtype: torch.dtype | None = None
    """Dtype (of the `MixedPrecisionPolicy`, or the shard's) to which casts round shards first; None
    until a gather in float8. Views, copies inherit it: FSDP2 copies shards on some ranks only."""
    _ahead: tuple[Any, CastAhead | None] = None, None
    """The result of `_versions` when a scale or cast was kept, and that scale or cast."""
    _tensor_names = ("_inner",)
    _context = ("how",)

    @staticmethod
    def __new__(cls, inner: Tensor, how: CastConfig, write_counter: Tensor | None = None) -> Any:
        """Wrap `inner`, which gathers cast by `how`; `write_counter` (or `inner`) counts writes."""
        self: Any = cls._wrap(inner, inner.dtype)
        self._inner, self.how = inner, how
        self.write_counter = inner if write_counter is None else write_counter
        return self

    @property
    def high_precision(self) -> Tensor:
        """The weight as a plain tensor, not copied, with the version counter of `write_counter`."""
        if self._inner is self.write_counter:
            return self._inner
        # This is a view: its `_inner` was made below autograd, with a separate version counter.
        with torch.inference_mode(self.write_counter.is_inference()):
            return self.write_counter.as_strided(self.shape, self.stride(), self.storage_offset())

    def data_ptr(self) -> int:
        """Return the address of the weight, by which accelerate finds it in an optimizer."""
        return self._inner.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, wrapper = kwargs or {}, args[0] if args else None
        inner_args, inner_values = [*map(_unwrapped, args)], map(_unwrapped, kwargs.values())
        inner_kwargs = dict(zip(kwargs, inner_values, strict=True))
        if isinstance(wrapper, Float8GatherWeight) and (func.is_view or func in _WRAPS_RESULT):
            # In inference mode compound ops arrive whole; their parts are dispatched here again.
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
            # Shards that FSDP2 makes in a first forward in inference mode must serve training, too.
            with as_inference_as(wrapper):
                result = func(*inner_args, **inner_kwargs)
                if isinstance(result, Tensor):
                    return wrapper._like(func, result)
                return [wrapper._like(func, x) for x in result]  # of ops such as split
        result = func(*inner_args, **inner_kwargs)
        written: dict[int, Float8GatherWeight] = {}  # id of an inner tensor -> its wrapper
        arguments = func._schema.arguments if func._schema.is_mutable else ()
        for place, argument in enumerate(arguments):
            if argument.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for x in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(x, Float8GatherWeight):
                        written[id(x._inner)] = x
        if written:  # `result` was computed below autograd, where torch counts no writes
            torch.autograd.graph.increment_version([x.write_counter for x in written.values()])
        return written.get(id(result), result)  # in-place ops return the wrapper they wrote

    def _like(self, func: Any, result: Tensor) -> Tensor:
        """Return `result`, which `func` made of `self._inner`, wrapped if in high precision."""
        if result is self._inner:
            return self
        if result.dtype not in HIGH_PRECISION_DTYPES:
            return result
        view = func.is_view and result.dtype == self.dtype
        return self.wrap(result, self.write_counter if view else None)

    def wrap(self, values: Tensor, write_counter: Tensor | None = None) -> "Float8GatherWeight":
        """Wrap `values` like this tensor; `write_counter` (default `values`) counts writes."""
        new: Float8GatherWeight = type(self)(values, self.how, write_counter)
        new.param_dtype = self.param_dtype
        return new

    def keep(self, ahead: CastAhead, weight: Any) -> None:
        """Store `ahead` until `weight` (`self` or its DTensor) changes; skip inference tensors."""
        if not (self.write_counter.is_inference() or weight.is_inference()):  # no versions
            self._ahead = self._versions(weight), ahead

    def forget_cast(self) -> None:
        """Free the scale and float8 data that `keep` stored for the next all-gathers."""
        self._ahead = None, None

    @property
    def has_one_scale(self) -> bool:
        """Whether one scale, equal on all ranks, covers the weight, not one per row or block."""
        return self.how.scaling_granularity.one_scale

    def kept(self, weight: Any) -> CastAhead | None:
        """Return what `keep(ahead, weight)` stored; None if none, or if `_versions` changed."""
        versions, ahead = self._ahead
        if ahead is not None and versions != (now := self._versions(weight)):
            if now[-1] and now[:-1] == versions[:-1]:  # it was cast, but not in this capture
                warn(
                    "float8: each gather in this CUDA graph casts its weight; to cast all at once, "
                    "capture precompute_float8_dynamic_scale_for_fsdp(model) before the forward"
                )
            self.forget_cast()
        return self._ahead[1]

    def _versions(self, weight: Any) -> tuple[Any, ...]:
        """Return a key that changes if `weight` is written or moved, or `param_dtype` is set anew.

        The version of `weight`, a DTensor, counts writes by ops on it and by compiled code; that of
        `write_counter` counts writes through `to_local()` and foreach ops. Replays of CUDA graphs
        count no writes, so the key has the id of the capture: each graph makes its own casts.
        """
        counter, inner = self.write_counter, self._inner
        capture = counter.is_cuda and torch.cuda.is_current_stream_capturing() and _capture_id()
        of_inner = inner._version, inner.data_ptr(), inner.stride(), self.param_dtype, capture
        return weight._version, counter._version, counter.data_ptr(), counter.stride(), *of_inner

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., tuple[tuple[Tensor, ...], GatherInfo]]:
        """`_pre_all_gather`, the hook by which FSDP2 gets tensors to all-gather, and metadata."""
        hook: Any = functools.partial(self._pre_all_gather)
        hook.__signature__ = _SIGNATURE  # FSDP2 inspects it at each call; computing it takes long
        return hook  # type: ignore[no-any-return]

    def _pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], GatherInfo]:
        """Return the tensors to all-gather for this shard, and metadata for `fsdp_post_all_gather`.

        They are zero-padded along dim 0 to the size of the largest shard. If `_why_not_in_float8`
        has a reason, such as shards that cut blocks, warn, and return the shard in high precision.
        """
        dtype, rows = mp_policy.param_dtype or self.dtype, self.shape[0]
        if rows != outer_size[0] and self.shape[1:] == outer_size[1:]:  # sharded along dim 0 only
            rows = -(-outer_size[0] // mesh.size())  # the largest piece of `torch.chunk`
        # Make no inference tensors: training may use a weight gathered in inference mode.
        with as_inference_as(self):
            if problem := self._why_not_in_float8(outer_size, rows, mesh):
                warn(
                    f"float8: a weight of {tuple(outer_size)} is gathered in high precision: "
                    f"{problem}; shard it along dim 0, evenly and between blocks, or leave "
                    f"enable_fsdp_float8_all_gather, and HELD, out"
                )
                return (padded_shard(self._inner.to(dtype), rows),), GatherInfo(outer_size)
            return self._to_send(outer_size, rows, mesh, module, dtype)

    def _why_not_in_float8(self, size: torch.Size, rows: int, mesh: Any) -> str | None:
        """Return why a weight of `size`, `rows` per rank, cannot be sent in float8, else None."""
        granularity = self.how.scaling_granularity
        if granularity.one_scale:
            return None
        if self.shape[1] != size[1]:
            return f"its columns are sharded, which {granularity} would cut"
        if rows * mesh.size() != size[0]:
            return f"shards of {rows} rows are not all of one size, for which scales are sent"
        if rows % (granularity.height or 1):  # None only under one scale: see above
            return f"shards of {rows} rows would cut {granularity}"
        return None

    def quantized(self, shard: Tensor, cast: Cast, dtype: torch.dtype) -> CastAhead:
        """Round `shard` [R, K], R >= 0, to `dtype`; quantize it by `cast` to scale and data."""
        data, scale = quantize(shard, cast, row=True, via=dtype).row
        if data.shape != shard.shape:  # padded for a GEMM
            data = data[: shard.shape[0], : shard.shape[1]]
        return CastAhead(scale, data.contiguous())

    def _to_send(
        self, size: torch.Size, rows: int, mesh: Any, module: Any, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], GatherInfo]:
        """Return (tensors to all-gather, metadata) of this shard [R, K] of `module.weight` [*size].

        The tensors are the float8 bytes, zero-padded to [rows, K], and scales, if there are several
        ranks and not one scale for all. A valid cast or scale that `keep` stored is used, except
        under delayed scaling; else the shard (even R = 0) is rounded to `dtype` and quantized.
        """
        weight, config, shard = module.weight, self.how, self._inner
        owner = local_tensor(weight)  # stores kept casts; with CPU offload `self` is a copy of it
        owner.param_dtype = dtype  # from now on the shard can be cast ahead
        delayed = config.scaling_type is ScalingType.DELAYED
        kept = None if delayed else owner.kept(weight)  # delayed casts record amaxes: none is kept
        one_scale, amax = config.scaling_granularity.one_scale, None
        quantized: Any = kept
        if kept is None or kept.data is None:
            if delayed:
                cast = module._float8_cast_of_shard(config, shard)
                amax = cast.source.amax
            elif kept is not None:  # only the scale was kept, on the CPU if shards are offloaded
                cast = Cast(config, scale=kept.scale.to(shard.device))
            else:
                reduce = amax_over(sharding_groups(weight)) if one_scale else None
                cast = Cast(config, reduce=reduce)
            quantized = self.quantized(shard, cast, dtype)
        scale = quantized.scale
        sent = padded_shard(quantized.data.view(torch.uint8), rows)
        if not one_scale and mesh.size() > 1:  # a single rank has all scales already
            return (sent, scale.contiguous().view(torch.uint8)), GatherInfo(size)
        computed_now = kept is None or kept.scale is not scale  # on FSDP2's stream for gathers
        return (sent,), GatherInfo(size, scale, amax, on_gather_stream=computed_now)

    def fsdp_post_all_gather(
        self, received: tuple[Tensor, ...], info: GatherInfo, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return (weight, ()): `received`, not copied, as a `Float8Tensor` or in high precision.

        `()`: FSDP2 has to free only `received`. If `out`, the weight of an earlier call over the
        same memory, is given, update its scale and amax, if in float8, and return None.
        """
        size, scale, amax, on_gather_stream = info
        for x in (scale, amax):
            if on_gather_stream and x is not None and x.is_cuda:  # else its memory may be reused
                x.record_stream(torch.cuda.current_stream(x.device))
        in_float8 = received[0].dtype == torch.uint8
        with as_inference_as(self):  # see `_pre_all_gather`
            if in_float8 and scale is None:  # each rank sent the scales of its shard
                scale = received[1].view(torch.float32)
            if out is None:
                data: Any = received[0].view(-1)[: size.numel()].view(size)  # without padding
                if in_float8:
                    data = self._gathered(data.view(self.how.dtype), scale, dtype, amax)
                return data, ()
        if in_float8:  # `out` has the bytes of `received` already
            gathered = local_tensor(out)
            gathered._scale, gathered._amax = scale, amax
        return None

    def _gathered(self, data: Tensor, scale: Any, dtype: torch.dtype, amax: Any) -> Float8Tensor:
        return Float8Tensor(data, scale, dtype, self.how.scaling_granularity, amax)


def _capture_id() -> int:
    """Return the driver's id of the CUDA graph that the current stream captures at the moment."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status, capture_id = ctypes.c_int(), ctypes.c_uint64()
    get_info = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo
    if error := get_info(stream, ctypes.byref(status), ctypes.byref(capture_id)):
        raise RuntimeError(f"cuStreamGetCaptureInfo: got error {error}, expected 0")
    return capture_id.value


_SIGNATURE = inspect.signature(functools.partial(Float8GatherWeight._pre_all_gather, None))  # type: ignore[arg-type]

WRAPPERS: dict[int, type[Float8GatherWeight]] = {2: Float8GatherWeight}
"""Wrapper class by number of dims of a weight; `float8.experts.gather` adds that of [E, N, K]."""

_WRAPS_RESULT = (
    *(aten.clone.default, aten._to_copy.default, aten._pin_memory.default),
    *(aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default),
)
"""Ops besides views whose results are `Float8GatherWeight`s: sharding and `to_empty` use them."""

torch.serialization.add_safe_globals([Float8GatherWeight, CastConfig, ScalingType])


def _unwrapped(x: Any) -> Any:
    """Return `x` (if a list or tuple, a list) with each wrapper replaced by its inner tensor."""
    if isinstance(x, Float8GatherWeight):
        return x._inner
    return [*map(_unwrapped, x)] if isinstance(x, list | tuple) else x


def padded_shard(x: Tensor, rows: int) -> Tensor:
    """Return `x` [R, ...] contiguous and zero-padded to [rows, ...]; R may be 0."""
    pad = (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0])
    return nn.functional.pad(x, pad) if any(pad) else x.contiguous()
