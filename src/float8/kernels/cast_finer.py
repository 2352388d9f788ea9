"""Casts under finer scales than one per tensor: the way to `cast_axiswise` and `cast_blockwise`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from float8.config import CastConfig
from float8.kernels.cast import check_cast
from float8.kernels.cast_axiswise import cast_axiswise_reference, cast_axiswise_triton
from float8.kernels.cast_blockwise import cast_blockwise_reference, cast_blockwise_triton
from float8.kernels.runtime.launch import takes_triton_directly
from float8.kernels.runtime.private import surely
from float8.scales import Operand


def cast_finer(
    x: Tensor,
    spec: CastConfig,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
    traced: bool = False,
) -> tuple[Operand | None, Operand | None]:
    """Cast ``x`` to float8 under a scale per row and column, or per block of 128.

    Each scale is that of the amax of what it covers, by `amax_to_scale`; the arithmetic of an
    element is that of :func:`cast`. What is not finite spoils what shares its scale only. Row data
    and column data come from the same read of ``x``, but for `AXISWISE`, which takes two.

    `AXISWISE`: row data have a scale per row of ``x``, column data one per column. `BLOCK_1x128`: a
    block is a run of 128 elements along the contraction dim, so that of a row of ``x`` for row
    data, and of a column of ``x`` for column data. `BLOCK_128x128`: it is a square, and column data
    are the transposed bytes and scales of row data. A block that crosses the end of ``x`` covers
    what is there.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides. Slow, but right, where no dim is
            contiguous.
        spec: format, granularity, and whether scales are rounded up to powers of two.
        row: whether to return row data.
        col: whether to return column data.
        pad_rows: whether row data under `AXISWISE` has its number of rows padded to a multiple of
            16 too, as that under blocks always has.
        after: what a compiler must have computed first, as in :func:`cast`; not read.
        traced: cast by plain torch code, which a compiler fuses into what produces ``x``, and which
            may then see the producer's values before they are rounded to the dtype of ``x``. Only
            the transposition of column data is an op of its own; so is the whole cast where ``x``
            may turn out to be empty, and under blocks where C is no multiple of their width, or
            rows are not contiguous.

    Returns:
        ``(row, col)``, None where not asked for. Row data is [R, C], column data [C, R], both
        contiguous and padded with zeros. `AXISWISE` pads as :func:`cast` does, scales are [rows, 1]
        of both. `BLOCK_1x128` pads to multiples of 16 and, along what is contracted, 128,
        `BLOCK_128x128` of 128 and 128. The scales lie as GEMMs want them: of data [M, K] and
        `BLOCK_1x128` they are [M, K / 128] with strides (1, M), of `BLOCK_128x128` [M / 128,
        K / 128], contiguous, their second dim padded with zeros to a multiple of 4. Those of
        padding rows are that of amax 0. No gradient flows through it.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: ``x`` is not 2-D, neither layout is asked for, or the granularity is another.
    """
    check_cast("cast_finer", x, row, col)
    how: tuple[Any, ...]
    twin: Callable[..., list[Tensor]]
    granularity = spec.scaling_granularity
    if granularity.by_rows:
        how = (spec.dtype, row, col, pad_rows, spec.power_of_2)
        twin, triton = cast_axiswise_reference, cast_axiswise_triton
        op = torch.ops.float8.cast_axiswise.default
    elif granularity.width is not None:
        how = (spec.dtype, granularity.width, granularity.square, row, col, spec.power_of_2)
        twin, triton = cast_blockwise_reference, cast_blockwise_triton
        op = torch.ops.float8.cast_blockwise.default
        # Nothing gained, and Inductor's C++ (torch 2.13) drops the last run where it is not whole.
        traced = traced and x.shape[1] % granularity.width == 0 and x.stride(1) == 1
    else:
        raise ValueError(f"cast_finer: got {granularity}, expected AXISWISE or a BLOCK")
    if traced and surely(x.numel() != 0):
        out = twin(x.detach(), *how)
    else:
        direct = x.is_cuda and takes_triton_directly(x)
        out = (triton if direct else op)(x, *how, after)
    return Operand(out[0], out[1]) if row else None, Operand(out[-2], out[-1]) if col else None
