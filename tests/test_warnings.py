"""Warnings name the line of user code that called the library, in eager and in compiled code."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from float8 import (
    Float8LinearConfig,
    Float8Tensor,
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    update_float8_weights,
)
from float8.checkpoints import load_float8_checkpoint, save_float8_checkpoint
from support.devices import E4M3

HELD = Float8LinearConfig(float8_weights=Float8Weights.HELD)


class Subclass(torch.Tensor):
    """Is held by no layer."""


def model_of(config: Any = HELD) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)  # type: ignore[no-any-return]


def unheld() -> nn.Sequential:
    model = model_of()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Subclass))
    return model


def nothing_to_convert(_: Path) -> Callable[[], Any]:
    return lambda: convert_to_float8_training(nn.ReLU())


def weights_that_cannot_be_held(_: Path) -> Callable[[], Any]:
    model = unheld()
    return lambda: update_float8_weights(model)


def an_optimizer_step(_: Path) -> Callable[[], Any]:
    model = unheld()
    optimizer = torch.optim.SGD(model.parameters())
    with warnings.catch_warnings(action="ignore"):
        attach_to_optimizer(model, optimizer)
    model[0].weight.grad = torch.zeros(32, 32)
    return lambda: optimizer.step()


def a_product(_: Path) -> Callable[[], Any]:
    x = Float8Tensor.from_high_precision(torch.randn(32, 32), E4M3)
    return lambda: x @ x


def another_configuration(_: Path) -> Callable[[], Any]:
    state, model = model_of("delayed").state_dict(), model_of()
    return lambda: model.load_state_dict(state)


def meta_tensors_that_are_left(folder: Path) -> Callable[[], Any]:
    save_float8_checkpoint(model_of(), folder)
    model = nn.Sequential(nn.Linear(32, 32, bias=False)).to("meta")
    model.register_buffer("positions", torch.empty(2, device="meta"), persistent=False)
    return lambda: load_float8_checkpoint(model, folder)


EAGER = (
    nothing_to_convert,
    weights_that_cannot_be_held,
    an_optimizer_step,
    a_product,
    another_configuration,
    meta_tensors_that_are_left,
)
COMPILED = weights_that_cannot_be_held, a_product


@pytest.mark.parametrize(
    ("of", "compiled"), [*((x, False) for x in EAGER), *((x, True) for x in COMPILED)]
)
def test_warnings_point_to_user_code(of: Any, compiled: bool, tmp_path: Path) -> None:
    call = of(tmp_path)
    _, line = inspect.getsourcelines(call)
    torch._dynamo.reset()
    run: Any = torch.compile(call, backend="aot_eager") if compiled else call
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    ours = [each for each in told if str(each.message).startswith("float8: ")]
    assert ours
    assert {(each.filename, each.category) for each in ours} == {(__file__, UserWarning)}
    if of is not a_product or not compiled:  # which warns as it is traced, within `run()`
        assert {each.lineno for each in ours} == {line}
