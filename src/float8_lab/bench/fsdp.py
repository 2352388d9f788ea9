"""`float8 bench fsdp`: training steps of Llama blocks that FSDP2 shards over all GPUs of a host.

Every variant is built, checked, timed and torn down before the next one, since a host may not hold
two of them. Clocks that drop while GPUs heat up would favour the first ones: so the whole list
runs twice, and medians are over the steps of both times.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from float8_lab.bench.block import StackSize
from float8_lab.bench.fsdp_step import Reference, ShardedStep, build_and_free
from float8_lab.bench.fsdp_variants import BF16, Plan, ShardedVariant, sharded_variants
from float8_lab.bench.ranks import Report, run_ranks
from float8_lab.bench.variants import HIGH_PRECISION, many_compilations

Row = dict[str, Any]

PASSES = 2
"""How often the list of variants is run."""


@dataclass
class _Record:
    """What is known of a variant, over both passes."""

    row: Row
    times: list[float] = field(default_factory=list)


def bench_fsdp(plan: Plan, ranks: int, device_type: str) -> Iterator[list[Row]]:
    """Time every variant on `ranks` new processes; an empty list after each, then all rows.

    Raises:
        WrongResultError: A gradient is wrong; says which.
        RankFailedError: A rank failed; all have ended.
    """
    return run_ranks(_measure_all, (plan,), ranks, device_type)


def communication_settings() -> dict[str, Any]:
    """What decides how fast GPUs talk: versions, and NCCL's own switches."""
    switches = ("NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_CUMEM_ENABLE")
    found: dict[str, Any] = {name: os.environ[name] for name in switches if name in os.environ}
    if torch.cuda.is_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, version))
    return found


def _measure_all(report: Report, device: torch.device, plan: Plan) -> None:
    """What each rank does; rank 0 reports."""
    variants = sharded_variants(plan)
    records: dict[str, _Record] = {}
    first = dist.get_rank() == 0
    references: dict[str, Reference] = {}  # last ones by role: at most two are kept
    with many_compilations():
        for turn in range(PASSES):
            for variant in variants:
                with build_and_free(variant, plan.size, device) as step:
                    if turn == 0:
                        records[variant.name] = _Record(_first_look(step, variant, references))
                    else:
                        step.first_gradients()
                        step.optimize()
                    record = records[variant.name]
                    record.times += step.times(plan.rounds)
                    if turn == 0:
                        record.row["peak_gib"] = step.peak_gib
                        record.row["exposed_ms"] = step.exposed_ms()
                if first:
                    report([])
    if first:
        report(_rows(variants, records, plan.size))


def _first_look(
    step: ShardedStep, variant: ShardedVariant, references: dict[str, Reference]
) -> Row:
    """Check the gradients of the first step, count the bytes of the second."""
    gradients = step.first_gradients()
    row: Row = {
        "recipe": variant.variant.recipe,
        "mode": variant.variant.mode,
        "gather": variant.gather,
        "sqnr_db": float("inf"),
        "same_bits": None,
    }
    if variant.variant.is_reference:
        references[HIGH_PRECISION] = Reference(gradients)
    else:
        row["sqnr_db"] = references[HIGH_PRECISION].check(variant.name, gradients)
    twin = references.get(variant.variant.name)
    if variant.variant.ours and variant.gather == BF16:
        references[variant.variant.name] = Reference(gradients)
    elif twin is not None:
        row["same_bits"] = twin.same_bits(gradients)
        del references[variant.variant.name]
    del gradients
    step.optimize()
    traffic = step.traffic()
    row["gathered_mb"] = traffic.gathered / 1e6
    row["reduce_scattered_mb"] = traffic.reduce_scattered / 1e6
    row["all_reduced_kb"] = traffic.all_reduced / 1e3
    row["traffic"] = asdict(traffic)  # in bytes
    return row


def _rows(
    variants: Sequence[ShardedVariant], records: dict[str, _Record], size: StackSize
) -> list[Row]:
    tokens = dist.get_world_size() * size.batch * size.seq_len
    for variant in variants:
        record = records[variant.name]
        record.row["ms"] = statistics.median(record.times)
        record.row["tokens_per_s"] = tokens / record.row["ms"] * 1e3
    compiled = [v for v in variants if v.variant.is_reference]
    base = records[compiled[-1].name].row["ms"]  # compiled bf16, where there is one
    for record in records.values():
        record.row["speedup"] = base / record.row["ms"]
    return [records[variant.name].row for variant in variants]
