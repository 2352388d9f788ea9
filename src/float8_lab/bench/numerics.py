"""`float8 bench numerics`: how exact the three GEMMs of a layer are under each recipe."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from float8 import Float8Linear, sync_float8_amax_and_scale_history
from float8_lab.bench.linear import Layer
from float8_lab.bench.shapes import GEMMS, GRAD_WEIGHT, Shape
from float8_lab.bench.step import Row
from float8_lab.bench.variants import Variant
from float8_lab.numerics import ROLES, Call, compare, decibels, numerics_report, watch

STEPS = 4
"""How many steps of tensors there are: the last is measured, the others fill histories."""

HOT = 2.0**14
"""By how much hot channels and tokens exceed others. e4m3 has normal numbers down to 2^-15 of its
largest: a tensor with one scale bears outliers of some 2^12 before the others lose bits."""

_HOT_COUNT = 4
_WHOLE, _EVEN = "sqnr_{}", "even_{}"


class Sample(NamedTuple):
    """What a layer reads in a few steps; bf16."""

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
    """Draw tensors of all families in these shapes, with their names."""
    for shape in shapes:
        for name in FAMILIES:
            case = name if len(shapes) == 1 else f"{name} {shape}"
            yield case, _family(name, shape, device)


def captured_samples(
    model: nn.Module, prefix: str, losses: Sequence[Callable[[], Tensor]]
) -> dict[str, Sample]:
    """What the linear layers of `model` below `prefix` (`"layers.0."`) read, by their names there.

    Each of `losses` runs forward on one batch and returns its loss. The model is left as it was.
    """
    below = ((name, layer) for name, layer in model.named_modules() if name.startswith(prefix))
    layers = {name: layer for name, layer in below if isinstance(layer, nn.Linear)}
    seen: dict[str, dict[str, list[Tensor]]] = {name: {} for name in layers}

    def see(call: Call, role: str, x: Tensor) -> None:
        seen[call.layer].setdefault(role, []).append(x.detach().bfloat16())

    for loss in losses:
        watch(model, layers, loss, see)
    samples = {}
    for name, roles in seen.items():
        steps = list(zip(roles["input"], roles["grad_output"], strict=True))
        samples[name.removeprefix(prefix)] = Sample(roles["weight"][-1], steps)
    return samples


def bench_numerics(
    samples: Iterable[tuple[str, Sample]], variants: Sequence[Variant]
) -> Iterator[list[Row]]:
    """Compare each variant with float64; yields the rows of one sample at a time.

    `sqnr_*` are in dB, of whole results; `even_*` are those of the mean relative error of tokens,
    of grad_weight that of input channels: a few of them may have nearly all the power.
    Underflow and saturation are of this library's casts, the worst of each role.
    """
    for case, sample in samples:
        x, grad = (t.double() for t in sample.steps[-1])
        weight = sample.weight.double()
        exact = dict(zip(GEMMS, (x @ weight.t(), grad @ weight, grad.t() @ x), strict=True))
        yield [
            {"case": case, "recipe": variant.recipe, **measure(variant, sample, exact)}
            for variant in variants
        ]


def measure(variant: Variant, sample: Sample, exact: Mapping[str, Tensor]) -> Row:
    """The columns of one variant; `exact` are the results of the last step in float64."""
    model = variant.convert(Layer(sample.weight))
    (parameter,) = model.parameters()
    for x, grad in sample.steps[:-1] if "delayed" in variant.recipe else ():
        with variant.around():
            y = model(x)
        y.backward(grad)
        if variant.ours:
            sync_float8_amax_and_scale_history(model)
    x, grad = sample.steps[-1]
    x = x.detach().requires_grad_()
    columns = [f"{kind}_{role}" for kind in ("underflow", "saturation") for role in ROLES]
    row: Row = dict.fromkeys(columns)  # the worst of each role; None where it is not ours
    if isinstance(model.get_submodule("linear"), Float8Linear):
        for cast in numerics_report(model, x, loss=lambda y: (y * grad).sum()).casts:
            for kind in ("underflow", "saturation"):
                key = f"{kind}_{cast.role}"
                row[key] = max(row[key] or 0.0, getattr(cast, kind))
    with variant.around():
        y = model(x)
    gradients = torch.autograd.grad(y, (x, parameter), grad)
    results = dict(zip(GEMMS, (y.detach(), *gradients), strict=True))
    for gemm, found in results.items():
        signal, noise, *rows_and_columns = compare(exact[gemm], found).tolist()
        relative, count = rows_and_columns[2:] if gemm == GRAD_WEIGHT else rows_and_columns[:2]
        row[_WHOLE.format(gemm)] = decibels(signal, noise)
        row[_EVEN.format(gemm)] = decibels(count, relative)
    return row


def plot_numerics(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the SQNR of each GEMM over cases, a mark for each recipe; the format is the suffix's."""
    cases, recipes = (dict.fromkeys(row[key] for row in rows) for key in ("case", "recipe"))
    figure = Figure(figsize=(11, 2.5 + 0.4 * len(cases)), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    kinds = (_WHOLE, "whole"), (_EVEN, "tokens or channels alike")
    columns = itertools.product(kinds, GEMMS)
    for axes, ((key, kind), gemm) in zip(panels.flat, columns, strict=True):
        for recipe, marker in zip(recipes, itertools.cycle(_MARKERS), strict=False):
            own = {row["case"]: row[key.format(gemm)] for row in rows if row["recipe"] == recipe}
            style = {"label": recipe, "alpha": 0.7, "fillstyle": "none"}
            axes.plot(list(own.values()), list(own), marker, **style)
        axes.set_title(f"{gemm}, {kind}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    panels[0, 0].invert_yaxis()
    for axes in panels[1]:
        axes.set_xlabel("SQNR in dB", fontsize=8)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


_MARKERS = ("ks", "C0o", "C1x", "C2^", "C3v", "C4D", "C0+", "C2+", "C3+", "C5*", "C6p", "C7h")
