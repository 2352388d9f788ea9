"""How the rows of an input meet a weight: the quantization and the three GEMMs of a layer."""

from typing import Any, Protocol

from torch import Tensor

from float8.gemm import matmul
from float8.quantize import padded, quantize, to_col


class Products(Protocol):
    """How the rows of an input meet a weight: `Linear` asks, and never knows which kind it is.

    `index` are tensors of one call that the products read, as the ends of the groups of rows. They
    are saved for backward, and given to every method that takes rows.
    """

    columns_from_values: bool
    """Compiled code casts the input to column data in backward, from the values that are kept."""
    keeps_row_data: bool
    """Backward makes column data of the row data of the input, which are not of this rank alone."""
    repeats_scales: bool
    """The one scale of a weight is there for each of its rows, [E, N] of experts."""
    stored_transposed: bool
    """The Parameter of the weights [E, N, K] lies as [E, K, N]."""

    quantize_rows: Any  # (x [M, C], cast, *index, row, col, traced) -> Quantized
    quantize_grad: Any  # the same of grad_output [M, N]
    quantize_weight: Any  # (weight, cast, row, col, pad_rows, traced, after) -> Quantized
    padded: Any  # (row data, granularity) -> Operand
    transposed: Any  # (row data, cast config, after) -> Operand, column data
    output: Any  # (a [M, K], b [N, K], (M, N), *index, gemm, out_dtype) -> [M, N]
    grad_input: Any  # (a [M, N], b [K, N], (M, K), *index, gemm, out_dtype) -> [M, K], or a promise
    grad_weight: Any  # (a [N, M], b [K, M], (N, K), *index, gemm, out_dtype) -> [N, K]
    outer: Any  # (grad_output [M, N], input [M, K], *index) -> [N, K] in their dtype
    finished: Any  # None, or: the promise of grad_input, when grad_weight is under way -> [M, K]


class Dense:
    """All rows meet one weight [N, K]."""

    columns_from_values = True
    keeps_row_data = False
    repeats_scales = False
    stored_transposed = False
    finished = None
    quantize_rows = quantize_grad = quantize_weight = staticmethod(quantize)
    padded = staticmethod(padded)
    transposed = staticmethod(to_col)
    output = grad_input = grad_weight = staticmethod(matmul)

    @staticmethod
    def outer(grad_output: Tensor, x: Tensor) -> Tensor:
        """Multiply in high precision: `grad_output.T @ x`."""
        return grad_output.t() @ x


PRODUCTS: dict[int, Any] = {2: Dense}
"""The products of a layer, by the dims of its weight; `float8.experts` adds those of [E, N, K]."""
