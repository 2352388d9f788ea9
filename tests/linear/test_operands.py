"""The operands of the three GEMMs, bit for bit: which scale, which format, which layout."""

import pytest
import torch
from torch import nn

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits
from support.configs import DELAYED, DYNAMIC, MIXES, mixed, tensorwise
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded
from support.reference import reference_cast, reference_scale, up16, zero_padded
from support.spies import GemmSpy

SHAPES = [(32, 64, 48), (7, 33, 19), (1, 16, 1)]


def run(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list:
    with GemmSpy() as spy:
        layer(x.detach().requires_grad_()).backward(g)
    assert len(spy.gemms) == 3
    return spy.gemms


def expected(x, scale_x, fx, w, scale_w, fw, g, scale_g, fg):
    """All three GEMMs' operands from scratch: `(a, scale_a, b, scale_b)` each."""
    (M, K), N = x.shape, w.shape[0]
    x8, w8, g8 = (
        reference_cast(*c) for c in ((x, scale_x, fx), (w, scale_w, fw), (g, scale_g, fg))
    )
    Mp, Np, Kp = up16(M), up16(N), up16(K)
    return [
        (zero_padded(x8, M, Kp), scale_x, zero_padded(w8, Np, Kp), scale_w),
        (zero_padded(g8, M, Np), scale_g, zero_padded(w8.t(), Kp, Np), scale_w),
        (zero_padded(g8.t(), Np, Mp), scale_g, zero_padded(x8.t(), Kp, Mp), scale_x),
    ]


def assert_operands(gemms: list, wanted: list) -> None:
    names = ("output", "grad_input", "grad_weight")
    for name, gemm, want in zip(names, gemms, wanted, strict=True):
        for part, got, w in zip(("a", "scale a", "b", "scale b"), gemm, want, strict=True):
            assert same_bits(got, w), f"{name}: {part}"


@on_devices
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "K", "N"), SHAPES)
def test_dynamic_operands(
    device: str, dtype: torch.dtype, power_of_2: bool, M: int, K: int, N: int
) -> None:
    config = tensorwise(round_scales_to_power_of_2=power_of_2)
    linear = nn.Linear(K, N, bias=False, device=device, dtype=dtype)
    x, g = (seeded(i, M, n, dtype=dtype, device=device) * 3 for i, n in ((0, K), (1, N)))
    w = linear.weight
    operands = expected(
        *(x, reference_scale(x, E4M3, power_of_2), E4M3),
        *(w, reference_scale(w, E4M3, power_of_2), E4M3),
        *(g, reference_scale(g, E5M2, power_of_2), E5M2),
    )
    assert_operands(run(Float8Linear.from_float(linear, config), x, g), operands)


@on_devices
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_role_takes_its_own_kind_of_scale(device: str, dtype: torch.dtype, mix) -> None:
    """Second step: a delayed role takes the scale of step 1, a dynamic one that of step 2."""
    M, K, N = 24, 40, 16
    linear = nn.Linear(K, N, bias=False, device=device, dtype=dtype)
    layer = Float8Linear.from_float(linear, mixed(*mix))
    # Larger in step 2, so that the delayed scale saturates and the two differ.
    steps = [
        {
            "x": seeded(10 * s, M, K, dtype=dtype, device=device) * s,
            "w": seeded(10 * s + 1, N, K, dtype=dtype, device=device) * s,
            "g": seeded(10 * s + 2, M, N, dtype=dtype, device=device) * s,
        }
        for s in (1, 2)
    ]
    for step in (steps[0], *steps):  # a scale is known after two steps alike
        with torch.no_grad():
            layer.weight.copy_(step["w"])
        gemms = run(layer, step["x"], step["g"])
        sync_float8_amax_and_scale_history(layer)

    arguments = []
    for name, cast, format in zip("xwg", mix, (E4M3, E4M3, E5M2), strict=True):
        source = steps[0 if cast is DELAYED else 1][name]
        arguments += [steps[1][name], reference_scale(source, format), format]
    assert_operands(gemms, expected(*arguments))


@on_devices
def test_target_dtypes_are_honoured(device: str) -> None:
    """The formats of all roles swapped: e5m2 for input and weight, e4m3 for grad_output."""
    e4m3, e5m2 = CastConfig(target_dtype=E4M3), CastConfig(target_dtype=E5M2)
    config = Float8LinearConfig(
        cast_config_input=e5m2, cast_config_weight=e4m3, cast_config_grad_output=e4m3
    )
    linear = nn.Linear(32, 16, bias=False, device=device)
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 16, device=device)
    w = linear.weight
    operands = expected(
        *(x, reference_scale(x, E5M2), E5M2),
        *(w, reference_scale(w, E4M3), E4M3),
        *(g, reference_scale(g, E4M3), E4M3),
    )
    assert_operands(run(Float8Linear.from_float(linear, config), x, g), operands)


@on_devices
def test_second_uses_can_be_cast_differently(device: str) -> None:
    """Own formats for the operands of grad_weight and for the weight of grad_input."""
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=CastConfig(target_dtype=E5M2),
        cast_config_weight_for_grad_input=CastConfig(target_dtype=E5M2),
        cast_config_grad_output=CastConfig(target_dtype=E4M3),
        cast_config_grad_output_for_grad_weight=CastConfig(target_dtype=E4M3),
    )
    linear = nn.Linear(48, 32, bias=False, device=device)
    x, g = seeded(0, 16, 48, device=device), seeded(1, 16, 32, device=device)
    gemms = run(Float8Linear.from_float(linear, config), x, g)
    formats = [(a.dtype, b.dtype) for a, _, b, _ in gemms]
    assert formats == [(E4M3, E4M3), (E4M3, E5M2), (E4M3, E5M2)]
    _, _, b, scale_b = gemms[1]
    wanted = reference_cast(linear.weight, reference_scale(linear.weight, E5M2), E5M2)
    assert same_bits(b, wanted.t())
    assert same_bits(scale_b, reference_scale(linear.weight, E5M2))
    _, _, b, scale_b = gemms[2]
    assert same_bits(b, reference_cast(x, reference_scale(x, E5M2), E5M2).t())
    assert same_bits(scale_b, reference_scale(x, E5M2))


@on_devices
def test_second_use_with_delayed_scaling_keeps_its_own_history(device: str) -> None:
    config = Float8LinearConfig(
        cast_config_grad_output=DYNAMIC,
        cast_config_grad_output_for_grad_weight=CastConfig(
            scaling_type=DELAYED.scaling_type, target_dtype=E4M3
        ),
    )
    linear = nn.Linear(32, 16, bias=False, device=device)
    layer = Float8Linear.from_float(linear, config)
    assert {n for n, _ in layer.named_buffers()} == {
        "fp8_amax_grad_output_for_grad_weight",
        "fp8_amax_history_grad_output_for_grad_weight",
        "fp8_scale_grad_output_for_grad_weight",
    }
    g1, g2 = seeded(1, 16, 16, device=device), 2 * seeded(2, 16, 16, device=device)
    for g in (g1, g1, g2):
        gemms = run(layer, seeded(0, 16, 32, device=device), g)
        sync_float8_amax_and_scale_history(layer)
    assert same_bits(gemms[1][1], reference_scale(g2, E5M2))
    assert same_bits(gemms[2][1], reference_scale(g1, E4M3))


@on_devices
def test_operands_lie_contiguous_along_the_contraction(device: str) -> None:
    layouts = []

    class Layouts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._scaled_mm.default:
                layouts.append((args[0].is_contiguous(), args[1].t().is_contiguous()))
            return func(*args, **(kwargs or {}))

    layer = Float8Linear(32, 48, bias=False, device=device)
    with Layouts():
        layer(seeded(0, 16, 32, device=device).requires_grad_()).sum().backward()
    assert layouts == [(True, True)] * 3


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_input_and_reads_the_weight_as_it_is(
    device: str, dtype: torch.dtype
) -> None:
    linear = nn.Linear(32, 16, bias=False, device=device)
    layer = Float8Linear.from_float(linear)
    x = seeded(0, 16, 32, device=device)
    with GemmSpy() as spy, torch.autocast(device, dtype):
        assert layer(x).dtype == dtype
    ((a, scale_a, b, scale_b),) = spy.gemms
    low, w = x.to(dtype), linear.weight
    assert same_bits(a, reference_cast(low, reference_scale(low, E4M3), E4M3))
    assert same_bits(scale_a, reference_scale(low, E4M3))
    assert same_bits(b, reference_cast(w, reference_scale(w, E4M3), E4M3))
    assert same_bits(scale_b, reference_scale(w, E4M3))


@pytest.mark.gpu  # the CPU always accumulates in float32
def test_fast_accumulation_goes_to_the_gemms_that_ask_for_it() -> None:
    device = "cuda"
    fast = []

    class Fast(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._scaled_mm.default:
                # torch releases differ in passing it by name or, as the eighth, by position.
                fast.append(args[7] if len(args) > 7 else kwargs.get("use_fast_accum", False))
            return func(*args, **(kwargs or {}))

    layer = Float8Linear(32, 48, bias=False, device=device, dtype=torch.bfloat16)
    x = seeded(0, 16, 32, device=device, dtype=torch.bfloat16).requires_grad_()
    with Fast():
        layer(x).sum().backward()
    assert fast == [True, False, False]
