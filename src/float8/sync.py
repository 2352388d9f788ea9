"""What scaling does once per optimizer step, on one device or on many."""

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from float8.arguments import require_module
from float8.config import CastSite
from float8.linear import Float8Linear, StackedState, amax_name, is_current, stack_state
from float8.parallel import (
    all_reduce_amax,
    has_precomputable_scales,
    mesh_device_type,
    precompute_float8_dynamic_scale_for_fsdp,
    shard_amax,
    sync_groups,
)
from float8.linear import Float8Linear, StackedState, amax_name, is_current, stack_state
from float8.quantize.history import update_history_and_scale

_stacks: "weakref.WeakKeyDictionary[nn.Module, list[StackedState]]" = weakref.WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.inference_mode(False)  # what it creates is written again outside of inference mode
@torch.no_grad()
def sync_float8_amax_and_scale_history(
    model: nn.Module,
    fp8_layers: Sequence[Float8Linear] | None = None,
    *,
    group: Any = None,
) -> None:
    """Turn the amaxes of this step into the scales of the next, for all layers at once.

    Call it once per optimizer step, after the last `backward()` and before the next forward, or
    let `attach_to_optimizer` do so. Amaxes count since the last call, so gradient accumulation
    needs nothing special, and a call where nothing was recorded changes nothing. Does nothing for
    a model without delayed scaling.

    Once `torch.distributed` is initialised, amaxes are those of all ranks, through one all-reduce
    for everything: each rank must call it.

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
            their mesh.
    """
    require_module(model, "model")
    if fp8_layers is None:
        linears = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    else:
        linears = _float8_linears(fp8_layers)
    layers = [layer for layer in linears if layer.config.delayed_sites]
    if not layers:
        return
    groups = _by_setting(layers)
    stacks = _stacks.get(model, [])
    if len(stacks) != len(groups) or not all(map(is_current, stacks, groups.values())):
        stacks = [stack_state(alike) for alike in groups.values()]
        _stacks[model] = stacks

    _join_tied(layers)
    amaxes = [torch.stack(stacked.amaxes) for stacked in stacks]
    if ranks := sync_groups([layer.weight for layer in layers], group, _beside(layers, model)):
        amaxes = _over_ranks(amaxes, list(groups.values()), ranks)
    for stacked, amax, (first, *_) in zip(stacks, amaxes, groups.values(), strict=True):
        update_history_and_scale(
            amax,
            stacked.history,
            stacked.scale,
            stacked.float8_max,
            scale_fn_name=first.config.delayed_scaling_config.scale_fn_name,
            round_to_power_of_2=first.config.round_scales_to_power_of_2,
        )
        torch._foreach_zero_(stacked.amaxes)
    for layer in layers:
        layer.mark_synced()


def attach_to_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Run at every `optimizer.step()` what the scaling of `model` needs once per step.

    With delayed scaling `sync_float8_amax_and_scale_history(model)` right before
    the step; with dynamic scaling of weights that FSDP2 gathers in float8
    `precompute_float8_dynamic_scale_for_fsdp(model)` right after it. Through the optimizer's own
    hooks. With several optimizers, attach the model to each. Harmless for other models.

    Args:
        model: the converted model, compiled or not.
        optimizer: the optimizer that steps its parameters.

    Returns:
        A handle whose `remove()` ends the attachment.

    Raises:
        TypeError: an argument has the wrong type.
    """
    require_module(model, "model")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(*_: Any) -> None:
        sync_float8_amax_and_scale_history(model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_step(*_: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(model)

    before = optimizer.register_step_pre_hook(before_step)
    if not has_precomputable_scales(model):
        return before
    return _Both(before, optimizer.register_step_post_hook(after_step))


class _Both(RemovableHandle):
    """Two handles as one."""

    def __init__(self, first: RemovableHandle, second: RemovableHandle) -> None:
        self._handles = first, second
        super().__init__(OrderedDict())

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _join_tied(layers: Sequence[Float8Linear]) -> None:
    """Give all layers with one weight its amax: FSDP2's gather takes the scale of one of them."""
    tied: dict[int, list[Tensor]] = {}
    for layer in layers:
        if layer.config.enable_fsdp_float8_all_gather and layer.plan.weight.delayed:
            amax = layer.get_buffer(amax_name(CastSite.WEIGHT))
            tied.setdefault(id(layer.weight), []).append(amax)
    for amaxes in tied.values():
        if len(amaxes) > 1:
            largest = torch.stack(amaxes).amax()
            for amax in amaxes:
                amax.copy_(largest)


def _over_ranks(
    amaxes: list[Tensor], groups: list[list[Float8Linear]], ranks: tuple[Any, ...]
) -> list[Tensor]:
    """`amaxes`, one per group of layers, over all ranks, with one all-reduce per device."""
    layers = [layer for alike in groups for layer in alike]
    device_type = mesh_device_type([layer.weight for layer in layers])
    gathers = any(layer.config.enable_fsdp_float8_all_gather for layer in layers)
    reduced: list[Tensor | None] = [None] * len(amaxes)
    for device in {amax.device: None for amax in amaxes}:
        here = [i for i, amax in enumerate(amaxes) if amax.device == device]
        together = torch.cat([amaxes[i] for i in here])
        if gathers:
            unused = torch.cat([_of_unused_shards(groups[i], amaxes[i]) for i in here])
            both = torch.stack([together, unused])
            all_reduce_amax(both, ranks, device_type)
            together, unused = both.unbind()
            together = torch.where(together != 0, torch.maximum(together, unused), together)
        else:
            all_reduce_amax(together, ranks, device_type)
        parts = torch.split(together, [len(amaxes[i]) for i in here])
        for i, part in zip(here, parts, strict=True):
            reduced[i] = part
    return [amax for amax in reduced if amax is not None]


def _of_unused_shards(layers: list[Float8Linear], amaxes: Tensor) -> Tensor:
    """[S] float32: the amaxes of shards in layers that this rank did not run; 0 for all others.

    They count where another rank did: it used these shards, of which it does not know the amaxes.
    """
    found, row = torch.zeros_like(amaxes), 0
    for layer in layers:
        for site in layer.config.delayed_sites:
            if site is CastSite.WEIGHT and not layer.has_unsynced_amax():
                amax = shard_amax(layer.weight)
                if amax is not None:
                    found[row] = amax
            row += 1
    return found


def _beside(layers: Sequence[Float8Linear], model: nn.Module) -> Iterator[Tensor]:
    """All parameters of FSDP2's modules with `layers` in them: not all are gathered at once."""
    inside = set(layers)
    for module in model.modules():
        if hasattr(type(module), "reshard") and not inside.isdisjoint(module.modules()):
            yield from module.parameters()


def _float8_linears(layers: object) -> list[Float8Linear]:
    if not isinstance(layers, Iterable):
        raise TypeError(
            f"fp8_layers: got {type(layers).__name__}, expected a list of Float8Linear, or None "
            f"for all of the model"
        )
    linears = list(layers)
    for layer in linears:
        if not isinstance(layer, Float8Linear):
            raise TypeError(
                f"fp8_layers: got a {type(layer).__name__} in it, expected Float8Linear only; "
                f"leave fp8_layers out to sync all of the model"
            )
    return linears


def _by_setting(layers: Sequence[Float8Linear]) -> dict[Any, list[Float8Linear]]:
    """Group layers whose state can be stacked and updated as one."""
    groups: dict[Any, list[Float8Linear]] = {}
    for layer in layers:
        config = layer.config
        device = layer.weight.device
        key = (config.delayed_scaling_config, config.round_scales_to_power_of_2, device)
        groups.setdefault(key, []).append(layer)
    return groups
