"""Which layers of a model to convert, told without changing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.filters import too_small
from float8.convert.measure import measure_linear

CONVERT = "convert"


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
    return lambda K, N: Verdict(too_small(gpu, tokens, K, N))


def by_measuring(tokens: int, config: Float8LinearConfig, device: torch.device) -> Judge:
    """A judge that runs a layer of each shape on `device`."""

    def judge(K: int, N: int) -> Verdict:
        times = measure_linear(tokens, K, N, device, config)
        return Verdict("slower" if times.float8_ms > times.bf16_ms else None, *times)

    return judge


def plan_conversion(model: nn.Module, tokens: int, judge: Judge, head: str) -> list[dict[str, Any]]:
    """Judge every `nn.Linear` of a model, on the meta device, too, without changing it.

    Args:
        model: Any model.
        tokens: Per forward; a column of the rows.
        judge: Called once for each row.
        head: Name of the output head, which is left in high precision.

    Returns:
        A row per shape, in the order of the model: how many, which, their times, their fate.
    """
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            key = (linear.in_features, linear.out_features, name == head)
            groups.setdefault(key, []).append(name)
    rows = []
    for (K, N, is_head), names in groups.items():
        slower, bf16_ms, float8_ms = judge(K, N)
        reason = slower or ("output head" if is_head else None)
        layers = " ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        row = {"M": tokens, "K": K, "N": N, "count": len(names), "layers": layers}
        row |= {"bf16_ms": bf16_ms, "float8_ms": float8_ms}
        row["speedup"] = bf16_ms / float8_ms if bf16_ms and float8_ms else None
        row["fate"] = f"leave: {reason.partition(':')[0]}" if reason else CONVERT
        rows.append(row)
    return rows


def planned_speedup(rows: list[dict[str, Any]]) -> float:
    """Of all linear layers together, as planned; of measured rows."""
    bf16 = sum(row["count"] * row["bf16_ms"] for row in rows)
    planned = sum(
        row["count"] * row["float8_ms" if row["fate"] == CONVERT else "bf16_ms"] for row in rows
    )
    return float(bf16 / planned)
