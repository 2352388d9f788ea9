"""The two hooks by which FSDP2 gathers a weight in float8.

Each rank casts its shard under the scale of the whole weight. What travels is a view of the bytes
as `uint8`: not every backend knows float8.
"""

import inspect
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8 import kernels
from float8.config import CastSite
from float8.linear import Float8Linear, scale_name
from float8.parallel.collectives import all_reduce_amax
from float8.scaling import amax_to_scale
from float8.tensor import Float8GatherWeight, Float8Tensor, local_tensor

_SCALE = scale_name(CastSite.WEIGHT)


class ShardCast(NamedTuple):
    """The cast of this rank's shard, which may have no rows."""

    gathered: tuple[Tensor, ...]
    """What all ranks need of it, rows by rows of the shard: the float8 data [rows, K]."""

    scale: Tensor
    """0-dim float32: of the whole weight, the same on all ranks."""

    amax: Tensor | None
    """0-dim float32: of the shard, where delayed scaling records it."""


class GatherMetadata(NamedTuple):
    """What this rank knows of a gather besides what travels."""

    scale: Tensor
    """As in `ShardCast`."""

    amax: Tensor | None
    """As in `ShardCast`."""

    outer_size: torch.Size
    """[N, K] of the whole weight."""


class FSDPFloat8Weight(Float8GatherWeight):
    """A `Float8GatherWeight` with FSDP2's hooks; while not sharded a plain weight.

    `cast_shard` and `joined` are the seam for finer scales: scales that belong to rows or blocks of
    the shard are one more tensor in `ShardCast.gathered`, padded and sent like the data, and
    `joined` gets them from all ranks. Torch takes a second tensor of even shards only: where a
    shard is padded it wants each tensor in the size of the padded shard.
    """

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
        """The bytes to gather and what the other ranks' receivers must know of them.

        Args:
            mesh: 1-D, the ranks that hold the shards.
            outer_size: [N, K] of the whole weight.
            outer_stride: not used; the whole weight is contiguous.
            module: the layer whose weight this is.
            mp_policy: FSDP2's; its `param_dtype` is what the shard is rounded to first.

        Returns:
            `((bytes,), metadata)`: `uint8` of the shape of the largest shard, padded with zeros
            where this one is smaller, and what need not travel.
        """
        plan, inner = self.plan, self.high_precision
        self.shared.take_place(inner)
        plan.param_dtype = mp_policy.param_dtype or inner.dtype
        shard = inner.to(plan.param_dtype)
        group = mesh.get_group()
        cast = self.cast_shard(shard, module, group)
        # Torch's chunks: all as long as the first but the last, behind which may be empty ones.
        # A shard of another dim than the first is never padded, nor is one of everything.
        rows = shard.shape[0]
        if shard.shape[1] == outer_size[1] and rows != outer_size[0]:
            rows = -(-outer_size[0] // group.size())
        sent = tuple(_padded_bytes(x, rows) for x in cast.gathered)
        return sent, GatherMetadata(cast.scale, cast.amax, outer_size)

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
        """The gathered weight as a `Float8Tensor` [N, K] over the gathered bytes.

        Args:
            all_gather_outputs: `uint8`, padding included: of each tensor that the ranks sent.
            metadata: by `fsdp_pre_all_gather`.
            param_dtype: the dtype that the weight reports.
            out: the result of the first call, whose memory was filled anew: takes the new scale
                and amax.
        """
        scale, amax, _ = metadata
        for made in (scale, amax):  # on the stream of the gather, read on this one
            if made is not None and made.is_cuda:
                made.record_stream(torch.cuda.current_stream(made.device))
        if out is None:
            return self.joined(all_gather_outputs, metadata, param_dtype), ()
        gathered: Float8Tensor = local_tensor(out)
        gathered._scale, gathered._amax = scale, amax
        return None

    def cast_shard(self, shard: Tensor, module: nn.Module, group: Any) -> ShardCast:
        """Cast the shard [rows, K], already rounded to what FSDP2 computes in.

        Args:
            shard: float32, bfloat16 or float16; may have no rows.
            module: the layer.
            group: the ranks that hold the shards.
        """
        if self.plan.delayed:
            return self._cast_delayed(shard, module, group)
        known = self.precomputed
        if known is not None and known.param_dtype == shard.dtype:
            scale = known.scale
        else:
            scale = self._scale_from_all(_amax(shard), group)
        return ShardCast((self._cast(shard, scale),), scale, None)

    def joined(
        self, received: tuple[Tensor, ...], metadata: GatherMetadata, param_dtype: torch.dtype
    ) -> Tensor:
        """The whole weight [N, K] over the memory of what all ranks sent.

        Args:
            received: `uint8`, of each tensor in `ShardCast.gathered`; rows of padding at the end.
            metadata: this rank's.
            param_dtype: the dtype that the weight reports.
        """
        (data,) = received
        size = metadata.outer_size
        whole = data.view(-1)[: size.numel()].view(size).view(self.plan.dtype)
        gathered = Float8Tensor(whole, metadata.scale, param_dtype)
        gathered._amax = metadata.amax
        return gathered

    def _cast_delayed(self, shard: Tensor, module: nn.Module, group: Any) -> ShardCast:
        """With the scale from the layer's history.

        The gather does not know what for; each forward in training records the amax. The sync makes
        it that of the whole weight.
        """
        if not isinstance(module, Float8Linear):
            raise TypeError(
                f"FSDPFloat8Weight: got it as a weight of a {type(module).__name__}, expected the "
                f"Float8Linear that has its history; convert the model again"
            )
        history = module.get_buffer(_SCALE)
        if not module.knows_weight_scale():
            amax = _amax(shard)
            scale = self._scale_from_all(amax.clone(), group)
            return ShardCast((self._cast(shard, scale),), scale, amax)
        amax = torch.zeros_like(history)
        if shard.numel() == 0:
            return ShardCast((self._cast(shard, history),), history.clone(), amax)
        done = kernels.cast_delayed(
            shard, history, amax, self.plan.dtype, row=True, col=False, record=True
        )
        assert done.row is not None
        return ShardCast((done.row[:, : shard.shape[1]],), done.scale, amax)

    def _scale_from_all(self, amax: Tensor, group: Any) -> Tensor:
        all_reduce_amax(amax, (group,) if dist.get_world_size(group) > 1 else ())
        return amax_to_scale(amax, self.plan.dtype, self.plan.round_to_power_of_2)

    def _cast(self, shard: Tensor, scale: Tensor) -> Tensor:
        if shard.numel() == 0:
            return shard.to(self.plan.dtype)
        data, _ = kernels.cast(shard, scale, self.plan.dtype, row=True, col=False)
        assert data is not None
        return data[:, : shard.shape[1]]  # it may have more columns, for GEMMs


# FSDP2 looks at the hook's signature at every gather; found from the code, that takes as long as
# the cast.
FSDPFloat8Weight.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    FSDPFloat8Weight.fsdp_pre_all_gather
)


def shard_amax(weight: Tensor) -> Tensor | None:
    """0-dim float32: the amax of this rank's shard as it would be cast; None if it has none.

    Args:
        weight: of a layer; only DTensors of an `FSDPFloat8Weight` have such a shard.
    """
    local = local_tensor(weight)
    if local is weight or not isinstance(local, FSDPFloat8Weight):
        return None
    return _amax(local.high_precision.to(local.plan.param_dtype or local.dtype))


def _amax(shard: Tensor) -> Tensor:
    return kernels.amax(shard) if shard.numel() else shard.new_zeros((), dtype=torch.float32)


def _padded_bytes(x: Tensor, rows: int) -> Tensor:
    """`x` [R, C] as [rows, C * bytes of an element] `uint8`, contiguous; R may be 0."""
    if x.numel() == 0:
        return x.new_zeros((rows, x.shape[1] * x.itemsize), dtype=torch.uint8)
    bytes_ = x.view(torch.uint8)
    missing = rows - bytes_.shape[0]
    assert missing >= 0
    return torch.nn.functional.pad(bytes_, (0, 0, 0, missing)) if missing else bytes_.contiguous()


torch.serialization.add_safe_globals([FSDPFloat8Weight])
