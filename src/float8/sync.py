"""What delayed scaling does once per optimizer step."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from float8.convert.arguments import require_module
from float8.linear import Float8Linear, StackedState, is_current, stack_state
from float8.scaling import update_history_and_scale

_stacks: "weakref.WeakKeyDictionary[nn.Module, list[StackedState]]" = weakref.WeakKeyDictionary()


@torch.inference_mode(False)  # what it creates is written again outside of inference mode
@torch.no_grad()
def sync_float8_amax_and_scale_history(
    model: nn.Module, fp8_layers: Sequence[Float8Linear] | None = None
) -> None:
    """Turn the amaxes of this step into the scales of the next, for all layers at once.

    Call it once per optimizer step, after the last `backward()` and before the next forward, or
    let `attach_to_optimizer` do so. Amaxes count since the last call, so gradient accumulation
    needs nothing special, and a call where nothing was recorded changes nothing. Does nothing for
    a model without delayed scaling.

    Args:
        model: the converted model, compiled or not.
        fp8_layers: the layers to sync, to save the walk over the model; None: all of `model`.

    Raises:
        TypeError: an argument has the wrong type.
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
        stacks = [stack_state(group) for group in groups.values()]
        _stacks[model] = stacks

    for stacked, (first, *_) in zip(stacks, groups.values(), strict=True):
        update_history_and_scale(
            torch.stack(stacked.amaxes),
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
    """Run `sync_float8_amax_and_scale_history(model)` at every `optimizer.step()`.

    The sync runs right before the step, through the optimizer's own hooks. With several
    optimizers, attach the model to each. Harmless for a model without delayed scaling.

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

    def before_step(*_: Any) -> None:
        sync_float8_amax_and_scale_history(model)

    return optimizer.register_step_pre_hook(before_step)


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
