"""One linear layer in bf16 and in float8, as `float8 plan` measures them.

Times are of forward and backward in eager mode, those of the GPU alone: a layer that is compiled
alone is cast apart from what makes its input, as in no model.
"""

from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn

from float8_lab.bench.step import Step, bench_steps
from float8_lab.bench.variants import EAGER, Variant, make_variants

_CACHE_MULTIPLE, _MOST_SETS = 4, 16

Shape = tuple[int, int, int]  # of a layer at work: M tokens, K features in, N features out
Times = tuple[float, float]  # ms forward and backward, bf16 and float8; on a CPU those of the host


def measure_linear(shape: Shape, recipe: str, device: torch.device) -> Times:
    """Check, then time a layer on random data in eager mode; raises as `bench_steps`."""
    variants = make_variants([recipe], [EAGER])
    *_, (high, low) = bench_steps(partial(LinearStep, shape, device), variants, device, rounds=5)
    return high["ms"], low["ms"]


class LinearStep(Step):
    """Forward and backward of a layer, timed on the GPU alone."""

    at_least = 17.0

    def __init__(self, shape: Shape, device: torch.device, variant: Variant) -> None:
        self.shape = _, K, N = shape
        torch.manual_seed(0)
        layer = nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
        super().__init__(variant, nn.Sequential(layer), *self._data(device))

    def _data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        M, K, N = self.shape
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)
        return make(M, K), make(M, N)

    def times(self, rounds: int) -> list[float]:
        """Milliseconds of the GPU, by a CUDA graph; on a CPU those of `rounds` steps of the host.

        On data that is not in the cache, and long enough for clocks to drop.
        """
        if self.device.type != "cuda":
            return super().times(rounds)
        M, K, N = self.shape
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        sets = max(2, min(_MOST_SETS, -(-_CACHE_MULTIPLE * cache // (2 * M * (K + N)))))
        calls = [partial(self.gradients, *self._data(self.device)) for _ in range(sets)]
        torch.cuda.synchronize()  # it records on a stream of its own
        measure = import_module("triton.testing").do_bench_cudagraph
        # All results are alive, so none reuses another's memory.
        found = measure(lambda: [call() for call in calls], return_mode="all")
        return [ms / sets for ms in found]
