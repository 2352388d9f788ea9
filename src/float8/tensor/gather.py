"""`Float8GatherWeight`: a weight in high precision that FSDP2 gathers in float8.

Each rank casts its shard under the scale of the whole weight, and sends a view of its bytes.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.config import CastConfig, CastSite, Float8Weights, ScalingGranularity, ScalingType
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.runtime.private import warn
from float8.quantize import Cast, quantize
from float8.scales import UNKNOWN_SCALE, DelayedScale
from float8.tensor.float8_tensor import Float8Tensor
from float8.tensor.ranks import (
    all_ranks_have_some,
    amax_over,
    dtensor_like,
    local_tensor,
    sharding_groups,
)
from float8.tensor.wrapper import Wrapper, as_inference_as

aten = torch.ops.aten


class GatherInfo(NamedTuple):
    """A gather as this rank knows it, besides what is sent."""

    size: torch.Size  # of the whole weight
    scale: Tensor | None = None  # of the whole weight, alike on all ranks; None: scales are sent
    amax: Tensor | None = None  # see `Float8Tensor`
    made_here: bool = True  # on the stream of the gather, not before it


class CastAhead(NamedTuple):
    """Made of the values of a shard before its gather."""

    scale: Tensor
    data: Tensor | Any = None  # float8, as Float8Weights.HELD keeps them; None: only the scale


class Float8GatherWeight(Wrapper):
    """A high-precision tensor with the `CastConfig` in which FSDP2 gathers it.

    To everything but the gather it is the tensor that it holds, `inner`, which is not copied.
    Views, copies and `empty_like`, `new_zeros` and `new_empty` of it are of its class; the results
    of all other ops are plain. Writes through any view, and through the plain tensors that
    `high_precision` gives, raise the version of `counted`, a plain tensor over the same memory. If
    it did not change, a scale computed ahead is still valid.

    Scales finer than one per tensor are sent with the data; FSDP2 takes those of even shards only.
    Others are gathered in high precision, as are weights with a scale over rows of two ranks.
    """

    _inner: Tensor
    how: CastConfig
    counted: Tensor
    param_dtype: torch.dtype | None = None
    """That of the `MixedPrecisionPolicy`, to which shards are rounded before the cast. None until
    the first gather. Views and copies inherit it: FSDP2 copies shards on some ranks only."""
    _ahead: tuple[Any, CastAhead | None] = None, None
    """The versions of some values, and what was made of them."""
    _tensors_inside = ("_inner",)
    _context = ("how",)

    @staticmethod
    def __new__(cls, inner: Tensor, how: CastConfig, counted: Tensor | None = None) -> Any:
        """See the class."""
        self: Any = cls._around(inner, inner.dtype)
        self._inner, self.how = inner, how
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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, weight = kwargs or {}, args[0] if args else None
        plain = [*map(_plain, args)], dict(zip(kwargs, map(_plain, kwargs.values()), strict=True))
        if isinstance(weight, Float8GatherWeight) and (func.is_view or func in _KEEP):
            # In inference mode nobody has taken compound ops apart.
            result: Any = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            # FSDP2 shards and pads in its first forward, which may be an evaluation in inference
            # mode; the weights must do for training then.
            with as_inference_as(weight):
                result = func(*plain[0], **plain[1])
                if isinstance(result, Tensor):
                    return weight._like(func, result)
                return [weight._like(func, x) for x in result]
        result = func(*plain[0], **plain[1])
        written: dict[int, Any] = {}
        for place, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for x in given if isinstance(given, list | tuple) else (given,):
                    if isinstance(x, Float8GatherWeight):
                        torch.autograd.graph.increment_version(x.counted)
                        written[id(x._inner)] = x
        return written.get(id(result), result)

    def _like(self, func: Any, result: Tensor) -> Tensor:
        """Return `result` of an op on the inner tensor as a tensor of this kind."""
        if result is self._inner:
            return self
        if result.dtype not in HIGH_PRECISION_DTYPES:
            return result
        view = func.is_view and result.dtype == self.dtype
        new: Float8GatherWeight = type(self)(result, self.how, self.counted if view else None)
        new.param_dtype = self.param_dtype
        return new

    def keep(self, ahead: CastAhead, weight: Any) -> None:
        """Keep what was made until `weight`, this or the DTensor around it, is written."""
        if not (self.counted.is_inference() or weight.is_inference()):  # which count no writes
            self._ahead = self._versions(weight), ahead

    def can_keep_casts(self, weight: Any) -> bool:
        """Whether each rank has rows: else ranks would disagree if the next cast all-reduces."""
        return all_ranks_have_some(weight)

    def keep_if_held(self, made: CastAhead, weight: Any, module: Any) -> None:
        """Keep a cast for a module of ours with HELD; others may have the weight, too."""
        config = getattr(module, "_float8_config", None)
        if config and config.float8_weights is Float8Weights.HELD and self.can_keep_casts(weight):
            self.keep(made, weight)

    def forget_cast(self) -> None:
        """Drop a cast that was kept; a scale that was computed ahead stays."""
        if (ahead := self._ahead[1]) is not None and ahead.data is not None:
            self._ahead = None, None

    def kept(self, weight: Any) -> CastAhead | None:
        """Return what was kept, unless `weight` was written since."""
        versions, ahead = self._ahead
        return ahead if ahead is not None and versions == self._versions(weight) else None

    def _versions(self, weight: Any) -> tuple[Any, ...]:
        """Return what changes when `weight` is written, or rounded to another dtype.

        The DTensor counts writes by ops on it and by compiled code. The shard counts those through
        `to_local()`, and by foreach ops, as an optimizer's.
        """
        a, b = self.counted, self._inner
        of_b = b._version, b.data_ptr(), b.stride()
        return weight._version, self.param_dtype, a._version, a.data_ptr(), a.stride(), *of_b

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], GatherInfo]:
        """Cast the shard, view it as `uint8`, and pad it to the largest shard.

        With CPU offload `self` is a copy: cached state is read from `module.weight`.
        """
        dtype, rows = mp_policy.param_dtype or self.dtype, self.shape[0]
        # Torch's chunks: all as long as the first but the last, behind which may be empty ones.
        # A shard of another dim than the first is never padded, nor is one of everything.
        if rows != outer_size[0] and self.shape[1:] == outer_size[1:]:
            rows = -(-outer_size[0] // mesh.size())
        # What is made outlives an evaluation if weights stay gathered, and must do for training.
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
        """Say why scales cannot be sent with shards of so many rows, or return None."""
        granularity = self.how.scaling_granularity
        if granularity.one_scale:
            return None
        if self.shape[1] != size[1]:
            return f"its columns are sharded, which {granularity} would cut"
        if rows * mesh.size() != size[0]:
            return f"shards of {rows} rows are not all of one size, for which scales are sent"
        if rows % (granularity.height or 1):
            return f"shards of {rows} rows would cut {granularity}"
        return None

    def _to_send(
        self, size: torch.Size, rows: int, mesh: Any, module: Any, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], GatherInfo]:
        """Cast the shard [R, K] of the weight of `module` to what is sent, padded to `rows`.

        R may be 0. With delayed scaling the amax of the shard comes along for each forward in
        training to record; the sync makes it that of the whole weight. HELD keeps a dynamic cast.
        """
        weight, how, shard, amax = module.weight, self.how, self._inner, None
        owner = local_tensor(weight)
        owner.param_dtype = dtype  # scales are computed ahead from now on
        delayed = how.scaling_type is ScalingType.DELAYED
        made = ahead = None if delayed else owner.kept(weight)
        if made is None or made.data is None:
            cast, has_scale = Cast(how), ahead is not None
            if ahead is not None:  # it may be offloaded
                cast = Cast(how, scale=ahead.scale.to(shard.device))
            elif delayed:
                amax = shard.new_zeros((), dtype=torch.float32)
                scale = torch.full_like(amax, UNKNOWN_SCALE)
                if has_scale := module._float8_knows_weight_scale():
                    scale = module.get_buffer(CastSite.WEIGHT.scale).to(shard.device)
                cast = Cast(how, DelayedScale(scale, amax), record=True)
            if not has_scale and how.scaling_granularity.one_scale:
                cast = cast._replace(reduce=amax_over(sharding_groups(weight)))
            row = quantize(shard, cast, row=True, via=dtype).row
            data, (R, K) = row.data, shard.shape
            made = CastAhead(row.scale, data if data.shape == shard.shape else data[:R, :K])
            if not delayed:
                owner.keep_if_held(made, weight, module)
        sent = padded_shard(made.data.contiguous().view(torch.uint8), rows)
        if how.scaling_granularity.one_scale or mesh.size() == 1:  # from one rank one tensor
            known = ahead is not None and ahead.data is None and ahead.scale is made.scale
            return (sent,), GatherInfo(size, made.scale, amax, made_here=not known)
        return (sent, made.scale.contiguous().view(torch.uint8)), GatherInfo(size)

    def fsdp_post_all_gather(
        self, received: tuple[Tensor, ...], info: GatherInfo, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight, a `Float8Tensor` [N, K] over the gathered bytes.

        `out` is the result of the first call, over the same memory, which was filled anew.
        """
        size, scale, amax, made_here = info
        for made in (scale, amax) if made_here else ():
            if made is not None and made.is_cuda:  # and is read on this stream
                made.record_stream(torch.cuda.current_stream(made.device))
        with as_inference_as(self):
            data = received[0].view(-1)[: size.numel()].view(size)
            if data.dtype != torch.uint8:
                return None if out is not None else (data, ())
            scale = received[1].view(torch.float32) if scale is None else scale
            if out is None:
                return self._gathered(data.view(self.how.dtype), scale, dtype, amax), ()
        old = local_tensor(out)
        old._scale, old._amax = scale, amax
        return None

    def _gathered(self, data: Tensor, scale: Tensor, dtype: torch.dtype, amax: Any) -> Float8Tensor:
        return Float8Tensor(data, scale, dtype, self.how.scaling_granularity, amax)


_KEEP = (
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
)
"""Ops besides views whose result is of the class too: what sharding and `to_empty` make use of."""

# FSDP2 asks for the hook's signature at every gather; found anew, that takes as long as the cast.
_hook: Any = Float8GatherWeight.fsdp_pre_all_gather
_hook.__signature__ = inspect.signature(_hook)
torch.serialization.add_safe_globals(
    [Float8GatherWeight, CastConfig, ScalingGranularity, ScalingType]
)


def _plain(x: Any) -> Any:
    """Return an argument with each Float8GatherWeight in it replaced by its inner tensor."""
    if isinstance(x, Float8GatherWeight):
        return x._inner
    return [*map(_plain, x)] if isinstance(x, list | tuple) else x


def padded_shard(x: Tensor, rows: int) -> Tensor:
    """Return `x` [R, ...] with zeros behind, [rows, ...], contiguous; R may be 0."""
    behind = (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0])
    return nn.functional.pad(x, behind) if any(behind) else x.contiguous()


# Version counters, which tell of writes, are there outside of inference mode only.
@torch.inference_mode(False)
def high_precision(x: Tensor) -> Tensor:
    """Return `x`, maybe a DTensor, without its `CastConfig`; shares memory and version counters."""
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
    tensor: Any = type(model)(values.detach(), model.how)
    tensor.param_dtype = model.param_dtype
    if values is not new:
        with torch.no_grad():
            tensor = dtensor_like(tensor, new)
    return nn.Parameter(tensor, requires_grad=new.requires_grad)
