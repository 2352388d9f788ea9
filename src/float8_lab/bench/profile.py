"""`float8 bench profile`: where the time of a step goes, by kind of kernel."""

import re
from pathlib import Path

import torch
from torch.profiler import profile

from float8_lab.bench.step import Row, Step
from float8_lab.bench.variants import many_compilations

GEMM, CAST, ATTENTION, OTHER = "GEMM", "cast/amax", "attention", "other"

# The first that matches the name of a kernel (on a GPU) or of an op (on a CPU) decides. Attention
# comes first, since its kernels are made of GEMMs and say so; Inductor's kernels are named after
# all they do, so that an amax fused into a norm counts as an amax.
_KINDS = (
    (ATTENTION, r"flash|fmha|attention|sdpa|softmax"),
    (GEMM, r"gemm|nvjet|cutlass|cublas|xmma|scaled_mm|mkldnn_linear|(^|::)(add|b)?mm\b"),
    (CAST, r"amax|_cast_|float8::|transpose_kernel|abs"),
)


def profile_step(step: Step, device: torch.device, trace: Path) -> list[Row]:
    """Run one step under the profiler; rows have the µs of each kind of kernel, and its share."""
    with many_compilations():
        step.warm_up()
        with profile() as profiled:
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
    profiled.export_chrome_trace(str(trace))
    gpu = device.type == "cuda"
    found: dict[str, Row] = {}
    for event in profiled.key_averages():
        # The time of an annotation is that of the kernels in it, counted themselves.
        on_gpu = event.device_type == torch.profiler.DeviceType.CUDA
        if not event.is_user_annotation and (on_gpu or not gpu):
            kind = kind_of(event.key)
            row = found.setdefault(kind, {"kind": kind, "calls": 0, "us": 0.0})
            row["calls"] += event.count
            row["us"] += event.self_device_time_total if gpu else event.self_cpu_time_total
    total = sum(row["us"] for row in found.values())
    if not total:
        raise ValueError(
            f"profile: the profiler saw no kernels on {device.type}; on a GPU it needs CUPTI and "
            "the right to use performance counters"
        )
    rows = (found[kind] for kind in (GEMM, CAST, ATTENTION, OTHER) if kind in found)
    return [{**row, "share": row["us"] / total} for row in rows]


def kind_of(name: str) -> str:
    """Return the kind of a kernel or op of this name."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lower)), OTHER)
