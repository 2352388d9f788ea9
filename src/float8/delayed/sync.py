"""Sync of delayed scaling: once per step, compute the next scales of all layers from amaxes."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8 import kernels
from float8.config import DelayedScalingConfig, Float8LinearConfig, require_module
from float8.convert.conversion import Feature
from float8.delayed.cast import UNKNOWN_SCALE
from float8.delayed.state import WEIGHT
from float8.formats import FLOAT8_MAX
from float8.kernels.runtime.private import untraced
from float8.linear import Float8Linear
from float8.ranks import mesh_device_type, sync_groups, unlike
from float8.scales import amax_to_scale
from float8.tensor.ranks import amax_over, is_fsdp_module, local_tensor


@torch.no_grad()
def sync_float8_amax_and_scale_history(
    model: nn.Module, fp8_layers: Sequence[Float8Linear] | None = None, *, group: Any = None
) -> None:
    """Compute the scales of delayed scaling for the next step from amaxes of this and past steps.

    Call this function once per optimizer step, after the last `backward()` and before the next
    forward, or let `attach_to_optimizer` do so. The amaxes of this step are all recorded since the
    last call, by one or more microbatches; if none was, the history stays as it is. In one process
    the function compiles without a graph break. A layer that trains on without this call raises a
    `RuntimeError` where it can detect that: see "A missing sync" in docs/scaling.md.

    If `torch.distributed` is initialized, one all-reduce per process group combines the amaxes of
    all layers, so every rank must call this. The first call checks that ranks have equal layers. In
    `ddp.join()` set `throw_on_early_termination=True`: ranks without inputs do not sync.

    Args:
        model: the converted model, compiled or not.
        fp8_layers: the layers to sync, to save a walk over `model`. None: all layers of `model`.
        group: the `ProcessGroup` of the ranks that train on parts of the same batch. None: all dims
            of the weights' device mesh; if weights have none, the mesh of other parameters under
            the same `fully_shard`; else all ranks. Pass a group for unsharded pipeline stages, for
            independent models per rank, and for tensor parallel under DDP, where the mesh of the
            weights has only one replica.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `group` is None, and weights are on different meshes, or no parameter tells the
            mesh while FSDP2 keeps weights gathered in float8 (`reshard()` first); the group lacks
            ranks that hold parts of a weight; or ranks have different layers to sync.
    """
    require_module(model, "model")
    if fp8_layers is not None:
        listed = [*fp8_layers] if isinstance(fp8_layers, Iterable) else [None]  # refused below
        if not all(isinstance(x, Float8Linear) for x in listed):
            kinds = f"{type(fp8_layers).__name__} of {[type(x).__name__ for x in listed]}"
            expected = "a list of Float8Linear; None syncs all of the model"
            raise TypeError(f"fp8_layers: got a {kinds}, expected {expected}")
    layers = _delayed_layers(model.modules() if fp8_layers is None else listed)
    if not layers:
        return
    if dist.is_available() and dist.is_initialized():
        _reduce_amaxes(model, layers, group)
    tied: dict[int, list[Tensor]] = {}  # weight id -> amaxes of its layers: FSDP2 uses one scale
    for layer in layers:
        if WEIGHT in layer._float8_stateful and layer._float8_config.enable_fsdp_float8_all_gather:
            tied.setdefault(id(layer.weight), []).append(layer.get_buffer(WEIGHT.amax))
    for amaxes in tied.values():
        if len(amaxes) > 1:
            torch._foreach_copy_(amaxes, [torch.stack(amaxes).amax()] * len(amaxes))
    _update_scales(layers)
    unknown: list[Any] = []  # pairs of a layer and one of its sites
    for layer in layers:
        layer._float8_mark_synced()
        if layer._float8_shard_groups():  # its casts do not all-reduce for scales known to be set
            known = layer._float8_known
            unknown += [(layer, site) for site in layer._float8_stateful if site.name not in known]
    if unknown:  # waits for the device, at each sync until all scales are set
        values = torch.stack([layer.get_buffer(site.scale) for layer, site in unknown]).tolist()
        for (layer, site), value in zip(unknown, values, strict=True):
            layer._float8_note_known(site, value)


@torch.no_grad()
def forget_float8_amax(model: nn.Module) -> None:
    """Discard all amaxes recorded since scales were last updated, for forwards on invalid data.

    `torch.distributed.pipelining` runs such forwards in the first `schedule.step()`, to find the
    shapes of a stage: with gradients, on uninitialized memory. Call this function after that step
    and before `optimizer.step()`. Scales do not change: casts whose scale is not set yet go on to
    compute it from their data. Raises a `TypeError` if `model` is not an `nn.Module`.
    """
    require_module(model, "model")
    for layer in _delayed_layers(model.modules()):
        torch._foreach_zero_([layer.get_buffer(site.amax) for site in layer._float8_stateful])
        layer._float8_mark_synced()


def _delayed_layers(modules: Iterable[nn.Module]) -> list[Float8Linear]:
    return [x for x in modules if isinstance(x, Float8Linear) and x._float8_stateful]


def _update_scales(layers: list[Float8Linear]) -> None:
    """Push the amaxes of `layers` into their histories, compute new scales, and zero the amaxes."""
    # Each batch is updated as one tensor: its key -> largest value of a format -> sites' buffers.
    batches: dict[Any, dict[float, list[list[Any]]]] = {}
    for layer in layers:
        for site in layer._float8_stateful:
            buffers: list[Any] = [layer._buffers[name] for name in site[1:]]
            cast = getattr(layer._float8_plan.casts, site.name).config
            key = layer._float8_config.delayed_scaling_config, cast.power_of_2, buffers[0].device
            batches.setdefault(key, {}).setdefault(FLOAT8_MAX[cast.dtype], []).append(buffers)
    for (config, power_of_2, device), formats in batches.items():
        buffers_of_all = itertools.chain(*formats.values())
        amaxes, histories, scales = (list(kind) for kind in zip(*buffers_of_all, strict=True))
        # The largest value for each site, filled on the device: a copy from the host would wait.
        kwargs: Any = {"dtype": torch.float64, "device": device}
        maxima = torch.cat([torch.full((len(sites),), x, **kwargs) for x, sites in formats.items()])
        amax, history, scale = map(torch.stack, (amaxes, histories, scales))
        history, scale = next_history_and_scale(amax, history, scale, maxima, config, power_of_2)
        torch._foreach_copy_(histories, history.unbind())
        torch._foreach_copy_(scales, scale.unbind())
        torch._foreach_zero_(amaxes)


def next_history_and_scale(
    amax: Tensor,
    history: Tensor,
    scale: Tensor,
    float8_max: Tensor,
    config: DelayedScalingConfig,
    power_of_2: bool,
) -> tuple[Tensor, Tensor]:
    """Push the amaxes of a step into their histories; return the new histories and scales.

    `amax` and `scale` are [S] float32 for S casts, `history` is [S, history_len], most recent
    first, `float8_max` is [S] float64, the largest value of the format of each cast. The new scale
    is `max(a, 2**-100) / float8_max`, rounded up to 2**n if `power_of_2`. Here `a` is the largest
    or the latest amax in the new history (`config.scale_fn_name`); if it is 0, the scale stays.

    If an amax is 0 (nothing was recorded since the last update, or only zeros), its history does
    not change, so a repeated update is a no-op. A non-finite amax enters the history as 0, so that
    one overflow does not spoil the scales of the next `history_len` steps. A scale of 0 (not set,
    `UNKNOWN_SCALE`) stays 0 until an amax > 0 is less than twice the largest in `history`: if
    weights are initialized near zero, gradients grow by orders of magnitude in the first step.
    """
    latest, previous_peak = amax.nan_to_num(0.0, 0.0, 0.0), history.amax(dim=1)
    settled = (latest - previous_peak).abs() < previous_peak  # 0 < latest < 2 * previous_peak
    has_scale = settled | (scale != UNKNOWN_SCALE)
    pushed = torch.cat([latest.unsqueeze(1), history[:, :-1]], dim=1)
    history = torch.where((amax != 0).unsqueeze(1), pushed, history)
    peak = history.amax(dim=1) if config.scale_fn_name == "max" else history[:, 0]
    fresh = amax_to_scale(peak, float8_max, power_of_2)
    return history, torch.where(has_scale & (peak > 0), fresh, scale)


def _reduce_amaxes(model: nn.Module, layers: list[Float8Linear], group: Any) -> None:
    """All-reduce the amaxes in the buffers of `layers` by max over the ranks of `group`.

    None: the mesh of the weights; if no weight is a DTensor, that of other Parameters in the FSDP2
    modules of `model` around `layers`; without any, all ranks. If only other ranks ran a layer,
    this rank takes part with the amax of its shard of a weight that FSDP2 gathers in float8.
    """
    weights: Any = [x.weight for x in layers if not x._float8_never_trains]  # not in float8 only
    shard_groups = {x for layer in layers for x in layer._float8_shard_groups()}
    # A weight that FSDP2 gathered lacks the mesh, which its module's other Parameters have.
    layer_set, fsdp_modules = {*layers}, filter(is_fsdp_module, model.modules())
    fsdp_parents = (module for module in fsdp_modules if not layer_set.isdisjoint(module.modules()))
    fsdp_parameters = (parameter for parent in fsdp_parents for parameter in parent.parameters())
    groups = sync_groups(weights, group, fsdp_parameters, shard_groups)
    if not groups:  # one process
        return
    device_type = mesh_device_type(weights)
    _require_same_layers(model, layers, groups, device_type)
    amaxes, shard_amaxes = [], []
    for layer in layers:
        for site in layer._float8_stateful:
            amaxes.append(layer.get_buffer(site.amax))
            skipped = site == WEIGHT and not layer._float8_has_unsynced_amax()
            shard_amax = _shard_amax(layer.weight) if skipped else None
            shard_amaxes.append(amaxes[-1].new_zeros(()) if shard_amax is None else shard_amax)
    values = torch.stack([x.to(amaxes[0].device) for x in amaxes + shard_amaxes])
    recorded, shard_maxima = amax_over(groups, device_type)(values).chunk(2)
    merged = torch.where(recorded != 0, torch.maximum(recorded, shard_maxima), recorded)
    torch._foreach_copy_(amaxes, merged.unbind())


def _shard_amax(weight: Tensor) -> Tensor | None:
    """Return the amax of this rank's shard of `weight` if FSDP2 will gather it in float8."""
    local = local_tensor(weight)
    if local is weight or not hasattr(local, "param_dtype"):
        return None
    return kernels.amax(local.high_precision.to(local.param_dtype or local.dtype))


@untraced
def _require_same_layers(
    model: nn.Module, layers: list[Float8Linear], groups: tuple[Any, ...], device_type: str | None
) -> None:
    """Raise a `ValueError` unless all ranks of `groups` have the same `layers` in the same order.

    Compares names in `model`, sizes and configurations; skipped if these `groups` agreed before on
    as many layers. Communicates on `device_type` or, if that is None, on the buffers' device.
    """
    key = (len(layers), *(group.group_name for group in groups))
    if key in layers[0]._float8_compared:
        return
    names = {id(module): name for name, module in model.named_modules()}
    lines = [f"{names.get(id(x))!r} {x} {x._float8_config.delayed_scaling_config}" for x in layers]
    device = layers[0].get_buffer(layers[0]._float8_stateful[0].amax).device
    if device_type not in (None, device.type):  # buffers are offloaded; the mesh is of GPUs
        device = torch.device(device_type)
    if (differ := unlike(lines, groups, device)) is not None:
        raise ValueError(
            f"model: got different layers with delayed scaling on the ranks, expected the same; "
            f"convert alike, or give a `group=` that trains the same model. This rank has "
            f"{len(lines)}, and others lack or reorder {'; '.join(differ[:4]) or 'none of them'}"
        )
    layers[0]._float8_compared |= {key}


class DelayedScaling(Feature):
    """Plug-in for delayed scaling: checks configurations, and updates scales at optimizer steps."""

    def check_config(self, config: Float8LinearConfig) -> None:
        """Raise `ValueError` if `delayed_scaling_config` is not default, but no cast `DELAYED`."""
        value = config.delayed_scaling_config
        if not config.delayed_sites and value != DelayedScalingConfig():
            got = f"delayed_scaling_config: got {value!r}, expected the default, as no scaling_type"
            raise ValueError(f"{got} is DELAYED; leave it out, or set one to DELAYED")

    def before_step(self, model: nn.Module, group: Any) -> None:
        """Compute the next scales of `model`, before `optimizer.step()` or after it with a closure.

        Amaxes are reduced over `group`. None: the mesh of weights or other parameters, or all.
        """
        sync_float8_amax_and_scale_history(model, group=group)
