"""The weights of experts in float8: cast together, and held until they are written."""

from typing import Any

import torch
from torch import Tensor

from float8.config import CastConfig, ScalingGranularity
from float8.formats import E4M3, ceil16, ceil128
from float8.gemm import Gemm, grouped_matmul
from float8.kernels import transpose_bytes
from float8.kernels.cast_groups import cast_groups
from float8.kernels.runtime.ops import register
from float8.quantize import Cast
from float8.scales import Operand, Quantized
from float8.tensor.held_weights import HeldWeight, still_holds, until_written


def cast_weights(weight: Tensor, cast: Cast, *, row: bool = False, col: bool = False) -> Quantized:
    """Cast the weights [E, N, K] of experts, each under scales of its own.

    They are one matrix whose groups of rows are all of one size. Weights that lie as [E, K, N] are
    read as they lie: their row data are the column data of that.

    Args:
        weight: float32, bfloat16 or float16; copied if neither of the last dims is contiguous.
        cast: how; always to e4m3, dynamic.
        row: make row data: [E, N, ceil16(K)], scales [E, N].
        col: make column data: [E, K, ceil16(N)], scales [E, K].
    """
    weight, spec = weight.detach(), cast.how
    if transposed := weight.transpose(1, 2).is_contiguous():
        weight, row, col = weight.transpose(1, 2), col, row
    E, R, C = weight.shape
    ends = torch.arange(R, E * R + 1, R, dtype=torch.int32, device=weight.device)
    matrix, width = weight.contiguous().view(E * R, C), E * ceil128(R)
    made = cast_groups(matrix, ends, spec, row=row, col=col, width=width)
    of_row = of_col = None
    if row:
        of_row = Operand(made.row.data.view(E, R, ceil16(C)), made.row.scale.view(E, R))
    if col:  # those of each expert lie beside each other
        data = made.col.data.view(ceil16(C), E, ceil128(R)).transpose(0, 1)
        of_col = Operand(data[:, :C, : ceil16(R)], made.col.scale[:, :C])
    return Quantized(of_col, of_row) if transposed else Quantized(of_row, of_col)


# ---------------------------------------------------------------- gathered


def row_data(rows: Operand) -> Operand:
    """Return gathered weights [E, N, K], scales [E, N, 1], as `cast_weights` makes row data."""
    return Operand(_padded(rows.data, (0, -rows.data.shape[2] % 16)), rows.scale.squeeze(-1))


def column_data(rows: Operand, cast: Cast, after: Tensor | None = None) -> Operand:
    """Return gathered weights [E, N, K], scales [E, N, 1], as `cast_weights` makes column data.

    As `quantize.columns` does: under one scale for each expert bytes are transposed; else values
    are cast again. `after`: what a compiler must have computed first.
    """
    (E, N, K), spec = rows.data.shape, cast.how
    if not spec.scaling_granularity.one_scale:
        dtype = torch.bfloat16 if spec.power_of_2 else torch.float32
        values = rows.data.to(dtype).mul_(rows.scale.to(dtype))
        return cast_weights(values, cast, col=True).col
    matrix = _padded(rows.data, (0, 0, 0, -N % 16)).flatten(0, 1)
    data = transpose_bytes(matrix, after=after)[:K].view(K, E, -1).transpose(0, 1)
    return Operand(data, rows.scale[:, 0].expand(E, K).contiguous())


def _padded(data: Tensor, by: tuple[int, ...]) -> Tensor:
    if not any(by):
        return data
    return torch.nn.functional.pad(data.view(torch.uint8), by).view(data.dtype)


# ---------------------------------------------------------------- held


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def hold_groups(weight: Tensor, parameter: Tensor, cast: Cast) -> HeldWeight:
    """Cast weights [E, N, K] to both layouts in one read, to be read until one is written.

    `parameter`: they themselves, or what they are a view of.
    """
    made = cast_weights(weight, cast, row=True, col=True)
    # `.data`: no views. Compiled code hands those on to backward as others, which have no mark.
    row, col = (Operand(x.data.data, x.scale) for x in (made.row, made.col))
    return until_written(Quantized(row, col), parameter)


def product_with_held(
    a: Operand,
    parameter: Tensor,
    held: Operand,
    turned: bool,
    offs: Tensor,
    cast: Cast,
    columns: bool,
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply `a` by weights, or their columns: what is held of them, or a cast made here.

    The Parameter itself tells when it is written: compiled code may turn a view into another one.
    It lies as [E, K, N] if `turned`.
    """
    how = cast.how
    return HELD_GROUPED_GEMM(  # type: ignore[no-any-return]
        *a, *held, parameter.detach(), turned, offs, columns, how.scaling_granularity.one_scale,
        how.power_of_2, gemm.use_fast_accum, gemm.emulate, out_dtype,
    )  # fmt: skip


@torch.no_grad()
def held_grouped_matmul(
    a: Tensor,
    a_scale: Tensor,
    data: Tensor,
    scale: Tensor,
    weight: Tensor,
    turned: bool,
    offs: Tensor,
    columns: bool,
    one_scale: bool,
    power_of_2: bool,
    use_fast_accum: bool,
    emulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply groups in float8 by weights, of which float8 data may be held.

    `float8.linear.held_matmul` with groups, and with its arguments but for these: `weight`
    [E, N, K], or as it lies, [E, K, N], if `turned`; `offs` [E] int32, where the groups of `a` end;
    `one_scale`, whether a scale covers all of an expert. Returns [T, N], or for `columns` [T, K].
    """
    b = Operand(data, scale)
    if not still_holds(data, weight):
        of = ScalingGranularity.TENSORWISE if one_scale else ScalingGranularity.AXISWISE
        cast = Cast(CastConfig(target_dtype=E4M3, scaling_granularity=of, power_of_2=power_of_2))
        weight = weight.transpose(1, 2) if turned else weight
        made = cast_weights(weight, cast, row=not columns, col=columns)
        b = made.col if columns else made.row
    gemm = Gemm(use_fast_accum, emulate)
    return grouped_matmul(Operand(a, a_scale), b, offs, gemm=gemm, out_dtype=out_dtype)


def _held_grouped_matmul_fake(a: Tensor, a_scale: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((a.shape[0], data.shape[1]), dtype=rest[-1])


register(
    "held_grouped_matmul",
    held_grouped_matmul,
    triton=held_grouped_matmul,
    fake=_held_grouped_matmul_fake,
    flops=lambda a, a_scale, data, *_, **__: 2 * a[0] * a[1] * data[1],
)

HELD_GROUPED_GEMM = torch.ops.float8.held_grouped_matmul.default
