"""An input that was cast before, for several layers at once."""

import pytest
import torch
from torch import nn

from float8 import Float8Linear, Float8LinearConfig, Float8Tensor
from support.configs import delayed, of_recipe, tensorwise
from support.models import seeded


def layer_of(config: Float8LinearConfig) -> Float8Linear:
    torch.manual_seed(0)
    return Float8Linear.from_float(nn.Linear(24, 40), config)


@pytest.mark.parametrize("compiled", [False, True])
def test_its_bytes_are_taken(compiled: bool) -> None:
    """Of dims that need padding, too; gradients go to what was cast."""
    results = []
    for cast in (False, True):
        layer = layer_of(tensorwise())
        x, g = seeded(1, 2, 5, 24).requires_grad_(), seeded(2, 2, 5, 40)

        def run(x, layer=layer, cast=cast):
            return layer(Float8Tensor.from_high_precision(x) if cast else x)

        y = torch.compile(run, fullgraph=True, backend="aot_eager")(x) if compiled else run(x)
        y.backward(g)
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_under_autocast_it_stays_as_it_is() -> None:
    x, layer = seeded(1, 4, 24, dtype=torch.bfloat16), layer_of(tensorwise())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(Float8Tensor.from_high_precision(x)), layer(x))


def test_delayed_scaling_records_its_amax() -> None:
    layer, x = layer_of(delayed()), seeded(1, 4, 24)
    cast = Float8Tensor.from_high_precision(x)
    cast._amax = x.abs().amax()
    with torch.no_grad():
        layer(cast)
    assert layer.fp8_amax_input == 0
    layer(cast)
    assert layer.fp8_amax_input == cast._amax


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_a_layer_that_casts_in_another_way_refuses_it(recipe: str) -> None:
    cast = Float8Tensor.from_high_precision(seeded(1, 4, 24))
    with pytest.raises(ValueError, match=r"got input in(.)*expected(.)*to_original_precision"):
        layer_of(of_recipe(recipe))(cast)
