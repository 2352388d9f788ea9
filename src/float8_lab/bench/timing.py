"""Times of calls, fair to each other: interleaved rounds, medians, GPU clocks on a GPU."""

import statistics
from collections.abc import Callable, Sequence

import torch

from float8_lab.device import Clock

Call = Callable[[], object]
Sampler = Callable[[], float]  # takes one sample: milliseconds per call

_WARMUP = 3
_CACHE_MULTIPLE, _MOST_SETS = 4, 16


def take_turns(samplers: Sequence[Sampler], rounds: int) -> list[float]:
    """Return the median of each sampler over interleaved rounds, in milliseconds.

    Interleaved, since clocks drop while a GPU heats up. The first rounds do not count.
    """
    turns = [[sample() for sample in samplers] for _ in range(_WARMUP + rounds)]
    return [statistics.median(times) for times in zip(*turns[_WARMUP:], strict=True)]


def call_sampler(calls: Sequence[Call], device: torch.device) -> Sampler:
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


def kernel_sampler(calls: Sequence[Call], device: torch.device, at_least_ms: float) -> Sampler:
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
