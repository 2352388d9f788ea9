"""Token counts that data decide, `x[mask]`: one graph for all of them, also for none at all."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tolerances
from float8 import (
    Float8Weights,
    all_linears,
    convert_to_float8_training,
    save_gemm_outputs,
    sync_float8_amax_and_scale_history,
    update_float8_weights,
)
from sqnr import same_bits, sqnr
from support.configs import FINER, RECIPES, of_recipe
from support.devices import on_devices
from support.models import fp8_state, seeded

COUNTS = (40, 0, 1, 127, 128, 129)
SELECTIVE = partial(create_selective_checkpoint_contexts, save_gemm_outputs)


@pytest.fixture(autouse=True)
def _follow_masks() -> Any:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


class Masked(nn.Module):
    """Two layers on the tokens of a mask, the second one under selective checkpointing."""

    def __init__(self, device: str, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 72, device=device, dtype=torch.bfloat16)
        self.second = nn.Linear(72, 48, device=device, dtype=torch.bfloat16)
        convert_to_float8_training(self, module_filter_fn=all_linears, **how)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.first(x[mask])
        if not self.training:
            return self.second(y)
        return checkpoint(self.second, y, use_reentrant=False, context_fn=SELECTIVE)


def inputs(count: int, device: str, *shape: int) -> tuple[Tensor, Tensor]:
    x = seeded(count, 160, *shape, device=device, dtype=torch.bfloat16).requires_grad_()
    return x, seeded(0, 160).argsort().to(device) < count


def results(model: nn.Module, run: Any, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    y = run(x, mask)
    y.backward(seeded(1, *y.shape, device=y.device, dtype=y.dtype))
    made = {"output": y, "grad_input": x.grad}
    made |= {name: weight.grad for name, weight in model.named_parameters()}
    x.grad = None
    return made


KINDS = [
    *[pytest.param(name, {}, id=name) for name in (*RECIPES, *FINER)],
    pytest.param("tensorwise", {"float8_weights": Float8Weights.HELD}, id="held"),
    pytest.param("rowwise", {"pad_inner_dim": True, "emulate": True}, id="emulated"),
]


@on_devices
@pytest.mark.parametrize(("recipe", "more"), KINDS)
def test_one_graph_with_the_bits_of_eager_mode(recipe: str, more: Any, device: str) -> None:
    model = Masked(device, config=of_recipe(recipe, **more))
    update_float8_weights(model)
    eager = copy.deepcopy(model)
    update_float8_weights(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for count in COUNTS:
        x, mask = inputs(count, device, 2, 64)
        wanted, got = results(eager, eager, x, mask), results(model, compiled, x, mask)
        for name, value in wanted.items():
            assert same_bits(got[name], value), (count, name)
        for each in (model, eager) if recipe == "delayed" else ():
            sync_float8_amax_and_scale_history(each)
        for name, value in fp8_state(eager).items():
            assert same_bits(fp8_state(model)[name], value), (count, name)
    assert counter.frame_count == 1


@on_devices
@pytest.mark.parametrize(
    "recipe", ["blockwise", pytest.param("delayed", marks=pytest.mark.exhaustive)]
)
def test_under_inductor(recipe: str, device: str) -> None:
    model = Masked(device, config=recipe)
    compiled = torch.compile(model, fullgraph=True)
    for count in COUNTS:
        x, mask = inputs(count, device, 64)
        wanted, got = results(model, model, x, mask), results(model, compiled, x, mask)
        for name, value in wanted.items():
            if value.any():
                assert sqnr(value, got[name]) >= tolerances.COMPILED, (count, name)
            else:
                assert same_bits(got[name], value), (count, name)


@on_devices
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_an_exported_model_takes_any_count(recipe: str, strict: bool, device: str) -> None:
    model = Masked(device, config=recipe).eval()
    with torch.no_grad():
        exported = torch.export.export(model, inputs(40, device, 64), strict=strict).module()
        for count in COUNTS:
            given = inputs(count, device, 64)
            assert same_bits(exported(*given), model(*given)), count
