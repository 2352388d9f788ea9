"""Compiled code is as accurate as eager code, at sizes that take Inductor many kernels."""

import pytest
import torch
from torch import Tensor

from float8.config import Float8LinearRecipeName
from float8_lab.bench.model import Size, model_step
from float8_lab.bench.variants import COMPILED, EAGER, Variant, make_variants, many_compilations
from sqnr import sqnr

LOST = 0.5
"""At most so many dB: sums in another order, and values that Inductor does not round to bf16."""


def results_of(variant: Variant) -> dict[str, Tensor]:
    step = model_step(variant, Size("150m", blocks=1, seq_len=4096), torch.device("cuda"))
    step.warm_up()
    return {name: x.clone() for name, x in step().items()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe",
    [*(recipe.value for recipe in Float8LinearRecipeName), "tensorwise+fuse", "delayed+fuse"],
)
def test_a_block_loses_nothing_by_being_compiled(recipe: str) -> None:
    torch._dynamo.reset()
    (bf16, eager), (_, compiled) = (make_variants([recipe], [mode]) for mode in (EAGER, COMPILED))
    with many_compilations():
        exact, one, other = (results_of(variant) for variant in (bf16, eager, compiled))
    assert len(exact) > 7
    for name, expected in exact.items():
        assert sqnr(expected, other[name]) > sqnr(expected, one[name]) - LOST, name
