"""`float8 bench experts`: layers of experts, forward and backward."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.config import Float8LinearConfig, Float8Weights
from float8.experts.functional import apply_grouped
from float8.experts.plan import EXPECTED, no_grouped_gemm, plan_experts
from float8.weights.held import Held, hold
from float8_lab.bench.step import Results, Row, Step, bench_steps
from float8_lab.bench.variants import EAGER, HIGH_PRECISION, Variant
from float8_lab.trainer.recipes import recipe_config

RECIPES = ["tensorwise", "tensorwise+held", "rowwise", "rowwise+held", "rowwise_with_gw_hp"]
RECIPES += ["blockwise", "blockwise+held"]


class Experts(NamedTuple):
    """E experts, [2 * ff, hidden] and [hidden, ff] each, and the rows that they share."""

    E: int
    rows: int
    hidden: int
    ff: int

    def __str__(self) -> str:
        names = (name for name, each in EXPERTS.items() if each == self)
        return next(names, ",".join(map(str, self)))


EXPERTS = {
    "mixtral-8x7b": Experts(8, 16_384, 4096, 14_336),
    "deepseek-v3": Experts(8, 32_768, 7168, 2048),  # of one of 32 ranks
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
        self.plan = plan_experts(config) if config else None
        if w13.is_cuda:  # as trainers do: one kernel each way, the same for all variants
            self._swiglu = torch.compile(_swiglu, fullgraph=True, dynamic=False)
        self.cast_held()

    def cast_held(self) -> None:
        """Cast weights that are held, as it is due at each step of an optimizer."""
        self.held: list[Held | None] = [None, None]
        if self.config and self.plan and self.config.float8_weights is Float8Weights.HELD:
            self.held = [hold(w, self.plan.casts.weight) for w in (self.w13, self.w2)]

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

    def __init__(
        self, weights: Any, offs: Tensor, data: Any, microbatches: int, variant: Variant
    ) -> None:
        w13, w2 = weights
        super().__init__(variant, Layer(variant.config, w13, w2, offs), *data)
        self.microbatches = microbatches if "held" in variant.recipe else 1

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
    """Time layers of experts, forward and backward of one microbatch; after a shape, all rows yet.

    Weights that are held are cast once in `microbatches`. SwiGLU is compiled on GPUs, all else is
    eager. Experts have as many rows each. Each layer is compared with bf16's before it is timed.
    """
    variants = [Variant(HIGH_PRECISION, EAGER)]
    variants += [Variant(recipe, EAGER, config=recipe_config(recipe)) for recipe in recipes]
    for each in variants:
        if each.config and (reason := no_grouped_gemm(each.config)):
            raise ValueError(f"recipe: got {each.recipe!r} with {reason}, expected {EXPECTED}")
    all_rows: list[Row] = []
    for shape in experts:
        E, rows, K, ff = shape
        torch.compiler.reset()
        make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        weights = make(E, 2 * ff, K).mul_(K**-0.5), make(E, K, ff).mul_(ff**-0.5)
        offs = (torch.arange(1, E + 1) * rows / E).round().to(device, torch.int32)
        data = make(rows, K), make(rows, K)
        step = functools.partial(LayerStep, weights, offs, data, microbatches)
        *_, found = bench_steps(step, variants, device, rounds)
        part = {"part": str(shape), **shape._asdict()}
        all_rows += [{**part, **row, "mode": None} for row in found]
        yield [*all_rows]
