"""The cost model against what was measured, and against sums done by hand."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

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
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

Shape = tuple[int, int, int]


def measured(name: str, key: str, **wanted: str) -> dict[Shape, dict[str, float]]:
    """Milliseconds by shape and by the column `key`, of the rows whose columns are as `wanted`."""
    found: dict[Shape, dict[str, float]] = defaultdict(dict)
    for row in json.loads((RESULTS / name).read_text())["rows"]:
        is_a_sum = row["K"] is None
        if not is_a_sum and all(row[column] == value for column, value in wanted.items()):
            found[row["M"], row["K"], row["N"]][row[key]] = row["ms"]
    return found


GEMMS = {chip: measured(f"{chip}-matmul.json", "variant") for chip in ("h100", "h200")}
LAYERS = measured("h100-linear-eager.json", "recipe", mode="eager")
# The smaller ones take the time that the CPU needs to issue them.
BOUND_BY_THE_GPU = {shape: ms for shape, ms in LAYERS.items() if ms["bf16"] >= 1.4}


def gemm_error(chip: str, shape: Shape, variant: str) -> float:
    modelled = gemm_ms(*shape, KNOWN[chip], float8=variant != "bf16")
    return modelled / GEMMS[chip][shape][variant] - 1


@pytest.mark.parametrize("variant", ["bf16", "float8", "float8 fast accum"])
@pytest.mark.parametrize(("chip", "shape"), [(c, shape) for c in GEMMS for shape in GEMMS[c]])
def test_every_measured_gemm_is_within_16_percent(chip: str, shape: Shape, variant: str) -> None:
    """The worst in bf16: H100, squares of 2048, +15.5 %; H200, 4096 x 1024 x 1024, +15.1 %."""
    assert abs(gemm_error(chip, shape, variant)) < 0.16


@pytest.mark.parametrize("chip", GEMMS)
def test_half_of_the_measured_gemms_are_within_5_percent(chip: str) -> None:
    variants = [(shape, variant) for shape, ms in GEMMS[chip].items() for variant in ms]
    errors = [abs(gemm_error(chip, *names)) for names in variants]
    assert len(errors) >= 50
    assert median(errors) < 0.05


@pytest.mark.parametrize("shape", BOUND_BY_THE_GPU)
def test_layers_bound_by_the_gpu_are_near_the_measured_ones(shape: Shape) -> None:
    """bf16 from -12.0 to -0.1 %, float8 from -9.1 to -0.1 %, speedups from -8.4 to +6.6 %.

    One layer differs as much between hosts: 8192 x 8192 x 10240 took 3.66 ms on another H100, and
    4.00 on the one that these numbers are of.
    """
    ms = BOUND_BY_THE_GPU[shape]
    for recipe in ("tensorwise", "delayed"):
        cost = linear_cost(*shape, H100, Float8LinearConfig.from_recipe_name(recipe))
        assert -0.125 < cost.bf16_ms / ms["bf16"] - 1 < 0.01
        assert -0.095 < cost.float8_ms / ms[recipe] - 1 < 0.01
        assert -0.09 < cost.speedup / (ms["bf16"] / ms[recipe]) - 1 < 0.07


def test_small_layers_in_eager_mode_take_longer_than_their_gpu_time() -> None:
    """What the model leaves out: the time to issue kernels."""
    extra = json.loads((RESULTS / "h100-linear-eager.json").read_text())["extra"]
    assert linear_cost(8192, 1024, 1024, H100).float8_ms < extra["host_us"]["tensorwise"] / 2e3


def test_four_llama_blocks_are_near_the_measured_ones() -> None:
    """80.2 ms in bf16 and 61.7 tensorwise; of these, 20.6 were fitted to such blocks."""
    rows = json.loads((RESULTS / "h100-block-llama3-8b.json").read_text())["rows"]
    ms = {row["recipe"]: row["ms"] for row in rows if row["mode"] == "compiled"}
    layers = [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 14336)] * 2 + [(14336, 4096)]
    costs = [linear_cost(8192, *layer, H100) for layer in layers]
    rest = rest_ms(8192, 8192, 4, 4096, 14336, H100)
    assert rest == pytest.approx(16 + 4.5, rel=0.01)
    assert 4 * sum(c.bf16_ms for c in costs) + rest == pytest.approx(ms["bf16"], rel=0.04)
    assert 4 * sum(c.float8_ms for c in costs) + rest == pytest.approx(ms["tensorwise"], rel=0.04)


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
    assert linear_cost(8192, 1024, 1024, H100).speedup < 0.9
    assert linear_cost(8192, 256, 256, H100).speedup < 0.5
    assert linear_cost(16, 4096, 4096, H100).speedup < 1


@pytest.mark.parametrize(("float8", "tflops", "item"), [(False, 750, 2), (True, 1380, 1)])
def test_a_gemm_by_hand(float8: bool, tflops: float, item: int) -> None:
    M, K, N = 256, 512, 1024
    operations_us = 2 * M * K * N / (tflops * 1e6)
    memory_us = (item * (M * K + K * N) + 2 * M * N) / 3.02e6
    expected = (operations_us + 0.3 * memory_us + 3.5) / 1e3
    assert gemm_ms(M, K, N, H100, float8=float8) == pytest.approx(expected)


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
