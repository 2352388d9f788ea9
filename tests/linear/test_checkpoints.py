"""Saving and loading: plain and converted checkpoints, strict, weights only."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    high_precision_state_dict,
)
from sqnr import assert_same_bits
from support.configs import DELAYED, DYNAMIC, delayed, mixed, tensorwise
from support.copies import through_file
from support.models import copied, fp8_state
from support.stacks import step

ASSIGN = pytest.mark.parametrize("assign", [False, True])
EXACT = {"round_scales_to_power_of_2": True}
"""1 / (1 / scale) is exact for powers of two."""


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 17))


def converted(config: Float8LinearConfig | None = None) -> nn.Sequential:
    return convert_to_float8_training(plain(), config=config or delayed())


def trained(config: Float8LinearConfig | None = None, steps: int = 2) -> nn.Sequential:
    """After that many steps; scales are known after two."""
    model = converted(config)
    for seed in range(steps):
        step(model, seed)
    return model


def assert_train_alike(model: nn.Module, other: nn.Module) -> None:
    for seed in (3, 4):
        assert_same_bits(step(other, seed), step(model, seed))


@ASSIGN
def test_converted_to_converted_goes_on_bit_for_bit(assign: bool) -> None:
    model = trained()
    step(model, 2, sync=False)  # an amax not synced yet
    with torch.device("meta" if assign else "cpu"):
        other = converted()
    other.load_state_dict(through_file(model.state_dict()), assign=assign)
    assert_same_bits(fp8_state(other), fp8_state(model))
    assert_train_alike(model, other)


@pytest.mark.parametrize("kind", ["fresh", "used", "used, assigned", "meta, assigned"])
def test_plain_checkpoint_loads_strictly_and_forgets_the_state(
    kind: str, recwarn: pytest.WarningsRecorder
) -> None:
    """What the layers knew was of other weights."""
    checkpoint, assign = plain(), "assigned" in kind
    with torch.device("meta" if "meta" in kind else "cpu"):
        model = converted()
    if "used" in kind:
        step(model, 0)
        step(model, 2, sync=False)
    buffers, state = fp8_state(model), through_file(checkpoint.state_dict())
    result = model.load_state_dict(state, strict=True, assign=assign)
    assert result.missing_keys == result.unexpected_keys == recwarn.list == []
    assert torch.equal(model[0].weight, checkpoint[0].weight)
    assert_same_bits(fp8_state(model), fp8_state(converted()))
    for name, buffer in fp8_state(model).items():
        # In place: compiled graphs and stacks hold it.
        assert buffer is buffers[name] or "meta" in kind, name
    other = converted()
    other.load_state_dict(checkpoint.state_dict())
    assert_train_alike(other, model)


def test_only_another_weight_ends_the_state_of_a_layer() -> None:
    """With `strict=False`, as for a checkpoint of adapters or of biases alone."""
    model = trained()
    before = copied(model)
    model.load_state_dict({"2.bias": torch.zeros(17)}, strict=False)
    assert_same_bits(fp8_state(model), before)
    model.load_state_dict({"2.weight": torch.zeros(17, 48)}, strict=False)
    fresh = fp8_state(converted())
    wanted = {name: (before if name.startswith("0.") else fresh)[name] for name in before}
    assert_same_bits(fp8_state(model), wanted)


@ASSIGN
def test_state_of_a_checkpoint_in_bfloat16_comes_back_as_float32(assign: bool) -> None:
    state = {name: value.bfloat16() for name, value in converted().state_dict().items()}
    model = converted()
    model.load_state_dict(state, assign=assign)
    assert {buffer.dtype for buffer in fp8_state(model).values()} == {torch.float32}


def test_a_checkpoint_with_a_part_of_a_layer_is_refused() -> None:
    for model, key in ((converted(), "0.fp8_scale_input"), (plain(), "0.weight")):
        state = model.state_dict()
        del state[key]
        with pytest.raises(RuntimeError, match=rf"Missing key.*{key}"):
            converted().load_state_dict(state)


# ---------------------------------------------------------------- into plain models


@pytest.mark.parametrize("config", [tensorwise(), delayed(), mixed(DELAYED, DYNAMIC, DYNAMIC)])
def test_high_precision_state_dict_loads_into_the_plain_model(config) -> None:
    model, target = trained(config), plain()
    state = high_precision_state_dict(model)
    assert list(state) == list(target.state_dict())
    target.load_state_dict(through_file(state), strict=True)
    assert_same_bits(state, target.state_dict())
    assert any(isinstance(module, Float8Linear) for module in model.modules())  # left as it was
    if config == tensorwise():
        assert list(model.state_dict()) == list(state)


WRAPPINGS = {
    "checkpoint-layer": lambda m: nn.Sequential(checkpoint_wrapper(m[0]), m[1], m[2]),
    "compile-layer": lambda m: nn.Sequential(torch.compile(m[0], backend="eager"), m[1], m[2]),
    "both": lambda m: torch.compile(checkpoint_wrapper(m), backend="eager"),
    "shared": lambda m: nn.ModuleList([m, m[0]]),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_high_precision_state_dict_of_a_wrapped_model_loads_into_the_wrapped_plain_one(wrap):
    model, target = trained(), plain()
    wrapped, wanted = wrap(model), wrap(target)
    state = high_precision_state_dict(wrapped)
    assert list(state) == list(wanted.state_dict())
    wanted.load_state_dict(through_file(state), strict=True)
    assert torch.equal(target[0].weight, model[0].weight)
    assert any("fp8_" in key for key in wrapped.state_dict())  # the hook is gone again


def test_high_precision_state_dict_keeps_a_buffer_of_that_name_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Identity())
    model[1].register_buffer("fp8_scale_input", torch.ones(()))
    convert_to_float8_training(model, config=delayed())
    assert list(high_precision_state_dict(model)) == ["0.weight", "0.bias", "1.fp8_scale_input"]
    with pytest.raises(TypeError, match=r"model: got dict, expected an nn.Module"):
        high_precision_state_dict({})


@ASSIGN
def test_scales_of_other_shapes_are_refused(assign: bool) -> None:
    """Torch would take their first element."""
    for name, shape in (("scale_input", 4), ("scale_input", 1), ("amax_weight", 3)):
        state = trained().state_dict() | {f"0.fp8_{name}": torch.ones(shape)}
        with pytest.raises(RuntimeError, match=rf"size mismatch for 0\.fp8_{name}: got shape"):
            converted().load_state_dict(state, assign=assign)


@ASSIGN
def test_encode_scales_of_other_libraries_are_refused(assign: bool) -> None:
    """float8_experimental and torchao <= 0.9 have them, of shape [1]; without them it loads."""
    model, other = trained(), converted()
    state = {
        k: x.reshape(1) if "fp8_" in k and not x.dim() else x for k, x in model.state_dict().items()
    }
    with pytest.raises(RuntimeError, match=r"expected \[\]; without the state .* starts anew"):
        other.load_state_dict(state, assign=assign)
    other.load_state_dict({k: x for k, x in state.items() if "fp8_" not in k}, assign=assign)
    assert_same_bits(high_precision_state_dict(other), high_precision_state_dict(model))
    assert_same_bits(fp8_state(other), fp8_state(converted()))


# ---------------------------------------------------------------- of another configuration


@ASSIGN
def test_state_of_delayed_scaling_is_dropped_by_a_dynamic_model(assign) -> None:
    model, other = trained(), converted(tensorwise())
    state = through_file(model.state_dict())
    expected = r"dropped the state of grad_output, which is not delayed here; .* of input, .*weight"
    with pytest.warns(UserWarning, match=expected) as told:
        other.load_state_dict(state, assign=assign)
    assert len({str(warning.message) for warning in told}) == 1
    assert any("fp8_scale" in key for key in state)
    assert fp8_state(other) == {}
    assert_same_bits(other.state_dict(), high_precision_state_dict(model))


@pytest.mark.parametrize(("device", "assign"), [("cpu", False), ("cpu", True), ("meta", True)])
def test_state_of_the_roles_that_both_have_is_taken(assign: bool, device: str) -> None:
    model, config = trained(mixed(DELAYED, DYNAMIC, DELAYED)), mixed(DELAYED, DELAYED, DYNAMIC)
    with torch.device(device):
        other = converted(config)
    if device == "cpu":
        step(other, 1)
    expected = "dropped the state of grad_output.*; found no state of weight, which starts anew"
    with pytest.warns(UserWarning, match=expected):
        other.load_state_dict(through_file(model.state_dict()), assign=assign)
    mine, fresh = fp8_state(model), fp8_state(converted(config))
    wanted = {name: (fresh if "weight" in name else mine)[name] for name in fresh}
    assert_same_bits(fp8_state(other), wanted)
    step(other, 2)


@ASSIGN
def test_histories_of_another_length_are_cut_or_filled(assign, recwarn) -> None:
    long = trained(delayed(delayed_scaling_config=DelayedScalingConfig(4), **EXACT), 3)
    short = converted(delayed(delayed_scaling_config=DelayedScalingConfig(2), **EXACT))
    with pytest.warns(UserWarning, match="all but the last 2 of 4 steps of input; dropped all but"):
        short.load_state_dict(through_file(long.state_dict()), assign=assign)
    before, after = fp8_state(long), fp8_state(short)
    for name, x in after.items():
        assert torch.equal(x, before[name][:2] if "history" in name else before[name]), name
    recwarn.clear()
    long.load_state_dict(short.state_dict(), assign=assign)
    for name, x in fp8_state(long).items():
        assert torch.equal(x[:2] if "history" in name else x, after[name])
        assert "history" not in name or not x[2:].any()
    assert not recwarn.list
    step(long, 3)
    step(short, 3)


@ASSIGN
def test_a_checkpoint_is_loaded_with_more_sites_than_it_has(assign) -> None:
    more = CastConfig(ScalingType.DELAYED, target_dtype=torch.float8_e5m2)
    config = delayed(**EXACT)
    model = trained(config)
    other = converted(
        dataclasses.replace(config, cast_config_input_for_grad_weight=more, emulate=True)
    )
    with pytest.warns(UserWarning, match="found no state of input_for_grad_weight, which starts"):
        other.load_state_dict(through_file(model.state_dict()), assign=assign)
    assert_same_bits({name: fp8_state(other)[name] for name in fp8_state(model)}, fp8_state(model))
    assert not other[0].fp8_scale_input_for_grad_weight.any()
    step(other, 1)
