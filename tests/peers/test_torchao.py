"""torchao's layer on the same tensors: as accurate. Models that it converted, or is to quantise.

MXFP8 as torchao has it: bytes, exponents, their order, and the three products of a layer.
"""

import pytest
import torch
from torch import Tensor, nn

import float8
from float8 import (
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from sqnr import sqnr
from support.devices import GPU
from support.lazily import Lazily

peer, quantization = Lazily("torchao.float8"), Lazily("torchao.quantization")


def three(weight: Tensor, x: Tensor, grad: Tensor, recipe: str, library=None) -> list[Tensor]:
    """Return output and gradients of a layer in float8, or in high precision."""
    x = x.detach().requires_grad_()
    layer = nn.Linear(256, 192, bias=False, device=x.device, dtype=x.dtype)
    layer.weight.data.copy_(weight)
    if library is not None:
        config = library.Float8LinearConfig.from_recipe_name(recipe)
        take = {"module_filter_fn": all_linears}
        layer = library.convert_to_float8_training(nn.Sequential(layer), config=config, **take)[0]
    out = layer(x)
    return [out, *torch.autograd.grad(out, (x, layer.weight), grad)]


@pytest.mark.parametrize(
    ("device", "recipe"),
    [
        *(("cpu", recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
        pytest.param("cuda", "tensorwise", marks=GPU),
    ],
)
@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
def test_errors_are_those_of_torchao(outliers: bool, recipe: str, device: str) -> None:
    """Or less, with hot channels and tiny gradients of as many sizes as there are tokens."""
    options = {"device": device, "dtype": torch.bfloat16}
    weight = torch.randn(192, 256, **options) / 16
    x, grad = torch.randn(128, 256, **options), torch.randn(128, 192, **options)
    if outliers:
        x[::7, ::31] *= 50
        if recipe != "tensorwise":
            x[:, :4] *= 2.0**14
            weight[:, :4] /= 2.0**14
            grad *= 1e-10 * torch.exp(3 * x[:, 4:5].float())
    exact = three(weight.double(), x.double(), grad.double(), recipe)
    ours, theirs = (three(weight, x, grad, recipe, library) for library in (float8, peer))
    for a, b, reference in zip(ours, theirs, exact, strict=True):
        more = sqnr(reference, a) - sqnr(reference, b)
        assert more > (-0.05 if recipe == "tensorwise" else -0.1)
        assert more < 0.05 or recipe != "tensorwise"


def test_a_model_that_torchao_converted_stays_and_says_so() -> None:
    model = peer.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
    reason = "which torchao converted already, expected an nn.Linear: convert the plain model"
    for classes in ([], [type(model[0])]):
        with pytest.warns(UserWarning, match=reason):
            convert_to_float8_training(model, linear_classes=classes)
        assert reason in conversion_report(model).layers[0].skip_reason


def test_a_model_is_quantised_on_its_way_back_only() -> None:
    model, plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Sequential(nn.Linear(64, 64))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 64)
    message = r"got a weight of class Int8Tensor, expected .*; call convert_to_high_precision"
    with pytest.raises(TypeError, match=message):
        quantization.quantize_(
            convert_to_float8_training(model), quantization.Int8WeightOnlyConfig()
        )
    model(x).sum().backward()
    for each in (convert_to_high_precision(model), plain):
        quantization.quantize_(each, quantization.Int8WeightOnlyConfig())
    assert type(model[0].weight) is type(plain[0].weight)
    assert torch.equal(model[0](x), plain[0](x))
