"""Scaling once per optimizer step: sync of amaxes, held weights, hooks of optimizers."""

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from float8.config import CastSite, Float8Weights, require_module
from float8.experts import Float8Experts
from float8.formats import FLOAT8_MAX
from float8.fsdp.gather import Float8GatherWeight
from float8.fsdp.weights import precompute_float8_dynamic_scale_for_fsdp, shard_amax
from float8.kernels.runtime.private import untraced, warn
from float8.linear import Float8Linear, Float8Module
from float8.linear.state import next_history_and_scale
from float8.parallel.ddp import require_no_join
from float8.parallel.groups import mesh_device_type, sync_groups, unlike
from float8.quantize import scales_of
from float8.tensor import Float8Tensor, is_dtensor, is_fsdp_module, local_tensor
from float8.tensor.ranks import amax_over
from float8.weights.held import can_be_held, hold


@torch.no_grad()
def sync_float8_amax_and_scale_history(
    model: nn.Module, fp8_layers: Sequence[Float8Linear] | None = None, *, group: Any = None
) -> None:
    """Turn the amaxes of this step into the scales of the next, for all layers at once.

    Call it once per optimizer step, after the last `backward()` and before the next forward, or
    let `attach_to_optimizer` do so. It uses all amaxes recorded since the last call: it may follow
    several microbatches, and changes nothing where nothing was recorded. In one process it compiles
    without a graph break. Layers that train on without a sync raise a `RuntimeError` where that can
    be noticed: see "A missing sync" in docs/scaling.md.

    Once `torch.distributed` is initialised, one all-reduce combines the amaxes of all layers, so
    every rank must call it. At the first call ranks also compare their layers.

    Args:
        model: the converted model, compiled or not.
        fp8_layers: the layers to sync, to save the walk over the model; None: all of `model`.
        group: the `ProcessGroup` of the ranks that train on parts of the same batch. None: the mesh
            of the weights, in all of its dims; else the mesh of other parameters under the same
            `fully_shard`; else all ranks. Pass a group for unsharded pipeline stages, for
            independent models per rank, and for tensor parallel under DDP, where weights know the
            mesh of one replica.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no `group` is given, and weights are on different meshes, or gathered in float8
            at the moment. Or ranks that hold parts of a weight would not share its amaxes. Or ranks
            have different layers with delayed scaling.
        RuntimeError: DDP in `model` is within a `join()` that goes on without inputs.
    """
    require_module(model, "model")
    if fp8_layers is not None:
        given = [*fp8_layers] if isinstance(fp8_layers, Iterable) else [None]
        if not all(isinstance(x, Float8Linear) for x in given):
            kinds = f"{type(fp8_layers).__name__} of {[type(x).__name__ for x in given]}"
            expected = "a list of Float8Linear; None syncs all of the model"
            raise TypeError(f"fp8_layers: got a {kinds}, expected {expected}")
    layers = _delayed_layers(model.modules() if fp8_layers is None else given)
    if not layers:
        return
    if dist.is_available() and dist.is_initialized():
        _reduce_amaxes(model, layers, group)
    tied: dict[int, list[Tensor]] = {}  # FSDP2's gather takes the scale of one of the layers
    for layer in layers:
        gathers = layer._float8_config.enable_fsdp_float8_all_gather
        if gathers and CastSite.WEIGHT in layer._float8_delayed:
            tied.setdefault(id(layer.weight), []).append(layer.get_buffer(CastSite.WEIGHT.amax))
    for amaxes in tied.values():
        if len(amaxes) > 1:
            torch._foreach_copy_(amaxes, [torch.stack(amaxes).amax()] * len(amaxes))
    # Updated as one tensor: (config, power of 2, device) -> largest value of a format -> buffers.
    alike: dict[Any, dict[float, list[list[Any]]]] = {}
    for layer in layers:
        delayed = layer._float8_config.delayed_scaling_config
        for site in layer._float8_delayed:
            buffers: list[Any] = [layer._buffers[name] for name in site.buffers]
            how = getattr(layer._float8_plan.casts, site.value).how
            of_format = alike.setdefault((delayed, how.power_of_2, buffers[0].device), {})
            of_format.setdefault(FLOAT8_MAX[how.dtype], []).append(buffers)
    for (delayed, power_of_2, device), formats in alike.items():
        every = itertools.chain(*formats.values())
        amaxes, histories, scales = (list(kind) for kind in zip(*every, strict=True))
        # Made on the device: a copy from the host would wait for it.
        like: Any = {"dtype": torch.float64, "device": device}
        maxima = [torch.full((len(x),), largest, **like) for largest, x in formats.items()]
        amax, history, scale = map(torch.stack, (amaxes, histories, scales))
        rule: Any = {"scale_fn_name": delayed.scale_fn_name, "round_to_power_of_2": power_of_2}
        new_histories, new_scales = next_history_and_scale(
            amax, history, scale, torch.cat(maxima), **rule
        )
        torch._foreach_copy_(histories, new_histories.unbind())
        torch._foreach_copy_(scales, new_scales.unbind())
        torch._foreach_zero_(amaxes)
    for layer in layers:
        layer._float8_mark_synced()
    # Layers that share their work with other ranks learn which of their scales are known.
    shared = [x for x in layers if x._float8_groups()]
    unknown = [(x, s) for x in shared for s in x._float8_delayed if s not in x._float8_known]
    if unknown:  # asks the device, until all amaxes have settled
        values = torch.stack([layer.get_buffer(site.scale) for layer, site in unknown]).tolist()
        for (layer, site), value in zip(unknown, values, strict=True):
            layer._float8_note_known(site, value)


@torch.no_grad()
def forget_float8_amax(model: nn.Module) -> None:
    """Forget all amaxes recorded since the last sync: for forwards that were no training.

    `torch.distributed.pipelining` runs such forwards in the first `schedule.step()`, to find the
    shapes of a stage: with gradients, on memory that nobody has written. Call this after that, and
    before the optimizer's step. Until the next sync scales come from the data. Raises a `TypeError`
    if `model` is no `nn.Module`.
    """
    require_module(model, "model")
    for layer in _delayed_layers(model.modules()):
        torch._foreach_zero_([layer.get_buffer(site.amax) for site in layer._float8_delayed])
        layer._float8_mark_synced()


@untraced
@torch.no_grad()
def update_float8_weights(model: nn.Module) -> None:
    """Cast the weights of all layers with `Float8Weights.HELD`, for every forward to come.

    Call it after `optimizer.step()`, or let `attach_to_optimizer` do so. Before the first call, and
    in evaluation, weights are cast on the fly. If the version counter of a weight changed, its next
    use casts it again and keeps the result; compiled code casts it at every use. Fused optimizers
    and writes into `weight.data` or through a raw pointer do not raise the version counter: call
    this after those. `.to()` and assigning a new Parameter drop held data. Under FSDP2 the next
    gather casts the shard, and keeps it; this call drops what was kept.

    A warning names the layers whose weights are cast on the fly all the same, and says why: those
    under tensor parallel, with delayed scaling, or without rows on a rank; experts of torchtitan
    without FSDP2, and under FSDP in high precision or offloaded.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: a `HELD` layer is under FSDP1 or FSDP2, but gathers in high precision.
    """
    require_module(model, "model")
    mods = {
        mod: name or "(root)"
        for name, mod in model.named_modules()
        if isinstance(mod, Float8Linear | Float8Experts)
        if mod._float8_config.float8_weights is Float8Weights.HELD
    }
    if not mods:
        return
    alike: dict[Any, dict[Tensor, list[Float8Linear]]] = {}  # kind -> weight -> its layers
    on_the_fly: list[str] = []
    fsdp1 = "summon_full_params"  # a method of its modules; FSDP writes past version counters
    wraps = (x.modules() for x in model.modules() if is_fsdp_module(x) or hasattr(type(x), fsdp1))
    under_fsdp = set(itertools.chain(*wraps))
    for mod, name in mods.items():
        for shard in map(local_tensor, mod._parameters.values()):
            if isinstance(shard, Float8GatherWeight):
                shard.forget_cast()
        if isinstance(mod, Float8Experts):
            gathered = "gathered by FSDP, in high precision or offloaded"
            for attr, why in mod._float8_hold(gathered if mod in under_fsdp else None).items():
                if why != gathered or not _held_by_gathers(mod._parameters[attr]):
                    on_the_fly.append(f"{name}.{attr} ({why})")
            continue
        mod._float8_set_held()  # frees the old data before casting
        weight: Any = mod._parameters.get("weight")
        if mod in under_fsdp and not mod._float8_config.enable_fsdp_float8_all_gather:
            raise ValueError(
                f"layer {name!r}: got float8_weights=HELD for a weight that FSDP gathers in high "
                f"precision, expected in float8; convert with enable_fsdp_float8_all_gather=True "
                f"and fully_shard, or with Float8Weights.ON_THE_FLY"
            )
        if reason := _why_on_the_fly(mod, weight, mod in under_fsdp):
            on_the_fly.append(f"{name} ({reason})")
        elif mod not in under_fsdp and not weight.is_meta:  # FSDP2's gather keeps the shard
            kind = weight.device, weight.dtype, mod._float8_plan.casts.weight
            alike.setdefault(kind, {}).setdefault(weight, []).append(mod)
    for (_, dtype, cast), readers in alike.items():
        scales: list[Tensor] | list[None] = [None] * len(readers)
        if cast.how.scaling_granularity.one_scale:
            scales = scales_of(list(readers), cast.how, dtype)
        for (weight, layers), scale in zip(readers.items(), scales, strict=True):
            held = hold(weight, cast._replace(scale=scale))
            for layer in layers:
                layer._float8_set_held(held)
    if on_the_fly:
        count, first = len(on_the_fly), ", ".join(on_the_fly[:3])
        warn(
            f"float8: {count} layer(s) cast their weight on the fly, which is no plain "
            f"Parameter with dynamic scaling: {first}{', ...' * (count > 3)}"
        )


def _held_by_gathers(weight: Any) -> bool:
    """Return whether FSDP2's gathers can keep the float8 cast of the shard of `weight`."""
    local = local_tensor(weight)
    shard = local is not weight and isinstance(local, Float8GatherWeight)
    return local.can_keep_casts(weight) if shard else isinstance(local, Float8Tensor)


def _why_on_the_fly(layer: Float8Linear, weight: Any, under_fsdp: bool) -> str | None:
    """Say why a layer with `HELD` cannot hold its weight, or return None."""
    if under_fsdp and not _held_by_gathers(weight):
        return "gathered in high precision, or without rows on a rank"
    if weight is None:
        return "computed at each use"
    if CastSite.WEIGHT in layer._float8_delayed:
        return "with delayed scaling"
    # The hooks of a weight that is gathered in float8 hold it.
    if under_fsdp or weight.is_meta or can_be_held(weight):
        return layer._float8_why_never_held
    return "under tensor parallel" if is_dtensor(weight) else f"a {type(weight).__name__}"


@dataclass(eq=False)
class Attachment:
    """The hooks that `attach_to_optimizer` registered, and the modules that they serve."""

    mods: list[Float8Module]
    handles: list[RemovableHandle]

    def remove(self) -> None:
        """Remove hooks and held weights, but no shards; also runs when the optimizer is freed."""
        for handle in self.handles:
            handle.remove()
        for mod in self.mods:
            if isinstance(mod, Float8Module):  # it may be in high precision by now
                mod._float8_detach()
        self.mods.clear()


def attach_to_optimizer(model: nn.Module, optimizer: Any, *, group: Any = None) -> Attachment:
    """Run at every `optimizer.step()` what the scaling of `model` needs once per step.

    Registers hooks on the optimizer. `sync_float8_amax_and_scale_history(model)` runs right before
    the step; with a closure right after it, so that all forwards in the closure count.
    `precompute_float8_dynamic_scale_for_fsdp(model)` and `update_float8_weights(model)` follow.
    Attaching casts held weights now, and again at their first use, because a checkpoint may be
    loaded in between. With several optimizers, attach the model to each. Harmless for other models.

    Args:
        model: the converted model, compiled or not.
        optimizer: the `torch.optim.Optimizer` that steps its parameters, or a wrapper that has it
            as `.optimizer` or `.base_optimizer`, as those of accelerate and Lightning.
        group: the process group passed to the sync.

    Returns:
        A handle whose `remove()` ends the attachment.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: as `update_float8_weights`.
    """
    require_module(model, "model")
    inner = _unwrapped(optimizer)

    def hook(is_after: bool, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0]: optimizer
        if is_after == (closure is not None):
            sync_float8_amax_and_scale_history(model, group=group)
        if is_after:
            precompute_float8_dynamic_scale_for_fsdp(model)
            update_float8_weights(model)

    update_float8_weights(model)  # so that a lack of memory shows now
    mods = [x for x in model.modules() if isinstance(x, Float8Module)]
    before, after = (untraced(functools.partial(hook, is_after)) for is_after in (False, True))
    handles = [inner.register_step_pre_hook(before), inner.register_step_post_hook(after)]
    attachment = Attachment(mods, handles)
    for mod in mods:
        mod._float8_attach()  # a checkpoint may be loaded next
    # A training that ends in an error removes nothing.
    weakref.finalize(inner, attachment.remove).atexit = False
    return attachment


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside; wrappers may be an `Optimizer` by name only."""
    inner = optimizer
    for _ in range(9):  # one may be said to wrap itself
        wrapped = getattr(inner, "optimizer", None)
        if wrapped is None and isinstance(inner, torch.optim.Optimizer):
            return inner
        inner = getattr(inner, "base_optimizer", None) if wrapped is None else wrapped
    expected = "a torch.optim.Optimizer, or what holds one as `.optimizer` or `.base_optimizer`"
    raise TypeError(f"optimizer: got {type(optimizer).__name__}, expected {expected}")


def _delayed_layers(modules: Iterable[nn.Module]) -> list[Float8Linear]:
    return [layer for layer in modules if isinstance(layer, Float8Linear) and layer._float8_delayed]


# ---------------------------------------------------------------- ranks


def _reduce_amaxes(model: nn.Module, layers: list[Float8Linear], group: Any) -> None:
    """Make the amaxes of this rank those of all, with one all-reduce."""
    weights: list[Any] = [layer.weight for layer in layers]
    shard_groups = {each for layer in layers for each in layer._float8_groups()}
    # Parameters of FSDP2's modules around layers tell, too: not all are gathered at once.
    inside, fsdp = {*layers}, filter(is_fsdp_module, model.modules())
    around = (module for module in fsdp if not inside.isdisjoint(module.modules()))
    beside = (parameter for module in around for parameter in module.parameters())
    ranks = sync_groups(weights, group, beside, shard_groups)
    if not ranks:
        return
    require_no_join(model)
    there = mesh_device_type(weights)
    _require_same_layers(model, layers, ranks, there)
    amaxes, shards = [], []
    for layer in layers:
        for site in layer._float8_delayed:
            amaxes.append(layer.get_buffer(site.amax))
            # Another rank may have run a layer that this one skipped: its gather read this shard.
            unused = site is CastSite.WEIGHT and not layer._float8_has_unsynced_amax()
            shard = shard_amax(layer.weight) if unused else None
            shards.append(amaxes[-1].new_zeros(()) if shard is None else shard)
    both = amax_over(ranks, there)(torch.stack([x.to(amaxes[0].device) for x in amaxes + shards]))
    recorded, unrecorded = both.chunk(2)
    together = torch.where(recorded != 0, torch.maximum(recorded, unrecorded), recorded)
    torch._foreach_copy_(amaxes, together.unbind())


@untraced
def _require_same_layers(
    model: nn.Module, layers: list[Float8Linear], ranks: tuple[Any, ...], there: str | None
) -> None:
    """Compare the layers of all ranks once, else they would reduce unlike amaxes."""
    done = (len(layers), *(group.group_name for group in ranks))
    if done in layers[0]._float8_compared:
        return
    names = {id(module): name for name, module in model.named_modules()}
    lines = [f"{names.get(id(x))!r} {x} {x._float8_config.delayed_scaling_config}" for x in layers]
    device = layers[0].get_buffer(layers[0]._float8_delayed[0].amax).device
    device = device if there in (None, device.type) else torch.device(there)
    if (differ := unlike(lines, ranks, device)) is not None:
        raise ValueError(
            f"model: got different layers with delayed scaling on the ranks, expected the same; "
            f"convert alike, or give a `group=` that trains the same model. This rank has "
            f"{len(lines)}, and others lack or reorder {'; '.join(differ[:4]) or 'none of them'}"
        )
    layers[0]._float8_compared |= {done}
