"""Which layers of a model to convert, told without changing it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from float8.config import Float8LinearConfig
from float8.convert import ModuleFilter
from float8.convert.filters import too_small
from float8.convert.measure import measure_linear


class Verdict(NamedTuple):
    """What is known of layers of one shape."""

    slower: str | None
    """What says that float8 is slower; None: it is not."""
    bf16_ms: float | None = None
    """Forward and backward, if measured."""
    float8_ms: float | None = None


Judge = Callable[[int, int], Verdict]
"""`judge(in_features, out_features)`."""


def by_size(tokens: int, gpu: str) -> Judge:
    """A judge that runs nothing: by the limits of a GPU that `float8.convert.filters` knows."""

    def judge(in_features: int, out_features: int) -> Verdict:
        return Verdict(too_small(gpu, tokens, in_features, out_features))

    return judge


def by_measuring(tokens: int, config: Float8LinearConfig, device: torch.device) -> Judge:
    """A judge that runs a layer of each shape once on `device`."""

    @functools.cache
    def judge(in_features: int, out_features: int) -> Verdict:
        times = measure_linear(tokens, in_features, out_features, device, config)
        return Verdict("slower" if times.float8_ms > times.bf16_ms else None, *times)

    return judge


class LayerPlan(NamedTuple):
    """All linear layers of one shape that share a fate."""

    in_features: int
    out_features: int
    names: tuple[str, ...]
    """Their names in the model."""
    verdict: Verdict
    """What is known of one of them."""
    convert: bool


def plan_conversion(
    model: nn.Module, judge: Judge, module_filter_fn: ModuleFilter
) -> tuple[LayerPlan, ...]:
    """Judge every `nn.Linear` of a model, on the meta device, too, without changing it.

    Args:
        model: Any model.
        judge: Called once for each group.
        module_filter_fn: Layers for which it returns False are left in high precision.

    Returns:
        The layers grouped by shape, in the order of the model.
    """
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for fqn, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            wanted = module_filter_fn(linear, fqn)
            key = (linear.in_features, linear.out_features, wanted)
            groups.setdefault(key, []).append(fqn or "(root)")
    plan = []
    for (in_features, out_features, wanted), names in groups.items():
        verdict = judge(in_features, out_features)
        convert = wanted and verdict.slower is None
        plan.append(LayerPlan(in_features, out_features, tuple(names), verdict, convert))
    return tuple(plan)
