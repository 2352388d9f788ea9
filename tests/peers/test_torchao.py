"""The same layer on the same tensors as torchao's, where that is installed: as accurate."""

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    Float8LinearConfig,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from sqnr import sqnr
from support.devices import on_devices

peer = pytest.importorskip("torchao.float8")


def three(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x)
    out.backward(grad)
    (weight,) = layer.parameters()
    assert x.grad is not None
    assert weight.grad is not None
    return [out, x.grad, weight.grad]


@on_devices
@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
def test_errors_are_those_of_torchao(outliers: bool, device: str) -> None:
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16}
    weight = torch.randn(192, 256, **options) / 16
    x, grad = torch.randn(128, 256, **options), torch.randn(128, 192, **options)
    if outliers:
        x[::7, ::31] *= 50

    def layer() -> nn.Module:
        made = nn.Linear(256, 192, bias=False, **options)
        made.weight.data.copy_(weight)
        return made

    wide = [t.double() for t in (x, weight, grad)]
    exact = [wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0]]
    take = {"module_filter_fn": lambda module, name: True}
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    ours = three(convert_to_float8_training(nn.Sequential(layer()), config=config, **take), x, grad)
    config = peer.Float8LinearConfig.from_recipe_name("tensorwise")
    converted = peer.convert_to_float8_training(nn.Sequential(layer()), config=config, **take)
    theirs = three(converted, x, grad)
    for a, b, reference in zip(ours, theirs, exact, strict=True):
        assert sqnr(reference, a.double()) == pytest.approx(sqnr(reference, b.double()), abs=0.05)


def test_a_model_that_torchao_converted_stays_and_says_so() -> None:
    model = peer.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
    reason = "which torchao converted already, expected an nn.Linear: convert the plain model"
    for classes in ([], [type(model[0])]):
        with pytest.warns(UserWarning, match=reason):
            convert_to_float8_training(model, linear_classes=classes)
        assert reason in conversion_report(model).layers[0].skip_reason


def test_a_converted_model_is_not_quantised() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
    message = r"got a weight of class Int8Tensor, expected .*; call convert_to_high_precision"
    with pytest.raises(TypeError, match=message):
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    model(torch.randn(4, 64)).sum().backward()


def test_a_model_on_its_way_back_is_quantised() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Sequential(nn.Linear(64, 64))
    plain.load_state_dict(model.state_dict())
    for each in (convert_to_high_precision(convert_to_float8_training(model)), plain):
        quantization.quantize_(each, quantization.Int8WeightOnlyConfig())
    assert type(model[0].weight) is type(plain[0].weight)
    x = torch.randn(4, 64)
    assert torch.equal(model[0](x), plain[0](x))
