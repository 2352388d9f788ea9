"""FSDP2 with float8 all-gather: scales ahead of the gathers, and which weights are gathered so."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.config import ScalingType, require_module
from float8.experts import Float8Experts, GatherExperts, names_to_gather
from float8.kernels.runtime.private import untraced, warn
from float8.linear import Float8Linear
from float8.linear.plan import plan_linear
from float8.quantize import scales_of
from float8.tensor import Float8GatherWeight, Float8Tensor, is_dtensor, local_tensor
from float8.tensor.gather import CastAhead
from float8.tensor.ranks import amax_over, no_shard_is_empty, sharding_groups


def shard_amax(weight: Tensor) -> Tensor | None:
    """Return the amax of this rank's shard as it would be cast, 0-dim float32; None without one."""
    local = local_tensor(weight)
    if local is weight or not isinstance(local, Float8GatherWeight):
        return None
    return kernels.amax(local.high_precision.to(local.param_dtype or local.dtype))


@untraced
@torch.inference_mode(False)
@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Compute the scales of all weights with dynamic scaling and float8 all-gather at once.

    Call it on all ranks after `optimizer.step()`, or let `attach_to_optimizer` do so: then one
    all-reduce serves all weights of a dtype (one per mesh dim that shards them). Without it each
    gather does one of its own, with the same result. The first forward, and weights with empty
    shards, always do so. Does nothing for other models.

    A scale counts until the weight is written again, by an optimizer's step, an op on the Parameter
    or on a view of it, loading, or a write into a tensor of a state dict. Call it again after what
    goes unnoticed: writes through NumPy or a raw pointer, `.data` of tensors in state dicts,
    `torch._foreach_*` of DTensors in state dicts, fused optimizers and `torch.distributed` on both
    kinds of tensor.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: a weight is gathered at the moment, so that its shard cannot be reached.
    """
    require_module(model, "model")
    alike: dict[Any, dict[Any, Tensor]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Float8Linear):
            continue
        weight: Any = layer.weight
        how = layer._float8_plan.casts.weight.how
        dynamic = how.scaling_type is ScalingType.DYNAMIC and how.scaling_granularity.one_scale
        if not (dynamic and layer._float8_config.enable_fsdp_float8_all_gather):
            continue
        shard = local_tensor(weight)
        if isinstance(shard, Float8Tensor):
            raise ValueError(
                f"layer {name!r}: got a weight that is gathered at the moment, expected its shard; "
                f"before optimizer.step(), call reshard() on the modules that keep their weights"
            )
        # Before the first gather FSDP2 may still move the shard, on some ranks only, and what it
        # will be rounded to is not known.
        ready = isinstance(shard, Float8GatherWeight) and is_dtensor(weight)
        ready = ready and shard.param_dtype is not None and not shard.counted.is_inference()
        if ready and no_shard_is_empty(weight):
            where = sharding_groups(weight), weight.device_mesh.device_type, shard.device
            of_one = alike.setdefault((*where, shard.dtype, shard.param_dtype, shard.how), {})
            of_one[weight] = shard.high_precision
    for (groups, device_type, _, _, param_dtype, how), shards in alike.items():
        reduce = amax_over(groups, device_type)
        scales = scales_of(list(shards.values()), how, param_dtype, reduce)
        for weight, scale in zip(shards, scales, strict=True):
            weight._local_tensor.keep(CastAhead(scale), weight)


def enable_float8_all_gather(module: nn.Module) -> None:
    """Make the weights of converted layers whose configuration asks for it gather in float8.

    A weight that an embedding uses, too, stays plain: bytes cannot be looked up in. So do weights
    of experts that lie as [E, K, N]: their rows are not what a scale covers.
    """
    made: dict[Any, Tensor] = {}
    users = _users(module.modules())
    config: Any
    ours = Float8Linear | Float8Experts
    for weight, places in users.items():
        config, *others = {
            isinstance(mod, ours) and name in names_to_gather(mod) and mod._float8_config
            for mod, name in places
        }
        gathers = config and config.enable_fsdp_float8_all_gather and not others
        if gathers and not isinstance(local_tensor(weight), Float8GatherWeight):
            grouped = weight.dim() == 3
            kind = GatherExperts if grouped else Float8GatherWeight
            # `.data`: no view that refers to the weight.
            made[weight] = kind(weight.data, plan_linear(config, grouped=grouped).casts.weight.how)
    _take_places(made, users)


def disable_float8_all_gather(layers: Iterable[nn.Module]) -> None:
    """Make weights that were to be gathered in float8 ordinary Parameters again."""
    users = _users(layers)
    made = {x: x.high_precision for x in users if isinstance(x, Float8GatherWeight)}
    _take_places(made, users)


def _users(modules: Iterable[nn.Module]) -> dict[Any, list[tuple[nn.Module, str]]]:
    """Return all Parameters, each with the modules that have it and the names it has there."""
    users: dict[Any, list[tuple[nn.Module, str]]] = {}
    for mod in modules:
        for name, parameter in mod._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((mod, name))
    return users


def _take_places(made: dict[Any, Tensor], users: dict[Any, list[tuple[nn.Module, str]]]) -> None:
    """Give each old weight the content of `made[weight]`; the object stays the same.

    It keeps gradient and attributes. Where torch cannot, because something refers to the weight,
    its users get a new one, and a warning says so.
    """
    ours, new_objects = {*Float8GatherWeight.__annotations__, "_is_param"}, 0
    for old, tensor in made.items():
        new: Any = nn.Parameter(tensor, requires_grad=old.requires_grad)
        new.grad = old.grad
        new.__dict__.update({name: x for name, x in vars(old).items() if name not in ours})
        try:
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        except RuntimeError:  # nothing has changed then
            new_objects += 1
            for mod, name in users[old]:
                mod._parameters[name] = new
    if new_objects:
        warn(
            f"float8: the weights of {new_objects} layer(s) are new Parameters, because something "
            f"refers to the old ones (a compiled forward, a graph, a weakref). An optimizer made "
            f"before does not train them: make it afterwards"
        )
