"""`float8 bench experts`: layers of experts forward and backward, their GEMMs and casts alone."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.config import Float8LinearConfig, Float8Weights
from float8.experts.functional import apply_grouped
from float8.gemm import grouped_matmul
from float8.kernels.cast_groups import cast_groups
from float8.linear.plan import EXPECTED, no_grouped_gemm, plan_linear
from float8.linear.weight import Weight, hold
from float8.quantize import quantize
from float8_lab.bench.step import Results, Row, Step, bench_steps, check
from float8_lab.bench.timing import kernel_sampler, take_turns
from float8_lab.bench.variants import EAGER, HIGH_PRECISION, Variant
from float8_lab.trainer.recipes import recipe_config

GEMM_AT_LEAST = 24.0  # dB of SQNR against bf16
RECIPES = ["tensorwise", "tensorwise+held", "rowwise", "rowwise+held", "rowwise_with_gw_hp"]


class Experts(NamedTuple):
    """E experts, [2 * ff, hidden] and [hidden, ff] each, and the rows that they share."""

    E: int
    rows: int
    hidden: int
    ff: int

    def __str__(self) -> str:
        known = (name for name, each in EXPERTS.items() if each == self)
        return next(known, ",".join(map(str, self)))


EXPERTS = {
    "mixtral-8x7b": Experts(8, 16_384, 4096, 14_336),
    "deepseek-v3": Experts(8, 32_768, 7168, 2048),  # the share of one of 32 ranks
    "qwen3-30b-a3b": Experts(128, 65_536, 2048, 768),
    "deepseek-v2-lite": Experts(64, 49_152, 2048, 1408),
}


def parse_experts(text: str) -> Experts:
    """Return a model of `EXPERTS`, or `"E,rows,hidden,ff"`."""
    if text in EXPERTS:
        return EXPERTS[text]
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if len(numbers) != 4 or 0 in numbers or any(n % 16 for n in numbers[2:]):
        expected = f"{', '.join(EXPERTS)}, or E,rows,hidden,ff, the last two multiples of 16"
        raise ValueError(f"shape: got {text!r}, expected one of {expected}")
    return Experts(*numbers)


class Layer(nn.Module):
    """`w2(silu(gate) * up)` with gate and up by `w13`, of rows that lie sorted by expert."""

    def __init__(self, config: Float8LinearConfig | None, w13: Tensor, w2: Tensor, offs: Tensor):
        super().__init__()
        self.w13, self.w2, self.offs = nn.Parameter(w13), nn.Parameter(w2), offs
        self.config, self._swiglu = config, _swiglu
        self.plan = plan_linear(config, grouped=True) if config else None
        if w13.is_cuda:  # as trainers do: one kernel each way, the same for all variants
            self._swiglu = torch.compile(_swiglu, fullgraph=True, dynamic=False)
        self.cast_held()

    def cast_held(self) -> None:
        """Cast weights that are held, as it is due at each step of an optimizer."""
        self.held: list[Weight | None] = [None, None]
        if self.config and self.config.float8_weights is Float8Weights.HELD:
            cast = plan_linear(self.config).casts.weight
            self.held = [hold(w, cast) for w in (self.w13, self.w2)]

    def forward(self, x: Tensor) -> Tensor:
        """The output [rows, hidden] for x [rows, hidden]."""
        return self._product(self._swiglu(self._product(x, self.w13, 0)), self.w2, 1)

    def _product(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        if self.plan is None:
            return F.grouped_mm(x, w.transpose(-2, -1), offs=self.offs)
        return apply_grouped(x, w, self.offs, self.plan, False, self.held[number])


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


class LayerStep(Step):
    """Forward and backward of a layer, and the casts of weights that are due."""

    at_least = 17.0
    microbatches = 1  # in which weights that are held are cast once

    def update(self) -> None:
        """Cast weights that are held."""
        self.model.cast_held()  # type: ignore[operator]

    def __call__(self) -> Results:
        """One step; gradients of weights are those of the last microbatch."""
        for _ in range(self.microbatches - 1):
            self.gradients(self._x, self._grad)
        return super().__call__()

    def times(self, rounds: int) -> list[float]:
        """Milliseconds of one microbatch."""
        return [ms / self.microbatches for ms in super().times(rounds)]


def bench_experts(
    experts: Sequence[Experts],
    recipes: Sequence[str],
    device: torch.device,
    rounds: int,
    microbatches: int = 4,
) -> Iterator[list[Row]]:
    """Time layers of experts, their GEMMs and their casts; yields the rows of one part at a time.

    Times of layers are of forward and backward of one microbatch: weights that are held are cast
    once in `microbatches`, others in each forward and backward. SwiGLU is compiled on GPUs, all
    else is eager. Experts have as many rows each. Each layer and each product is compared with
    bf16's before it is timed.
    """
    variants = [Variant(HIGH_PRECISION, EAGER)]
    variants += [Variant(recipe, EAGER, config=recipe_config(recipe)) for recipe in recipes]
    for each in variants:
        if each.config and (reason := no_grouped_gemm(each.config)):
            raise ValueError(f"recipe: got {each.recipe!r} with {reason}, expected {EXPECTED}")
    for shape in experts:
        E, rows, K, ff = shape
        torch.compiler.reset()
        make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        weights = make(E, 2 * ff, K).mul_(K**-0.5), make(E, K, ff).mul_(ff**-0.5)
        offs = (torch.arange(1, E + 1) * rows / E).round().to(device, torch.int32)
        x, grad, h = make(rows, K), make(rows, K), make(rows, 2 * ff)
        for part, found in (
            ("forward + backward", _layers(weights, offs, x, grad, variants, rounds, microbatches)),
            ("GEMMs alone", _gemms(weights, offs, rows, rounds)),
            ("casts alone", _casts(weights, offs, x, h, rounds)),
        ):
            about = {"part": f"{shape}: {part}", **shape._asdict()}
            yield [about | row for row in found]


def _layers(
    weights: Any, offs: Tensor, x: Tensor, grad: Tensor, variants: Any, rounds: int, many: int
) -> Iterator[Row]:
    def make(variant: Variant) -> Step:
        w13, w2 = weights
        step = LayerStep(variant, Layer(variant.config, w13, w2, offs), x, grad)
        step.microbatches = many if "held" in variant.recipe else 1
        return step

    *_, found = bench_steps(make, variants, x.device, rounds)
    for row in found:
        yield {**row, "mode": None}


def _gemms(weights: Any, offs: Tensor, rows: int, rounds: int) -> Iterator[Row]:
    """Products of both weights; float8 with scales of rows, as all recipes read them."""
    plan = plan_linear(recipe_config("rowwise"), grouped=True)
    for name, w in zip(("w13", "w2"), weights, strict=True):
        _, N, K = w.shape
        x, g = (torch.randn(rows, n, dtype=w.dtype, device=w.device) for n in (K, N))
        cast = plan.casts.weight
        x8, g8 = (cast_groups(t, offs, cast.how, row=True, col=True) for t in (x, g))
        w8: Any = quantize(w, cast, row=True, col=True)
        for gemm, plain, ours in (
            ("output", (x, w.transpose(1, 2)), (x8.row, w8.row, offs)),
            ("grad_input", (g, w), (g8.row, w8.col, offs)),
            ("grad_weight", (g.t(), x), (g8.col, x8.col, x8.ends)),
        ):
            how: Any = {"gemm": getattr(plan, gemm), "out_dtype": w.dtype}
            bf16 = functools.partial(F.grouped_mm, *plain, offs=offs)
            float8 = functools.partial(grouped_matmul, *ours, **how)
            row: Row = {"case": f"{name} {gemm}"}
            row["sqnr_db"] = check(row["case"], {"": bf16()}, {"": float8()}, GEMM_AT_LEAST)
            before, ms = _times((bf16, float8), w.device, rounds)
            flop = 2e-9 * rows * N * K
            row |= {"bf16_tflops": flop / before, "float8_tflops": flop / ms}
            yield row | {"speedup": before / ms}


def _casts(weights: Any, offs: Tensor, x: Tensor, h: Tensor, rounds: int) -> Iterator[Row]:
    """Casts to both layouts, which read twice and write two bytes, beside copies."""
    for recipe in ("tensorwise", "rowwise"):
        cast = plan_linear(recipe_config(recipe)).casts.weight
        tokens = functools.partial(cast_groups, offs=offs, how=cast.how, row=True, col=True)
        whole = functools.partial(quantize, cast=cast, row=True, col=True)
        cases: list[tuple[str, Tensor, Callable[..., object]]] = [
            ("x", x, tokens),
            ("gate and up", h, tokens),
            ("w13", weights[0], whole),
            ("w2", weights[1], whole),
        ]
        for case, data, call in cases:
            copy, ms = _times((data.clone, functools.partial(call, data)), x.device, rounds)
            row = {"case": case, "recipe": recipe, "us": ms * 1e3, "of_copy": 1.5 * copy / ms}
            yield row | {"gb_per_s": 6e-6 * data.numel() / ms}


def _times(calls: Sequence[Any], device: torch.device, rounds: int) -> list[float]:
    return take_turns([kernel_sampler([call], device, 10.0) for call in calls], rounds)
