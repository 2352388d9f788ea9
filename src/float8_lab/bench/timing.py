"""Times of calls, fair to each other: interleaved rounds, medians, GPU clocks on a GPU."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]
Sampler = Callable[[], float]  # takes one sample: milliseconds per call

_WARMUP = 3
_CACHE_MULTIPLE, _MOST_SETS = 4, 16


def take_turns(samplers: Mapping[str, Sampler], rounds: int) -> dict[str, float]:
    """Return the median of each sampler over interleaved rounds, in milliseconds.

    Interleaved, since clocks drop while a GPU heats up. The first rounds do not count.
    """
    turns = [[sample() for sample in samplers.values()] for _ in range(_WARMUP + rounds)]
    medians = map(statistics.median, zip(*turns[_WARMUP:], strict=True))
    return dict(zip(samplers, medians, strict=True))


def call_sampler(
    calls: Sequence[Call], device: torch.device, *, lead_in: Call | None = None
) -> Sampler:
    """Sample calls issued one after the other: the larger of GPU time and time to issue them.

    By CUDA events on a GPU, by the host's clock elsewhere. On a GPU `lead_in` is issued before the
    clock starts, so that the first call finds it at work, as a training step does.
    """

    def sample() -> float:
        if device.type != "cuda":
            began = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - began) * 1e3 / len(calls)
        if lead_in is not None:
            lead_in()
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / len(calls)

    return sample


def kernel_sampler(
    calls: Sequence[Call], device: torch.device, *, at_least_ms: float = 0.0
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


def steady_sampler(call: Call, device: torch.device, *, at_least_ms: float = 5.0) -> Sampler:
    """Sample a call in a steady state: as many back to back as take `at_least_ms`.

    On a GPU at least three: a single one would be charged the wait for its first kernel, which a
    training step hides behind the work before it, and what the host's caches forgot of it.
    """
    once = min(call_sampler([call], device)() for _ in range(_WARMUP))
    count = max(3 if device.type == "cuda" else 1, min(20, round(at_least_ms / max(once, 1e-3))))
    return call_sampler([call] * count, device, lead_in=call)


def input_sets(set_bytes: int, device: torch.device) -> int:
    """Return how many input sets of `set_bytes` outgrow the L2 cache several times; at least 2."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(_MOST_SETS, -(-_CACHE_MULTIPLE * cache // set_bytes)))
