"""The scaled float8 GEMM and its emulation."""

from float8.gemm.matmul import Gemm, matmul

__all__ = ["Gemm", "matmul"]
