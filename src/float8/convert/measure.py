"""Check, then time one linear layer, forward and backward, in bf16 and in float8."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.linear import Float8Linear

Call = Callable[[], object]

_AT_LEAST = 17.0  # dB: output and gradients of one layer against bf16
_WARMUP, _ROUNDS = 3, 10


class WrongResultError(ArithmeticError):
    """Raised where what was to be timed computes something else than its reference."""


class LinearTimes(NamedTuple):
    """Milliseconds of forward and backward."""

    bf16_ms: float
    float8_ms: float


def measure_linear(
    tokens: int,
    in_features: int,
    out_features: int,
    device: torch.device,
    config: Float8LinearConfig,
) -> LinearTimes:
    """Return median times on random data, of the GPU alone; on a CPU of the host.

    Raises:
        WrongResultError: the float8 layer computes something else than bf16.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        bf16 = nn.Linear(in_features, out_features, bias=False, device=device, dtype=torch.bfloat16)
        data = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16)
        grad = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)

    def step(layer: nn.Module) -> tuple[Tensor, ...]:
        x = data.detach().requires_grad_()
        with torch.enable_grad():
            output = layer(x)
            return output.detach(), *torch.autograd.grad(output, (x, bf16.weight), grad)

    layers = bf16, Float8Linear.from_float(bf16, config)
    _check(f"linear {tokens},{in_features},{out_features}", *map(step, layers))
    calls = [issued_at_once([functools.partial(step, layer)], device) for layer in layers]
    # Interleaved, so that a clock that drops while a GPU heats up drops for both alike.
    turns = [[milliseconds(call, device) for call in calls] for _ in range(_WARMUP + _ROUNDS)]
    bf16_ms, float8_ms = map(statistics.median, zip(*turns[_WARMUP:], strict=True))
    return LinearTimes(bf16_ms, float8_ms)


def _check(what: str, reference: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> None:
    names = ("output", "gradient of the input", "gradient of the weight")
    for name, expected, got in zip(names, reference, result, strict=True):
        error = torch.linalg.vector_norm(expected - got, dtype=torch.float32)
        signal = torch.linalg.vector_norm(expected, dtype=torch.float32)
        sqnr = 20 * torch.log10(signal / error).item()
        if not sqnr >= _AT_LEAST:  # also if it is NaN
            raise WrongResultError(
                f"{what}: {name}: SQNR {sqnr:.1f} dB, expected at least {_AT_LEAST:.0f} dB; "
                f"nothing was timed"
            )


def issued_at_once(calls: Sequence[Call], device: torch.device) -> Call:
    """Return `calls` as one: on a GPU a CUDA graph, which the CPU needs no time to issue."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
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
    return graph.replay


def milliseconds(call: Call, device: torch.device) -> float:
    """Return the time of a call: by CUDA events on a GPU, by the host's clock elsewhere."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end))
