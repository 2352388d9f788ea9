"""The scaled float8 GEMM and its emulation."""

from float8.gemm.scaled_mm import scaled_mm

__all__ = ["scaled_mm"]
