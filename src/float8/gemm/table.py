"""What the two kernels were measured to take: tables shipped with the package, one per chip.

`benchmarks/fit_gemm_choice.py` writes them from what `float8 bench matmul` measured.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import NamedTuple

from float8.cost import Ceilings

# By the name of the ceilings.
_FILES = {
    "h100": "h100.json",
    "h200": "h200.json",
}


class MeasuredGemm(NamedTuple):
    """One measured `[M, K] @ [K, N]`: fast accumulation, bf16 result, second operand in e4m3.

    Attributes:
        M: Rows of the first operand.
        K: Contraction dim.
        N: Columns of the result.
        format_a: Format of the first operand, `e4m3` or `e5m2`.
        tensorwise_us: Microseconds of the tensorwise kernel.
        rowwise_us: Microseconds of the rowwise kernel alone, its scale vectors given.
    """

    M: int
    K: int
    N: int
    format_a: str
    tensorwise_us: float
    rowwise_us: float


KernelTable = tuple[MeasuredGemm, ...]


@functools.cache
def kernel_table(ceilings: Ceilings | None) -> KernelTable | None:
    """The table of the kind of device that `ceilings` are of; None if nothing was measured."""
    file = None if ceilings is None else _FILES.get(ceilings.name)
    if file is None:
        return None
    text = resources.files("float8.gemm").joinpath(file).read_text(encoding="utf-8")
    return tuple(MeasuredGemm(*row) for row in json.loads(text)["gemms"])
