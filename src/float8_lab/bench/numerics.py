"""`float8 bench numerics`: how exact the three GEMMs of a layer are under each recipe."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8 import sync_float8_amax_and_scale_history
from float8_lab.bench.linear import Layer
from float8_lab.bench.shapes import GEMMS, Shape
from float8_lab.bench.step import Row
from float8_lab.bench.variants import Variant
from float8_lab.numerics import compare, decibels

STEPS = 4  # of tensors: the last is measured, the others fill histories
HOT = 2.0**14
"""By how much hot channels and tokens exceed others. e4m3 has normal numbers down to 2^-15 of its
largest: a tensor with one scale bears outliers of some 2^12 before the others lose bits."""

_HOT_COUNT = 4


class Sample(NamedTuple):
    """Tensors that a layer reads in a few steps; bf16."""

    weight: Tensor  # [N, K]
    steps: Sequence[tuple[Tensor, Tensor]]  # input [M, K] and grad_output [M, N]


def _family(name: str, shape: Shape, device: torch.device) -> Sample:
    M, K, N = shape

    def draw(*size: int) -> Tensor:
        x = torch.randn(size, device=device)
        if name == "heavy tails":  # Student's t with 3 degrees of freedom
            x /= torch.randn(3, *size, device=device).square().mean(0).sqrt()
        return x

    weight, steps = torch.randn(N, K, device=device) * K**-0.5, []
    hot = torch.randperm(K, device=device)[:_HOT_COUNT]
    for _ in range(STEPS):
        x, grad = draw(M, K), draw(M, N) * 1e-4
        if name == "hot channels":
            x[:, hot] *= HOT
        if name == "hot tokens":  # with gradients as small: they say little
            tokens = torch.randperm(M, device=device)[:_HOT_COUNT]
            x[tokens] *= HOT
            grad[tokens] /= HOT
        if name == "tiny gradients":  # and of as many sizes as there are tokens
            grad *= 1e-6 * torch.exp(3 * draw(M, 1))
        steps.append((x.bfloat16(), grad.bfloat16()))
    if name == "hot channels":
        weight[:, hot] /= HOT  # as large in the output as others
    return Sample(weight.bfloat16(), steps)


FAMILIES = ("normal", "heavy tails", "hot channels", "hot tokens", "tiny gradients")


def random_samples(shapes: Sequence[Shape], device: torch.device) -> Iterator[tuple[str, Sample]]:
    """Yield tensors of all families in these shapes, with their names."""
    for shape in shapes:
        for name in FAMILIES:
            case = name if len(shapes) == 1 else f"{name} {shape}"
            yield case, _family(name, shape, device)


def bench_numerics(
    samples: Iterable[tuple[str, Sample]], variants: Sequence[Variant]
) -> Iterator[list[Row]]:
    """Compare each variant with float64; yields the rows of one sample at a time.

    `sqnr_*` are in dB, of whole results; `even_*` those of the mean relative error of tokens, of
    grad_weight of input channels: a few of them may have nearly all the power.
    """
    for case, sample in samples:
        x, grad = (t.double() for t in sample.steps[-1])
        weight = sample.weight.double()
        exact = dict(zip(GEMMS, (x @ weight.t(), grad @ weight, grad.t() @ x), strict=True))
        yield [
            {"case": case, "recipe": variant.recipe, **_measure(variant, sample, exact)}
            for variant in variants
        ]


def _measure(variant: Variant, sample: Sample, exact: Mapping[str, Tensor]) -> Row:
    """The columns of one variant; `exact` are the results of the last step in float64."""
    model = variant.convert(Layer(sample.weight))
    (parameter,) = model.parameters()
    for x, grad in sample.steps[:-1] if "delayed" in variant.recipe else ():
        model(x).backward(grad)
        if variant.ours:
            sync_float8_amax_and_scale_history(model)
    x, grad = sample.steps[-1]
    x = x.detach().requires_grad_()
    row: Row = {}
    y = model(x)
    gradients = torch.autograd.grad(y, (x, parameter), grad)
    results = dict(zip(GEMMS, (y.detach(), *gradients), strict=True))
    for gemm, found in results.items():
        signal, noise, *rows_and_columns = compare(exact[gemm], found).tolist()
        relative, count = rows_and_columns[2:] if gemm == "grad_weight" else rows_and_columns[:2]
        row[f"sqnr_{gemm}"] = decibels(signal, noise)
        row[f"even_{gemm}"] = decibels(count, relative)
    return row
