"""The scales of all weights that are gathered in float8, with one all-reduce."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.arguments import require_module
from float8.linear import Float8Linear
from float8.parallel.collectives import (
    Group,
    all_reduce_amax,
    mesh_device_type,
    sharding_groups,
)
from float8.scaling import amax_to_scale
from float8.tensor import Float8GatherWeight, Float8Tensor, PrecomputedScale, local_tensor


class _Kind(NamedTuple):
    """What weights must have in common for their scales to be computed together."""

    groups: tuple[Group, ...]
    mesh_device_type: str | None
    device: torch.device
    shard_dtype: torch.dtype
    param_dtype: torch.dtype
    dtype: torch.dtype
    round_to_power_of_2: bool


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.inference_mode(False)
@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Compute the scales of all weights with dynamic scaling and float8 all-gather at once.

    Call it after `optimizer.step()`, or let `attach_to_optimizer` do so: one all-reduce then
    serves all weights (one per mesh, should there be several). Without it, each gather does an
    all-reduce of its own, with the same result; so it remains for weights with so few rows that
    some ranks hold none. A scale counts until the weight is written again.
    Does nothing for a model without such weights or not sharded. All ranks must call it.

    Args:
        model: the converted model, sharded with `fully_shard`, compiled or not.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: a weight is gathered at the moment, so that its shard cannot be reached.
    """
    require_module(model, "model")
    kinds: dict[_Kind, list[Float8GatherWeight]] = {}
    for weight in _sharded_weights(model):
        shard: Float8GatherWeight = local_tensor(weight)
        plan = shard.plan
        param_dtype = plan.param_dtype or shard.dtype
        kind = _Kind(
            sharding_groups(weight),
            mesh_device_type([weight]),
            shard.device,
            shard.dtype,
            param_dtype,
            plan.dtype,
            plan.round_to_power_of_2,
        )
        kinds.setdefault(kind, []).append(shard)

    together: dict[tuple[tuple[Group, ...], str | None, torch.device], list[_Kind]] = {}
    for kind in kinds:
        where = (kind.groups, kind.mesh_device_type, kind.device)
        together.setdefault(where, []).append(kind)
    for (groups, device_type, _), members in together.items():
        # Rounding keeps the order of numbers: the amax of rounded values is the rounded amax.
        amaxes = [_amaxes(kinds[kind]).to(kind.param_dtype).to(torch.float32) for kind in members]
        amax = torch.cat(amaxes)
        all_reduce_amax(amax, groups, device_type)
        for kind, part in zip(members, torch.split(amax, [len(a) for a in amaxes]), strict=True):
            _set_scales(kinds[kind], part, kind)


def has_precomputable_scales(model: nn.Module) -> bool:
    """Whether `precompute_float8_dynamic_scale_for_fsdp` may have something to do, once sharded."""
    return any(
        isinstance(layer, Float8Linear)
        and layer.config.enable_fsdp_float8_all_gather
        and not layer.plan.weight.delayed
        for layer in model.modules()
    )


def _sharded_weights(model: nn.Module) -> Iterator[Tensor]:
    """Each weight once, also if layers share it."""
    seen: set[int] = set()
    for name, layer in model.named_modules():
        if not isinstance(layer, Float8Linear) or not layer.config.enable_fsdp_float8_all_gather:
            continue
        weight = layer.weight
        if layer.plan.weight.delayed or id(weight) in seen:
            continue
        seen.add(id(weight))
        if isinstance(weight, Float8Tensor):
            raise ValueError(
                f"layer {name!r}: got a weight that is gathered at the moment, expected its "
                f"shard; call reshard() on the modules that keep their weights, before "
                f"optimizer.step()"
            )
        if (
            weight is not local_tensor(weight)
            and isinstance(local_tensor(weight), Float8GatherWeight)
            and _on_all_ranks(weight)
        ):
            yield weight


def _on_all_ranks(weight: Any) -> bool:
    """Whether each rank holds a part. All must agree on whether the weight was written since.

    Loading a checkpoint in place writes nothing where a shard is empty.
    """
    for dim, placement in enumerate(weight.placements):
        if placement.is_shard():
            size, ranks = weight.shape[placement.dim], weight.device_mesh.size(dim)
            if -(-size // ranks) * (ranks - 1) >= size > 0 and ranks > 1:
                return False
    return True


def _amaxes(shards: list[Float8GatherWeight]) -> Tensor:
    """[S] float32, the amaxes of the local shards."""
    full = [shard.high_precision for shard in shards]
    return torch.stack(torch._foreach_norm(full, float("inf"))).float()


def _set_scales(shards: list[Float8GatherWeight], amax: Tensor, kind: _Kind) -> None:
    # Four floats apart: cuBLASLt takes scales at multiples of 16 bytes only.
    spaced = amax.new_empty(len(amax), 4)
    spaced[:, 0] = amax_to_scale(amax, kind.dtype, kind.round_to_power_of_2)
    scales = spaced[:, 0].unbind()
    for shard, scale in zip(shards, scales, strict=True):
        shard.set_precomputed(PrecomputedScale(scale, kind.param_dtype))
