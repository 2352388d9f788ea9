"""`dynamic=True` from the start, and outputs whose columns were padded."""

import pytest
import torch
from torch import nn

from float8 import convert_to_float8_training
from support.configs import delayed, tensorwise


@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
def test_two_layers_compile_with_dynamic_shapes(config) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_float8_training(model, config=config)
    compiled = torch.compile(model, dynamic=True, backend="aot_eager", fullgraph=True)
    for tokens in (16, 40):
        x = torch.randn(tokens, 32)
        assert torch.equal(compiled(x), model(x))


def test_padded_columns_leave_an_output_like_any_other() -> None:
    layer = convert_to_float8_training(nn.Linear(64, 10, bias=False))
    output = layer(torch.randn(8, 64))
    assert output.is_contiguous()
    assert output.view(-1).shape == (80,)
    torch.relu_(output).sum().backward()
