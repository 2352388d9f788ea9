"""Optimizer hooks that sync scales and update float8 weights of a model once per step."""

import functools
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn, optim
from torch.utils.hooks import RemovableHandle

from float8.config import require_module
from float8.convert.conversion import FEATURES, Feature
from float8.kernels.runtime.private import untraced
from float8.linear import Float8Module


@dataclass(eq=False)
class Attachment:
    """Handle to the hooks that `attach_to_optimizer` registered, and to the float8 modules."""

    mods: list[Float8Module]
    handles: list[RemovableHandle]

    def remove(self) -> None:
        """Remove hooks, free `Float8Weights.HELD` casts; also runs when the optimizer is freed."""
        for handle in self.handles:
            handle.remove()
        for mod in self.mods:
            if isinstance(mod, Float8Module):  # not converted back in the meantime
                mod._float8_detach()
        self.mods.clear()


def attach_to_optimizer(model: nn.Module, optimizer: Any, *, group: Any = None) -> Attachment:
    """Register hooks that update scales and float8 weights of `model` at every `optimizer.step()`.

    `sync_float8_amax_and_scale_history(model)` updates delayed scaling right before the step, or
    with a closure right after it, so that all forwards in the closure count. After the step
    `update_float8_weights(model)` and `precompute_float8_dynamic_scale_for_fsdp(model)` cast
    weights. The former also runs now, to see if memory suffices, but until the next step eager code
    casts again at the first use, compiled code at each. With several optimizers, attach to each.

    Args:
        model: the converted model, compiled or not.
        optimizer: the `torch.optim.Optimizer` that steps its parameters, or a wrapper that has it
            as `.optimizer` or `.base_optimizer`, as those of accelerate and Lightning.
        group: the `ProcessGroup` over which amaxes of delayed scaling are reduced. None: all dims
            of the weights' mesh or, if no weight is a DTensor, of other Parameters'; or all ranks.

    Returns:
        A handle whose `remove()` removes the hooks.

    Raises:
        TypeError: `model` or `optimizer` has the wrong type; a step raises one for `group`.
        ValueError: FSDP gathers a linear layer with `Float8Weights.HELD` in high precision.
    """
    require_module(model, "model")
    inner = _unwrapped(optimizer)
    before_step: Any = [x.before_step for x in FEATURES if _overrides(x, Feature.before_step)]
    after_step: Any = [x.after_step for x in FEATURES if _overrides(x, Feature.after_step)]

    def hook(_optimizer: Any, args: Any, kwargs: dict[str, Any], *, is_after_step: bool) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0]: optimizer
        if is_after_step == (closure is not None):  # once per step, after the forwards of a closure
            for run in before_step:
                run(model, group)
        if is_after_step:
            for run in after_step:
                run(model)

    for feature in FEATURES:
        feature.attach(model)
    mods = [x for x in model.modules() if isinstance(x, Float8Module)]
    pre_hook = untraced(functools.partial(hook, is_after_step=False))
    post_hook = untraced(functools.partial(hook, is_after_step=True))
    handles = [inner.register_step_pre_hook(pre_hook), inner.register_step_post_hook(post_hook)]
    attachment = Attachment(mods, handles)
    for mod in mods:
        mod._float8_attach()  # also has the next use cast held weights again
    weakref.finalize(inner, attachment.remove).atexit = False  # not at interpreter exit
    return attachment


def _overrides(feature: Feature, method: Any) -> bool:
    return getattr(type(feature), method.__name__) is not method


def _unwrapped(optimizer: Any) -> optim.Optimizer:
    """Return the `torch.optim.Optimizer` that `optimizer` is or wraps; else raise `TypeError`."""
    inner = optimizer
    for _ in range(9):  # not `while True`: a wrapper may be its own `.optimizer`
        wrapped = getattr(inner, "optimizer", None)
        if wrapped is None and isinstance(inner, optim.Optimizer):  # a wrapper may subclass it, too
            return inner
        inner = getattr(inner, "base_optimizer", None) if wrapped is None else wrapped
    expected = "a torch.optim.Optimizer, or what holds one as `.optimizer` or `.base_optimizer`"
    raise TypeError(f"optimizer: got {type(optimizer).__name__}, expected {expected}")
