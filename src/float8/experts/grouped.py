"""The casts and grouped GEMMs of experts: each group of rows is multiplied by one expert's weight.

For experts the autograd function `Linear` calls `Grouped`, for linear layers `Dense`. Rows [T, C]
are sorted by expert: group e has the rows `offs[e - 1]:offs[e]`. Weights are [E, N, K].
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig, Granularity
from float8.experts.kernels.cast_groups import Columns, cast_groups, ends_of_groups
from float8.experts.kernels.grouped_matmul import GROUPED_GEMM
from float8.formats import BLACKWELL, GEMM_ALIGNMENT, GROUP_ALIGNMENT, HOPPER, lacks_float8_gemm
from float8.gemm import Gemm, refused_gemm, without_padding
from float8.kernels.runtime.ops import register
from float8.products import PRODUCTS, Dense, Shape
from float8.quantize import Cast, dequantized, padded
from float8.scales import Operand, Quantized


def quantize_experts(
    weights: Tensor,  # [E, N, K], contiguous or a transposed view; others are copied
    cast: Cast,  # format and granularity; `scale`: None or, if one covers an expert, [E] to use
    *,
    row: bool = False,  # whether to return row data
    col: bool = False,  # whether to return column data, the transposed copy
    after: Tensor | None = None,  # a tensor that compiled code must compute before the cast
    **_: Any,  # `pad_rows` and `traced` of `quantize`, which experts do not need
) -> Quantized:
    """Quantize the weights [E, N, K] of E experts, each with scales of its own.

    The last dim is zero-padded to a multiple of 16, or of k under blocks of 1 x k or k x k:

    scales      row data [E, N, K padded]           column data [E, K, N padded]
    per expert  [E, N], equal for all N             [E, K], equal for all K
    per row     [E, N]                              [E, K]
    1 x k       [E, N, ceil(K / k)]                 [E, K, ceil(N / k)]
    k x k       [E, ceil(N / k), >= ceil(K / k)]    [E, ceil(K / k), >= ceil(N / k)]
    """
    assert (cast.source, cast.reduce) == (None, None)  # each expert has its own scale
    weights = weights.detach()
    if swapped := weights.transpose(1, 2).is_contiguous():
        weights, row, col = weights.transpose(1, 2), col, row
    by_blocks = cast.config.scaling_granularity.by_blocks
    quantize = _quantize_with_block_scales if by_blocks else _quantize_with_row_scales
    quantized = quantize(weights, cast, after, row, col)
    return Quantized(quantized.col, quantized.row) if swapped else quantized


def _quantize_with_row_scales(
    weights: Tensor, cast: Cast, after: Tensor | None, row: bool, col: bool
) -> Quantized:  # compiled code computes `after` before the cast
    """Quantize [E, R, C] if `row`, and its transpose if `col`, with a scale per row or expert."""
    E, R, C = weights.shape
    # Cast one matrix [E * R, C], in which the R rows of each expert are a group.
    ends = torch.arange(R, E * R + 1, R, dtype=torch.int32, device=weights.device)
    padded_rows = R + -R % GROUP_ALIGNMENT  # of one expert, in column data
    options: Any = {"row": row, "col": col, "width": E * padded_rows, "after": after}
    row_data, col_data = cast_groups(weights.contiguous().view(E * R, C), cast, ends, **options)
    if row:
        row_data = Operand(row_data.data.view(E, R, -1), row_data.scale.view(E, R))
    if col:  # [C, E * padded_rows], the columns of one expert beside those of the next
        data = col_data.data.view(-1, E, padded_rows).transpose(0, 1)
        col_data = Operand(data[:, :C, : R + -R % GEMM_ALIGNMENT], col_data.scale[:, :C])
    return Quantized(row_data, col_data)


def _quantize_with_block_scales(
    weights: Tensor, cast: Cast, after: Tensor | None, row: bool, col: bool
) -> Quantized:  # compiled code computes `after` before the cast
    """Quantize [E, R, C] if `row`, its transpose if `col`, with scales of 1 x k or k x k blocks."""
    (E, R, C), cast_config = weights.shape, cast.config
    width: Any = cast_config.scaling_granularity.width
    options: Any = {"row": row, "col": col, "scale": cast.scale, "after": after}
    if R % width:
        # In a matrix [E * R, C] blocks would cross experts, so cast each expert by itself. If its
        # rows were padded instead, compiled code would keep the padded weights for backward.
        per_expert: Any = [kernels.cast(x, cast_config, **options) for x in weights]
        rows, columns = zip(*per_expert, strict=True)
        row_data, col_data = _stacked(rows) if row else None, _stacked(columns) if col else None
        if row_data is not None:  # drop padding below row R; squares have fewer scales
            row_data = Operand(row_data.data[:, :R], row_data.scale[:, :R])
    else:
        matrix = weights.contiguous().view(E * R, C)
        row_data, col_data = kernels.cast(matrix, cast_config, **options)
        if row_data is not None:
            row_data = Operand(*(part.view(E, part.shape[0] // E, -1) for part in row_data))
        if col_data is not None:  # [C, E * R], the columns of one expert beside those of the next
            unpadded = col_data.data, col_data.scale[:, : E * R // width]
            col_data = Operand(*(part.view(len(part), E, -1).transpose(0, 1) for part in unpadded))
    if col_data is not None:  # drop padding below row C
        col_data = Operand(col_data.data[:, :C], col_data.scale[:, :C])
    return Quantized(row_data, col_data)


def _stacked(operands: Sequence[Operand]) -> Operand:
    """Stack `operands` on a new dim 0: scales, and data as bytes, as few backends stack float8."""
    data = torch.stack([x.data.view(torch.uint8) for x in operands]).view(operands[0].data.dtype)
    return Operand(data, torch.stack([x.scale for x in operands]))


def grouped_matmul(
    a: Operand | Columns,  # an `Operand`: groups of rows; `Columns`: groups of columns
    b: Operand,
    shape: Shape,  # the last two dims of the result, without padding
    ends: Tensor,  # [E] int32, ascending: one past the last row of each group, which may be empty
    *,
    gemm: Gemm,  # granularities of `a` and `b`, fast accumulation, emulation
    out_dtype: torch.dtype,  # of the result
) -> Tensor:
    """Multiply each group of rows by its own matrix, or contract two tensors over each group.

    If `a` is an `Operand` [R, K] with scales [R], and `b` [E, N, K] has scales [E, N], returns
    `a[ends[e - 1]:ends[e]] @ b[e].T` for each group e, [R, N]; rows outside all groups are zero. If
    `a` is `Columns`, data [N, R] with scales [E, N], and `b` [K, R] has scales [E, K], returns
    `a @ b.T` over the columns of each group e, [E, N, K]; these groups end at `a.ends`, not `ends`.

    Data are float8 and contiguous along the last dim, which is contracted. With 1 x k or k x k
    blocks `a` [R, K] has scales [R, K / k], `b` [E, N, K] has [E, N, K / k] or [E, ceil(N / k),
    >= K / k], and `Columns` and their `b` have [N, R / k] and [K, R / k]. CPUs emulate the GEMM.

    Raises:
        RuntimeError: unless `gemm.emulate`, the GPU (in eager mode) or Triton < 3.6 lacks the GEMM.
        ValueError: on a CPU, `a` is an `Operand`, and `ends` descend or are not in 0..R.
    """
    if not torch.compiler.is_compiling() and not gemm.emulate:
        # Of Blackwell's 10.x and 12.x, only 10.x has grouped GEMMs.
        only = BLACKWELL[:1] if gemm.granularities[0].exponents else HOPPER
        if reason := lacks_float8_gemm(a.data.device, only=only):
            raise refused_gemm(reason)
    ends, tokens = (a.ends, a.tokens) if isinstance(a, Columns) else (ends, None)
    y = GROUPED_GEMM(a.data, a.scale, b.data, b.scale, ends, tokens, gemm.packed(), out_dtype)
    return y if y.shape[-2:] == shape else without_padding(y, *shape)


def _outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if len(a) == 0:  # torch's grouped GEMM takes no empty tensors
        return a.new_zeros((ends.shape[0], a.shape[1], b.shape[1]))
    # Its operands need rows of a multiple of 16 bytes.
    (N, K), offs = (a.shape[1], b.shape[1]), ends_of_groups(ends, len(a))
    a, b = (F.pad(x, (0, -x.shape[1] % 8)) if x.shape[1] % 8 else x for x in (a, b))
    y = F.grouped_mm(a.t(), b, offs=offs)
    return y if y.shape[1:] == (N, K) else without_padding(y, N, K)


register(
    "grouped_outer",
    _outer,
    fake=lambda a, b, ends: a.new_empty((ends.shape[0], a.shape[1], b.shape[1])),
    flops=lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1],
)

GROUPED_OUTER = torch.ops.float8.grouped_outer.default
"""Op for grad_weight in high precision: compiled code supports torch's for bfloat16 only."""


class Grouped(Dense):
    """Namespace of casts and grouped GEMMs that autograd function `Linear` calls for experts."""

    columns_from_values = False
    repeats_scales = True

    quantize_rows = quantize_grad = staticmethod(cast_groups)
    quantize_weight = staticmethod(quantize_experts)

    @staticmethod
    def padded(row: Operand, granularity: Granularity) -> Operand:
        """Zero-pad K of [E, N, K] to a multiple of block width or 16; squeeze scales [E, N, 1]."""
        data, scale = padded(row, granularity)
        return Operand(data, scale if granularity.by_blocks else scale.squeeze(-1))

    @staticmethod
    def transposed(row: Operand, cast_config: CastConfig, after: Tensor | None = None) -> Operand:
        """Return column data [E, K, N padded], the transposed copy, of float8 weights [E, N, K].

        Scales are [E, N, 1] or of blocks. Under TENSORWISE or squares the bytes are transposed;
        else dequantized values are cast by `cast_config`. Compiled code computes `after` first.
        """
        granularity = cast_config.scaling_granularity
        if not granularity.square:
            values = dequantized(row, cast_config)
            return quantize_experts(values, Cast(cast_config), col=True, after=after).col
        E, N, K = row.data.shape
        multiple = granularity.height or GEMM_ALIGNMENT  # `height` is None for one scale per expert
        matrix = F.pad(row.data.view(torch.uint8), (0, 0, 0, -N % multiple)).flatten(0, 1)
        data = kernels.transpose_bytes(matrix.view(row.data.dtype), after=after)
        data = data[:K].view(K, E, -1).transpose(0, 1)  # [K, E * N] to [E, K, N]
        if granularity.by_blocks:
            return Operand(data, row.scale.mT)
        return Operand(data, row.scale[:, 0].expand(E, K).contiguous())  # the scale of each expert

    output = grad_input = grad_weight = staticmethod(grouped_matmul)

    @staticmethod
    def outer(g: Tensor, x: Tensor, offs: Tensor) -> Tensor:
        """Return `g[i:j].T @ x[i:j]` [E, N, K] in high precision, i:j being groups of rows."""
        return GROUPED_OUTER(g.contiguous(), x, offs)  # type: ignore[no-any-return]


class GroupedTransposed(Grouped):
    """`Grouped` for kept casts of weights [E, N, K], which are views of Parameters [E, K, N]."""

    stored_transposed = True


PRODUCTS[3] = Grouped
