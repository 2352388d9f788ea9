"""Shapes of float8 operands: what float8 GEMMs need of them."""

from float8.formats import GEMM_ALIGNMENT


def ceil16(n: int) -> int:
    """The smallest multiple of 16 that is not below ``n``.

    Written without a branch, so that it also works on symbolic sizes without a guard.
    """
    return (n + (GEMM_ALIGNMENT - 1)) // GEMM_ALIGNMENT * GEMM_ALIGNMENT
