"""`float8 bench profile`: where the time of a stack of blocks goes, by kind of kernel."""

import re
from pathlib import Path

import torch
from torch.profiler import profile

from float8_lab.bench.block import StackSize, stack_step
from float8_lab.bench.step import Row
from float8_lab.bench.variants import Variant, many_compilations

GEMM, CAST, ATTENTION, OTHER = "GEMM", "cast/amax", "attention", "other"

# The first that matches the name of a kernel (on a GPU) or of an op (on a CPU) decides. Attention
# comes first, since its kernels are made of GEMMs and say so; Inductor's kernels are named after
# all they do, so that an amax fused into a norm counts as an amax.
_KINDS = (
    (ATTENTION, r"flash|fmha|attention|sdpa|softmax"),
    (GEMM, r"gemm|nvjet|cutlass|cublas|xmma|scaled_mm|mkldnn_linear|(^|::)(add|b)?mm\b"),
    (CAST, r"amax|_cast_|float8::|transpose_kernel|abs"),
)


def profile_block(
    size: StackSize, variant: Variant, device: torch.device, folder: Path
) -> list[Row]:
    """Run one forward and one backward under the profiler, after a few that are not.

    `forward.json` and `backward.json` go to `folder`: traces for chrome://tracing and
    ui.perfetto.dev. Rows have the µs of each pass and kind of kernel, and its share of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gpu = device.type == "cuda"
    rows = []
    with many_compilations():
        step = stack_step(variant, size, device)
        step.warm_up()
        for which in ("forward", "backward"):
            with profile() as profiled:
                if which == "forward":
                    output, x = step.forward()
                else:
                    step.backward(output)
                    step.finish(output, x)
                if gpu:
                    torch.cuda.synchronize()
            rows += _rows(which, profiled, device)
            profiled.export_chrome_trace(str(folder / f"{which}.json"))
    return rows


def kind_of(name: str) -> str:
    """The kind of a kernel or op of this name."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lower)), OTHER)


def _rows(which: str, profiled: profile, device: torch.device) -> list[Row]:
    gpu = device.type == "cuda"
    found: dict[str, Row] = {}
    for event in profiled.key_averages():
        # The time of an annotation is that of the kernels in it, counted themselves.
        on_gpu = event.device_type == torch.profiler.DeviceType.CUDA
        if not event.is_user_annotation and (on_gpu or not gpu):
            kind = kind_of(event.key)
            row = found.setdefault(kind, {"pass": which, "kind": kind, "calls": 0, "us": 0.0})
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
