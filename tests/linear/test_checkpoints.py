"""Saving and loading: plain and converted checkpoints, strict, weights only."""

import contextlib
import dataclasses
import io

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8Linear,
    ScalingType,
    convert_to_float8_training,
    high_precision_state_dict,
    sync_float8_amax_and_scale_history,
)
from support.configs import DELAYED, DYNAMIC, delayed, mixed, of_recipe, tensorwise
from support.models import forward_backward, fp8_state, seeded


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 17))


def converted(**more) -> nn.Sequential:
    return convert_to_float8_training(plain(), config=delayed(**more))


def step(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    results = forward_backward(model, seeded(seed, 8, 32), seeded(seed + 50, 8, 17))
    sync_float8_amax_and_scale_history(model)
    return results


def through_file(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("assign", [False, True])
def test_converted_to_converted_goes_on_bit_for_bit(assign: bool) -> None:
    model, other = converted(), converted()
    for seed in (0, 1):
        step(model, seed)
    forward_backward(model, seeded(2, 8, 32), seeded(52, 8, 17))  # an amax not synced yet
    other.load_state_dict(through_file(model.state_dict()), assign=assign)
    for name, buffer in fp8_state(model).items():
        assert torch.equal(buffer, fp8_state(other)[name]), name
    for seed in (3, 4):
        results, others = step(model, seed), step(other, seed)
        assert all(torch.equal(results[name], others[name]) for name in results)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after-training"])
def test_plain_checkpoint_loads_strictly_and_forgets_the_state(used: bool, assign: bool) -> None:
    """What the layers knew was of other weights."""
    checkpoint, model = plain(), converted()
    buffers = fp8_state(model)
    if used:
        step(model, 0)
        buffers = fp8_state(model)
        forward_backward(model, seeded(2, 8, 32), seeded(52, 8, 17))  # an amax not synced yet
    result = model.load_state_dict(
        through_file(checkpoint.state_dict()), strict=True, assign=assign
    )
    assert result.missing_keys == result.unexpected_keys == []
    assert torch.equal(model[0].weight, checkpoint[0].weight)
    fresh = fp8_state(converted())
    for name, buffer in fp8_state(model).items():
        assert buffer is buffers[name], name  # in place: compiled graphs and stacks hold it
        assert torch.equal(buffer, fresh[name]), name
    other = converted()
    other.load_state_dict(checkpoint.state_dict())
    for seed in (1, 2):
        results, others = step(model, seed), step(other, seed)
        assert all(torch.equal(results[name], others[name]) for name in results)


def test_loading_nothing_of_a_layer_keeps_its_state() -> None:
    """As with `strict=False` and a checkpoint of adapters alone."""
    model = converted()
    for _ in range(2):  # scales are known then
        step(model, 0)
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    model.load_state_dict({"2.bias": torch.zeros(17)}, strict=False)
    for name, buffer in fp8_state(model).items():
        if name.startswith("0."):
            assert torch.equal(buffer, before[name]), name
        else:
            assert bool((buffer == 0).all()), name


def test_plain_checkpoint_assigned_to_a_meta_model_gives_fresh_state() -> None:
    with torch.device("meta"):
        model = plain()
    convert_to_float8_training(model, config=delayed())
    model.load_state_dict(plain().state_dict(), assign=True)
    fresh = fp8_state(converted())
    for name, buffer in fp8_state(model).items():
        assert buffer.device.type == "cpu", name
        assert torch.equal(buffer, fresh[name]), name
    for _ in range(2):  # scales are known then
        step(model, 0)


@pytest.mark.parametrize("assign", [False, True])
def test_state_of_a_checkpoint_in_bfloat16_comes_back_as_float32(assign: bool) -> None:
    state = {name: value.bfloat16() for name, value in converted().state_dict().items()}
    model = converted()
    model.load_state_dict(state, assign=assign)
    assert {buffer.dtype for buffer in fp8_state(model).values()} == {torch.float32}


def test_checkpoint_with_part_of_the_state_is_refused() -> None:
    model = converted()
    state = model.state_dict()
    del state["0.fp8_scale_input"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.fp8_scale_input"):
        model.load_state_dict(state)


def test_a_missing_weight_is_still_missing() -> None:
    state = plain().state_dict()
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        converted().load_state_dict(state)


def test_dynamic_models_have_the_keys_of_the_plain_one() -> None:
    model = convert_to_float8_training(plain(), config=tensorwise())
    assert list(model.state_dict()) == list(plain().state_dict())
    plain().load_state_dict(model.state_dict())


@pytest.mark.parametrize("config", [tensorwise(), delayed(), mixed(DELAYED, DYNAMIC, DYNAMIC)])
def test_high_precision_state_dict_loads_into_the_plain_model(config) -> None:
    model = convert_to_float8_training(plain(), config=config)
    for _ in range(2):  # scales are known then
        step(model, 0)
    state = high_precision_state_dict(model)
    assert list(state) == list(plain().state_dict())
    target = plain()
    target.load_state_dict(through_file(state), strict=True)
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in state.items())
    assert any(isinstance(module, Float8Linear) for module in model.modules())  # left as it was


WRAPPINGS = {
    "checkpoint-layer": lambda m: nn.Sequential(checkpoint_wrapper(m[0]), m[1], m[2]),
    "checkpoint-model": checkpoint_wrapper,
    "compile-layer": lambda m: nn.Sequential(torch.compile(m[0], backend="eager"), m[1], m[2]),
    "compile-model": lambda m: torch.compile(m, backend="eager"),
    "both": lambda m: torch.compile(checkpoint_wrapper(m), backend="eager"),
    "shared": lambda m: nn.ModuleList([m, m[0]]),
}


@pytest.mark.parametrize("how", WRAPPINGS)
def test_high_precision_state_dict_of_a_wrapped_model_loads_into_the_wrapped_plain_one(
    how: str,
) -> None:
    model, target = converted(), plain()
    for _ in range(2):  # scales are known then
        step(model, 0)
    wrapped, wanted = WRAPPINGS[how](model), WRAPPINGS[how](target)
    state = high_precision_state_dict(wrapped)
    assert list(state) == list(wanted.state_dict())
    wanted.load_state_dict(through_file(state), strict=True)
    assert torch.equal(target[0].weight, model[0].weight)
    assert any("fp8_" in key for key in wrapped.state_dict())  # the hook is gone again


def test_high_precision_state_dict_refuses_anything_but_a_module() -> None:
    with pytest.raises(TypeError, match=r"model: got dict, expected an nn.Module"):
        high_precision_state_dict({})


def test_high_precision_state_dict_keeps_a_buffer_of_that_name_elsewhere() -> None:
    """Only the state of Float8Linear goes; another module may use the name."""
    model = nn.Sequential(nn.Linear(32, 16), nn.Identity())
    model[1].register_buffer("fp8_scale_input", torch.ones(()))
    convert_to_float8_training(model, config=delayed())
    assert list(high_precision_state_dict(model)) == ["0.weight", "0.bias", "1.fp8_scale_input"]


# ---------------------------------------------------------------- of other libraries


def foreign(model: nn.Module, history_len: int = 16) -> dict[str, torch.Tensor]:
    """Of float8_experimental and torchao <= 0.9: all roles, vectors of one element, encode scales.

    Amaxes stay after a sync; before the first one they are the largest value of the format.
    """
    state = dict(model.state_dict())
    for name, layer in model.named_modules():
        if not isinstance(layer, Float8Linear):
            continue
        for role, largest in (("input", 448.0), ("weight", 448.0), ("grad_output", 57344.0)):
            prefix = f"{name}.fp8_"
            history = state.get(f"{prefix}amax_history_{role}", torch.zeros(history_len))
            scale = state.get(f"{prefix}scale_{role}", torch.zeros(()))
            synced = bool(history.any())
            state[f"{prefix}amax_{role}"] = history[:1] if synced else torch.full((1,), largest)
            state[f"{prefix}amax_history_{role}"] = history
            state[f"{prefix}scale_{role}"] = (1 / scale if synced else torch.ones(())).reshape(1)
    return state


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("mix", [(DELAYED,) * 3, (DELAYED, DYNAMIC, DELAYED)])
def test_encode_scales_of_other_libraries_are_converted(mix, synced: bool, assign: bool) -> None:
    config = mixed(*mix, round_scales_to_power_of_2=True)  # 1 / (1 / scale) is exact
    model, other = (convert_to_float8_training(plain(), config=config) for _ in "ab")
    for seed in (0, 1) if synced else ():
        step(model, seed)
    step(other, 5)
    other.load_state_dict(through_file(foreign(model)), assign=assign)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    for seed in (3, 4):
        results, others = step(model, seed), step(other, seed)
        assert all(torch.equal(results[name], others[name]) for name in results)


@pytest.mark.parametrize(
    ("config", "dropped"),
    [(tensorwise(), "grad_output"), (of_recipe("delayed"), "weight"), (delayed(), None)],
    ids=["dynamic", "recipe", "delayed"],
)
def test_first_names_of_float8_experimental(config, dropped) -> None:
    """It called the sites x, w and dL_dY until July 2024."""
    model = convert_to_float8_training(plain(), config=delayed(round_scales_to_power_of_2=True))
    for _ in range(2):  # scales are known then
        step(model, 0)
    state = foreign(model)
    for first, name in (("x", "input"), ("w", "weight"), ("dL_dY", "grad_output")):
        for key in [key for key in state if "fp8_" in key and key.endswith(f"_{name}")]:
            state[key.removesuffix(name) + first] = state.pop(key)
    assert "0.fp8_amax_history_dL_dY" in state
    other = convert_to_float8_training(plain(), config=config)
    told = pytest.warns(UserWarning, match=f"configuration: dropped the state of {dropped}, which")
    with told if dropped else contextlib.nullcontext():
        other.load_state_dict(through_file(state))
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "shapes", [{"scale_input": (4,)}, {"scale_input": (1,)}, {"amax_weight": (3,)}]
)
def test_scales_of_other_shapes_are_refused(shapes, assign: bool) -> None:
    """Torch would take their first element."""
    model = converted()
    for _ in range(2):  # scales are known then
        step(model, 0)
    state = model.state_dict()
    for name, shape in shapes.items():
        state[f"0.fp8_{name}"] = torch.ones(shape)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.fp8_(scale|amax)_\w+: got shape"):
        converted().load_state_dict(state, assign=assign)


# ---------------------------------------------------------------- of another configuration


@pytest.mark.parametrize("other_library", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_state_of_delayed_scaling_is_dropped_by_a_dynamic_model(assign, other_library) -> None:
    model, other = converted(), convert_to_float8_training(plain(), config=tensorwise())
    for _ in range(2):  # scales are known then
        step(model, 0)
    state = through_file(foreign(model) if other_library else model.state_dict())
    expected = r"dropped the state of grad_output, which is not delayed here; .* of input, .*weight"
    with pytest.warns(UserWarning, match=expected) as told:
        other.load_state_dict(state, assign=assign)
    assert len({str(warning.message) for warning in told}) == 1
    assert any("fp8_scale" in key for key in state)
    assert fp8_state(other) == {}
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_a_dynamic_checkpoint_starts_a_delayed_model_anew_and_drops_nothing(recwarn) -> None:
    model, other = converted(), convert_to_float8_training(plain(), config=tensorwise())
    for _ in range(2):  # scales are known then
        step(model, 0)
    model.load_state_dict(other.state_dict())
    fresh = fp8_state(converted())
    assert all(torch.equal(x, fresh[name]) for name, x in fp8_state(model).items())
    assert not recwarn.list


@pytest.mark.parametrize("assign", [False, True])
def test_state_of_the_roles_that_both_have_is_taken(assign: bool) -> None:
    first, second = mixed(DELAYED, DYNAMIC, DELAYED), mixed(DELAYED, DELAYED, DYNAMIC)
    model, other = (convert_to_float8_training(plain(), config=each) for each in (first, second))
    for _ in range(2):  # scales are known then
        step(model, 0)
    step(other, 1)
    expected = "dropped the state of grad_output.*; found no state of weight, which starts anew"
    with pytest.warns(UserWarning, match=expected):
        other.load_state_dict(through_file(model.state_dict()), assign=assign)
    mine, fresh = fp8_state(model), fp8_state(convert_to_float8_training(plain(), config=second))
    for name, x in fp8_state(other).items():
        assert torch.equal(x, fresh[name] if "weight" in name else mine[name]), name
    step(other, 2)


LONG, SHORTER = DelayedScalingConfig(history_len=4), DelayedScalingConfig(history_len=2)


@pytest.mark.parametrize("other_library", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_histories_of_another_length_are_cut_or_filled(assign, other_library, recwarn) -> None:
    # 1 / (1 / scale) is exact for powers of two
    more = {"round_scales_to_power_of_2": True}
    long = converted(delayed_scaling_config=LONG, **more)
    short = converted(delayed_scaling_config=SHORTER, **more)
    for seed in range(3):
        step(long, seed)
    state = foreign(long, 4) if other_library else long.state_dict()
    with pytest.warns(UserWarning, match="all but the last 2 of 4 steps of input; dropped all but"):
        short.load_state_dict(through_file(state), assign=assign)
    before, after = fp8_state(long), fp8_state(short)
    for name, x in after.items():
        assert torch.equal(x, before[name][:2] if "history" in name else before[name]), name
    recwarn.clear()
    long.load_state_dict(foreign(short, 2) if other_library else short.state_dict(), assign=assign)
    for name, x in fp8_state(long).items():
        if "history" in name:
            assert torch.equal(x[:2], after[name])
            assert not x[2:].any()
        else:
            assert torch.equal(x, after[name])
    assert not recwarn.list
    step(long, 3)
    step(short, 3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_that_a_checkpoint_lacks_leaves_the_rest_alone(assign: bool, device: str) -> None:
    """Where the model is on the meta device, too."""
    if device == "meta" and not assign:
        pytest.skip("nothing can be copied to the meta device")
    first, second = mixed(DELAYED, DYNAMIC, DELAYED), delayed()
    model = convert_to_float8_training(plain(), config=first)
    for _ in range(2):  # scales are known then
        step(model, 0)
    with torch.device(device):
        other = convert_to_float8_training(plain(), config=second)
    with pytest.warns(UserWarning, match="found no state of weight, which starts anew"):
        other.load_state_dict(through_file(model.state_dict()), assign=assign)
    mine, fresh = fp8_state(model), fp8_state(converted())
    for name, x in fp8_state(other).items():
        assert torch.equal(x, fresh[name] if "weight" in name else mine[name]), name
    step(other, 2)


def test_a_whole_state_is_assigned_to_a_model_on_the_meta_device() -> None:
    model = converted()
    for _ in range(2):  # scales are known then
        step(model, 0)
    with torch.device("meta"):
        other = converted()
    other.load_state_dict(through_file(model.state_dict()), assign=True)
    assert all(torch.equal(x, fp8_state(model)[name]) for name, x in fp8_state(other).items())


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_of_other_libraries_is_loaded_with_more_sites_than_it_has(assign) -> None:
    """Theirs have one cast for each tensor, so a second one starts anew."""
    more = CastConfig(ScalingType.DELAYED, target_dtype=torch.float8_e5m2)
    config = delayed(round_scales_to_power_of_2=True)
    model = convert_to_float8_training(plain(), config=config)
    config = dataclasses.replace(config, cast_config_input_for_grad_weight=more, emulate=True)
    other = convert_to_float8_training(plain(), config=config)
    for _ in range(2):  # scales are known then
        step(model, 0)
    with pytest.warns(UserWarning, match="found no state of input_for_grad_weight, which starts"):
        other.load_state_dict(through_file(foreign(model)), assign=assign)
    for name, x in fp8_state(model).items():
        assert torch.equal(fp8_state(other)[name], x), name
    assert not other[0].fp8_scale_input_for_grad_weight.any()
    step(other, 1)
