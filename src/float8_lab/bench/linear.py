"""`float8 bench linear`: one linear layer, forward and backward, in bf16 and in float8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from float8.sync import sync_float8_amax_and_scale_history
from float8_lab.bench.floor import float8_gemms_sampler
from float8_lab.bench.memory import peak_bytes, saved_bytes
from float8_lab.bench.quality import check
from float8_lab.bench.shapes import Shape
from float8_lab.bench.timing import issue_microseconds, steady_sampler, take_turns
from float8_lab.bench.variants import EAGER, HIGH_PRECISION, Variant, many_compilations

Row = dict[str, Any]

# Lower bounds of the SQNR in dB: bf16 against float64, float8 against bf16.
_REFERENCE_AT_LEAST = 40.0
_FLOAT8_AT_LEAST = 17.0
_CHECKED = 256
_FLOOR = "floor"
_SUM = "sum"
# Layers so small that only the time to issue them counts.
_TOKENS, _WIDTH, _CHAIN = 32, 256, 16


class Layer(nn.Module):
    """Holds a linear layer: the compiler leaves a bare `nn.Linear` alone."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output [M, N] for x [M, K]."""
        output: Tensor = self.linear(x)
        return output


class LayerStep:
    """Forward and backward of one layer on fixed random data."""

    def __init__(self, variant: Variant, shape: Shape, weight: Tensor, x: Tensor) -> None:
        self._variant = variant
        linear = nn.Linear(shape.K, shape.N, bias=False, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(weight)
        self.layer = variant.convert(Layer(linear))
        variant.compile(self.layer)
        self._x = x
        self.weight = next(self.layer.parameters())

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output [M, N] and the input [M, K] that it was computed from.

        The input is a new tensor object at each call: layers that read the same object in eager
        mode share one cast of it, which a second call would find done.
        """
        x = self._x.detach().requires_grad_()
        with self._variant.around():
            output: Tensor = self.layer(x)
        return output, x

    def __call__(self, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output [M, N], gradient of the input [M, K], gradient of the weight [N, K]."""
        output, x = self.forward()
        grad_x, grad_weight = torch.autograd.grad(output, (x, self.weight), grad_output)
        return output.detach(), grad_x, grad_weight


def bench_linear(
    shapes: Mapping[str, Sequence[Shape]],
    variants: Sequence[Variant],
    device: torch.device,
    rounds: int,
) -> Iterator[list[Row]]:
    """Time every variant of every shape; yields the rows of one shape, then a set's sums.

    The first variant of each mode must be bf16. Times are those of a steady state: in eager mode,
    if issuing takes longer than the GPU, they are the time to issue. The sync of delayed scaling,
    which happens once per optimizer step for a whole model, is not in them; `float8 bench block`
    has it.

    Raises:
        WrongResultError: A result is wrong; says which.
    """
    for name, members in shapes.items():
        summed: list[list[Row]] = []
        for shape in members:
            rows = _rows(name, shape, variants, device, rounds)
            summed.append(rows)
            yield rows
        if len(summed) > 1:
            yield _sums(name, summed)


def _rows(
    name: str, shape: Shape, variants: Sequence[Variant], device: torch.device, rounds: int
) -> list[Row]:
    torch.compiler.reset()  # the shape before may have filled the compiler's cache
    M, K, N = shape
    weight = torch.randn(N, K, device=device, dtype=torch.bfloat16) * K**-0.5
    x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    grad = torch.randn(M, N, device=device, dtype=torch.bfloat16)
    rows: list[Row] = []
    samplers = {}
    with many_compilations():
        reference = LayerStep(variants[0], shape, weight, x)(grad)
        _check_reference(shape, variants[0], x, weight, grad, reference)
        for variant in variants:
            step = LayerStep(variant, shape, weight, x)
            call = _caller(step, grad)
            call()
            if variant.ours:
                sync_float8_amax_and_scale_history(step.layer)  # from here on delayed, if it is
            quality = _check(shape, variant, reference, step(grad))
            rows.append(
                {
                    "set": name,
                    "M": M,
                    "K": K,
                    "N": N,
                    "recipe": variant.recipe,
                    "mode": variant.mode,
                    "saved_mib": saved_bytes(step.forward, [step.weight]) / 2**20,
                    "peak_mib": _mib(peak_bytes(call, device)),
                    "sqnr_db": quality,
                }
            )
            samplers[variant.name] = steady_sampler(call, device)
        del reference
        samplers[_FLOOR] = float8_gemms_sampler(shape, device)
        times = take_turns(samplers, rounds)
    bf16 = {v.mode: times[v.name] for v in variants if v.is_reference}
    for row, variant in zip(rows, variants, strict=True):
        row["ms"] = times[variant.name]
        row["floor_ms"] = times[_FLOOR]
        row["speedup"] = bf16[variant.mode] / row["ms"]
    return rows


def _caller(step: LayerStep, grad: Tensor) -> Callable[[], object]:
    return lambda: step(grad)


def _mib(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def _check_reference(
    shape: Shape,
    variant: Variant,
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """High precision itself against float64, on a part of every result."""
    output, grad_x, grad_weight = (result[:_CHECKED] for result in results)
    what = f"linear {shape} {variant.name}"
    rows, features = x[:_CHECKED].double(), grad[:, :_CHECKED].double()
    check(f"{what}: output", rows @ weight.double().t(), output, _REFERENCE_AT_LEAST)
    expected = grad[:_CHECKED].double() @ weight.double()
    check(f"{what}: gradient of the input", expected, grad_x, _REFERENCE_AT_LEAST)
    expected = features.t() @ x.double()
    check(f"{what}: gradient of the weight", expected, grad_weight, _REFERENCE_AT_LEAST)


def _check(
    shape: Shape,
    variant: Variant,
    reference: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
) -> float:
    """The lowest SQNR in dB of output and gradients, all of them complete."""
    at_least = _REFERENCE_AT_LEAST if variant.is_reference else _FLOAT8_AT_LEAST
    names = ("output", "gradient of the input", "gradient of the weight")
    return min(
        check(f"linear {shape} {variant.name}: {name}", expected, result, at_least)
        for name, expected, result in zip(names, reference, results, strict=True)
    )


def _sums(name: str, summed: Sequence[Sequence[Row]]) -> list[Row]:
    sums = []
    for same in zip(*summed, strict=True):  # one variant over all shapes
        total: Row = {"set": name, "M": _SUM, "K": None, "N": None}
        total |= {key: same[0][key] for key in ("recipe", "mode")}
        for key in ("saved_mib", "ms", "floor_ms"):
            values = [row[key] for row in same]
            total[key] = None if None in values else sum(values)
        total["peak_mib"] = None
        total["sqnr_db"] = min(row["sqnr_db"] for row in same)
        sums.append(total)
    bf16 = {
        total["mode"]: total["ms"] for total in reversed(sums) if total["recipe"] == HIGH_PRECISION
    }
    for total in sums:
        total["speedup"] = bf16[total["mode"]] / total["ms"]
    return sums


def host_microseconds(variants: Sequence[Variant], device: torch.device) -> dict[str, float]:
    """Time of the calling thread to issue one forward and backward in eager mode, by recipe.

    Of a chain of layers, divided by their number: a single one would be charged the start of
    `backward()`, which is the same for a whole model.
    """
    result = {}
    for variant in variants:
        if variant.mode != EAGER:
            continue
        make = {"device": device, "dtype": torch.bfloat16}
        linears = [nn.Linear(_WIDTH, _WIDTH, bias=False, **make) for _ in range(_CHAIN)]
        chain = variant.convert(nn.Sequential(*linears))
        x, grad = (torch.randn(_TOKENS, _WIDTH, **make) for _ in range(2))  # type: ignore[call-overload]
        call = _chain_caller(chain, variant, x, grad)
        # A CPU computes in the calling thread, for seconds if it has no float8 GEMM of its own.
        calls, samples = (3, 15) if device.type == "cuda" else (1, 3)
        issue = issue_microseconds(call, device, calls=calls, samples=samples)
        result[variant.recipe] = issue / _CHAIN
    return result


def _chain_caller(
    chain: nn.Module, variant: Variant, x: Tensor, grad: Tensor
) -> Callable[[], object]:
    parameters = list(chain.parameters())

    def call() -> object:
        leaf = x.detach().requires_grad_()
        with variant.around():
            output: Tensor = chain(leaf)
        return torch.autograd.grad(output, (leaf, *parameters), grad)

    return call
