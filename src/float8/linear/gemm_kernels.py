"""Which kernel runs each GEMM of a layer, told without running it."""

from __future__ import annotations

from typing import NamedTuple

from float8.config import GEMM_OPERANDS, Float8GemmConfig, Float8LinearConfig
from float8.formats import E4M3
from float8.gemm import GemmKernel, KernelTable, choose_kernel
from float8.kernels import ceil16


class LinearKernels(NamedTuple):
    """The kernel of each of the three GEMMs; None: it does not run in float8."""

    output: GemmKernel | None
    grad_input: GemmKernel | None
    grad_weight: GemmKernel | None


def linear_kernels(
    tokens: int,
    in_features: int,
    out_features: int,
    config: Float8LinearConfig,
    table: KernelTable | None,
) -> LinearKernels:
    """The kernels of a layer in bf16, run eagerly or compiled for this number of tokens.

    Args:
        tokens: Rows of the input.
        in_features: K.
        out_features: N.
        config: How the layer runs.
        table: What was measured on the device; None: nothing.
    """
    M, K, N = tokens, ceil16(in_features), ceil16(out_features)
    dims = {"output": (M, K, N), "grad_input": (M, N, K), "grad_weight": (N, ceil16(M), K)}

    def kernel(gemm: str) -> GemmKernel | None:
        if config.emulate or not config.runs_in_float8(gemm):
            return None
        a, b = (config.cast_config(site).target_dtype or E4M3 for site in GEMM_OPERANDS[gemm])
        gemm_config: Float8GemmConfig = getattr(config, f"gemm_config_{gemm}")
        return choose_kernel(
            table,
            *dims[gemm],
            dtype_a=a,
            dtype_b=b,
            use_fast_accum=gemm_config.use_fast_accum,
        )

    return LinearKernels(*(kernel(gemm) for gemm in LinearKernels._fields))
