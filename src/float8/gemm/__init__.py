"""The scaled float8 GEMM and its emulation."""

from float8.gemm.matmul import GEMM_OPS, Gemm, matmul

__all__ = ["GEMM_OPS", "Gemm", "matmul"]
