"""Our converter in torchtitan: its debug model, built, sharded, initialised and trained on the CPU.

Its attention needs a GPU for backward: here it is PyTorch's own. Its `Trainer` is in
`test_torchtitan_trainer`.
"""

import importlib

import pytest
import torch
from torch import Tensor

import tolerances
from float8 import (
    Float8Linear,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from sqnr import sqnr
from support.configs import RECIPES
from support.models import fp8_state
from support.ranks import RankError, Ranks

pytest.importorskip("torchtitan")
titan = importlib.import_module("float8.integrations.torchtitan")
titan_run = importlib.import_module("support.titan_run")
built, step = titan_run.built, titan_run.step


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_in_high_precision(recipe: str) -> None:
    (plain, optimizers), (model, ours) = built(), built(recipe_name=recipe)
    report = conversion_report(model)
    assert len(report.converted) == 30
    assert [layer.fqn for layer in report.skipped] == ["lm_head"]
    assert all(type(x) is titan.ConvertedLinear for x in model.modules() if hasattr(x, "plan"))
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name
    wanted, got = step(plain, optimizers, 0), step(model, ours, 0)
    assert got["loss"] == pytest.approx(wanted["loss"].item(), abs=0.02)
    for name, grad in wanted.items():
        assert sqnr(grad, got[name]) > tolerances.MODEL, name
    step(model, ours, 1)
    histories = [x for name, x in fp8_state(model).items() if "history" in name]
    assert len(histories) == {"tensorwise": 0, "delayed": 60}[recipe]
    assert all((x > 0).sum() == 2 for x in histories)


def test_the_way_back_and_conversion_without_our_converter() -> None:
    (plain, _), (model, _) = built(), built(recipe_name="delayed")
    kinds = [*map(type, plain.modules())]
    assert [*map(type, convert_to_high_precision(model).modules())] == kinds
    convert_to_float8_training(plain, config="delayed")
    assert len(conversion_report(plain).converted) == 30
    linear = plain.layers["0"].feed_forward.w1
    assert isinstance(linear, Float8Linear)
    assert isinstance(linear, titan.Linear)
    assert [*map(type, convert_to_high_precision(plain).modules())] == kinds


def test_layers_are_left_out_by_name_and_weights_gathered_in_float8() -> None:
    model, _ = built(
        recipe_name="tensorwise", filter_fqns=["attention"], enable_fsdp_float8_all_gather=True
    )
    layers = {name: x for name, x in model.named_modules() if isinstance(x, Float8Linear)}
    assert len(layers) == 18
    assert not any("attention" in name for name in layers)
    assert all(type(x.weight.data) is not Tensor for x in layers.values())
    assert all(x.config.enable_fsdp_float8_all_gather for x in layers.values())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tp", [1, 2])
def test_it_trains_under_fsdp2_and_tensor_parallel(
    two: Ranks, tp: int, recipe: str, compiled: bool
) -> None:
    """By torchtitan's own `parallelize_fn`, weights gathered in float8, against one device."""
    steps = 2 if tp == 1 else 1  # other sums move weights to the neighbouring float8 value
    model, optimizers = built(recipe_name=recipe)
    titan_run.fill(model)
    for seed in range(steps):
        wanted = step(model, optimizers, seed)
    wanted |= fp8_state(model)
    how = {"recipe_name": recipe, "enable_fsdp_float8_all_gather": True, "compiled": compiled}
    for got in two.run(on_ranks, tp, steps, "partial_dtensor", how):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            same = torch.equal(got[name], value)
            other_sums = compiled or tp > 1
            assert same or (other_sums and sqnr(value, got[name]) > tolerances.COMPILED), name


@pytest.mark.xdist_group("ranks")
def test_parts_of_weights_that_are_plain_tensors_are_refused(two: Ranks) -> None:
    with pytest.raises(RankError, match=r"got tensor parallel with spmd_backend='spmd_types'"):
        two.run(on_ranks, 2, 1, "spmd_types", {"recipe_name": "tensorwise"})


def on_ranks(tp: int, steps: int, backend: str, how: dict) -> dict[str, Tensor]:
    torch._dynamo.reset()  # these processes have seen other models
    return titan_run.on_ranks(tp, steps, backend, **how)


@pytest.mark.parametrize("by", ["converter", "hand"])
def test_feed_forwards_are_fused(by: str) -> None:
    converter = {"recipe_name": "tensorwise"} if by == "converter" else {}
    (apart, optimizers), (fused, ours) = (built(**converter) for _ in range(2))
    for model in (apart, fused):
        convert_to_float8_training(model, fuse=model is fused)
    fates = {(each.module, each.reason) for each in conversion_report(fused).fused}
    assert fates == {("FeedForward", None)}
    assert len(conversion_report(fused).converted) == 30
    wanted, got = step(apart, optimizers, 0), step(fused, ours, 0)
    for name, value in wanted.items():
        assert sqnr(value, got[name]) > tolerances.COMPILED, name
