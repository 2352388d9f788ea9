"""Multiplications that `FlopCounterMode` counts: each once, also where an op multiplies inside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from float8 import all_linears, convert_to_float8_training, grouped_linear, update_float8_weights
from float8.experts.kernels.cast_groups import cast_groups
from float8.experts.plan import plan_experts
from float8.weights.held import TIMES_HELD, hold
from support.configs import of_recipe
from support.microbatches import with_weights
from support.models import seeded
from support.rings import short

pytestmark = pytest.mark.xdist_group("compilers")  # one worker makes them ready


def counted(run: Callable[..., Tensor], *args: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        y = run(*args)
        if y.requires_grad:
            y.sum().backward()
    return int(counter.get_total_flops())


def counted_in_graphs(run: Callable[..., Tensor], *args: Any) -> int:
    """Those of compiled code, by fake tensors, as torch counts what to compute again."""
    found = []

    def count(graph: Any, inputs: Any) -> Any:
        inputs[0].fake_mode.allow_non_fake_inputs = True  # constants
        with FlopCounterMode(display=False) as counter:
            graph(*inputs)
        found.append(int(counter.get_total_flops()))
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    torch.compile(run, backend=backend, fullgraph=True)(*args).sum().backward()
    return sum(found)


OFFS = torch.tensor([10, 10, 25, 40], dtype=torch.int32)
ONE = 2 * 40 * 96 * 64


@pytest.mark.parametrize(
    ("recipe", "count"),
    short(
        {0, 2},
        [("rowwise", counted), ("tensorwise", counted_in_graphs), ("rowwise_with_gw_hp", counted)],
    ),
)
def test_grouped_gemms(recipe: str, count: Callable[..., int]) -> None:
    """Of all tokens, in whatever groups, without what lies between groups."""
    x, w = seeded(0, 40, 64).requires_grad_(), seeded(1, 4, 96, 64).requires_grad_()

    def run(x: Tensor, w: Tensor) -> Tensor:
        return grouped_linear(x, w, OFFS, config=recipe)

    assert count(run, x, w) == 3 * ONE
    assert count(run, x.detach(), w) == 2 * ONE
    assert count(run, x, w.detach()) == 2 * ONE


@pytest.mark.parametrize("recipe", short({"blockwise"}, ["tensorwise", "rowwise", "blockwise"]))
def test_layers(recipe: str) -> None:
    """On the meta device they multiply as on a GPU; compiled, by held weights, in an op of ours."""
    for device, held, count in (
        ("cpu", False, counted),
        ("meta", False, counted),
        ("cpu", True, counted),
        ("cpu", True, counted_in_graphs),
    ):
        config = with_weights(of_recipe(recipe)) if held else of_recipe(recipe)
        model = nn.Sequential(nn.Linear(128, 256, bias=False)).to(device)
        convert_to_float8_training(model, config=config, module_filter_fn=all_linears)
        if held:
            update_float8_weights(model)
        assert bool(model[0]._float8_held) == held
        x = seeded(0, 128, 128).to(device).requires_grad_()
        assert count(model, x) == 3 * 2 * 128 * 128 * 256, (device, held, count)


@pytest.mark.parametrize("columns", [False, True])
def test_held_weights_of_experts(columns: bool) -> None:
    plan, weight = plan_experts(of_recipe("rowwise")), seeded(0, 4, 96, 64)
    held = hold(weight, plan.casts.weight)
    x = seeded(1, 40, 96 if columns else 64)
    a = cast_groups(x, plan.casts.input, OFFS, row=True).row
    b = (held.col_data, held.col_scale) if columns else (held.row_data, held.row_scale)

    def run() -> Tensor:
        of, shape = "axiswise axiswise False False False", (40, 64 if columns else 96)
        return TIMES_HELD(*a, *b, weight, OFFS, False, *shape, columns, True, of, torch.float32)

    assert counted(run) == ONE
