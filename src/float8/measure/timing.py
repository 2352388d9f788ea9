"""Times of calls, fair to each other: interleaved rounds, medians, GPU clocks on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]

Sampler = Callable[[], float]
"""Takes one sample: milliseconds per call."""

WARMUP_ROUNDS = 3


def take_turns(samplers: Mapping[str, Sampler], rounds: int) -> dict[str, float]:
    """Median of each sampler over interleaved rounds, in milliseconds.

    Interleaved, so that a clock that drops while a GPU heats up drops for all alike. A few rounds
    before those that count are thrown away.
    """
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(WARMUP_ROUNDS + rounds):
        for name, sample in samplers.items():
            milliseconds = sample()
            if turn >= WARMUP_ROUNDS:
                times[name].append(milliseconds)
    return {name: statistics.median(values) for name, values in times.items()}


def kernel_sampler(
    calls: Sequence[Call], device: torch.device, *, at_least_ms: float = 0.0
) -> Sampler:
    """Samples what the GPU needs for `calls`, without the time to issue them.

    On a GPU the calls become one CUDA graph. Elsewhere the time of the calling thread counts.

    Args:
        calls: The same work on different data. Together larger than the L2 cache, so that no call
            finds its input there.
        device: Where they run.
        at_least_ms: How long a sample takes on a GPU. Long ones show what holds in training, where
            a GPU is at its limit of power and its clocks drop by a quarter.
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
        once = call_sampler([graph.replay], device)()
    replays = max(1, round(at_least_ms / once))
    return call_sampler([graph.replay] * replays, device, per_sample=len(calls) * replays)


def call_sampler(
    calls: Sequence[Call],
    device: torch.device,
    *,
    per_sample: int | None = None,
    lead_in: Call | None = None,
) -> Sampler:
    """Samples calls issued one after the other: the larger of GPU time and time to issue them.

    Args:
        calls: What a sample runs.
        device: Where they run: CUDA events on a GPU, the host's clock elsewhere.
        per_sample: How many units of work a sample is; None: one per call.
        lead_in: Issued on a GPU before the clock starts, so that the first call finds it at work,
            as a training step finds it with the step before.
    """
    units = len(calls) if per_sample is None else per_sample

    def on_host() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e3 / units

    def on_gpu() -> float:
        with torch.cuda.device(device):
            start, end = _event(), _event()
            if lead_in is not None:
                lead_in()
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / units

    return on_gpu if device.type == "cuda" else on_host


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
