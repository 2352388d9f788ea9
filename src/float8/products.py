"""How the rows of an input meet a weight: the quantization and the three GEMMs of a layer."""

from typing import Any

from torch import Tensor

from float8.gemm import matmul
from float8.quantize import padded, quantize, to_col

Shape = tuple[int, int]


def _outer(grad_output: Tensor, x: Tensor) -> Tensor:
    return grad_output.t() @ x


class Dense:
    """The products of a plain layer: all rows meet one weight [N, K].

    `Linear` asks `call.products` and never knows which kind it is; experts and layers whose tokens
    ranks share have others with these attributes. `index` below are tensors of one call that the
    products read, saved for backward: none here, the ends of the groups of rows of experts.
    """

    columns_from_values = True
    """Compiled code casts the input to column data in backward, from the values that are kept."""
    keeps_row_data = False
    """Backward makes column data of the row data of the input, which are not of this rank alone."""
    repeats_scales = False
    """The one scale of a weight is there for each of its rows, [E, N] of experts."""
    stored_transposed = False
    """The Parameter of the weights [E, N, K] lies as [E, K, N]."""

    quantize_rows: Any = staticmethod(quantize)  # (input [M, K], cast, *index, row, col, traced)
    quantize_grad: Any = staticmethod(quantize)  # (grad_output [M, N], cast, *index, row, col)
    quantize_weight: Any = staticmethod(
        quantize
    )  # (weight, cast, row, col, pad_rows, traced, after)
    padded: Any = staticmethod(padded)  # (row data of a weight, granularity) -> as GEMMs read them
    transposed: Any = staticmethod(
        to_col
    )  # (row data of a weight, cast config, after) -> column data
    output: Any = staticmethod(
        matmul
    )  # ([M, K], [N, K], (M, N), *index, gemm, out_dtype) -> [M, N]
    grad_input: Any = staticmethod(matmul)  # ([M, N], [K, N], (M, K), *index, ...) -> [M, K]
    grad_weight: Any = staticmethod(matmul)  # ([N, M], [K, M], (N, K), *index, ...) -> [N, K]
    # Each of these three None, or a function that ranks run together:
    scatter: Any = None  # output [M, N] -> that of this rank
    start: Any = None  # grad_input [M, K] -> a promise of that of this rank
    finished: Any = None  # the promise, when grad_weight is under way -> grad_input
    outer: Any = staticmethod(_outer)  # (grad_output, input, *index) -> grad_weight, in their dtype


PRODUCTS: dict[int, Any] = {2: Dense}
"""The products of a layer, by the dims of its weight; `float8.experts` adds those of [E, N, K]."""
