"""`Float8GatherWeight`: a weight in high precision that FSDP2 gathers in float8.

Each rank casts its shard under the scale of the whole weight. What is sent is a view of the bytes
as `uint8`: not every backend knows float8.
"""

import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.config import CastConfig, CastSite, Float8Weights, ScalingGranularity, ScalingType
from float8.formats import HIGH_PRECISION_DTYPES
from float8.quantize import Cast, quantize
from float8.scales import UNKNOWN_SCALE, DelayedScale, Operand, Quantized
from float8.tensor.float8_tensor import Float8Tensor
from float8.tensor.ranks import (
    all_ranks_have_some,
    amax_over,
    dtensor_like,
    local_tensor,
    sharding_groups,
)
from float8.tensor.wrapper import Wrapper, as_inference_as, instances, mapped

aten = torch.ops.aten


class GatherMetadata(NamedTuple):
    """A gather as this rank knows it, besides what is sent."""

    size: torch.Size
    """Of the gathered weight."""
    scale: Tensor | None = None
    """Of the whole weight, the same on all ranks; None if scales are sent."""
    amax: Tensor | None = None
    """For delayed scaling to record; see `Float8Tensor`."""


class Float8GatherWeight(Wrapper):
    """A high-precision tensor with the spec of the cast in which FSDP2 gathers it.

    To everything but the gather it is the tensor that it holds. Views, copies and `empty_like`,
    `new_zeros` and `new_empty` of it are of its class; the results of all other ops are plain. All
    views, and the plain tensors that `high_precision` gives, count their writes in one version
    counter, which tells whether a scale that was computed ahead is still that of the values.

    Scales finer than one per tensor are sent with the data, as a second tensor. FSDP2 takes one of
    even shards only. Of others, and where a scale would cover elements of two ranks, the weight is
    gathered in high precision, with a warning.

    Args:
        inner: float32, bfloat16 or float16; shared, not copied.
        spec: how it is cast.
        counted: the plain tensor over the same memory whose version counter tells of writes; None:
            `inner`.
    """

    _inner: Tensor
    spec: CastConfig
    counted: Tensor
    param_dtype: torch.dtype | None = None
    """It is rounded to before the cast; known from the first gather on, of views and copies, too:
    FSDP2 copies shards on some ranks only, and all must know the same."""
    _known: tuple[Any, Any] = None, None
    """The versions of some values, and what `keep` was given then."""
    _inner_tensors = ("_inner",)
    _context = ("spec",)

    @staticmethod
    def __new__(
        cls, inner: Tensor, spec: CastConfig, counted: Tensor | None = None
    ) -> "Float8GatherWeight":
        """See the class."""
        self: Float8GatherWeight = cls._around(inner, inner.dtype)
        self._inner, self.spec = inner, spec
        self.counted = inner if counted is None else counted
        return self

    @property
    def high_precision(self) -> Tensor:
        """Return a plain tensor that shares its memory, and its version counter."""
        if self._inner is self.counted:
            return self._inner
        # Ops on what is inside run below the version counters: a view made there has its own.
        with torch.inference_mode(self.counted.is_inference()):
            return self.counted.as_strided(self.shape, self.stride(), self.storage_offset())

    def _assign(self, new: Tensor) -> None:
        """Take `new` in the place of the tensor inside: shared, or copied if it lies otherwise.

        Raises:
            ValueError: its class, shape, dtype or device is another.
        """
        values = high_precision(new)
        got, expected = _described(values), _described(self._inner)
        if got != expected:
            raise ValueError(
                f"data: got {got}, expected {expected}; to change dtype or device, "
                f"call .to() on the module or assign it a new Parameter; FSDP1 cannot "
                f"gather in float8: convert with enable_fsdp_float8_all_gather=False for it"
            )
        values = values.detach()
        if (values.stride(), values.storage_offset()) != (self.stride(), self.storage_offset()):
            values = self._inner.new_empty_strided(self.shape, self.stride()).copy_(values)
        self._inner = self.counted = values
        self._known = None, None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, weight = kwargs or {}, args[0]
        plain = [*map(_plain, args)], dict(zip(kwargs, map(_plain, kwargs.values()), strict=True))
        if (func.is_view or func in _KEEP) and isinstance(weight, Float8GatherWeight):
            # FSDP2 shards and pads in its first forward, which may be an evaluation in inference
            # mode; the weights must do for training then.
            with as_inference_as(weight):
                result = func(*plain[0], **plain[1])
                return mapped(lambda x: weight._like(func, x), Tensor, result)
        result = func(*plain[0], **plain[1])
        if not func._schema.is_mutable:
            return result
        written: list[Float8GatherWeight] = []
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                written += instances(Float8GatherWeight, given)
        torch.autograd.graph.increment_version([x.counted for x in written])
        same = {id(x._inner): x for x in written}
        return mapped(lambda x: same.get(id(x), x), Tensor, result)

    def _like(self, func: Any, result: Tensor) -> Tensor:
        """Return `result` of an op on the inner tensor as a tensor of this kind."""
        if result is self._inner:
            return self
        if result.dtype not in HIGH_PRECISION_DTYPES:
            return result
        shares = func.is_view and result.dtype == self.dtype
        new = type(self)(result, self.spec, self.counted if shares else None)
        new.param_dtype = self.param_dtype
        return new

    # ---------------------------------------------------------------- what the next gather knows

    def gather_in(self, dtype: torch.dtype) -> None:
        """Note to which dtype it is rounded; a scale or a cast of another is forgotten."""
        if self.param_dtype is not dtype:
            self.param_dtype, self._known = dtype, (None, None)

    def keep(self, made: Cast | Operand, weight: Any) -> None:
        """Keep a cast with a scale computed ahead, or what a cast made, of the values of now.

        `weight`: this one, or the DTensor around it, which counts writes, too.
        """
        self._known = self._versions(weight), made

    def known(self, weight: Any) -> Cast | Operand | None:
        """Return what was kept since `weight`, this or the DTensor around it, was last written."""
        versions, made = self._known
        if made is None or versions != self._versions(weight):
            return None
        return made  # type: ignore[no-any-return]

    def _versions(self, weight: Any) -> tuple[Any, ...]:
        """Return what changes when `weight`, this or the DTensor around it, is written.

        A DTensor counts the writes of ops on it and of compiled code; its shard those through
        `to_local()`, and of ops that take lists, as an optimizer's.
        """
        inner = ((x._version, x.data_ptr(), x.stride()) for x in (self.counted, self._inner))
        return weight._version, *inner

    # ---------------------------------------------------------------- the hooks of FSDP2

    # Grad mode is off already, says FSDP2. What is made here outlives an evaluation in inference
    # mode if the weights stay gathered, and must then do for training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], GatherMetadata]:
        """Cast the shard to the `uint8` to gather, with zeros behind up to the largest.

        `mesh` is that of this gather, to which tensor parallel adds another. An offloaded weight
        comes as a copy of that of `module`.
        """
        dtype, rows = mp_policy.param_dtype or self.dtype, self.shape[0]
        # Torch's chunks: all as long as the first but the last, behind which may be empty ones.
        # A shard of another dim than the first is never padded, nor is one of everything.
        if rows != outer_size[0] and self.shape[1:] == outer_size[1:]:
            rows = -(-outer_size[0] // mesh.size())
        if problem := self._why_not_in_float8(rows, mesh.size(), outer_size):
            warnings.warn(
                f"float8: a weight of {tuple(outer_size)} is gathered in high precision: "
                f"{problem}; shard it evenly along dim 0, or leave enable_fsdp_float8_all_gather "
                f"out",
                stacklevel=2,
            )
            shard = padded_shard(self.high_precision.to(dtype), rows)
            return (shard,), GatherMetadata(outer_size)
        return self._to_send(mesh, outer_size, rows, module, dtype)

    def _why_not_in_float8(self, rows: int, ranks: int, outer_size: torch.Size) -> str | None:
        """Say why scales cannot be sent with shards of so many rows, or return None."""
        granularity = self.spec.scaling_granularity
        if granularity.one_scale:
            return None
        if self.shape[1] != outer_size[1]:
            return f"its columns are sharded, which {granularity} would cut"
        if rows * ranks != outer_size[0]:
            return f"shards of {rows} rows are not all of one size, for which scales are sent"
        if rows % (granularity.height or 1):
            block = f"{granularity.height} x {granularity.width}"
            return f"shards of {rows} rows would cut blocks of {block}"
        return None

    def _to_send(
        self, mesh: Any, outer_size: torch.Size, rows: int, module: Any, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], GatherMetadata]:
        """Cast the shard, rounded to `dtype` first, to what is sent, padded to `rows`."""
        (data, scale), _, amax, _ = self._cast(module, dtype)
        sent = padded_shard(data.contiguous().view(torch.uint8), rows)
        if self.spec.scaling_granularity.one_scale or mesh.size() == 1:  # torch takes one of one
            return (sent,), GatherMetadata(outer_size, scale, amax)
        return (sent, scale.contiguous().view(torch.uint8)), GatherMetadata(outer_size)

    @torch.inference_mode(False)
    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: GatherMetadata,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight, a `Float8Tensor` [N, K] over the gathered bytes.

        `out` is the result of the first call, over the same memory, which was filled anew.
        """
        size, scale, amax = metadata
        # Made on the stream of the gather, read on this one.
        for made in (scale, amax):
            if made is not None and made.is_cuda:
                made.record_stream(torch.cuda.current_stream(made.device))
        received = all_gather_outputs[0]
        data = received.view(-1)[: size.numel()].view(size)
        if received.dtype != torch.uint8:
            return None if out is not None else (data, ())
        if scale is None:
            scale = all_gather_outputs[1].view(torch.float32)
        if out is None:
            return self._gathered(data.view(self.spec.dtype), scale, param_dtype, amax), ()
        old: Any = getattr(out, "_local_tensor", out)
        old._scale, old._amax = scale, amax
        return None

    def _gathered(
        self, data: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None
    ) -> Float8Tensor:
        return Float8Tensor(data, scale, dtype, self.spec.scaling_granularity, amax)

    def _cast(self, module: Any, dtype: torch.dtype) -> Quantized:
        """Cast the shard [rows, K] of the weight of `module`, rounded to `dtype` first.

        There may be no rows. Row data come without padding. Their scale is that of the whole weight
        under `TENSORWISE`; under other granularities those of the shard. With delayed scaling the
        amax of the shard comes along for each forward in training to record; the sync makes it that
        of the whole weight. With `Float8Weights.HELD` a dynamic cast is kept until the weight is
        written.
        """
        weight, how, shard = module.weight, self.spec, self.high_precision
        owner = getattr(weight, "_local_tensor", weight)  # `self`, or what that is a copy of
        owner.gather_in(dtype)
        delayed = how.scaling_type is ScalingType.DELAYED
        known: Any = None if delayed else owner.known(weight)
        if isinstance(known, Operand):
            return Quantized(known)
        cast, amax, ahead = Cast(how), None, known is not None
        if ahead:  # it may be offloaded
            cast = cast._replace(scale=known.scale.to(shard.device))
        if delayed:
            ahead, amax = (
                module._float8_knows_weight_scale(),
                shard.new_zeros((), dtype=torch.float32),
            )
            scale = torch.full_like(amax, UNKNOWN_SCALE)
            if ahead:
                scale = module.get_buffer(CastSite.WEIGHT.scale).to(shard.device)
            cast = cast._replace(state=DelayedScale(scale, amax), record=True)
        if how.scaling_granularity.one_scale and not ahead:
            cast = cast._replace(reduce=amax_over(sharding_groups(weight)))
        row = quantize(shard, cast, row=True, via=dtype).row
        made = Operand(row.data[: shard.shape[0], : shard.shape[1]], row.scale)
        keep = module._float8_config.float8_weights is Float8Weights.HELD and not delayed
        # Ranks must agree on who takes part in the all-reduce of a cast.
        if keep and all_ranks_have_some(weight):
            owner.keep(made, weight)
        return Quantized(made, amax=amax)


_KEEP = {
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    # Under inference mode these come as they are; they may return the tensor itself.
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
    aten.contiguous.default,
    aten.pin_memory.default,
    # Not of its values.
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
}
"""Ops besides views whose result is of the class too: what sharding and `to_empty` make use of."""


def _described(x: Any) -> str:
    if type(x) not in (Tensor, nn.Parameter):
        return type(x).__name__
    return f"shape {tuple(x.shape)}, {x.dtype} on {x.device}"


def _plain(x: Any) -> Any:
    """Return an argument of an op with tensors inside in the place of those around them."""
    if isinstance(x, Float8GatherWeight):
        return x._inner
    return [*map(_plain, x)] if isinstance(x, list | tuple) else x


torch.serialization.add_safe_globals(
    [Float8GatherWeight, CastConfig, ScalingGranularity, ScalingType]
)


def padded_shard(x: Tensor, rows: int) -> Tensor:
    """Return `x` [R, ...] with zeros behind, [rows, ...], contiguous; R may be 0."""
    missing = rows - x.shape[0]
    behind = (0, 0) * (x.dim() - 1) + (0, missing)
    return nn.functional.pad(x, behind) if missing else x.contiguous()


# FSDP2 looks at the hook's signature at every gather; found from the code, that takes as long as
# the cast.
Float8GatherWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    Float8GatherWeight.fsdp_pre_all_gather
)


# ---------------------------------------------------------------- weights in and out of state dicts


# Version counters, which tell of writes, are there outside of inference mode only.
@torch.inference_mode(False)
def high_precision(x: Tensor) -> Tensor:
    """Return `x`, maybe a DTensor, without its spec; shares memory and version counters."""
    local = local_tensor(x)
    if not isinstance(local, Float8GatherWeight):
        return x
    plain = local.high_precision.detach()
    if local is x:
        return plain
    new: Any = x.detach()
    new._local_tensor = plain
    return new  # type: ignore[no-any-return]


def gathered_like(new: Any, old: Tensor | None) -> nn.Parameter:
    """Return `new` as a weight that is gathered like `old`; itself if `old` is a plain tensor."""
    model, values = local_tensor(old), local_tensor(new)
    if not isinstance(model, Float8GatherWeight) or isinstance(values, Float8GatherWeight):
        return new  # type: ignore[no-any-return]
    tensor: Any = type(model)(values.detach(), model.spec)
    tensor.param_dtype = model.param_dtype
    if values is not new:
        with torch.no_grad():
            tensor = dtensor_like(tensor, new)
    return nn.Parameter(tensor, requires_grad=new.requires_grad)
