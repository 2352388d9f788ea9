"""The cost model against what was measured, and against sums done by hand."""

import pytest
import torch

from float8 import CastConfig, Float8LinearConfig, ScalingType
from float8.cost import (
    KNOWN,
    cast_bytes,
    ceilings_by_device_name,
    ceilings_of,
    gemm_ms,
    linear_cost,
    rest_ms,
)

H100 = KNOWN["h100"]
# TFLOP/s of an H100 SXM: (M, K, N), bf16, e4m3 with fast accumulation, without.
MEASURED = [
    ((8192, 8192, 8192), 768, 1429, 1424),
    ((8192, 4096, 14336), 656, 1210, 1190),
    ((8192, 14336, 4096), 679, 1305, 1278),
    ((8192, 4096, 4096), 640, 1118, 1136),
]
WORST_ERROR = 0.12


@pytest.mark.parametrize(("shape", "bf16", "fast", "slow"), MEASURED)
def test_gemm_times_are_near_the_measured_ones(
    shape: tuple[int, int, int], bf16: float, fast: float, slow: float
) -> None:
    M, K, N = shape
    gflop = 2 * M * K * N / 1e9
    assert gemm_ms(M, K, N, H100, float8=False) == pytest.approx(gflop / bf16, rel=WORST_ERROR)
    for rate in (fast, slow):
        assert gemm_ms(M, K, N, H100, float8=True) == pytest.approx(gflop / rate, rel=WORST_ERROR)


def test_four_llama_blocks_are_near_the_measured_ones() -> None:
    """benchmarks/results/h100-block-llama3-8b.json, compiled: 82.2 ms in bf16, 61.2 tensorwise."""
    layers = [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 14336)] * 2 + [(14336, 4096)]
    costs = [linear_cost(8192, *layer, H100) for layer in layers]
    rest = rest_ms(8192, 8192, 4, 4096, 14336, H100)
    assert 4 * sum(c.bf16_ms for c in costs) + rest == pytest.approx(82.2, rel=WORST_ERROR)
    assert 4 * sum(c.float8_ms for c in costs) + rest == pytest.approx(61.2, rel=WORST_ERROR)


def test_bytes_of_all_casts() -> None:
    M, K, N = 64, 32, 48
    amaxes = 2 * (M * K + M * N + N * K)
    casts = 4 * (M * K + M * N) + 2 * 3 * N * K
    assert cast_bytes(M, K, N) == amaxes + casts
    # With delayed scaling the amax is taken in the read of the cast.
    assert cast_bytes(M, K, N, Float8LinearConfig.from_recipe_name("delayed")) == casts


def test_a_layer_all_in_high_precision_costs_what_bf16_costs() -> None:
    disabled = CastConfig(scaling_type=ScalingType.DISABLED)
    names = ("input", "weight", "grad_output")
    config = Float8LinearConfig(**{f"cast_config_{name}": disabled for name in names})
    cost = linear_cost(8192, 4096, 4096, H100, config)
    assert cost.cast_ms == 0
    assert cost.speedup == 1


def test_a_gemm_in_high_precision_is_charged_as_one_and_saves_its_casts() -> None:
    disabled = CastConfig(scaling_type=ScalingType.DISABLED)
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=disabled,
        cast_config_grad_output_for_grad_weight=disabled,
    )
    M, K, N = 8192, 4096, 4096
    # Input and grad_output lose the column data they need for grad_weight only.
    assert cast_bytes(M, K, N) - cast_bytes(M, K, N, config) == M * K + M * N
    mixed, full = linear_cost(M, K, N, H100, config), linear_cost(M, K, N, H100)
    assert mixed.bf16_ms == full.bf16_ms
    difference = gemm_ms(N, M, K, H100, float8=False) - gemm_ms(N, M, K, H100, float8=True)
    assert mixed.gemm_ms - full.gemm_ms == pytest.approx(difference)


def test_large_layers_gain_and_small_ones_lose() -> None:
    assert linear_cost(8192, 8192, 8192, H100).speedup > 1.4
    assert linear_cost(8192, 512, 512, H100).speedup < 1
    assert linear_cost(16, 4096, 4096, H100).speedup < 1


def test_a_layer_bound_by_memory_takes_the_time_of_its_bytes() -> None:
    M, K, N = 128, 8192, 132 * 256
    moved = 2 * (M * K + K * N + M * N)
    expected = moved / 3.02e9 + H100.kernel_us / 1e3
    assert gemm_ms(M, K, N, H100, float8=False) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_devices_are_known_by_name(name: str, known: str | None) -> None:
    assert ceilings_by_device_name(name) is (None if known is None else KNOWN[known])


def test_a_cpu_is_not_known() -> None:
    assert ceilings_of(torch.device("cpu")) is None
    assert ceilings_of(torch.device("meta")) is None
