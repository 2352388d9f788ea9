"""The delayed-scaling buffers of a layer: names, dtype, initial state, moving and copying."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import DELAYED, DYNAMIC, delayed, mixed, tensorwise
from support.devices import on_devices
from support.models import forward_backward, fp8_state, seeded
from support.spies import GemmSpy

NAMES = [
    f"fp8_{kind}_{role}"
    for role in ("input", "weight", "grad_output")
    for kind in ("amax", "amax_history", "scale")
]


def trained(device: str = "cpu", **more) -> nn.Sequential:
    """A model after two synced steps and one unsynced one: every buffer is in use."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 17)).to(device)
    convert_to_float8_training(model, config=delayed(**more))
    step(model, 0)
    step(model, 1)
    step(model, 2, sync=False)
    return model


def step(model: nn.Module, seed: int, *, sync: bool = True) -> dict[str, torch.Tensor]:
    weight = next(model.parameters())
    x = seeded(seed, 8, 32, dtype=weight.dtype, device=weight.device)
    g = seeded(seed + 50, 8, 17, dtype=weight.dtype, device=weight.device)
    results = forward_backward(model, x, g)
    if sync:
        sync_float8_amax_and_scale_history(model)
    return results


def assert_train_alike(a: nn.Module, b: nn.Module) -> None:
    """Two more steps give the same results and leave the same state."""
    for seed in (3, 4):
        results, others = step(a, seed), step(b, seed)
        assert all(torch.equal(results[name], others[name]) for name in results)
    states = fp8_state(a), fp8_state(b)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# ---------------------------------------------------------------- names and shapes


@on_devices
def test_state_dict_keys_shapes_and_dtypes(device: str) -> None:
    config = delayed(delayed_scaling_config=DelayedScalingConfig(history_len=5))
    state = Float8Linear(32, 16, device=device, config=config).state_dict()
    assert list(state) == ["weight", "bias", *NAMES]
    for name in NAMES:
        assert state[name].dtype == torch.float32
        assert state[name].shape == ((5,) if "history" in name else ())
        assert state[name].device.type == device


def test_only_delayed_roles_have_state() -> None:
    assert list(Float8Linear(32, 16, config=tensorwise()).state_dict()) == ["weight", "bias"]
    config = mixed(DYNAMIC, DELAYED, DYNAMIC)
    names = [name for name, _ in Float8Linear(32, 16, config=config).named_buffers()]
    assert names == ["fp8_amax_weight", "fp8_amax_history_weight", "fp8_scale_weight"]


@pytest.mark.parametrize(("enable_amax_init", "first_scale"), [(True, 0.0), (False, 1.0)])
def test_initial_values(enable_amax_init: bool, first_scale: float) -> None:
    layer = Float8Linear(32, 16, config=delayed(enable_amax_init=enable_amax_init))
    for name in NAMES:
        expected = first_scale if "scale" in name else 0.0
        assert bool((layer.get_buffer(name) == expected).all()), name


def test_reset_parameters_forgets_all_amaxes() -> None:
    model = trained()
    layer = model[0]
    layer.reset_parameters()
    fresh = Float8Linear(32, 48, config=layer.config)
    for name in NAMES:
        assert torch.equal(layer.get_buffer(name), fresh.get_buffer(name))


# ---------------------------------------------------------------- dtype and device


@on_devices
@pytest.mark.parametrize("convert", ["bfloat16", "half", "double", "float"])
def test_state_stays_float32_and_exact(device: str, convert: str) -> None:
    model = trained(device)
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    getattr(model, convert)()
    assert next(model.parameters()).dtype == getattr(torch, convert.replace("half", "float16"))
    for name, buffer in fp8_state(model).items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, before[name])


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_goes_on_after_a_change_of_dtype(device: str, dtype: torch.dtype) -> None:
    model = trained(device).to(dtype)
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    step(model, 3)
    changed = [n for n, b in fp8_state(model).items() if not torch.equal(b, before[n])]
    assert {name for name in before if "history" in name} <= set(changed)


@pytest.mark.gpu
def test_state_moves_with_the_model() -> None:
    model = trained("cpu")
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        model.to(device, dtype)
        for name, buffer in fp8_state(model).items():
            assert buffer.device.type == device
            assert torch.equal(buffer.cpu(), before[name])


# ---------------------------------------------------------------- copies


@on_devices
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_trains_on_as_the_original_does(device: str, how: str) -> None:
    model = trained(device)
    if how == "deepcopy":
        clone = copy.deepcopy(model)
    elif how == "pickle":
        clone = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        clone = torch.load(file, weights_only=False)
    assert type(clone[0]) is Float8Linear
    assert_train_alike(model, clone)


@on_devices
def test_a_deepcopy_has_state_of_its_own(device: str) -> None:
    model = trained(device)
    clone = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    step(clone, 9)
    assert all(torch.equal(buffer, before[name]) for name, buffer in fp8_state(model).items())
    changed = [n for n, b in fp8_state(clone).items() if not torch.equal(b, before[n])]
    assert {name for name in before if "history" in name} <= set(changed)


# ---------------------------------------------------------------- eval and accumulation


@on_devices
@pytest.mark.parametrize("known", [False, True], ids=["first-step", "after-a-sync"])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_recorded_without_gradients(device: str, known: bool, training: bool) -> None:
    model = trained(device) if known else trained(device).apply(reset)
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    model.train(training)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            model(1000 * seeded(8, 4, 32, device=device))
    assert all(torch.equal(buffer, before[name]) for name, buffer in fp8_state(model).items())


@on_devices
def test_training_in_eval_mode_scales_by_the_data_and_records(device: str) -> None:
    """As with dropout switched off: histories go on, though evaluation does not read them."""
    layer = Float8Linear(32, 48, bias=False, device=device, config=delayed()).eval()
    dynamic = Float8Linear.from_float(layer, tensorwise())
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 48, device=device)
    for factor in (1, 100):
        results = []
        for each in (layer, dynamic):
            leaf = (factor * x).requires_grad_()
            output = each(leaf)
            results.append((output, *torch.autograd.grad(output, (leaf, each.weight), g)))
        assert all(map(torch.equal, *results))
        assert layer.fp8_amax_input.item() == (factor * x).abs().max().item()
        assert layer.fp8_amax_grad_output.item() == g.abs().max().item()
        sync_float8_amax_and_scale_history(layer)
    assert layer.fp8_amax_history_input[:2].tolist() == [
        (100 * x).abs().max().item(),
        x.abs().max().item(),
    ]


def reset(module: nn.Module) -> None:
    if isinstance(module, Float8Linear):
        module.reset_parameters()


@on_devices
def test_amaxes_are_the_largest_over_microbatches(device: str) -> None:
    layer = Float8Linear(32, 17, bias=False, device=device, config=delayed())
    batches = [
        (f * seeded(i, 8, 32, device=device), seeded(i + 9, 8, 17, device=device) / f)
        for i, f in enumerate((1, 5, 2))
    ]
    for x, g in batches:
        layer(x).backward(g)
    assert layer.fp8_amax_input.item() == max(x.abs().max().item() for x, _ in batches)
    assert layer.fp8_amax_weight.item() == layer.weight.abs().max().item()
    assert layer.fp8_amax_grad_output.item() == max(g.abs().max().item() for _, g in batches)
    sync_float8_amax_and_scale_history(layer)
    assert layer.fp8_amax_history_input[0].item() == max(x.abs().max().item() for x, _ in batches)
    assert layer.fp8_amax_input.item() == 0


# ---------------------------------------------------------------- enable_amax_init


@on_devices
def test_amax_init_makes_the_first_step_equal_dynamic_scaling(device: str) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 17)).to(device)
    dynamic = convert_to_float8_training(copy.deepcopy(plain), config=tensorwise())
    model = convert_to_float8_training(plain, config=delayed(enable_amax_init=True))
    for seed in (0, 1):  # two microbatches: both before the first sync
        wanted, got = step(dynamic, seed, sync=False), step(model, seed, sync=False)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@on_devices
def test_without_amax_init_the_first_scales_are_one(device: str) -> None:
    layer = Float8Linear(32, 16, bias=False, device=device, config=delayed(enable_amax_init=False))
    x, g = 1000 * seeded(0, 16, 32, device=device), seeded(1, 16, 16, device=device)
    with GemmSpy() as spy:
        results = forward_backward(layer, x, g)
    assert [s.item() for _, a, _, b in spy.gemms for s in (a, b)] == [1.0] * 6
    assert spy.gemms[0][0].float().abs().max() == 448  # saturated, not NaN
    assert all(bool(result.isfinite().all()) for result in results.values())
    sync_float8_amax_and_scale_history(layer)
    scale = torch.tensor(x.double().abs().max().item() / 448, dtype=torch.float64).float()
    assert layer.fp8_scale_input.item() == scale.item()
