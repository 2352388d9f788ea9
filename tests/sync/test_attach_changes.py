"""Attachments to models that change meanwhile."""

import gc

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


def test_of_two_attachments_one_is_left() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=delayed())
    first, second = (torch.optim.SGD(model.parameters(), 1e-3) for _ in "ab")
    attachment, _ = attach_to_optimizer(model, first), attach_to_optimizer(model, second)
    attachment.remove()
    attachment.remove()  # once more changes nothing
    assert model[0].attached
    del second
    gc.collect()
    assert not model[0].attached
