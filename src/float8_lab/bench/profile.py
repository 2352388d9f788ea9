"""`float8 bench profile`: where the time of a step goes."""

import re

import torch
from torch.profiler import profile

from float8_lab.bench.step import Results, Row, Step

GEMMS, ATTENTION, CASTS, ELSE = KINDS = "gemms_ms", "attention_ms", "casts_ms", "else_ms"

# The first that matches the name of a kernel (on a GPU) or of an op (on a CPU) decides. Inductor
# names its own kernels after all that is fused into them, and after ops that read what they lay
# out, attention and casts among them: such a kernel is a cast if it takes an amax or saturates.
# Attention comes before GEMMs, since its kernels are made of them and say so.
_KINDS = (
    (CASTS, r"^triton_(?!tem_).*(amax|clamp)"),
    (ELSE, r"^triton_(?!tem_)"),
    (ATTENTION, r"flash|fmha|attention|sdpa|softmax"),
    (GEMMS, r"gemm|nvjet|cutlass|cublas|xmma|scaled_mm|mkldnn_linear|^triton_|(^|::)(add|b)?mm\b"),
    (CASTS, r"amax|abs|clamp|float8::|^_?(cast\w*|measure\w*|transpose)_kernel"),
)
STEPS = 3  # whose mean is taken


class ProfiledStep(Step):
    """A step whose kernels are told apart."""

    def check(self, references: dict[str, Results]) -> Row:
        """Also run it under the profiler: ms of each kind of kernel, and launches.

        On a CPU, to try it, ops are counted, with the time of the host.
        """
        row, gpu = super().check(references), self.device.type == "cuda"
        with profile() as profiled:
            for _ in range(STEPS):
                self()
            if gpu:
                torch.cuda.synchronize()
        times, launches = dict.fromkeys(KINDS, 0.0), 0
        for event in profiled.key_averages():
            # The time of an annotation is that of the kernels in it, counted themselves.
            on_gpu = event.device_type == torch.profiler.DeviceType.CUDA
            if not event.is_user_annotation and (on_gpu or not gpu):
                us = event.self_device_time_total if gpu else event.self_cpu_time_total
                times[kind_of(event.key)] += us / 1e3 / STEPS
                launches += event.count
        if not any(times.values()):
            need = "on a GPU it needs CUPTI and the right to use performance counters"
            raise ValueError(f"profile: the profiler saw no kernels on {self.device.type}; {need}")
        return row | times | {"sum_ms": sum(times.values()), "launches": launches // STEPS}


def kind_of(name: str) -> str:
    """Return the kind of a kernel or op of this name, a column of its time."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lower)), ELSE)
