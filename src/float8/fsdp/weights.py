"""Float8 all-gather under FSDP2: conversion of weights, and casts before the gathers."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8.config import CastConfig, Float8LinearConfig, ScalingType, require_module
from float8.convert.conversion import Feature, Refusal, conversion_of
from float8.fsdp.foreach_cast import foreach_cast
from float8.fsdp.gather import WRAPPERS, CastAhead, Float8GatherWeight
from float8.kernels.runtime.private import untraced, warn
from float8.linear import Float8Module
from float8.quantize import Cast, scales_of
from float8.tensor import Float8Tensor, is_dtensor, is_fsdp_module, local_tensor
from float8.tensor.ranks import amax_over, no_shard_is_empty, sharding_groups
from float8.tensor.weights import require_one_cast


@untraced
@torch.inference_mode(False)
@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Cast the shards of all dynamically scaled weights together, before float8 all-gathers.

    Call this function on all ranks after `optimizer.step()`, or use `attach_to_optimizer`, which
    does. All gathers of a weight, in forward and backward of each microbatch, then send this cast,
    which takes a byte per element of the shard. Without this call each gather casts, with the same
    values, as it does until the first call after a forward, and if a weight's shards may be empty.
    Weights with one scale each, and equal dtypes, casts and mesh dims that shard them, take one
    all-reduce per mesh dim and, on GPUs, a cast kernel per 1024. For shards offloaded to the CPU,
    only such scales are computed. Weights without `enable_fsdp_float8_all_gather` are skipped.

    A cast is used until the weight is written: by an optimizer's step, an op on the Parameter or
    a view, loading, a write into a tensor of a state dict. Call this function again after writes
    that go unnoticed: by CUDA graphs, NumPy, raw pointers, `torch.distributed`, other libraries, or
    `.data` and `torch._foreach_*` in state dicts. In a CUDA graph, capture this call, then forward.

    Raises:
        TypeError: `model` is not an `nn.Module`.
        ValueError: a weight with one scale is gathered now, so that its shard cannot be reached.
    """
    require_module(model, "model")
    batches = _shards_to_cast(model)
    for shards in batches.values():
        for shard in shards.values():
            shard.forget_cast()  # frees the old casts before there are new ones
    for key, shards in batches.items():
        for (weight, shard), ahead in zip(shards.items(), _cast(key, shards), strict=True):
            shard.keep(ahead, weight)


class _BatchKey(NamedTuple):
    """What all shards that one call of `_cast` casts share: ranks, devices, dtypes and config."""

    one_scale: bool  # see `Float8GatherWeight.has_one_scale`
    groups: tuple[Any, ...]  # the process groups of ranks that share a weight
    device_type: str  # of the mesh, where weights are gathered
    device: torch.device  # of the shards, which may be offloaded
    dtype: torch.dtype  # of the shards
    param_dtype: torch.dtype  # to which they are rounded before the cast
    cast_config: CastConfig


def _cast(key: _BatchKey, shards: dict[Any, Float8GatherWeight]) -> list[CastAhead]:
    """Return casts of `shards`, {weight: shard} that share `key`; if offloaded, only the scales."""
    config, dtype = key.cast_config, key.param_dtype
    on_device, values = key.device.type == key.device_type, [x._inner for x in shards.values()]
    if key.one_scale:
        scales = scales_of(values, config, dtype, amax_over(key.groups, key.device_type))
        if not on_device:  # FSDP2 copies the shards to the device before it casts them
            return [CastAhead(scale) for scale in scales]
        return [*map(CastAhead, scales, foreach_cast(values, scales, config, dtype))]
    return [x.quantized(x._inner, Cast(config), dtype) for x in shards.values()]


def _shards_to_cast(model: nn.Module) -> dict[_BatchKey, dict[Any, Float8GatherWeight]]:
    """Return shards to cast, {key: {weight: shard}}; raise if one of one scale is gathered now."""
    batches: dict[_BatchKey, dict[Any, Float8GatherWeight]] = {}
    groups_of: dict[Any, tuple[Any, ...] | None] = {}  # sharding -> groups; None: empty shards
    weight: Any
    for module in model.modules():
        if not isinstance(module, Float8Module) or module._float8_never_trains:
            continue
        dynamic = module._float8_plan.casts.weight.config.scaling_type is ScalingType.DYNAMIC
        if not (dynamic and module._float8_config.enable_fsdp_float8_all_gather):
            continue
        for weight in module._parameters.values():
            shard = local_tensor(weight)
            if isinstance(shard, Float8Tensor) and shard._granularity.one_scale:
                name = next(name for name, mod in model.named_modules() if mod is module)
                raise ValueError(  # not skipped: other ranks wait for the amax of this shard
                    f"layer {name!r}: got a weight that is gathered at the moment, expected its "
                    f"shard; before optimizer.step(), call reshard() on the modules that keep "
                    f"their weights"
                )
            if not isinstance(shard, Float8GatherWeight) or shard is weight:  # not sharded
                continue
            # Before the first gather FSDP2 may still move the shard, on some ranks only, and the
            # dtype to which it will be rounded is unknown. Inference tensors count no writes.
            if shard.param_dtype is None or shard.write_counter.is_inference():
                continue
            mesh, one_scale = weight.device_mesh, shard.has_one_scale
            if shard.device.type != mesh.device_type and not one_scale:
                continue  # offloaded: gathers copy the shard to the device and compute scales there
            sharding = mesh, weight.placements, weight.shape
            if sharding not in groups_of:
                groups_of[sharding] = sharding_groups(weight) if no_shard_is_empty(weight) else None
            # A rank cannot see writes to its empty shard, so that weight is cast by gathers.
            if (groups := groups_of[sharding]) is not None:
                location = groups, mesh.device_type, shard.device
                key = _BatchKey(one_scale, *location, shard.dtype, shard.param_dtype, shard.how)
                batches.setdefault(key, {})[weight] = shard
    return batches


def refuse_shards(layer: Any, config: Float8LinearConfig) -> TypeError | ValueError | None:
    """Return the error to raise if the way `layer` is sharded rules out `config`, else None.

    `fully_shard` on the layer itself rules out all; a plain Parameter that is one rank's part of a
    weight, as in layers of fairscale, rules out `enable_fsdp_float8_all_gather`.
    """
    if is_fsdp_module(layer):
        cls = f"{type(layer).__module__}.{type(layer).__qualname__}"
        expected = "expected an nn.Linear: convert, then fully_shard"
        return TypeError(f"got a {cls}, which is sharded, {expected}")
    shard_groups = layer._float8_shard_groups() if isinstance(layer, Float8Module) else ()
    if shard_groups and not is_dtensor(layer.weight) and config.enable_fsdp_float8_all_gather:
        return ValueError(  # a layer of fairscale, whose part of the weight is a plain Parameter
            "got enable_fsdp_float8_all_gather=True, expected False: FSDP does not know that other "
            "ranks hold parts of the weight, too"
        )
    return None


class Float8Gathers(Feature):
    """Hooks, called by conversions and after steps, that have FSDP2 gather weights in float8."""

    def check_config(self, config: Float8LinearConfig) -> None:
        """Raise `ValueError` if `config` gathers float8, but GEMMs cannot share a weight's cast."""
        require_one_cast(config, "enable_fsdp_float8_all_gather")

    def sharing_ranks(self, config: Float8LinearConfig) -> int:
        """Return how many ranks split a weight's cast: all if `config` gathers in float8, or 1."""
        gathers = config.enable_fsdp_float8_all_gather and dist.is_available()
        return dist.get_world_size() if gathers and dist.is_initialized() else 1

    def why_not_changed(self, mod: Any) -> Refusal | None:
        """Return (problem, advice) if FSDP2 wraps `mod` or gathers its weight in float8."""
        if is_fsdp_module(mod):
            return "a layer that fully_shard was applied to", "apply it to the block around it"
        for name in _gathered_names(mod):
            weight: Any = mod._parameters.get(name)
            local = local_tensor(weight)
            sharded = isinstance(local, Float8GatherWeight) and local is not weight  # a DTensor
            gathered = isinstance(local, Float8Tensor) and not mod._float8_never_trains  # not ONLY
            if sharded or gathered:
                fix = "make the change before fully_shard, or load its state dict into a new model"
                return "a weight that FSDP2 gathers in float8", fix
        return None

    def why_not_taken(self, mod: Any, config: Float8LinearConfig) -> Refusal | None:
        """Return (problem, advice) if a weight to wrap is a DTensor or has gradient hooks."""
        names = _gathered_names(mod) if config.enable_fsdp_float8_all_gather else ()
        hooks = "_backward_hooks", "_post_accumulate_grad_hooks"
        for weight in map(mod._parameters.get, names):
            if is_dtensor(weight):
                got = "a DTensor as weight, which enable_fsdp_float8_all_gather cannot prepare"
                return got, "convert the model first, then call fully_shard"
            if any(getattr(weight, name, None) for name in hooks):
                got = "a weight with gradient hooks, which enable_fsdp_float8_all_gather would lose"
                return got, "register them on the weight after the conversion"
        return None

    def before_conversion(self, converted: Sequence[nn.Module]) -> None:
        """Unwrap the weights of `converted` modules, before these are converted again or back."""
        users = _users(converted)
        plain = {x: x.high_precision for x in users if isinstance(x, Float8GatherWeight)}
        _replace_contents(plain, users)

    def after_conversion(self, model: nn.Module, config: Float8LinearConfig | None) -> None:
        """Wrap weights in `model` for float8 gathers if `config`, unless None, enables these."""
        if config is not None and config.enable_fsdp_float8_all_gather:
            enable_float8_all_gather(model)

    def after_step(self, model: nn.Module) -> None:
        """Cast the shards of weights in `model` for gathers, after each optimizer step."""
        precompute_float8_dynamic_scale_for_fsdp(model)


def _gathered_names(mod: nn.Module) -> Sequence[str]:
    """Return names of weights of `mod`, [N, K] or [E, N, K], that can be gathered in float8."""
    conversion = conversion_of(mod)
    return conversion.stored_by_rows(mod) if conversion else ()


def enable_float8_all_gather(module: nn.Module) -> None:
    """Wrap weights of layers with `enable_fsdp_float8_all_gather`, so that FSDP2 gathers float8.

    A weight stays plain if a module that is not converted or has another configuration shares it,
    or if experts store it as [E, K, N], since scales must cover rows of [E, N, K].
    """
    new_tensors: dict[Any, Tensor] = {}
    users = _users(module.modules())
    for weight, uses in users.items():
        if not all(isinstance(mod, Float8Module) for mod, _ in uses):
            continue
        config, *other_configs = {mod._float8_config for mod, _ in uses}
        has_rows = all(name in _gathered_names(mod) for mod, name in uses)  # not [E, K, N]
        gathers = config.enable_fsdp_float8_all_gather and not other_configs and has_rows
        if gathers and not isinstance(local_tensor(weight), Float8GatherWeight):
            wrapper, casts = WRAPPERS[weight.dim()], uses[0][0]._float8_plan.casts
            # `.data` is no view of the weight: `swap_tensors` raises for one that has views.
            new_tensors[weight] = wrapper(weight.data, casts.weight.config)
    _replace_contents(new_tensors, users)


def _users(modules: Iterable[nn.Module]) -> dict[Any, list[tuple[Any, str]]]:
    """Map each Parameter of `modules` to the pairs (module, name) under which it is registered."""
    users: dict[Any, list[tuple[Any, str]]] = {}
    for mod in modules:
        for name, parameter in mod._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((mod, name))
    return users


def _replace_contents(
    new_tensors: dict[Any, Tensor], users: dict[Any, list[tuple[nn.Module, str]]]
) -> None:
    """Give each weight the contents `new_tensors[weight]`; the object and its gradient stay.

    Where a compiled graph or the like refers to a weight, torch refuses: then the modules in its
    `users`, pairs (module, name), get a new Parameter, and a warning is issued.
    """
    set_anew = {*Float8GatherWeight.__annotations__, "_is_param"}  # attributes that `new` sets
    replaced = 0
    for old, tensor in new_tensors.items():
        new: Any = nn.Parameter(tensor, requires_grad=old.requires_grad)
        new.grad = old.grad
        new.__dict__.update({name: x for name, x in vars(old).items() if name not in set_anew})
        try:
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        except RuntimeError:  # raised before it swaps anything
            replaced += 1
            for mod, name in users[old]:
                mod._parameters[name] = new
    if replaced:
        warn(
            f"float8: the weights of {replaced} layer(s) are new Parameters, because something "
            f"refers to the old ones (a compiled forward, a graph, a weakref). An optimizer made "
            f"before does not train them: make it afterwards"
        )
