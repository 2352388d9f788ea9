"""A granularity is data: all that casts and GEMMs ask of it follows from the sides of its block."""

import pytest
import torch

import tolerances
from float8.config import CastConfig, Float8LinearConfig, Granularity, ScalingGranularity
from float8.gemm import Gemm
from float8.linear.functional import apply_linear
from float8.linear.plan import Casts, plan_linear
from float8.quantize import Cast, quantize
from float8.scales import dequantised
from sqnr import sqnr
from support.models import seeded
from support.reference import reference_values


class Finer(Granularity):
    """What a new member of `ScalingGranularity` would be: a name, and the sides of its block."""

    RUNS_OF_48 = "runs_of_48", 1, 48
    SQUARES_OF_48 = "squares_of_48", 48, 48


def cast_under(granularity: Granularity) -> Cast:
    how = CastConfig()  # which takes no granularity but its own
    object.__setattr__(how, "scaling_granularity", granularity)
    return Cast(how)


@pytest.mark.parametrize(("M", "K", "N"), [(64, 96, 128), (33, 50, 41)])
def test_a_linear_layer_under_a_new_granularity(M: int, K: int, N: int) -> None:
    runs, squares = map(cast_under, Finer)
    of_runs, of_squares = Finer
    casts = Casts(runs, squares, runs, runs, squares, runs)
    with_squares = Gemm(granularities=(of_runs, of_squares))
    without = Gemm(granularities=(of_runs, of_runs))
    plan = plan_linear(Float8LinearConfig.from_recipe_name("blockwise"))._replace(
        casts=casts, output=with_squares, grad_input=with_squares, grad_weight=without
    )
    x, w = seeded(0, M, K).requires_grad_(), seeded(1, N, K).requires_grad_()
    g = seeded(2, M, N)
    y = apply_linear(x, w, None, plan, casts)
    y.backward(g)
    run, least = (1, 48), tolerances.HIGH_PRECISION
    weight = reference_values(w, (48, 48))
    assert sqnr(reference_values(x, run) @ weight.t(), y) > least
    assert sqnr(reference_values(g, run) @ weight, x.grad) > least
    across = reference_values(g.t(), run), reference_values(x.t(), run)
    assert sqnr(across[0] @ across[1].t(), w.grad) > least


@pytest.mark.parametrize("granularity", [*ScalingGranularity, *Finer])
def test_scales_have_the_shape_that_follows_from_the_block(granularity: Granularity) -> None:
    made = quantize(seeded(0, 140, 300), cast_under(granularity), row=True, col=True)
    for part in (made.row, made.col):
        assert tuple(part.scale.shape) == granularity.scales(tuple(part.data.shape))
    if granularity.square:
        values = dequantised(made.row, granularity)[:140, :300]
        assert torch.equal(dequantised(made.col, granularity)[:300, :140], values.t())
