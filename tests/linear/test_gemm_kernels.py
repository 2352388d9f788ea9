"""Kernels of a layer, told without running it."""

import torch

from float8 import CastConfig, Float8LinearConfig, ScalingType
from float8.config import Float8GemmConfig
from float8.gemm import GemmKernel, MeasuredGemm
from float8.linear import LinearKernels, linear_kernels

TENSORWISE, ROWWISE = GemmKernel.TENSORWISE, GemmKernel.ROWWISE
# Faster for all but one shape, that of the gradient of the weight.
TABLE = (
    MeasuredGemm(8192, 4096, 1024, "e4m3", 100.0, 50.0),
    MeasuredGemm(8192, 1024, 4096, "e5m2", 100.0, 50.0),
    MeasuredGemm(1024, 8192, 4096, "e5m2", 100.0, 100.0),
)
FAST = Float8GemmConfig(use_fast_accum=True)


def kernels(tokens: int = 8192, features: tuple[int, int] = (4096, 1024), **options):
    return linear_kernels(tokens, *features, Float8LinearConfig(**options), TABLE)


def test_by_default_only_the_output_has_a_choice() -> None:
    assert kernels() == LinearKernels(ROWWISE, TENSORWISE, TENSORWISE)
    config = Float8LinearConfig()
    assert linear_kernels(8192, 4096, 1024, config, None) == LinearKernels(*[TENSORWISE] * 3)


def test_each_gemm_is_judged_by_its_own_shape() -> None:
    fast = {f"gemm_config_{gemm}": FAST for gemm in LinearKernels._fields}
    assert kernels(**fast) == LinearKernels(ROWWISE, ROWWISE, TENSORWISE)
    # Odd dims are padded before a kernel sees them.
    assert kernels(8191, (4090, 1020), **fast) == LinearKernels(ROWWISE, ROWWISE, TENSORWISE)


def test_what_does_not_run_in_float8_has_no_kernel() -> None:
    assert kernels(emulate=True) == LinearKernels(None, None, None)
    disabled = CastConfig(scaling_type=ScalingType.DISABLED)
    found = kernels(
        cast_config_input_for_grad_weight=disabled,
        cast_config_grad_output_for_grad_weight=disabled,
    )
    assert found == LinearKernels(ROWWISE, TENSORWISE, None)


def test_a_weight_in_e5m2_is_tensorwise() -> None:
    config = CastConfig(target_dtype=torch.float8_e5m2)
    hp = CastConfig(scaling_type=ScalingType.DISABLED)
    found = kernels(
        cast_config_weight=config,
        cast_config_weight_for_grad_input=hp,
        cast_config_grad_output=hp,
        cast_config_grad_output_for_grad_weight=CastConfig(),
    )
    assert found == LinearKernels(TENSORWISE, None, TENSORWISE)
