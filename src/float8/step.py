"""Optimizer hooks that sync scales and update float8 weights of a model once per step."""

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from float8.config import require_module
from float8.convert.conversion import FEATURES, Feature
from float8.kernels.runtime.private import untraced
from float8.linear import Float8Module


@dataclass(eq=False)
class Attachment:
    """The hooks that `attach_to_optimizer` registered, and the float8 modules of its model."""

    mods: list[Float8Module]
    handles: list[RemovableHandle]

    def remove(self) -> None:
        """Remove the hooks and free held weights; also called when the optimizer is destroyed."""
        for handle in self.handles:
            handle.remove()
        for mod in self.mods:
            if isinstance(mod, Float8Module):  # not converted back in the meantime
                mod._float8_detach()
        self.mods.clear()


def attach_to_optimizer(model: nn.Module, optimizer: Any, *, group: Any = None) -> Attachment:
    """Sync scales and update float8 weights of `model` at every `optimizer.step()`.

    Registers hooks on the optimizer. `sync_float8_amax_and_scale_history(model)` runs right before
    the step, or with a closure right after it, so that all forwards in the closure count. After the
    step `update_float8_weights(model)` and `precompute_float8_dynamic_scale_for_fsdp(model)` run.
    This call casts held weights; the first use casts again, as a checkpoint may be loaded before.
    With several optimizers, attach the model to each. Models that need no hooks are unaffected.

    Args:
        model: the converted model, compiled or not.
        optimizer: the `torch.optim.Optimizer` that steps its parameters, or a wrapper that has it
            as `.optimizer` or `.base_optimizer`, as those of accelerate and Lightning.
        group: the process group for `sync_float8_amax_and_scale_history`, or None.

    Returns:
        A handle whose `remove()` removes the hooks.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: FSDP gathers a `HELD` weight in high precision; see `update_float8_weights`.
    """
    require_module(model, "model")
    inner = _unwrapped(optimizer)
    before_step: Any = [x.before_step for x in FEATURES if _overrides(x, Feature.before_step)]
    after_step: Any = [x.after_step for x in FEATURES if _overrides(x, Feature.after_step)]

    def hook(is_after: bool, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0]: optimizer
        if is_after == (closure is not None):  # before the step, or after it with a closure
            for run in before_step:
                run(model, group)
        for run in after_step if is_after else ():
            run(model)

    for feature in FEATURES:
        feature.attach(model)
    mods = [x for x in model.modules() if isinstance(x, Float8Module)]
    before, after = (untraced(functools.partial(hook, is_after)) for is_after in (False, True))
    handles = [inner.register_step_pre_hook(before), inner.register_step_post_hook(after)]
    attachment = Attachment(mods, handles)
    for mod in mods:
        mod._float8_attach()  # also marks held data as stale: a checkpoint may come next
    # Nothing updates held weights once the optimizer is collected: free them, but not at exit.
    weakref.finalize(inner, attachment.remove).atexit = False
    return attachment


def _overrides(feature: Feature, method: Any) -> bool:
    """Return whether the class of `feature` overrides a method of `Feature`."""
    return getattr(type(feature), method.__name__) is not method


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer in `optimizer`, itself or a wrapper; raise `TypeError` if none."""
    inner = optimizer
    for _ in range(9):  # not `while True`: a wrapper may be its own `.optimizer`
        wrapped = getattr(inner, "optimizer", None)
        if wrapped is None and isinstance(inner, torch.optim.Optimizer):  # wrappers may be, too
            return inner
        inner = getattr(inner, "base_optimizer", None) if wrapped is None else wrapped
    expected = "a torch.optim.Optimizer, or what holds one as `.optimizer` or `.base_optimizer`"
    raise TypeError(f"optimizer: got {type(optimizer).__name__}, expected {expected}")
