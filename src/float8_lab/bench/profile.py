"""`float8 bench profile`: where the time of a stack of blocks goes, by kind of kernel."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from float8_lab.bench.block import StackSize, StackStep
from float8_lab.bench.variants import Variant, many_compilations

Row = dict[str, Any]

GEMM, CAST, ATTENTION, OTHER = "GEMM", "cast/amax", "attention", "other"

# The first that matches the name of a kernel (on a GPU) or of an op (on a CPU) decides. Attention
# comes first, since its kernels are made of GEMMs and say so; Inductor's kernels are named after
# all they do, so that an amax fused into a norm counts as an amax.
_KINDS = (
    (ATTENTION, r"flash|fmha|attention|sdpa|softmax"),
    (GEMM, r"gemm|nvjet|cutlass|cublas|xmma|scaled_mm|mkldnn_linear|(^|::)(add|b)?mm\b"),
    (CAST, r"amax|_cast_|float8::|transpose_kernel|abs"),
)
_WARMUP = 3


def profile_block(
    size: StackSize, variant: Variant, device: torch.device, folder: Path
) -> list[Row]:
    """Run one forward and one backward under the profiler, after a few that are not.

    Args:
        size: What is run.
        variant: How.
        device: Where.
        folder: `forward.json` and `backward.json` go there: traces for chrome://tracing and
            ui.perfetto.dev.

    Returns:
        For each pass and kind of kernel its µs and its share of all kernels' time.

    Raises:
        ValueError: The profiler sees no kernels here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with many_compilations():
        step = StackStep(variant, size, device)
        for _ in range(_WARMUP):
            step()
        rows = []
        with _profiler(device) as forward:
            results = step.forward()
            _wait(device)
        rows += _rows("forward", forward, device)
        forward.export_chrome_trace(str(folder / "forward.json"))
        with _profiler(device) as backward:
            step.backward(*results)
            _wait(device)
        rows += _rows("backward", backward, device)
        backward.export_chrome_trace(str(folder / "backward.json"))
    return rows


def kind_of(name: str) -> str:
    """The kind of a kernel or op of this name."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lower)), OTHER)


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rows(which: str, profiled: profile, device: torch.device) -> list[Row]:
    times: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for event in profiled.key_averages():
        if event.is_user_annotation:  # its time is that of the kernels in it, counted themselves
            continue
        if device.type == "cuda":
            if event.device_type != torch.profiler.DeviceType.CUDA:
                continue
            microseconds = event.self_device_time_total
        else:
            microseconds = event.self_cpu_time_total
        kind = kind_of(event.key)
        times[kind] += microseconds
        counts[kind] += event.count
    total = sum(times.values())
    if not total:
        raise ValueError(
            f"profile: the profiler saw no kernels on {device.type}; on a GPU it needs CUPTI and "
            "the right to use performance counters"
        )
    return [
        {
            "pass": which,
            "kind": kind,
            "calls": counts[kind],
            "us": times[kind],
            "share": times[kind] / total,
        }
        for kind in (GEMM, CAST, ATTENTION, OTHER)
        if counts[kind]
    ]
