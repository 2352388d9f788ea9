"""The same layer on the same tensors as torchao's: as accurate. Its low-bit optimizers."""

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    Float8LinearConfig,
    all_linears,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from sqnr import same_bits, sqnr
from support.configs import RECIPES
from support.copies import through_file
from support.devices import on_devices
from support.models import FeedForward, fp8_state, seeded

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


optim = pytest.importorskip("torchao.optim")


def made(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = nn.Sequential(FeedForward(64, 128), FeedForward(64, 128))
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    attachment = attach_to_optimizer(model, optimizer)
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        x = seeded(seed, 32, 64)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    attachment.remove()
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"])
def test_it_trains_is_synced_and_resumes_bit_by_bit(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function
    )  # of each parameter's step
    model = made(recipe)
    optimizer = getattr(optim, name)(model.parameters(), lr=1e-2)
    first = train(model, optimizer, range(2))
    if recipe == "delayed":
        histories = [x for name, x in fp8_state(model).items() if "history" in name]
        assert all((x > 0).sum() == 2 for x in histories)
    again = made(recipe)
    again.load_state_dict(through_file(model.state_dict(), False))
    resumed = getattr(optim, name)(again.parameters(), lr=1e-2)
    resumed.load_state_dict(through_file(optimizer.state_dict(), False))
    rest = train(model, optimizer, range(2, 6))
    assert train(again, resumed, range(2, 6)) == rest
    assert rest[-1] < first[0]
    assert all(same_bits(x, again.state_dict()[name]) for name, x in model.state_dict().items())
