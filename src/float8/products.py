"""The functions with which a linear layer quantizes tensors and computes its three GEMMs."""

from typing import Any

from float8.gemm import matmul
from float8.quantize import padded, quantize, to_col

Shape = tuple[int, int]


class Dense:
    """Namespace of the functions with which a linear layer casts tensors and computes its GEMMs.

    The autograd function `Linear` gets this class, or a subclass for experts or for tokens that are
    sharded over ranks, and calls its functions, such as `quantize_rows`. Their `*expert_ends` are
    empty here, and one tensor for experts: the ends of the rows of each.
    """

    columns_from_values = True
    """Whether compiled code casts the input to column data (transposed) in backward."""
    keeps_row_data = False
    """Whether backward makes column data from row data of the input, gathered from all ranks."""
    repeats_scales = False
    """Whether a per-tensor scale is repeated for each row of the weights, as [E, N] for experts."""
    stored_transposed = False
    """Whether the Parameter stores weights [E, N, K] as [E, K, N]."""

    quantize_rows: Any = staticmethod(quantize)
    """Quantize the input [M, K]: `(x, cast, *expert_ends, row, col, traced)` to a `Quantized`."""
    quantize_grad: Any = staticmethod(quantize)
    """Quantize grad_output [M, N]: `(x, cast, *expert_ends, row, col)` to a `Quantized`."""
    quantize_weight: Any = staticmethod(quantize)
    """Quantize a weight: `(weight, cast, row, col, pad_rows, traced, after)` to a `Quantized`."""
    padded: Any = staticmethod(padded)
    """Pad row data of a weight for GEMMs: `(row_data, granularity)` to an `Operand`."""
    transposed: Any = staticmethod(to_col)
    """Convert row data of a weight to column data: `(row_data, cast_config, after)`."""
    output: Any = staticmethod(matmul)
    """Multiply [M, K] by [N, K]: `(a, b, (M, N), *expert_ends, gemm, out_dtype)` to [M, N]."""
    grad_input: Any = staticmethod(matmul)
    """Multiply [M, N] by [K, N], with the arguments of `output` and shape (M, K), to [M, K]."""
    grad_weight: Any = staticmethod(matmul)
    """Multiply [N, M] by [K, M], with the arguments of `output` and shape (N, K), to [N, K]."""
    outer: Any = staticmethod(lambda grad_output, x: grad_output.t() @ x)
    """Compute grad_weight in high precision: `(grad_output, input, *expert_ends)` to [N, K]."""
    scatter: Any = None
    """None, or a function that reduce-scatters the output [M, N] over ranks by rows."""
    start: Any = None
    """None, or a function that starts to reduce-scatter grad_input [M, K] over ranks by rows."""
    finished: Any = None
    """None, or a function that waits for the result of `start`, after grad_weight is launched."""


PRODUCTS: dict[int, Any] = {2: Dense}
"""Number of dims of a weight -> the class that multiplies by it; `float8.experts` adds 3."""
