"""Scaling once per optimizer step: sync of amaxes, held weights, hooks of optimizers."""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from float8.arguments import require_module
from float8.config import CastSite, Float8Weights
from float8.experts import Float8Experts
from float8.formats import FLOAT8_MAX
from float8.linear import Float8Layer, Float8Module
from float8.linear.weight import can_be_held, hold
from float8.parallel.ddp import require_no_join
from float8.parallel.fsdp import precompute_float8_dynamic_scale_for_fsdp, shard_amax
from float8.parallel.groups import mesh_device_type, sync_groups, unlike
from float8.quantize import scales_of
from float8.scales import next_history_and_scale
from float8.tensor import Float8GatherWeight, Float8Tensor, is_dtensor, is_fsdp_module, local_tensor
from float8.tensor.ranks import amax_over
from float8.untraced import untraced

HELD = Float8Weights.HELD


@torch.no_grad()
def sync_float8_amax_and_scale_history(
    model: nn.Module,
    fp8_layers: Sequence[Float8Layer] | None = None,
    *,
    group: Any = None,
) -> None:
    """Turn the amaxes of this step into the scales of the next, for all layers at once.

    Call it once per optimizer step, after the last `backward()` and before the next forward, or
    let `attach_to_optimizer` do so. Amaxes count since the last call, so gradient accumulation
    needs nothing special, and a call where nothing was recorded changes nothing. Does nothing for
    a model without delayed scaling. In a single process `torch.compile` takes it whole.

    A layer that trains on without a sync raises a `RuntimeError` where that can be noticed: see "A
    missing sync" in docs/scaling.md.

    Once `torch.distributed` is initialised, amaxes are those of all ranks, through one all-reduce
    for everything: each rank must call it. At the first call ranks also compare their layers.

    Args:
        model: the converted model, compiled or not.
        fp8_layers: the layers to sync, to save the walk over the model; None: all of `model`.
        group: the `ProcessGroup` of the ranks that train on parts of the same batch. None: the
            ranks of the mesh that the weights are on, in all of its dims (FSDP2, HSDP, FSDP2 with
            tensor parallel), else the mesh of other parameters under the same `fully_shard`, else
            all. Give a group for stages of a pipeline that are not sharded, for models that each
            rank trains by itself, and where the mesh is not all there is: with tensor parallel
            under DDP the weights know the mesh of one replica only. Weights gathered in 16 bits at
            the moment are plain tensors: if all parameters are, all ranks are taken.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no `group` is given, and layers (or, if they do not tell, those parameters) are
            on different meshes, or weights are gathered in float8 at the moment and nothing tells
            their mesh. Or ranks that hold parts of a weight would not share its amaxes. Or ranks
            have different layers with delayed scaling; a rank that has none does not take part.
        RuntimeError: DDP in `model` is within its `join()`, which goes on where ranks have run out
            of inputs.
    """
    require_module(model, "model")
    layers = _delayed_layers(model.modules() if fp8_layers is None else _listed(fp8_layers))
    if not layers:
        return
    weights = [layer.weight for layer in layers]
    parts: list[Any] = [layer for layer in layers if layer._float8_holds_part]
    parted = {layer._float8_mesh.get_group() for layer in parts}  # of weights that are no DTensors
    if ranks := sync_groups(weights, group, _beside(layers, model), parted):
        require_no_join(model)
        _require_same_layers(model, layers, ranks)
        _share_amaxes(layers, ranks)
    _join_tied(layers)
    # What is updated as one tensor: the buffers, by the largest value of each format.
    alike: dict[Any, dict[float, list[list[Tensor]]]] = {}
    for layer in layers:
        history = layer._float8_config.delayed_scaling_config
        for site in layer._float8_delayed:
            buffers: list[Any] = [layer._buffers[name] for name in site.buffers]
            how = getattr(layer._float8_plan.casts, site.value).how
            kind = history, how.power_of_2, buffers[0].device
            alike.setdefault(kind, {}).setdefault(FLOAT8_MAX[how.dtype], []).append(buffers)
    for (history, rounds, device), formats in alike.items():
        every = [buffers for of_format in formats.values() for buffers in of_format]
        amaxes, histories, scales = (list(kind) for kind in zip(*every, strict=True))
        # Made on the device: a copy from the host would wait for it.
        maxima = [
            torch.full((len(of_format),), float8_max, dtype=torch.float64, device=device)
            for float8_max, of_format in formats.items()
        ]
        new_histories, new_scales = next_history_and_scale(
            torch.stack(amaxes),
            torch.stack(histories),
            torch.stack(scales),
            torch.cat(maxima),
            scale_fn_name=history.scale_fn_name,
            round_to_power_of_2=rounds,
        )
        torch._foreach_copy_(histories, new_histories.unbind())
        torch._foreach_copy_(scales, new_scales.unbind())
        torch._foreach_zero_(amaxes)
    for layer in layers:
        layer._float8_mark_synced()
    _note_scales(layers)


def _note_scales(layers: list[Float8Layer]) -> None:
    """Tell layers that share their work with other ranks which of their scales are known."""
    shared = [x for x in layers if x._float8_holds_part or is_dtensor(x.weight)]
    unknown = [
        (x, site) for x in shared for site in x._float8_delayed if site not in x._float8_settled
    ]
    if unknown:  # asks the device, until all amaxes have settled
        scales = torch.stack([layer.get_buffer(site.scale) for layer, site in unknown])
        for (layer, site), scale in zip(unknown, scales.tolist(), strict=True):
            layer._float8_settle({site: scale})


@torch.no_grad()
def forget_float8_amax(model: nn.Module) -> None:
    """Forget all amaxes recorded since the last sync: for forwards that were no training.

    Such as those in which `torch.distributed.pipelining` finds out the shapes of a stage: they run
    with gradients, on memory that nobody has written, within the first `schedule.step()`. Call this
    after it, before the optimizer's step; until the next one scales come from the data.

    Args:
        model: the converted model, compiled or not.

    Raises:
        TypeError: `model` is no `nn.Module`.
    """
    require_module(model, "model")
    for layer in _delayed_layers(model.modules()):
        torch._foreach_zero_([layer.get_buffer(site.amax) for site in layer._float8_delayed])
        layer._float8_mark_synced()


@untraced
@torch.no_grad()
def update_float8_weights(model: nn.Module) -> None:
    """Cast the weights of all layers with `Float8Weights.HELD`, for every forward to come.

    Call it after `optimizer.step()`, or let `attach_to_optimizer` do so after each step. Before the
    first call, and in evaluation, weights are cast on the fly. A weight that changes between two
    calls is cast again where it is used, in compiled code at each use, if its version counter
    tells: it counts what loading and ops write, optimizers' too. It does not count what fused
    optimizers write, nor writes into `weight.data` or through a raw pointer: after those this must
    be called. `.to()` and a new Parameter end what is held.

    Under FSDP2 each rank holds its shard in float8 instead, cast when it is first sent. A warning
    names the layers whose weights are cast on the fly all the same, and says why: those under
    tensor parallel, where holding them gained nothing, and those with delayed scaling; of experts
    those under FSDP, and torchtitan's.

    Args:
        model: the converted model, compiled or not.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: a weight is under FSDP1, or under FSDP2 without
            `enable_fsdp_float8_all_gather=True`: there is nothing that could be held.
    """
    require_module(model, "model")
    layers: dict[Float8Layer, str] = {}
    experts: dict[Float8Experts, str] = {}
    for name, part in model.named_modules():
        if isinstance(part, Float8Layer) and part._float8_config.float8_weights is HELD:
            layers[part] = name
        if isinstance(part, Float8Experts) and part._float8_config.float8_weights is HELD:
            experts[part] = name
    if not layers and not experts:
        return
    alike: dict[Any, dict[Tensor, list[Float8Layer]]] = {}
    others: list[str] = []
    under_fsdp = _under_fsdp(model)
    for layer, name in layers.items():
        layer._float8_hold_weights()  # there is no room for both
        weight: Any = layer._parameters.get("weight")
        if layer in under_fsdp and not layer._float8_config.enable_fsdp_float8_all_gather:
            raise ValueError(
                f"layer {name or '(root)'!r}: got float8_weights=HELD for a weight that FSDP "
                f"gathers in high precision, expected one that fully_shard gathers in float8; "
                f"convert with enable_fsdp_float8_all_gather=True, or with "
                f"Float8Weights.ON_THE_FLY"
            )
        if reason := _why_on_the_fly(layer, weight, layer in under_fsdp):
            others.append(f"{name or '(root)'} ({reason})")
        elif layer not in under_fsdp and not weight.is_meta:  # else the gather holds the shard
            kind = weight.device, weight.dtype, layer._float8_plan.casts.weight
            alike.setdefault(kind, {}).setdefault(weight, []).append(layer)
    for (_, dtype, cast), readers in alike.items():
        scales: list[Tensor] | list[None] = [None] * len(readers)
        if cast.how.scaling_granularity.one_scale:
            scales = scales_of(list(readers), cast.how, dtype)
        for (weight, of_weight), scale in zip(readers.items(), scales, strict=True):
            held = hold(weight, cast._replace(scale=scale))
            for layer in of_weight:
                layer._float8_hold_weights(held)
    for part, name in experts.items():
        why = "gathered by FSDP" if part in under_fsdp else None
        others += [
            f"{name}.{each} ({reason})".lstrip(".")
            for each, reason in part._float8_hold(why).items()
        ]
    if others:
        more = ", ..." if len(others) > 3 else ""
        warnings.warn(
            f"float8: {len(others)} layer(s) cast their weight on the fly, which is no plain "
            f"Parameter with dynamic scaling: {', '.join(others[:3])}{more}",
            stacklevel=4,
        )


def _why_on_the_fly(layer: Float8Layer, weight: Any, under_fsdp: bool) -> str | None:
    """Say why a layer with `HELD` cannot hold its weight, or return None."""
    if layer._float8_holds_part:
        return "a part of one, of model parallel"
    if under_fsdp and not isinstance(local_tensor(weight), Float8GatherWeight | Float8Tensor):
        return "gathered in high precision"
    if weight is None:
        return "computed at each use"
    if CastSite.WEIGHT in layer._float8_delayed:
        return "with delayed scaling"
    # The hooks of a weight that is gathered in float8 hold it.
    if under_fsdp or weight.is_meta or can_be_held(weight):
        return None
    return "under tensor parallel" if is_dtensor(weight) else f"a {type(weight).__name__}"


def _under_fsdp(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose weights FSDP1 or FSDP2 writes past version counters."""
    fsdp1 = "summon_full_params"  # a method of its modules
    wrappers = [x for x in model.modules() if is_fsdp_module(x) or hasattr(type(x), fsdp1)]
    return {module for wrapper in wrappers for module in wrapper.modules()}


class Attachment:
    """The hooks that `attach_to_optimizer` registered."""

    def __init__(self, layers: list[Float8Module], handles: list[RemovableHandle]) -> None:
        self._layers, self._handles = layers, handles
        for layer in layers:
            layer._float8_attach()

    def remove(self) -> None:
        """End the attachment, and what is held until another one, or the next update.

        The end of the optimizer ends it, too.
        """
        for handle in self._handles:
            handle.remove()
        # Some may be in high precision by now.
        for layer in (x for x in self._layers if isinstance(x, Float8Module)):
            layer._float8_detach()
        self._handles, self._layers = [], []


def attach_to_optimizer(model: nn.Module, optimizer: Any, *, group: Any = None) -> Attachment:
    """Run at every `optimizer.step()` what the scaling of `model` needs once per step.

    With delayed scaling `sync_float8_amax_and_scale_history(model)`: right before the step, or, if
    that is given a closure, right after it: what the closure runs, once or often, is of this step.
    With dynamic scaling of weights that FSDP2 gathers in float8
    `precompute_float8_dynamic_scale_for_fsdp(model)` right after the step. Through the optimizer's
    own hooks. Weights with `Float8Weights.HELD` are cast at their next use, whatever writes them
    until then, and after each step: `update_float8_weights(model)`. With several optimizers, attach
    the model to each. Harmless for other models.

    Args:
        model: the converted model, compiled or not.
        optimizer: the `torch.optim.Optimizer` that steps its parameters, or what holds it as
            `.optimizer` or `.base_optimizer`, as the wrappers of accelerate and Lightning do.
        group: of the sync.

    Returns:
        A handle whose `remove()` ends the attachment.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a weight cannot be held, see `update_float8_weights`.
    """
    require_module(model, "model")
    inner = _unwrapped(optimizer)

    def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _has_closure(args, kwargs):
            sync_float8_amax_and_scale_history(model, group=group)

    def after_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _has_closure(args, kwargs):
            sync_float8_amax_and_scale_history(model, group=group)
        precompute_float8_dynamic_scale_for_fsdp(model)
        update_float8_weights(model)

    layers = [x for x in model.modules() if isinstance(x, Float8Module)]
    update_float8_weights(model)  # makes room for them
    for layer in layers:
        layer._float8_expire_weights()  # a checkpoint may be loaded next
    attachment = Attachment(
        layers,
        [
            inner.register_step_pre_hook(untraced(before_step)),
            inner.register_step_post_hook(untraced(after_step)),
        ],
    )
    # A training that ends in an error removes nothing.
    weakref.finalize(inner, attachment.remove).atexit = False
    return attachment


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step is given one, by its arguments: the first is the optimizer."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside; wrappers may be an `Optimizer` by name only."""
    outer: list[Any] = []
    inner = optimizer
    while inner is not None and not any(inner is each for each in outer):
        outer.append(inner)
        wrapped = getattr(inner, "optimizer", None)
        if wrapped is None and isinstance(inner, torch.optim.Optimizer):
            return inner
        inner = getattr(inner, "base_optimizer", None) if wrapped is None else wrapped
    raise TypeError(
        f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer, or an "
        f"object that holds one as `.optimizer` or `.base_optimizer`"
    )


# ---------------------------------------------------------------- layers


def _delayed_layers(modules: Iterable[nn.Module]) -> list[Float8Layer]:
    return [layer for layer in modules if isinstance(layer, Float8Layer) and layer._float8_delayed]


def _listed(layers: object) -> list[Float8Layer]:
    linears: list[Any] = list(layers) if isinstance(layers, Iterable) else []
    others = [type(x).__name__ for x in linears if not isinstance(x, Float8Layer)]
    if others or not isinstance(layers, Iterable):
        got = type(layers).__name__ + (f" with a {others[0]}" if others else "")
        raise TypeError(
            f"fp8_layers: got {got}, expected a list of Float8Linear; leave it out to sync all of "
            f"the model"
        )
    return linears


def _join_tied(layers: list[Float8Layer]) -> None:
    """Give all layers with one weight its amax: FSDP2's gather takes the scale of one of them."""
    tied: dict[int, list[Tensor]] = {}
    for layer in layers:
        if (
            layer._float8_config.enable_fsdp_float8_all_gather
            and CastSite.WEIGHT in layer._float8_delayed
        ):
            tied.setdefault(id(layer.weight), []).append(layer.get_buffer(CastSite.WEIGHT.amax))
    for amaxes in tied.values():
        if len(amaxes) > 1:
            torch._foreach_copy_(amaxes, [torch.stack(amaxes).amax()] * len(amaxes))


# ---------------------------------------------------------------- ranks


@untraced
def _require_same_layers(
    model: nn.Module, layers: list[Float8Layer], ranks: tuple[Any, ...]
) -> None:
    """Compare the layers of all ranks once, else they would reduce unlike amaxes."""
    done = (len(layers), *(group.group_name for group in ranks))
    if done in layers[0]._float8_agreed:
        return
    names = {id(module): name for name, module in model.named_modules()}
    lines = [f"{names.get(id(x))!r} {x} {x._float8_config.delayed_scaling_config}" for x in layers]
    there = mesh_device_type([layer.weight for layer in layers])
    device = layers[0].get_buffer(layers[0]._float8_delayed[0].amax).device
    device = device if there in (None, device.type) else torch.device(there)
    if (differ := unlike(lines, ranks, device)) is not None:
        raise ValueError(
            f"model: got different layers with delayed scaling on the ranks, expected the same on "
            f"all; convert alike, or say with `group=` which ranks train the same model. This rank "
            f"has {len(lines)}, of which others have not, or in another order: "
            f"{'; '.join(differ[:4]) or 'none'}"
        )
    layers[0]._float8_agree(done)


def _share_amaxes(layers: list[Float8Layer], ranks: tuple[Any, ...]) -> None:
    """Make the amaxes of this rank those of all, with one all-reduce."""
    amaxes, shards = [], []
    for layer in layers:
        for site in layer._float8_delayed:
            amaxes.append(layer.get_buffer(site.amax))
            # Where another rank ran a layer that this one did not, it used this shard, too.
            unused = site is CastSite.WEIGHT and not layer._float8_has_unsynced_amax()
            shard = shard_amax(layer.weight) if unused else None
            shards.append(amaxes[-1].new_zeros(()) if shard is None else shard)
    both = torch.stack([x.to(amaxes[0].device) for x in amaxes + shards])
    both = amax_over(ranks, mesh_device_type([layer.weight for layer in layers]))(both)
    recorded, unrecorded = both.chunk(2)
    together = torch.where(recorded != 0, torch.maximum(recorded, unrecorded), recorded)
    torch._foreach_copy_(amaxes, together.unbind())


def _beside(layers: Sequence[Float8Layer], model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of FSDP2's modules around `layers`: not all are gathered at once."""
    inside = set(layers)
    for module in model.modules():
        if is_fsdp_module(module) and not inside.isdisjoint(module.modules()):
            yield from module.parameters()
