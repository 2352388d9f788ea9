"""`float8 bench linear`: one linear layer in bf16 and in float8, and from which size on it gains.

Times are of forward and backward in eager mode, those of the GPU alone: a layer that is compiled
alone is cast apart from what makes its input, as in no model.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from float8.convert.speed import Smallest
from float8_lab.bench.step import Row, Step, bench_steps
from float8_lab.bench.variants import EAGER, HIGH_PRECISION, Variant, make_variants
from float8_lab.device import Clock

Sampler = Callable[[], float]  # takes one sample: milliseconds per call

_CACHE_MULTIPLE, _MOST_SETS = 4, 16
_NOISE = 2e-4  # of a mean over 145 layers: what three of them that differ by 1 % make


class Shape(NamedTuple):
    """A linear layer at work: M tokens, K input features, N output features."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        return f"{self.M},{self.K},{self.N}"


def grid() -> list[Shape]:
    """Sizes around those from which on layers gain, shuffled: any first part is a fair sample."""
    tokens = (512, 1024, 2048, 4096, 8192, 16384)
    features = (512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
    sizes = [Shape(*size) for size in itertools.product(tokens, features, features)]
    # Smaller layers lose under every recipe, larger ones gain.
    shapes = [shape for shape in sizes if 2e9 <= math.prod(shape) <= 1e11]
    random.Random(0).shuffle(shapes)
    return shapes


def parse_shape(text: str) -> Shape:
    """Return `"M,K,N"` as a shape; a `ValueError` if it is not three positive multiples of 16."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if len(numbers) != 3 or any(n < 16 or n % 16 for n in numbers):
        expected = "M,K,N, each a positive multiple of 16, for example 8192,4096,14336"
        raise ValueError(f"shape: got {text!r}, expected {expected}")
    return Shape(*numbers)


class LinearTimes(NamedTuple):
    """Milliseconds of forward and backward of a layer: of the GPU alone; on a CPU of the host."""

    bf16_ms: float
    float8_ms: float


def measure_linear(shape: Shape, recipe: str, device: torch.device) -> LinearTimes:
    """Check, then time a layer on random data in eager mode; raises as `bench_steps`."""
    bf16, float8 = _rows(shape, make_variants([recipe], [EAGER]), device, rounds=5)
    return LinearTimes(bf16["ms"], float8["ms"])


def bench_linear(
    shapes: Sequence[Shape], recipes: Sequence[str], device: torch.device, rounds: int
) -> Iterator[list[Row]]:
    """Time layers of these shapes in bf16 and under every recipe; yields the rows of each shape.

    The GPU's times alone, on data that is not in its cache, without the sync of delayed scaling.
    """
    for shape in shapes:
        rows = _rows(shape, make_variants(recipes, [EAGER]), device, rounds)
        yield [shape._asdict() | row for row in rows]


def _rows(
    shape: Shape, variants: Sequence[Variant], device: torch.device, rounds: int
) -> list[Row]:
    *_, rows = bench_steps(partial(LinearStep, shape, device), variants, device, rounds)
    return rows


class LinearStep(Step):
    """Forward and backward of a layer, timed on the GPU alone."""

    at_least = 17.0

    def __init__(self, shape: Shape, device: torch.device, variant: Variant) -> None:
        self.shape = shape
        torch.manual_seed(0)
        layer = nn.Linear(shape.K, shape.N, bias=False, device=device, dtype=torch.bfloat16)
        super().__init__(variant, nn.Sequential(layer), *self._data(device))

    def _data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        M, K, N = self.shape
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)
        return make(M, K), make(M, N)

    def times(self, rounds: int) -> list[float]:
        """Milliseconds on data that is not in the cache."""
        M, K, N = self.shape
        sets = input_sets(2 * M * (K + N), self.device)
        calls = [partial(self.gradients, *self._data(self.device)) for _ in range(sets)]
        sample = kernel_sampler(calls, self.device, 1.0)
        return [sample() for _ in range(rounds)]


def call_sampler(calls: Sequence[Callable[[], object]], device: torch.device) -> Sampler:
    """Sample calls issued one after the other: the larger of GPU time and time to issue them.

    By CUDA events on a GPU, by the host's clock elsewhere.
    """
    clock = Clock(device)

    def sample() -> float:
        clock.mark()
        for call in calls:
            call()
        clock.mark()
        return 1e3 * clock.collect()[0] / len(calls)

    return sample


def kernel_sampler(
    calls: Sequence[Callable[[], object]], device: torch.device, at_least_ms: float
) -> Sampler:
    """Sample what the GPU needs for `calls`, without the time to issue them: as one CUDA graph.

    Calls do the same work on different data, together larger than the L2 cache, so that none finds
    its input there. A sample takes `at_least_ms` on a GPU: long ones show what holds in training,
    where power is at its limit and clocks drop.
    """
    if device.type != "cuda":
        return call_sampler(calls, device)
    with torch.cuda.device(device):
        # Compiles kernels and chooses algorithms, on a side stream as graph capture wants it.
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:3]:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for call in calls]  # all alive, so none reuses another's memory
        del results  # the graph keeps the memory
    replays = max(1, round(at_least_ms / call_sampler([graph.replay], device)()))
    sample = call_sampler([graph.replay] * replays, device)
    return lambda: sample() / len(calls)


def input_sets(set_bytes: int, device: torch.device) -> int:
    """Return how many input sets of `set_bytes` outgrow the L2 cache several times; at least 2."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(_MOST_SETS, -(-_CACHE_MULTIPLE * cache // set_bytes)))


# ---------------------------------------------------------------- limits of the default filter

Cell = tuple[int, int, float, float]  # tokens, min(K, N), product, log of speedup


class Found(NamedTuple):
    """Limits, and what they decide."""

    limits: Smallest
    loss: float  # mean over all layers of how much more time they take than by the best choice
    right: float  # share of layers that take the least time


def fit(cells: Sequence[Cell]) -> Found:
    """Return limits of the least loss, each of a measured layer.

    The loss is the mean over all layers of how much slower each one becomes by what the limits
    decide for it. Of limits that lose as little, up to noise, those that convert the fewest layers.
    """
    table = torch.tensor(cells, dtype=torch.float64)
    sizes, gains = table[:, :3], table[:, 3]
    products = {_rounded(product) for product in sizes[:, 2].tolist()}
    columns = (*(sorted({*sizes[:, i].tolist()}) for i in (0, 1)), sorted(products))
    limits = [Smallest(int(M), int(F), product) for M, F, product in itertools.product(*columns)]
    large = (sizes >= torch.tensor(limits, dtype=torch.float64).unsqueeze(1)).all(-1)
    losses = torch.where(large, -gains, gains).clamp(min=0)  # [limits, cells]
    means = losses.mean(1)
    as_good = (means <= means.min() + _NOISE).nonzero().flatten().tolist()
    best = min(as_good, key=large.sum(1).tolist().__getitem__)
    return Found(limits[best], means[best].item(), (losses[best] == 0).double().mean().item())


def _rounded(product: float) -> float:
    """Down to two digits."""
    size = 10 ** (math.floor(math.log10(product)) - 1)
    return float(math.floor(product / size) * size)


def fit_rows(rows: Sequence[Row]) -> dict[str, Found]:
    """Return limits by recipe, of the eager rows of layers; of each size bf16 comes first."""
    cells: dict[str, list[Cell]] = {}
    bf16 = math.nan
    for row in rows:
        if row["K"] is None or row["mode"] != EAGER:  # older results have sums, too
            continue
        M, K, N = row["M"], row["K"], row["N"]
        if row["recipe"] == HIGH_PRECISION:
            bf16 = row["ms"]
        else:
            gain = math.log(bf16 / row["ms"])
            cells.setdefault(row["recipe"], []).append((M, min(K, N), float(M * K * N), gain))
    return {recipe: fit(each) for recipe, each in cells.items()}
