"""Weights of experts that FSDP2 gathers in float8.

Each rank quantizes its shard, which has whole experts or whole rows, and sends bytes and scales.
Scales are those of square blocks, or one per row; a scale per expert is repeated for its rows.
"""

from typing import Any

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.experts.grouped import quantize_experts
from float8.formats import E4M3, HIGH_PRECISION_DTYPES
from float8.fsdp.gather import WRAPPERS, CastAhead, Float8GatherWeight, GatherInfo, padded_shard
from float8.quantize import Cast
from float8.tensor import Float8Tensor
from float8.tensor.ranks import SharedTokens, local_tensor

aten = torch.ops.aten


class GatheredExperts(Float8Tensor):
    """Float8 weights [E, N, K] that FSDP2 all-gathered; scales are [E, N, 1] or of square blocks.

    Modules may call `weight.to(dtype)` before a GEMM: it changes the reported dtype, not the bytes.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten._to_copy.default and {*(kwargs or {})} == {"dtype"}:
            x, dtype = args[0], kwargs["dtype"]
            if dtype in HIGH_PRECISION_DTYPES:
                return cls._unchecked(x._data, x._scale, dtype, x._granularity, None)
        return super().__torch_dispatch__(func, types, args, kwargs)


class GatherExperts(Float8GatherWeight):
    """Wrapper of a shard of high-precision weights [E, N, K] that FSDP2 all-gathers in float8.

    Data and scales go in one all-gather if dim 0 is sharded evenly, else in two. Warns, and gathers
    in high precision, if dim 2 is sharded, or dim 1 within elements that share a scale.
    """

    def _why_not_in_float8(self, size: torch.Size, *_: Any) -> str | None:
        """Return why this shard of weights of shape `size` cannot be sent in float8, or None."""
        dim = next((dim for dim in range(3) if self.shape[dim] != size[dim]), 0)  # the sharded dim
        if dim == 2 or (dim == 1 and self.how.scaling_granularity.one_scale):
            return f"it is sharded along dim {dim}, which would cut what one scale covers"
        if dim == 1 and self.shape[1] % (side := self.how.scaling_granularity.height or 1):
            return f"shards of {self.shape[1]} rows would cut squares of {side} x {side}"
        return None

    @property
    def has_one_scale(self) -> bool:
        """Whether ranks must agree on one scale: False, as each expert has its own scales."""
        return False

    def quantized(self, shard: Tensor, cast: Cast, dtype: torch.dtype) -> CastAhead:
        """Round `shard` [E, N, K], E > 0, to `dtype` and cast it; return scales and float8 data."""
        data, scale = quantize_experts(shard.to(dtype), cast, row=True).row
        scale = scale if self.how.scaling_granularity.by_blocks else scale.unsqueeze(-1)
        return CastAhead(scale, data[..., : shard.shape[2]].contiguous())

    def _to_send(
        self, size: torch.Size, rows: int, mesh: Any, module: Any, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], GatherInfo]:
        """Return (tensors to all-gather, metadata) for this shard of weights of shape `size`.

        The tensors are the float8 bytes, padded to `rows` experts, and the scales if several ranks
        of `mesh` share dim 0 evenly; else the metadata have all scales. Sends a cast made ahead for
        a Parameter of `module`, if still valid; else rounds the shard to `dtype` and casts it.
        """
        ranks, self.param_dtype = mesh.size(), dtype  # casts ahead round a shard to it
        # The Parameter that keeps a cast; None if `self` is a copy, as with CPU offload.
        weight = next((x for x in module._parameters.values() if local_tensor(x) is self), None)
        quantized = None if weight is None else self.kept(weight)
        if quantized is None:
            quantized = self.quantized(padded_shard(self._inner, rows), Cast(self.how), dtype)
        scale = padded_shard(quantized.scale, rows)
        float8_bytes = padded_shard(quantized.data.view(torch.uint8), rows)
        sharded_dim = 1 if self.shape[1] != size[1] else 0
        if ranks > 1 and sharded_dim == 0 and rows * ranks == size[0]:  # FSDP2 can send both
            return (float8_bytes, scale.view(torch.uint8)), GatherInfo(size)
        if ranks > 1:  # all-gather the scales, too, along dim 0; drop those of padding experts
            along_dim_0 = SharedTokens(mesh.get_group().group_name, ranks, dim=0, before=1)
            scale = torch.cat(along_dim_0.gather(scale).chunk(ranks), sharded_dim)[: size[0]]
        return (float8_bytes,), GatherInfo(size, scale)

    def _gathered(self, data: Tensor, scale: Any, dtype: torch.dtype, amax: Any) -> GatheredExperts:
        granularity = self.how.scaling_granularity
        granularity = granularity if granularity.by_blocks else ScalingGranularity.AXISWISE
        return GatheredExperts(data.view(E4M3), scale, dtype, granularity)


WRAPPERS[3] = GatherExperts
torch.serialization.add_safe_globals([GatherExperts])
