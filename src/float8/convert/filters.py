"""Choose layers to convert: those that a filter takes, or that float8 makes no slower."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.measure import measure_linear
from float8.convert.smallest import SMALLEST, judged_as, too_small
from float8.linear import unsupported

DEFAULT_TOKENS = 8192

ModuleFilter = Callable[[nn.Module, str], bool]

SkipReason = Callable[[nn.Module, str], str | None]
"""Says why a layer is left in high precision; None: it is not."""

SKIP_REASON = "_float8_skip_reason"
"""The attribute of a layer that keeps this reason, for the report."""

WRAPPERS = {
    "module",
    "model",
    "base_model",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}
"""The names under which a model is found in what wraps it."""


def all_linears(mod: nn.Module, fqn: str) -> bool:
    """Take every layer, however slow float8 makes it: a `module_filter_fn`."""
    return True


def left_out(fqn: str) -> str | None:
    """Say why a layer of this name is left to a `module_filter_fn`, or return None.

    The head, which turns the last hidden states into logits: the loss depends on them directly, and
    it is a small part of a large model. And what PEFT trains: low-rank adapters, too small to gain,
    and copies of layers, so that no state of delayed scaling gets into its checkpoints.
    """
    parts = [part for part in fqn.split(".") if part not in WRAPPERS]
    if "lm_head" in parts or parts == ["output"]:
        return "the head: converted only if a module_filter_fn takes it"
    if any(part.startswith("lora_") or part == "modules_to_save" for part in parts):
        return "of an adapter: converted only if a module_filter_fn takes it"
    return None


def features(linear: Any) -> tuple[int, int]:
    """Return K and N of an `nn.Linear`, or of a `Conv1D`, whose weight is [K, N]."""
    has_features = hasattr(linear, "in_features")
    K, N = (linear.in_features, linear.out_features) if has_features else linear.weight.shape
    return K, N


def known_gpu(device: torch.device) -> str | None:
    """Return the GPU of `SMALLEST` that weights on `device` are for, or None.

    Weights on the CPU or the meta device are taken to be on their way to the current GPU.
    """
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device if device.type == "cuda" else None)
    return next((gpu for gpu in SMALLEST if gpu in name), None)


def choose_filter(
    module_filter_fn: ModuleFilter | None,
    config: Float8LinearConfig,
    tokens_per_step: int,
    auto_filter: bool,
    linear_classes: Collection[type[nn.Linear]],
) -> SkipReason:
    """Return a function that says why a layer stays; raises as `convert_to_float8_training`."""
    if module_filter_fn is not None and not callable(module_filter_fn):
        raise TypeError(
            f"module_filter_fn: got {type(module_filter_fn).__name__}, expected a function of a "
            f"module and its name that returns a bool, or None"
        )
    if not isinstance(tokens_per_step, int) or isinstance(tokens_per_step, bool):
        raise TypeError(f"tokens_per_step: got {tokens_per_step!r}, expected an int")
    if tokens_per_step < 1:
        raise ValueError(
            f"tokens_per_step: got {tokens_per_step}, expected at least 1: the rows of a layer's "
            f"input, tokens per forward on one device"
        )
    if auto_filter and module_filter_fn is not None:
        raise ValueError(
            "auto_filter: got True and a module_filter_fn, expected one of the two: a given "
            "filter decides alone"
        )
    if auto_filter and not torch.cuda.is_available():
        raise ValueError(
            "auto_filter: got True without a CUDA GPU, expected one to measure layers on: leave "
            "it out, or choose layers with a module_filter_fn"
        )

    for cls in linear_classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Linear)):
            raise TypeError(
                f"linear_classes: got {cls!r}, expected subclasses of nn.Linear, for example "
                f"linear_classes=[MyLinear]"
            )
    linear_classes = tuple(linear_classes)

    @functools.cache
    def measured(device: torch.device, in_features: int, out_features: int) -> str | None:
        times = measure_linear(tokens_per_step, in_features, out_features, device, config)
        speedup, where = times.bf16_ms / times.float8_ms, torch.cuda.get_device_name(device)
        slower = f"measured {speedup:.2f}x of bf16 at {tokens_per_step} tokens on {where}"
        return slower if speedup < 1 else None

    def skip(linear: Any, fqn: str) -> str | None:
        problem = unsupported(linear, config, linear_classes)  # of which no filter need know
        if problem is None and module_filter_fn is not None:
            return None if module_filter_fn(linear, fqn) else "module_filter_fn returned False"
        problem = problem or left_out(fqn)
        # Emulation is for its numerics; what cannot be converted has a better reason than speed.
        if problem is not None or config.emulate or not config.float8_gemms:
            return problem
        device, shape = linear.weight.device, features(linear)
        if auto_filter:
            if device.type != "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
            return measured(device, *shape)
        gpu = known_gpu(device)
        return too_small(gpu, judged_as(config), tokens_per_step, *shape) if gpu else None

    return skip
