"""The delayed-scaling buffers of a layer: names, dtype, initial state, moving and copying."""

import copy

import pytest
import torch
from torch import nn

import tolerances
from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from sqnr import assert_same_bits, sqnr
from support.configs import DELAYED, DYNAMIC, delayed, mixed, tensorwise
from support.copies import COPIES
from support.devices import E4M3, on_devices
from support.models import copied, forward_backward, fp8_state, seeded
from support.reference import reference_cast
from support.stacks import step

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
    for seed in range(3):
        step(model, seed, sync=seed < 2)
    return model


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """The buffers that are not as they were."""
    state = fp8_state(model)
    assert state.keys() == before.keys()
    assert {buffer.dtype for buffer in state.values()} == {torch.float32}
    return {name for name in before if not torch.equal(state[name].cpu(), before[name].cpu())}


@on_devices
def test_state_dict_keys_shapes_and_dtypes(device: str) -> None:
    config = delayed(delayed_scaling_config=DelayedScalingConfig(history_len=5))
    state = Float8Linear(32, 16, device=device, config=config).state_dict()
    assert list(state) == ["weight", "bias", *NAMES]
    for name in NAMES:
        assert state[name].dtype == torch.float32
        assert state[name].shape == ((5,) if "history" in name else ())
        assert state[name].device.type == device
    assert list(Float8Linear(32, 16, config=tensorwise()).state_dict()) == ["weight", "bias"]
    one = Float8Linear(32, 16, config=mixed(DYNAMIC, DELAYED, DYNAMIC))
    assert [name for name, _ in one.named_buffers()] == [n for n in NAMES if "weight" in n]


@pytest.mark.parametrize(("enable_amax_init", "first_scale"), [(True, 0.0), (False, 1.0)])
def test_initial_values(enable_amax_init: bool, first_scale: float) -> None:
    layer = trained(enable_amax_init=enable_amax_init)[0]
    layer.reset_parameters()
    for each in (layer, Float8Linear(32, 48, config=layer.config)):
        for name, buffer in fp8_state(each).items():
            assert bool((buffer == (first_scale if "scale" in name else 0.0)).all()), name


@on_devices
def test_amax_init_makes_the_first_step_equal_dynamic_scaling(device: str) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 17)).to(device)
    dynamic = convert_to_float8_training(copy.deepcopy(plain), config=tensorwise())
    model = convert_to_float8_training(plain, config=delayed(enable_amax_init=True))
    for seed in (0, 1):  # two microbatches: both before the first sync
        assert_same_bits(step(model, seed, sync=False), step(dynamic, seed, sync=False))


@on_devices
def test_without_amax_init_the_first_scales_are_one(device: str) -> None:
    layer = Float8Linear(32, 16, bias=False, device=device, config=delayed(enable_amax_init=False))
    x, g = 1000 * seeded(0, 16, 32, device=device), seeded(1, 16, 16, device=device)
    results = forward_backward(layer, x, g)
    # Saturated, not NaN.
    x8, w8 = (reference_cast(t, torch.ones(()), E4M3).double() for t in (x, layer.weight))
    assert sqnr(x8 @ w8.t(), results["output"].cpu()) > tolerances.GEMM
    assert all(bool(result.isfinite().all()) for result in results.values())
    sync_float8_amax_and_scale_history(layer)
    scale = torch.tensor(x.double().abs().max().item() / 448, dtype=torch.float64).float()
    assert layer.fp8_scale_input.item() == scale.item()


@on_devices
@pytest.mark.parametrize("convert", ["bfloat16", "half", "double", "float"])
def test_state_stays_float32_and_exact(device: str, convert: str) -> None:
    model = trained(device)
    before = copied(model)
    getattr(model, convert)()
    assert next(model.parameters()).dtype == getattr(torch, convert.replace("half", "float16"))
    assert not changed(model, before)
    if convert != "double":
        step(model, 3)
        assert {name for name in before if "history" in name} <= changed(model, before)


@pytest.mark.gpu
def test_state_moves_with_the_model() -> None:
    model = trained("cpu")
    before = copied(model)
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        model.to(device, dtype)
        assert {buffer.device.type for buffer in fp8_state(model).values()} == {device}
        assert not changed(model, before)


@on_devices
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_trains_on_as_the_original_does(device: str, how: str) -> None:
    model = trained(device)
    clone = COPIES[how](model)
    assert type(clone[0]) is Float8Linear
    for seed in (3, 4):
        before, results = copied(clone), step(model, seed)
        assert not changed(clone, before)
        assert_same_bits(step(clone, seed), results)
        assert not changed(clone, fp8_state(model))


@on_devices
def test_training_in_eval_mode_scales_by_the_data_and_records(device: str) -> None:
    """As with dropout switched off: histories go on, though evaluation does not read them."""
    layer = Float8Linear(32, 48, bias=False, device=device, config=delayed()).eval()
    dynamic = Float8Linear.from_float(layer, tensorwise())
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 48, device=device)
    amax = x.abs().max().item()
    for factor in (1, 100):
        assert_same_bits(*(forward_backward(each, factor * x, g) for each in (layer, dynamic)))
        assert layer.fp8_amax_input.item() == (factor * x).abs().max().item()
        assert layer.fp8_amax_grad_output.item() == g.abs().max().item()
        sync_float8_amax_and_scale_history(layer)
    assert layer.fp8_amax_history_input[:2].tolist() == [(100 * x).abs().max().item(), amax]


@on_devices
def test_amaxes_are_the_largest_over_microbatches(device: str) -> None:
    layer = Float8Linear(32, 17, bias=False, device=device, config=delayed())
    batches = [
        (f * seeded(i, 8, 32, device=device), seeded(i + 9, 8, 17, device=device) / f)
        for i, f in enumerate((1, 5, 2))
    ]
    for x, g in batches:
        layer(x).backward(g)
        with torch.no_grad():
            layer(9 * x)  # of no step
    largest = max(x.abs().max().item() for x, _ in batches)
    assert layer.fp8_amax_input.item() == largest
    assert layer.fp8_amax_weight.item() == layer.weight.abs().max().item()
    assert layer.fp8_amax_grad_output.item() == max(g.abs().max().item() for _, g in batches)
    sync_float8_amax_and_scale_history(layer)
    assert layer.fp8_amax_history_input[0].item() == largest
    assert layer.fp8_amax_input.item() == 0
    for x in (torch.full_like(batches[0][0], torch.inf), batches[0][0]):
        layer(x)
    assert not layer.fp8_amax_input.isfinite()  # a clean microbatch hides no other
