"""The scaled float8 GEMM, its emulation, and which kernel runs it."""

from float8.gemm.choice import GemmKernel, choose_kernel
from float8.gemm.scaled_mm import scaled_mm
from float8.gemm.table import KernelTable, MeasuredGemm, kernel_table

__all__ = [
    "GemmKernel",
    "KernelTable",
    "MeasuredGemm",
    "choose_kernel",
    "kernel_table",
    "scaled_mm",
]
