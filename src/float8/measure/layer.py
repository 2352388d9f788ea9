"""One linear layer measured, forward and backward, in bf16 and in float8."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.linear import Float8Linear
from float8.measure.quality import check
from float8.measure.timing import kernel_sampler, take_turns

_AT_LEAST = 17.0  # dB: output and gradients of one layer against bf16
_ROUNDS = 10


class LinearTimes(NamedTuple):
    """Milliseconds of forward and backward."""

    bf16_ms: float
    float8_ms: float


def measure_linear(
    tokens: int,
    in_features: int,
    out_features: int,
    device: torch.device,
    config: Float8LinearConfig | None = None,
) -> LinearTimes:
    """Time a layer with a bf16 weight on random data, after checking its results.

    On a GPU this is GPU time alone, as in a model large enough to hide the time to issue kernels;
    on a CPU it is host time.

    Args:
        tokens: Rows of the input.
        in_features: K.
        out_features: N.
        device: Where.
        config: How the float8 layer runs; None: the default.

    Raises:
        WrongResultError: The float8 layer computes something else than bf16.
    """
    bf16 = nn.Linear(in_features, out_features, bias=False, device=device, dtype=torch.bfloat16)
    float8 = Float8Linear.from_float(bf16, config)
    data = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16)
    grad = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)

    def step(layer: nn.Module) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            # A new object: layers that read the same one share its cast, and so would two calls.
            x = data.detach().requires_grad_()
            with torch.enable_grad():
                output = layer(x)
                gradients = torch.autograd.grad(output, (x, bf16.weight), grad)
            return output.detach(), *gradients

        return call

    reference, result = step(bf16)(), step(float8)()
    names = ("output", "gradient of the input", "gradient of the weight")
    what = f"linear {tokens},{in_features},{out_features}"
    for name, expected, got in zip(names, reference, result, strict=True):
        check(f"{what}: {name}", expected, got, _AT_LEAST)
    del reference, result
    samplers = {
        "bf16": kernel_sampler([step(bf16)], device),
        "float8": kernel_sampler([step(float8)], device),
    }
    times = take_turns(samplers, _ROUNDS)
    return LinearTimes(times["bf16"], times["float8"])
