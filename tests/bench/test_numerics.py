"""SQNR, underflow and saturation, against numbers computed by hand and against theory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from float8.formats import E4M3
from float8.linear.plan import Casts
from float8_lab.bench.numerics import FAMILIES, Sample, bench_numerics, random_samples
from float8_lab.bench.shapes import Shape
from float8_lab.bench.variants import EAGER, make_variants
from float8_lab.numerics import LayerCast, MeasuredCast, casts_of, measure_cast
from support.configs import of_recipe, tensorwise

# SQNR in dB of normal numbers that are cast to a format without leaving its normal range.
OF_E4M3, OF_E5M2 = 31.5, 25.5
GEMMS = ("output", "grad_input", "grad_weight")


def db(*noises: float) -> float:
    """The SQNR of a product whose operands have these, in dB."""
    return -10 * math.log10(sum(10 ** (-noise / 10) for noise in noises))


def numbers_of(cast: MeasuredCast, x: Tensor, *casts: Casts) -> LayerCast:
    return LayerCast.of("it", cast, measure_cast(x, cast, *casts))


def rows(sample: Sample, *recipes: str, peers: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    (found,) = bench_numerics([("it", sample)], make_variants(recipes, [EAGER], peers))
    return {row["recipe"]: row for row in found}


# With amax 448 the scale is 1. 2^-11 is less than half of the smallest number, 2^-9; 1.0625 lies
# between 1 and 1.125 and becomes the even one.
BY_HAND = torch.tensor([[448.0, 1.0, 1.0625, 2.0**-11, 0.0]])
SIGNAL = 448.0**2 + 1 + 1.0625**2 + 2.0**-22


def test_a_cast_by_hand() -> None:
    cast = casts_of(tensorwise())[0]
    assert (cast.role, cast.how.dtype) == ("input", E4M3)
    noise = 0.0625**2 + 2.0**-22
    columns = (0.0625 / 1.0625) ** 2 + 1  # relative errors: the fourth is lost, the last is zero
    sums = [448.0, 4, 1, 0, SIGNAL, noise, noise / SIGNAL, 1, columns, 4]
    expected = torch.tensor(sums, dtype=torch.float64)
    torch.testing.assert_close(measure_cast(BY_HAND, cast), expected, rtol=1e-12, atol=0)
    numbers = LayerCast.of("it", cast, expected)
    assert (numbers.layer, numbers.role, numbers.gemms) == ("it", cast.role, cast.gemms)
    assert (numbers.amax, numbers.underflow, numbers.saturation) == (448.0, 0.25, 0.0)
    assert numbers.sqnr_db == pytest.approx(10 * math.log10(SIGNAL / noise))
    assert numbers.even_db == pytest.approx(10 * math.log10(4 / columns))


def test_what_cannot_be_measured() -> None:
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


def test_gradients_too_small_for_float32_to_square() -> None:
    cast = casts_of(tensorwise())[0]
    tiny = numbers_of(cast, torch.randn(64, 64) * 1e-25)
    assert tiny.sqnr_db == pytest.approx(OF_E4M3, abs=0.5)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_casts_of_columns_are_those_of_the_transposed_tensor(recipe: str) -> None:
    x = torch.randn(200, 136) * torch.logspace(0, -6, 136)
    row, col = (cast for cast in casts_of(of_recipe(recipe)) if cast.role == "grad_output")
    there, back = measure_cast(x, col), measure_cast(x.t().contiguous(), row)
    torch.testing.assert_close(there, back, rtol=1e-12, atol=0)
    assert not torch.equal(measure_cast(x, col), measure_cast(x, row))


FACTOR = 2.0**15
M, K, N = 384, 512, 256


def flat(amax: Tensor) -> float:
    """SQNR of numbers of standard deviation 1 below the normal range of e4m3, in dB.

    There all numbers have the same distance, 2^-9 of the scale.
    """
    step = 2.0**-9 * amax.item() / 448
    return -10 * math.log10(step**2 / 12)


def test_theory_on_hot_tokens() -> None:
    x, weight, grad = (torch.randn(size) for size in ((M, K), (N, K), (M, N)))
    x[:3] *= FACTOR
    x, weight, grad = (tensor.bfloat16() for tensor in (x, weight, grad))
    of = rows(Sample(weight, [(x, grad)]), "tensorwise", "rowwise", "blockwise")
    below, above = db(flat(x.abs().max()), OF_E4M3), db(OF_E4M3, OF_E4M3)
    assert above - below > 10  # dB, what scales per token gain
    assert of["tensorwise"]["even_output"] == pytest.approx(below, abs=0.6)
    for recipe in ("rowwise", "blockwise"):
        assert of[recipe]["even_output"] == pytest.approx(above, abs=0.6)
        # Of the whole output the hot tokens are nearly all, and these are exact enough.
        assert of[recipe]["sqnr_output"] - of["tensorwise"]["sqnr_output"] < 1


def test_without_outliers_only_the_formats_count() -> None:
    of = rows(Sample(*tensors(1)), "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
    assert all(of["bf16"][f"sqnr_{gemm}"] > 50 for gemm in GEMMS)
    wide, narrow = db(OF_E4M3, OF_E5M2), db(OF_E4M3, OF_E4M3)
    for recipe, row in of.items():
        gradients = wide if recipe == "tensorwise" else narrow
        exact = {} if recipe != "rowwise_with_gw_hp" else {"grad_weight": of["bf16"]}
        for gemm in GEMMS if recipe != "bf16" else ():
            expected = narrow if gemm == "output" else gradients
            if gemm in exact:
                expected = exact[gemm][f"sqnr_{gemm}"]
            assert row[f"sqnr_{gemm}"] == pytest.approx(expected, abs=0.6), (recipe, gemm)


def tensors(growth: float) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """A weight, and three steps of which the last has an input larger by `growth`."""
    steps = [(torch.randn(M, K).bfloat16(), torch.randn(M, N).bfloat16()) for _ in range(3)]
    steps[-1][0].mul_(growth)
    return torch.randn(N, K).bfloat16(), steps


def test_delayed_scaling_has_seen_the_steps_before() -> None:
    of = rows(Sample(*tensors(4)), "tensorwise", "delayed")
    # A quarter exceeds the amax of about 4.6 before, that is 1.15 standard deviations now.
    assert of["delayed"]["sqnr_output"] < of["tensorwise"]["sqnr_output"] - 10
    assert of["delayed"]["sqnr_grad_input"] > 20  # which reads no input
    again = rows(Sample(*tensors(1)), "tensorwise", "delayed")
    assert again["delayed"]["sqnr_output"] > again["tensorwise"]["sqnr_output"] - 1


@pytest.mark.parametrize("family", ["hot channels", "tiny gradients"])
def test_at_least_as_exact_as_torchao(family: str) -> None:
    pytest.importorskip("torchao.float8")
    drawn = dict(random_samples([Shape(256, 384, 128)], torch.device("cpu")))[family]
    recipes = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    of = rows(drawn, *recipes, peers=("torchao",))
    for recipe in recipes:
        for gemm in GEMMS:
            for kind in ("sqnr", "even"):
                column = f"{kind}_{gemm}"
                assert of[recipe][column] - of[f"torchao {recipe}"][column] >= -0.1, column


def test_families_are_what_their_names_say() -> None:
    drawn = dict(random_samples([Shape(128, 64, 32)], torch.device("cpu")))
    assert tuple(drawn) == FAMILIES
    inputs = {case: family.steps[-1][0].double() for case, family in drawn.items()}
    for case, dim in (("hot channels", 0), ("hot tokens", 1)):
        sizes = inputs[case].square().mean(dim).sqrt().sort().values
        assert sizes[-4] / sizes[-5] > 2**12
    steps = drawn["hot channels"].steps
    hot = [step[0].abs().mean(0).topk(4).indices.sort().values for step in steps]
    assert torch.equal(hot[0], hot[-1])  # the same channels at each step
    kurtosis = inputs["heavy tails"].pow(4).mean() / inputs["heavy tails"].square().mean() ** 2
    assert kurtosis > 6  # 3 for normal numbers
    assert drawn["tiny gradients"].steps[-1][1].abs().median() < 1e-8
