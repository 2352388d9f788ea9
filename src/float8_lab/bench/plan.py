"""Which layers of a model to convert, told without changing it."""

from collections.abc import Callable
from typing import Any

from torch import nn

from float8.convert.measure import LinearTimes

CONVERT = "convert"


def plan_conversion(
    model: nn.Module,
    tokens: int,
    judge: Callable[[int, int], str | LinearTimes | None],
    head: str,
) -> list[dict[str, Any]]:
    """Judge every `nn.Linear` of a model, on the meta device, too, without changing it.

    Args:
        model: Any model.
        tokens: Per forward; a column of the rows.
        judge: `judge(in_features, out_features)` gives what was measured, or what says that float8
            is slower, or None if nothing does. Called once for each row.
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
        layers = " ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        row: dict[str, Any] = {"M": tokens, "K": K, "N": N, "count": len(names), "layers": layers}
        found = judge(K, N)
        if isinstance(found, LinearTimes):
            row |= {**found._asdict(), "speedup": found.bf16_ms / found.float8_ms}
            found = "slower" if found.float8_ms > found.bf16_ms else None
        reason = found or ("output head" if is_head else None)
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
