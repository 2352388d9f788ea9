"""What a layer keeps from forward to backward: float8 data, scales and the weight itself."""

import pytest
import torch
from torch import Tensor

from float8 import CastConfig, Float8Linear, Float8LinearConfig, convert_to_float8_training
from support.configs import DISABLED, MIXES, mixed
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import FeedForward, seeded
from support.spies import saved_tensors

M, K, N = 64, 32, 48


def without(saved: list[Tensor], *known: Tensor) -> list[Tensor]:
    return [s for s in saved if not any(s is k or s.data_ptr() == k.data_ptr() for k in known)]


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
def test_saved_data_are_float8_and_two_scales(device: str, mix, dtype: torch.dtype) -> None:
    layer = Float8Linear(K, N, device=device, dtype=dtype, config=mixed(*mix))
    x = seeded(0, M, K, dtype=dtype, device=device).requires_grad_()
    with saved_tensors() as saved:
        layer(x)
    assert any(s is layer.weight or s.data_ptr() == layer.weight.data_ptr() for s in saved)
    rest = without(saved, layer.weight)
    assert sorted((s.dtype, s.numel()) for s in rest if s.numel() == 1) == [(torch.float32, 1)] * 2
    assert [(s.dtype, s.numel()) for s in rest if s.numel() > 1] == [(E4M3, M * K)]


@on_devices
def test_the_saved_input_has_the_format_of_its_second_use(device: str) -> None:
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=CastConfig(target_dtype=E5M2),
        cast_config_grad_output=CastConfig(target_dtype=E4M3),
    )
    layer = Float8Linear(K, N, device=device, config=config)
    with saved_tensors() as saved:
        layer(seeded(0, M, K, device=device).requires_grad_())
    assert [s.dtype for s in without(saved, layer.weight) if s.numel() > 1] == [E5M2]


@on_devices
def test_a_frozen_weight_saves_no_input(device: str) -> None:
    layer = Float8Linear(K, N, device=device)
    layer.weight.requires_grad_(False)
    with saved_tensors() as saved:
        layer(seeded(0, M, K, device=device).requires_grad_())
    assert all(s.numel() == 1 for s in without(saved, layer.weight))


@on_devices
def test_an_input_without_gradient_saves_no_weight(device: str) -> None:
    layer = Float8Linear(K, N, device=device)
    with saved_tensors() as saved:
        layer(seeded(0, M, K, device=device))
    assert [(s.dtype, s.numel()) for s in saved if s.numel() > 1] == [(E4M3, M * K)]


@on_devices
def test_high_precision_grad_weight_saves_the_input_as_it_is(device: str) -> None:
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=DISABLED,
        cast_config_grad_output_for_grad_weight=DISABLED,
    )
    layer = Float8Linear(K, N, device=device, config=config)
    x = seeded(0, M, K, device=device).requires_grad_()
    with saved_tensors() as saved:
        layer(x)
    (kept,) = (s for s in without(saved, layer.weight) if s.numel() > 1)
    assert kept.data_ptr() == x.data_ptr()


@on_devices
def test_a_feed_forward_saves_less_than_in_bfloat16(device: str) -> None:
    """bf16 keeps x, silu's input, its output, its product's other factor and w2's input."""
    x = seeded(0, M, K, dtype=torch.bfloat16, device=device).requires_grad_() * 1

    def saved_bytes(model: FeedForward) -> int:
        with saved_tensors() as saved:
            model(x)
        parameters = {p.data_ptr() for p in model.parameters()}
        kept = {s.data_ptr(): s.nbytes for s in saved if s.data_ptr() not in parameters}
        return sum(kept.values())

    model = FeedForward(K, 4 * K).to(device, torch.bfloat16)
    plain = saved_bytes(model)
    float8 = saved_bytes(convert_to_float8_training(model))
    # w1 and w3 keep a float8 copy of their input each, together as much as one in bf16; w2 halves
    # its input.
    scales = 6 * 4
    assert float8 == plain - M * 4 * K + scales
