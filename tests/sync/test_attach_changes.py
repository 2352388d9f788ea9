"""Attachments to models that change meanwhile."""

import torch
from torch import nn

from float8 import (
    Float8Linear,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    convert_to_high_precision,
)
from support.configs import delayed


def test_an_attachment_outlives_the_way_back() -> None:
    """It writes nothing on layers in high precision, which can be converted again."""
    model = nn.Sequential(nn.Linear(32, 32))
    convert_to_float8_training(model, config=delayed(), module_filter_fn=all_linears)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach_to_optimizer(model, optimizer)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    convert_to_high_precision(model)
    attachment.remove()
    optimizer.step()
    convert_to_float8_training(model, config=delayed(), module_filter_fn=all_linears)
    assert isinstance(model[0], Float8Linear)
    assert not model[0].attached
