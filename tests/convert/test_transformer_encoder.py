"""`nn.TransformerEncoder` computes the same in training and in evaluation."""

import copy

import pytest
import torch
from torch import nn

import tolerances
from float8 import all_linears, convert_to_float8_training, convert_to_high_precision
from sqnr import sqnr
from support.configs import tensorwise
from support.models import seeded

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors")


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def padding(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output where a mask leaves tokens."""
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask[1, 5:] = True
    return model(x, src_key_padding_mask=mask)[~mask]


CALLS = {
    "encoder": lambda model, x: model(x),
    "layer": lambda model, x: model.layers[0](x),
    "padding": padding,
}


@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
def test_evaluation_runs_the_layers_of_training(call: str) -> None:
    model, x = encoder(), seeded(0, 2, 8, 32)
    plain = copy.deepcopy(model).eval()
    convert_to_float8_training(model, config=tensorwise(), module_filter_fn=all_linears)
    trained, evaluated = CALLS[call](model.train(), x), CALLS[call](model.eval(), x)
    # Attention has a fast path of its own, which adds in another order.
    assert sqnr(trained, evaluated) > tolerances.HIGH_PRECISION
    assert sqnr(trained, CALLS[call](plain, x)) < tolerances.HIGH_PRECISION


@torch.no_grad()
def test_the_fast_path_is_back_after_the_way_back() -> None:
    """Nor is it gone where no layer is converted."""
    model, x = encoder().eval(), seeded(0, 2, 8, 32)
    attributes, before = [dict(vars(part)) for part in model.modules()], model(x)
    names = [set(each) for each in attributes]
    convert_to_float8_training(model, module_filter_fn=all_linears)
    convert_to_float8_training(model, config=tensorwise(emulate=True), module_filter_fn=all_linears)
    again = copy.deepcopy(model)
    for each in (model, again):
        convert_to_high_precision(each)
        assert torch.equal(each(x), before)
        left = {"_ddp_params_and_buffers_to_ignore"}
        assert [set(vars(part)) - left for part in each.modules()] == names
        assert each.use_nested_tensor
        assert [layer.activation_relu_or_gelu for layer in each.layers] == [1, 1]
    others = nn.ModuleList([model, nn.Linear(16, 16)])
    convert_to_float8_training(others, module_filter_fn=lambda mod, fqn: fqn == "1")
    assert model.use_nested_tensor
    assert model.layers[0].activation_relu_or_gelu == 1
