"""The two hooks by which FSDP2 gathers a weight in float8.

Each rank casts its shard under the scale of the whole weight. What travels is a view of the bytes
as `uint8`: not every backend knows float8.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8 import kernels
from float8.config import CastSite
from float8.distributed.collectives import all_reduce_amax
from float8.linear import Float8Linear, scale_name
from float8.scaling import amax_to_scale
from float8.tensor import Float8GatherWeight, Float8Tensor, local_tensor

_SCALE = scale_name(CastSite.WEIGHT)


class GatherMetadata(NamedTuple):
    """What this rank knows of a gather besides the bytes."""

    scale: Tensor
    """0-dim float32: of the whole weight, the same on all ranks."""

    amax: Tensor | None
    """0-dim float32: of this rank's shard, which delayed scaling records where it is used."""

    outer_size: torch.Size
    """[N, K] of the whole weight."""


class FSDPFloat8Weight(Float8GatherWeight):
    """A `Float8GatherWeight` with FSDP2's hooks; while not sharded a plain weight."""

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
            where this one is smaller.
        """
        plan, inner = self.plan, self.high_precision
        self.shared.take_place(inner)
        plan.param_dtype = mp_policy.param_dtype or inner.dtype
        shard = inner.to(plan.param_dtype)
        group, amax = mesh.get_group(), None
        if plan.delayed:
            scale, amax, data = self._cast_delayed(shard, module, group)
        else:
            known = self.precomputed
            if known is not None and known.param_dtype == plan.param_dtype:
                scale = known.scale
            else:
                scale = self._scale_from_all(_amax(shard), group)
            data = self._cast(shard, scale)
        # Torch's chunks: all as long as the first but the last, behind which may be empty ones.
        # A shard of another dim than the first is never padded, nor is one of everything.
        rows = shard.shape[0]
        if shard.shape[1] == outer_size[1] and rows != outer_size[0]:
            rows = -(-outer_size[0] // group.size())
        return (_padded_bytes(data, rows, shard.shape[1]),), GatherMetadata(scale, amax, outer_size)

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
            all_gather_outputs: one `uint8`, padding included.
            metadata: by `fsdp_pre_all_gather`.
            param_dtype: the dtype that the weight reports.
            out: the result of the first call, whose memory was filled anew: takes the new scale
                and amax.
        """
        scale, amax, outer_size = metadata
        for made in (scale, amax):  # on the stream of the gather, read on this one
            if made is not None and made.is_cuda:
                made.record_stream(torch.cuda.current_stream(made.device))
        if out is None:
            (received,) = all_gather_outputs
            whole = received.view(-1)[: outer_size.numel()].view(outer_size)
            gathered = Float8Tensor(whole.view(self.plan.dtype), scale, param_dtype)
        else:
            gathered = local_tensor(out)
            gathered._scale = scale
        gathered._amax = amax
        return (gathered, ()) if out is None else None

    def _cast_delayed(
        self, shard: Tensor, module: nn.Module, group: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The scale from the layer's history, the amax of this shard, and the bytes.

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
            return scale, amax, self._cast(shard, scale)
        amax = torch.zeros_like(history)
        if shard.numel() == 0:
            return history.clone(), amax, shard
        done = kernels.cast_delayed(
            shard, history, amax, self.plan.dtype, row=True, col=False, record=True
        )
        assert done.row is not None
        return done.scale, amax, done.row

    def _scale_from_all(self, amax: Tensor, group: Any) -> Tensor:
        all_reduce_amax(amax, (group,) if dist.get_world_size(group) > 1 else ())
        return amax_to_scale(amax, self.plan.dtype, self.plan.round_to_power_of_2)

    def _cast(self, shard: Tensor, scale: Tensor) -> Tensor:
        if shard.numel() == 0:
            return shard
        data, _ = kernels.cast(shard, scale, self.plan.dtype, row=True, col=False)
        assert data is not None
        return data


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


def _padded_bytes(data: Tensor, rows: int, columns: int) -> Tensor:
    """[rows, columns] `uint8`, contiguous; `data` may have more columns, for GEMMs, and no rows."""
    if data.numel() == 0:
        return data.new_zeros((rows, columns), dtype=torch.uint8)
    bytes_ = data.view(torch.uint8)[:, :columns]
    missing = rows - bytes_.shape[0]
    assert missing >= 0
    return torch.nn.functional.pad(bytes_, (0, 0, 0, missing)) if missing else bytes_.contiguous()


torch.serialization.add_safe_globals([FSDPFloat8Weight])
