"""Which layers of a model to convert, told without changing it."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.filters import (
    DEFAULT_TOKENS,
    Judge,
    ModuleFilter,
    Verdict,
    by_measuring,
    current_gpu,
)


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
    model: nn.Module,
    *,
    tokens_per_step: int = DEFAULT_TOKENS,
    config: Float8LinearConfig | None = None,
    module_filter_fn: ModuleFilter | None = None,
    judge: Judge | None = None,
) -> tuple[LayerPlan, ...]:
    """Judge every `nn.Linear` of a model without changing it.

    Args:
        model: Any model; on the meta device, too.
        tokens_per_step: Rows of a layer's input: tokens per forward on one device.
        config: How layers would run; None: `Float8LinearConfig()`.
        module_filter_fn: Layers for which it returns False are left in high precision.
        judge: What decides about the others, from `float8.convert.by_size` or `by_measuring`;
            None: measured on the current GPU.

    Returns:
        The layers grouped by shape, in the order of the model.

    Raises:
        ValueError: There is neither a `judge` nor a GPU.
    """
    if judge is None:
        judge = by_measuring(tokens_per_step, config or Float8LinearConfig(), current_gpu())
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for fqn, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            wanted = module_filter_fn is None or module_filter_fn(linear, fqn)
            key = (linear.in_features, linear.out_features, wanted)
            groups.setdefault(key, []).append(fqn or "(root)")
    plan = []
    for (in_features, out_features, wanted), names in groups.items():
        verdict = judge(in_features, out_features)
        convert = wanted and verdict.slower is None
        plan.append(LayerPlan(in_features, out_features, tuple(names), verdict, convert))
    return tuple(plan)
