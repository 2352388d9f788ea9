"""SQNR, underflow and saturation, against numbers computed by hand and against theory."""

import importlib
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from float8 import all_linears, convert_to_float8_training
from float8.formats import E4M3
from float8_lab.numerics import LayerCast, MeasuredCast, casts_of, compare, decibels, measure_cast
from support.configs import of_recipe, tensorwise

# SQNR in dB of normal numbers that are cast to e4m3 without leaving its normal range.
OF_E4M3 = 31.5
GEMMS = ("output", "grad_input", "grad_weight")
M, K, N = 384, 512, 256


def numbers_of(cast: MeasuredCast, x: Tensor) -> LayerCast:
    return LayerCast.of("it", cast, measure_cast(x, cast).tolist())


# With amax 448 the scale is 1. 2^-11 is less than half of the smallest number, 2^-9; 1.0625 lies
# between 1 and 1.125 and becomes the even one.
BY_HAND = torch.tensor([[448.0, 1.0, 1.0625, 2.0**-11, 0.0]])
SIGNAL = 448.0**2 + 1 + 1.0625**2 + 2.0**-22


def test_a_cast_by_hand() -> None:
    cast = casts_of(tensorwise())[0]
    assert (cast.role, cast.how.dtype) == ("input", E4M3)
    noise = 0.0625**2 + 2.0**-22
    columns = (0.0625 / 1.0625) ** 2 + 1  # relative errors: the fourth is lost, the last is zero
    sums = [448.0, 5, 4, 1, 0, 0, SIGNAL, noise, noise / SIGNAL, 1, columns, 4]
    expected = torch.tensor(sums, dtype=torch.float64)
    torch.testing.assert_close(measure_cast(BY_HAND, cast), expected, rtol=1e-12, atol=0)
    numbers = LayerCast.of("it", cast, sums)
    assert (numbers.layer, numbers.role, numbers.gemms) == ("it", cast.role, cast.gemms)
    assert (numbers.amax, numbers.underflow, numbers.saturation) == (448.0, 0.25, 0.0)
    assert numbers.sqnr_db == pytest.approx(10 * math.log10(SIGNAL / noise))
    assert numbers.even_db == pytest.approx(10 * math.log10(4 / columns))


def test_zeros_what_is_not_finite_and_what_float32_cannot_square() -> None:
    cast = casts_of(tensorwise())[0]
    zeros = numbers_of(cast, torch.zeros(2, 16))
    assert (zeros.amax, zeros.underflow, zeros.saturation) == (0.0, 0.0, 0.0)
    assert (zeros.sqnr_db, zeros.even_db) == (math.inf, math.inf)
    for bad in (math.nan, math.inf):
        x = torch.ones(2, 16)
        x[0, 3] = bad
        numbers = numbers_of(cast, x)
        assert not math.isfinite(numbers.amax)
        assert math.isnan(numbers.sqnr_db)
        assert math.isnan(numbers.even_db)
    tiny = numbers_of(cast, torch.randn(64, 64) * 1e-25)
    assert tiny.sqnr_db == pytest.approx(OF_E4M3, abs=0.5)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_casts_of_columns_are_those_of_the_transposed_tensor(recipe: str) -> None:
    x = torch.randn(200, 136) * torch.logspace(0, -6, 136)
    row, col = (cast for cast in casts_of(of_recipe(recipe)) if cast.role == "grad_output")
    there, back = measure_cast(x, col), measure_cast(x.t().contiguous(), row)
    torch.testing.assert_close(there, back, rtol=1e-12, atol=0)
    assert not torch.equal(measure_cast(x, col), measure_cast(x, row))


# ---------------------------------------------------------------- the GEMMs of a layer


def exactness(convert: Any, weight: Tensor, x: Tensor, grad: Tensor) -> dict[str, Any]:
    """SQNR in dB of each GEMM, and that of its mean row or channel."""
    layer = nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.bfloat16)
    layer.weight.data = weight.clone()
    layer = convert(layer)
    x = x.detach().requires_grad_()
    y = layer(x)
    results = y.detach(), *torch.autograd.grad(y, (x, layer.weight), grad)
    x, grad, weight = x.detach().double(), grad.double(), weight.double()
    exact, found = (x @ weight.t(), grad @ weight, grad.t() @ x), {}
    for gemm, wanted, got in zip(GEMMS, exact, results, strict=True):
        signal, noise, *rows_and_columns = compare(wanted, got).tolist()
        relative, count = rows_and_columns[2:] if gemm == "grad_weight" else rows_and_columns[:2]
        found[gemm] = decibels(signal, noise)
        found[f"even {gemm}"] = decibels(count, relative)
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_at_least_as_exact_as_torchao(recipe: str) -> None:
    """With hot channels, and with tiny gradients of as many sizes as there are tokens."""
    pytest.importorskip("torchao.float8")
    torchao: Any = importlib.import_module("torchao.float8")

    ours = partial(convert_to_float8_training, config=recipe, module_filter_fn=all_linears)
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    theirs = partial(torchao.convert_to_float8_training, config=config)
    shapes = (N, K), (M, K), (M, N), (M, K)
    weight, x, grad, tokens = (torch.randn(shape).bfloat16() for shape in shapes)
    hot, tiny = torch.randperm(K)[:4], 1e-10 * torch.exp(3 * tokens[:, :1].float())
    x[:, hot] *= 2.0**14
    weight[:, hot] /= 2.0**14
    for step in ((x, grad), (tokens, (grad * tiny).bfloat16())):
        mine, other = (exactness(convert, weight, *step) for convert in (ours, theirs))
        for gemm, sqnr in other.items():
            assert mine[gemm] - sqnr >= -0.1, gemm
