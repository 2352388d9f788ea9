"""A granularity is data: all that casts and GEMMs ask of it follows from the sides of its block."""

import pytest
import torch
from torch import Tensor

from float8.config import Float8LinearConfig, Granularity, ScalingGranularity
from float8.formats import E4M3, FLOAT8_MAX
from float8.gemm import Gemm
from float8.linear.functional import apply_linear
from float8.linear.plan import Casts, plan_linear
from float8.quantize.quantize import Cast, quantize
from float8.quantize.spec import CastSpec, dequantised
from sqnr import sqnr
from support.models import seeded


class Finer(Granularity):
    """What a new member of `ScalingGranularity` would be: a name, and the sides of its block."""

    RUNS_OF_32 = "runs_of_32", 1, 32
    SQUARES_OF_32 = "squares_of_32", 32, 32


def rounded(x: Tensor, height: int, width: int) -> Tensor:
    """`x` [R, C] through float8 and back, in float64, block by block."""
    out = torch.empty_like(x, dtype=torch.float64)
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            at = slice(top, top + height), slice(left, left + width)
            scale = (x[at].abs().max().double() / FLOAT8_MAX[E4M3]).float()
            out[at] = (x[at] * (1 / scale)).to(E4M3).double() * scale.double()
    return out


@pytest.mark.parametrize(("M", "K", "N"), [(64, 96, 128), (33, 50, 41)])
def test_a_linear_layer_under_a_new_granularity(M: int, K: int, N: int) -> None:
    runs, squares = (Cast(CastSpec(E4M3, each)) for each in Finer)
    of_runs, of_squares = Finer
    casts = Casts(runs, squares, runs, runs, squares, runs)
    with_squares, without = (
        Gemm(granularities=(of_runs, of_squares)),
        Gemm(granularities=2 * (of_runs,)),
    )
    plan = plan_linear(Float8LinearConfig.from_recipe_name("blockwise"))._replace(
        casts=casts, output=with_squares, grad_input=with_squares, grad_weight=without
    )
    x, w = seeded(0, M, K).requires_grad_(), seeded(1, N, K).requires_grad_()
    g = seeded(2, M, N)
    y = apply_linear(x, w, None, plan, casts)
    y.backward(g)
    weight = rounded(w.detach(), 32, 32)
    assert sqnr(rounded(x.detach(), 1, 32) @ weight.t(), y) > 100
    assert sqnr(rounded(g, 1, 32) @ weight, x.grad) > 100
    across = rounded(g.t(), 1, 32), rounded(x.detach().t(), 1, 32)
    assert sqnr(across[0] @ across[1].t(), w.grad) > 100


@pytest.mark.parametrize("granularity", [*ScalingGranularity, *Finer])
def test_scales_have_the_shape_that_follows_from_the_block(granularity: Granularity) -> None:
    made = quantize(seeded(0, 140, 300), Cast(CastSpec(E4M3, granularity)), row=True, col=True)
    for part in (made.row, made.col):
        assert tuple(part.scale.shape) == granularity.scales(tuple(part.data.shape))
    if granularity.square:
        values = dequantised(made.row, granularity)[:140, :300]
        assert torch.equal(dequantised(made.col, granularity)[:300, :140], values.t())


def test_members_are_told_by_their_names() -> None:
    assert [each.value for each in ScalingGranularity] == [
        "tensorwise", "axiswise", "block_1x128", "block_128x128",
    ]  # fmt: skip
    assert all(ScalingGranularity(each.value) is each for each in ScalingGranularity)
