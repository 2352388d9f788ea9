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

    `Linear` calls these attributes of `call.products`. Experts, and layers whose tokens ranks
    share, have a class of the same attributes. `index` below are tensors that these functions take
    besides, saved for backward: none for `Dense`, the ends of the groups of rows for experts.
    """

    columns_from_values = True
    """Compiled code casts the input to column data in backward, from the values that are kept."""
    keeps_row_data = False
    """Backward makes column data of the row data of the input, which are not of this rank alone."""
    repeats_scales = False
    """The one scale of a weight is there for each of its rows, [E, N] of experts."""
    stored_transposed = False
    """The Parameter of the weights [E, N, K] lies as [E, K, N]."""

    quantize_rows: Any = staticmethod(quantize)
    """Quantize the input [M, K]: `(x, cast, *index, row, col, traced)` to a `Quantized`."""
    quantize_grad: Any = staticmethod(quantize)
    """Quantize grad_output [M, N]: `(x, cast, *index, row, col)` to a `Quantized`."""
    quantize_weight: Any = staticmethod(quantize)
    """Quantize a weight: `(weight, cast, row, col, pad_rows, traced, after)` to a `Quantized`."""
    padded: Any = staticmethod(padded)
    """Pad row data of a weight for GEMMs: `(row_data, granularity)` to an `Operand`."""
    transposed: Any = staticmethod(to_col)
    """Make column data of row data of a weight: `(row_data, cast_config, after)`."""
    output: Any = staticmethod(matmul)
    """Multiply [M, K] by [N, K]: `(a, b, (M, N), *index, gemm, out_dtype)` to [M, N]."""
    grad_input: Any = staticmethod(matmul)
    """Multiply [M, N] by [K, N], with the same arguments: [M, K]."""
    grad_weight: Any = staticmethod(matmul)
    """Multiply [N, M] by [K, M], with the same arguments: [N, K]."""
    outer: Any = staticmethod(_outer)
    """Compute grad_weight in high precision: `(grad_output, input, *index)` to [N, K]."""
    scatter: Any = None
    """None, or a function that sums the output up over ranks, and returns this rank's rows."""
    start: Any = None
    """None, or a function that starts to sum grad_input up over ranks."""
    finished: Any = None
    """None, or a function that waits for what `start` returned, once grad_weight is under way."""


PRODUCTS: dict[int, Any] = {2: Dense}
"""The products of a layer, by the dims of its weight; `float8.experts` adds those of [E, N, K]."""
