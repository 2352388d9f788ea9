"""Choose layers to convert: those that a filter takes, or that float8 makes no slower."""

import functools
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.measure import measure_linear
from float8.convert.smallest import (
    NARROW,
    SMALLEST,
    judged_as,
    too_narrow,
    too_small,
    waits_for_cpu,
)
from float8.linear import unsupported

DEFAULT_TOKENS = 8192

ModuleFilter = Callable[[nn.Module, str], bool]

LEFT_ALONE = "_float8_left_alone"
"""The attribute in which a layer that stays as it is keeps the reason, for the report."""

_NOT_TAKEN = "module_filter_fn returned"

CHOSEN_FOR = "_float8_chosen_for"
"""The attribute in which what was converted keeps what `chosen_for` says, for the report."""

ROUTER = 16
"""Layers with fewer features out are left to a `module_filter_fn`."""

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


def like_a_router(out_features: int) -> str | None:
    """Say that a layer is left to a `module_filter_fn` for its few outputs, or return None.

    Each of them decides much, and a float8 GEMM computes 16 at least.
    """
    if out_features >= ROUTER:
        return None
    few = f"N={out_features} is less than {ROUTER}, as a router's"
    return f"{few}: converted only if a module_filter_fn takes it"


def features(linear: Any) -> tuple[int, int]:
    """Return K and N of a linear layer."""
    return linear.in_features, linear.out_features


def gpu_for(device: torch.device) -> str | None:
    """Return the GPU that weights on `device` are for; None: there is none.

    Its name in `SMALLEST`, or that of CUDA if its limits are not known. Weights on the CPU or the
    meta device are taken to be on their way to the current GPU.
    """
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device if device.type == "cuda" else None)
    return str(short_name(name))


def short_name(gpu: Any) -> Any:
    """Return the name in `SMALLEST` of a GPU, however long its own is; without one, that."""
    found = isinstance(gpu, str) and re.search(rf"({'|'.join(SMALLEST)})(?!\w)", gpu.upper())
    return found[1] if found else gpu


def left_by(module_filter_fn: ModuleFilter, module: nn.Module, fqn: str) -> str | None:
    """Say why a filter leaves a module, or return None: it takes it."""
    taken = module_filter_fn(module, fqn)
    return None if taken else f"{_NOT_TAKEN} {taken!r}"


def keep_reasons(reasons: dict[nn.Module, str | None]) -> None:
    """Put back what an earlier conversion said of layers that the filter of this one left."""
    for part, reason in reasons.items():
        before = part.__dict__.get(LEFT_ALONE) or _NOT_TAKEN
        if (reason or "").startswith(_NOT_TAKEN) and not before.startswith(_NOT_TAKEN):
            reasons[part] = before


def chosen_for(
    device: torch.device,
    config: Float8LinearConfig,
    tokens_per_step: int,
    auto_filter: bool,
    gpu: str | None,
    cuda_graphs: bool,
) -> str | None:
    """Say for which GPU layers on `device` are chosen without a `module_filter_fn`, and by what.

    None: their speed is not asked for.
    """
    if not config.float8_gemms or (config.emulate and gpu is None):
        return None
    at = f"at {tokens_per_step} tokens per forward"
    at += ", as CUDA graphs" if cuda_graphs else ""
    where = gpu or gpu_for(device)
    if auto_filter:
        return f"chosen on the GPU here by measuring the GPU time of each shape {at}"
    if where in SMALLEST:
        how = f'gpu="{gpu}"' if gpu else "the GPU here"
        return f"chosen for {where} ({how}): limits of {judged_as(config)} {at}"
    if where:
        others = "auto_filter=True measures the others"
        return f"no limits known for {where}: layers narrower than {NARROW} stay; {others}"
    names = " or ".join(f'gpu="{name}"' for name in SMALLEST)
    return f"no GPU here: layers of any size are converted; {names} leaves those too small for it"


def choose_filter(
    module_filter_fn: ModuleFilter | None,
    config: Float8LinearConfig,
    tokens_per_step: int,
    auto_filter: bool,
    linear_classes: Collection[type[nn.Linear]],
    gpu: str | None = None,
    cuda_graphs: bool = False,
) -> Callable[[nn.Module, str], str | None]:
    """Return a function of a layer and its name that says why it stays; None: it does not.

    Raises as `convert_to_float8_training`.
    """
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
    for name, flag in (("auto_filter", auto_filter), ("cuda_graphs", cuda_graphs)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")
    if auto_filter and module_filter_fn is not None:
        raise ValueError(
            "auto_filter: got True and a module_filter_fn, expected one of the two: a given "
            "filter decides alone"
        )
    if cuda_graphs and module_filter_fn is not None:
        raise ValueError(
            "cuda_graphs: got True and a module_filter_fn, expected one of the two: a given filter "
            "decides alone"
        )
    if auto_filter and not torch.cuda.is_available():
        raise ValueError(
            "auto_filter: got True without a CUDA GPU, expected one to measure layers on: leave "
            "it out, or choose layers with a module_filter_fn"
        )
    if gpu is not None:
        if gpu not in tuple(SMALLEST):
            known = ", ".join(map(repr, SMALLEST))
            raise ValueError(
                f"gpu: got {gpu!r}, expected one whose limits are known, of {known}; leave it out "
                f"to convert for the GPU here"
            )
        if auto_filter or module_filter_fn is not None:
            other = "auto_filter=True" if auto_filter else "a module_filter_fn"
            raise ValueError(
                f"gpu: got {gpu!r} and {other}, expected one of the two: gpu= chooses layers by "
                f"the limits of that GPU"
            )
    classes = tuple(linear_classes) if isinstance(linear_classes, Iterable) else (None,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Linear)):
            raise TypeError(
                f"linear_classes: got {linear_classes!r}, expected a list of subclasses of "
                f"nn.Linear, for example linear_classes=[MyLinear]"
            )

    @functools.cache
    def measured(device: torch.device, in_features: int, out_features: int) -> str | None:
        times = measure_linear(tokens_per_step, in_features, out_features, device, config)
        speedup, where = times.bf16_ms / times.float8_ms, torch.cuda.get_device_name(device)
        if speedup < 1:
            return f"measured {speedup:.2f}x of bf16 at {tokens_per_step} tokens on {where}"
        return None if cuda_graphs else waits_for_cpu(times.bf16_ms)

    def skip(linear: Any, fqn: str) -> str | None:
        problem = unsupported(linear, config, classes)  # of which no filter need know
        if problem is None and module_filter_fn is not None:
            return left_by(module_filter_fn, linear, fqn)
        # What cannot be converted has a better reason than speed.
        if problem is not None or not config.float8_gemms:
            return problem
        device, shape = linear.weight.device, features(linear)
        problem = left_out(fqn) or like_a_router(shape[1])
        # Emulation is for its numerics, unless it is those of a GPU.
        if problem is not None or (config.emulate and gpu is None):
            return problem
        if auto_filter:
            if device.type != "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
            return measured(device, *shape)
        where = gpu or gpu_for(device)
        if where in SMALLEST:
            return too_small(where, judged_as(config), tokens_per_step, *shape, cuda_graphs)
        return too_narrow(where, *shape) if where else None

    return skip
