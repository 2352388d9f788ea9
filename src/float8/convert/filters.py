"""Which layers to convert: those that a filter takes, or those that float8 makes no slower."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from float8.config import Float8LinearConfig
from float8.linear import unsupported
from float8.plan import Judge, current_gpu, estimator, known_ceilings, measurer

ModuleFilter = Callable[[nn.Module, str], bool]

SkipReason = Callable[[nn.Linear, str], str | None]
"""Why a layer is left in high precision; None: it is not."""


def all_linears(mod: nn.Module, fqn: str) -> bool:
    """The `module_filter_fn` that takes every layer, however slow float8 makes it."""
    return True


def choose_filter(
    module_filter_fn: ModuleFilter | None,
    config: Float8LinearConfig,
    tokens_per_step: int,
    auto_filter: bool,
) -> SkipReason:
    """The filter that the arguments of `convert_to_float8_training` ask for.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the arguments cannot be honoured, alone or together.
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
    if module_filter_fn is not None:
        if auto_filter:
            raise ValueError(
                "auto_filter: got True and a module_filter_fn, expected one of the two: a given "
                "filter decides alone"
            )
        return _by_filter(module_filter_fn)
    if auto_filter:
        here = current_gpu()
        return _by_speed(config, lambda device: _measured(config, tokens_per_step, device, here))
    return _by_speed(config, lambda device: _estimated(config, tokens_per_step, device))


def _by_filter(module_filter_fn: ModuleFilter) -> SkipReason:
    def skip(linear: nn.Linear, fqn: str) -> str | None:
        return None if module_filter_fn(linear, fqn) else "module_filter_fn returned False"

    return skip


def _by_speed(
    config: Float8LinearConfig, judge_for: Callable[[torch.device], Judge | None]
) -> SkipReason:
    judge_for = functools.cache(judge_for)

    def skip(linear: nn.Linear, fqn: str) -> str | None:
        # Emulation is for its numerics; what cannot be converted has a better reason than speed.
        if config.emulate or unsupported(linear, config) is not None:
            return None
        judge = judge_for(linear.weight.device)
        if judge is None:
            return None
        verdict = judge(linear.in_features, linear.out_features)
        return None if verdict.worthwhile else str(verdict)

    return skip


def _estimated(config: Float8LinearConfig, tokens: int, device: torch.device) -> Judge | None:
    known = known_ceilings(device)
    return None if known is None else estimator(tokens, config, *known)


def _measured(
    config: Float8LinearConfig, tokens: int, device: torch.device, here: torch.device
) -> Judge:
    return measurer(tokens, config, device if device.type == "cuda" else here)
