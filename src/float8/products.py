"""The functions with which a linear layer quantizes tensors and computes its three GEMMs."""

from typing import Any

from float8.gemm import matmul
from float8.quantize import padded, quantize, to_col

Shape = tuple[int, int]


class Dense:
    """Namespace of the functions with which a linear layer casts tensors and computes its GEMMs.

    The autograd function `Linear` gets this class, a subclass for experts, or an instance of a
    subclass for tokens sharded over ranks, and calls its functions. Input is [M, K], output [M, N].
    `*group_ends` is empty here, or one tensor for experts: the ends of the rows of each.
    """

    columns_from_values = True
    """Whether compiled code makes column data (transposed) of the input in backward, not forward.
    Independent of this, forward makes them if grad_weight needs another cast than output."""
    keeps_row_data = False
    """Whether backward makes column data from saved row data, gathered from all ranks."""
    repeats_scales = False
    """Whether the scale of a weight with one is repeated for each row, as [E, N] for experts."""
    stored_transposed = False
    """Whether a Parameter whose casts are kept (`HELD`) stores weights [E, N, K] as [E, K, N]."""
    quantize_rows: Any = staticmethod(quantize)
    """Quantize the input [M, K]: `(x, cast, *group_ends, row=, col=, traced=)` to `Quantized`."""
    quantize_grad: Any = staticmethod(quantize)
    """Quantize grad_output [M, N]: `(x, cast, *group_ends, row=, col=)` to `Quantized`."""
    quantize_weight: Any = staticmethod(quantize)
    """Quantize a weight: `(x, cast, row=, col=, pad_rows=, traced=, after=)` to `Quantized`."""
    padded: Any = staticmethod(padded)
    """Pad row data of a weight to 16 or block width: `(row_data, granularity)` to an `Operand`."""
    transposed: Any = staticmethod(to_col)
    """Make column data from row data of a weight: `(row_data, cast_config, after)` to `Operand`."""
    output: Any = staticmethod(matmul)
    """Return `a @ b.T` [M, N]: `(a [M, K], b [N, K], (M, N), *group_ends, gemm=, out_dtype=)`."""
    grad_input: Any = staticmethod(matmul)
    """Return `a @ b.T` [M, K] of operands [M, N] and [K, N], with arguments as of `output`."""
    grad_weight: Any = staticmethod(matmul)
    """Return `a @ b.T` [N, K], of experts [E, N, K], of [N, M] and [K, M], like `output`."""
    outer: Any = staticmethod(lambda grad_output, x: grad_output.t() @ x)
    """Compute grad_weight in high precision: `(grad_output, input, *group_ends)` to [N, K]."""
    scatter: Any = None
    """None, or a function that reduce-scatters the output [M, N] over ranks by rows."""
    start: Any = None
    """None, or a function that starts to reduce-scatter grad_input [M, K] over ranks by rows."""
    finished: Any = None
    """None, or a function that waits for the result of `start`, after grad_weight is launched."""


PRODUCTS: dict[int, Any] = {2: Dense}
"""Number of dims of a weight -> the class like `Dense` for it; `float8.experts` adds that of 3."""
