"""Token counts that data decide, `x[mask]`: one graph for all of them, also for none at all."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tolerances
from float8 import (
    Float8Weights,
    all_linears,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
    update_float8_weights,
)
from sqnr import assert_close, same_bits
from support.configs import of_recipe
from support.devices import GPU, on_devices
from support.graphs import make_no_code
from support.models import fp8_state, gradients, seeded
from support.rings import short
from support.training import WRAPPINGS

COUNTS = (40, 0, 1, 129)


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
        how = "selective-checkpoint" if self.training else "plain"
        return WRAPPINGS[how](self.second, self.first(x[mask]))


def inputs(count: int, device: str, *shape: int) -> tuple[Tensor, Tensor]:
    x = seeded(count, 160, *shape, device=device, dtype=torch.bfloat16).requires_grad_()
    return x, seeded(0, 160).argsort().to(device) < count


def results(model: nn.Module, run: Any, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    y = run(x, mask)
    y.backward(seeded(1, *y.shape, device=y.device, dtype=y.dtype))
    made = {"output": y, "grad_input": x.grad, **gradients(model)}
    x.grad = None
    return made


LONGER = [pytest.mark.exhaustive]
EMULATED = {"pad_inner_dim": True, "emulate": True}
KINDS = [
    pytest.param("delayed", {}, id="delayed"),
    pytest.param("blockwise", {}, id="blockwise", marks=LONGER),
    pytest.param("tensorwise", {"float8_weights": Float8Weights.HELD}, id="held", marks=LONGER),
    pytest.param("rowwise", EMULATED, id="emulated", marks=LONGER),
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
        assert_close(wanted, got, what=count)
        for each in (model, eager) if recipe == "delayed" else ():
            sync_float8_amax_and_scale_history(each)
        assert_close(fp8_state(eager), fp8_state(model), what=count)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("recipe", "device"),
    [
        pytest.param("blockwise", "cpu", marks=LONGER),
        *(pytest.param(recipe, "cuda", marks=GPU) for recipe in ("blockwise", "delayed")),
    ],
)
def test_under_inductor(recipe: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":  # whose code takes long to make: GPUs run it here
        make_no_code(monkeypatch.setattr)
    model = Masked(device, config=recipe)
    compiled = torch.compile(model, fullgraph=True)
    for count in COUNTS:
        x, mask = inputs(count, device, 64)
        wanted, got = results(model, model, x, mask), results(model, compiled, x, mask)
        assert_close(wanted, got, tolerances.COMPILED, count)


@on_devices
@pytest.mark.parametrize(
    ("recipe", "strict"), short({1}, [("tensorwise", True), ("blockwise", False)])
)
def test_an_exported_model_takes_any_count(recipe: str, strict: bool, device: str) -> None:
    model = Masked(device, config=recipe).eval()
    with torch.no_grad():
        exported = torch.export.export(model, inputs(40, device, 64), strict=strict).module()
        for count in COUNTS:
            given = inputs(count, device, 64)
            assert same_bits(exported(*given), model(*given)), count


@on_devices
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_a_marked_dim_takes_any_size(recipe: str, device: str) -> None:
    layer = nn.Linear(64, 48, device=device)
    model = convert_to_float8_training(
        nn.Sequential(layer), config=recipe, module_filter_fn=all_linears
    )
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for count in (40, 17, 129):
        x = seeded(count, count, 64, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        assert_close({"output": model(x)}, {"output": compiled(x)}, what=count)
    assert counter.frame_count == 1
    dims = ({0: torch.export.Dim("tokens")},)
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=dims).module()
    assert same_bits(exported(x[:7]), model(x[:7]))
