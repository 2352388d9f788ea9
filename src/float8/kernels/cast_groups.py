"""High precision -> float8 of a tensor whose rows lie in groups, as the tokens of experts do.

Row data lie as the rows do, under a scale per row. Column data are the transposed copy under a
scale per column of each group, which begins at a multiple of 16 there: grouped GEMMs contract over
the rows of a group. One kernel measures all amaxes in one read, a second one casts. Where the
groups end is read on the device: nothing waits for it, and nothing is compiled anew.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import GROUP_ALIGNMENT, ceil16, ceil128
from float8.kernels import quads
from float8.kernels.amax import float32_bits, magnitude_bits
from float8.kernels.cast import check_cast, to_float8
from float8.kernels.cast_finer import cast_finer
from float8.kernels.cast_kernel import mantissa
from float8.kernels.numeric import reciprocal, scale_of_amax, to_float8_words
from float8.kernels.runtime.device import has_float8_conversion, launching_on
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec, Operand


class GroupsInFloat8(NamedTuple):
    """A tensor [R, C] in float8, whose rows lie in E groups."""

    row: Operand | Any = None
    """Data [R, ceil16(C)] and scales [R], or None; those of rows in no group mean nothing."""

    col: Operand | Any = None
    """Data [ceil16(C), width] and scales [E, ceil16(C)], or None. What lies behind a group up to
    the next one is zero."""

    ends: Tensor | Any = None
    """[E] int32: where each group ends in column data."""


def cast_groups(
    x: Tensor, offs: Tensor, spec: CastSpec, *, row: bool, col: bool, width: int | None = None
) -> GroupsInFloat8:
    """Cast ``x`` to float8 with the scales of groups of rows.

    Each scale is that of the amax of what it covers, by `amax_to_scale`; the arithmetic of an
    element is that of :func:`float8.kernels.cast`. What is not finite spoils its own group only.

    Args:
        x: [R, C] float32, bfloat16 or float16, contiguous.
        offs: [E] int32, ascending: the row behind the last one of each group, on the device of
            ``x``. Groups may be empty. Rows behind the last group are in none.
        spec: format, whether one scale covers all of a group, and whether scales are rounded up to
            powers of two.
        row: whether to return row data.
        col: whether to return column data.
        width: of column data; None: as much as groups of any sizes need. At least the sum of their
            sizes, each rounded up to 128.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: ``x`` is not a contiguous matrix, or neither layout is asked for.
    """
    check_cast("cast_groups", x, spec.dtype, row, col)
    if not x.is_contiguous():
        raise ValueError(
            f"cast_groups: x has strides {x.stride()}, expected a contiguous matrix; call "
            f"x.contiguous()"
        )
    if not col and spec.granularity.by_rows:  # a row is the same in any group
        made: Any = cast_finer(x, spec, row=True, col=False)[0]
        return GroupsInFloat8(Operand(made.data, made.scale.view(-1)))
    if width is None:
        most = x.shape[0] + (GROUP_ALIGNMENT - 1) * offs.shape[0]
        width = most // GROUP_ALIGNMENT * GROUP_ALIGNMENT
    one_scale = spec.granularity.one_scale
    out = torch.ops.float8.cast_groups.default(
        x, offs, spec.dtype, row, col, width, one_scale, spec.power_of_2
    )
    return GroupsInFloat8(
        Operand(out[0], out[1]) if row else None, Operand(out[-3], out[-2]) if col else None,
        out[-1] if col else None,
    )  # fmt: skip


def cast_groups_reference(
    x: Tensor,
    offs: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    width: int,
    one_scale: bool,
    power_of_2: bool,
) -> list[Tensor]:
    """Plain-torch twin: row data and scales, column data, scales and ends, those asked for."""
    out = cast_groups_fake(x, offs, dtype, row, col, width)
    for made in out:
        made.view(torch.uint8 if made.dtype == dtype else made.dtype).zero_()
    C, begin, at = x.shape[1], 0, 0
    if row:
        out[1].fill_(amax_to_scale(x.new_zeros(()).float(), dtype, power_of_2).item())
    for group, end in enumerate(offs.tolist()):
        rows = x[begin:end].to(torch.float32)
        size = end - begin
        of_group = rows.abs().amax() if rows.numel() else rows.new_zeros(())
        if row and size:
            amax = of_group.expand(size) if one_scale else rows.abs().amax(1)
            scale = amax_to_scale(amax, dtype, power_of_2)
            out[1][begin:end] = scale
            data = to_float8(x[begin:end], scale[:, None], dtype).view(torch.uint8)
            out[0].view(torch.uint8)[begin:end, :C] = data
        if col:
            amax = rows.new_zeros(out[-2].shape[1])
            if size:
                amax[:C] = of_group if one_scale else rows.abs().amax(0)
            scale = amax_to_scale(amax, dtype, power_of_2)
            out[-2][group] = scale
            data = to_float8(x[begin:end], scale[None, :C], dtype).view(torch.uint8)
            out[-3].view(torch.uint8)[:C, at : at + size] = data.t()
            at += ceil128(size)
            out[-1][group] = at
        begin = end
    return out


def cast_groups_fake(
    x: Tensor, offs: Tensor, dtype: torch.dtype, row: bool, col: bool, width: int, *_: object
) -> list[Tensor]:
    """Allocate the layouts asked for, uninitialised; sizes may be symbolic."""
    (R, C), E = x.shape, offs.shape[0]
    Cp, out = ceil16(C), []
    if row:
        out += [x.new_empty((R, Cp), dtype=dtype), x.new_empty((R,), dtype=torch.float32)]
    if col:
        out += [x.new_empty((Cp, width), dtype=dtype), x.new_empty((E, Cp), dtype=torch.float32)]
        out += [x.new_empty((E,), dtype=torch.int32)]
    return out


# ---------------------------------------------------------------- Triton


_BLOCK_R, _BLOCK_C = 64, 128


def _cast_groups_triton(x: Tensor, offs: Tensor, *how: Any) -> list[Tensor]:
    if x.numel() == 0:
        return cast_groups_reference(x, offs, *how)
    out = cast_groups_fake(x, offs, *how)
    (R, C), E = x.shape, offs.shape[0]
    dtype, row, col, width, one_scale, power_of_2 = how
    # The bits of amaxes: of rows, then of columns of each group, or of groups.
    amaxes = torch.zeros(E if one_scale else R + E * C, dtype=torch.int32, device=x.device)
    # Each tile lies within one group, the last one being that of all other rows.
    programs = (-(-R // _BLOCK_R) + 2 * E + 1) * -(-C // _BLOCK_C)
    groups = max(1 << E.bit_length(), 16)  # E + 1 or more
    blocks = groups, _BLOCK_R, _BLOCK_C
    measure: Any = _measure_groups_kernel
    data, scale = out[:2] if row else (x, amaxes)
    data_t, scale_t, ends = out[-3:] if col else (x, amaxes, offs)
    cast: Any = _cast_groups_kernel
    with launching_on(x.device):
        measure[(programs,)](x, offs, amaxes, R, C, E, one_scale, row, col, *blocks, num_warps=8)
        cast[(programs,)](
            x, offs, amaxes, data, scale, data_t, scale_t, ends, R, C, E, width, one_scale, row,
            col, mantissa(dtype), power_of_2, has_float8_conversion(x.device), *blocks, num_warps=8,
        )  # fmt: skip
    return out


@jit
def _place(offs_ptr, R, C, E, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Place this program: its group, where that begins and ends, in column data, and its tile."""
    tiles_c = tl.cdiv(C, BLOCK_C)
    tile = tl.program_id(0) // tiles_c
    g = tl.arange(0, GROUPS)
    # A group E of the rows that are in no other.
    end = tl.where(g < E, tl.load(offs_ptr + g, mask=g < E, other=0), R)
    begin = tl.where(g == 0, 0, tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= E), other=R))
    size = tl.where(g <= E, end - begin, 0)
    # Those that are filled up with zeros, too; empty ones have a scale.
    tiles = tl.where(g <= E, tl.maximum(tl.cdiv(size, 128) * (128 // BLOCK_R), 1), 0)
    behind = tl.cumsum(tiles, 0)  # the tile behind the last one of each group
    group = tl.sum(((behind <= tile) & (g <= E)).to(tl.int32), 0)
    here = g == group
    first = tl.sum(tl.where(here, behind - tiles, 0), 0)
    at = tl.sum(tl.where(g < group, tl.cdiv(size, 128) * 128, 0), 0)
    begin = tl.sum(tl.where(here, begin, 0), 0)
    size = tl.sum(tl.where(here, size, 0), 0)  # 0 where there are fewer tiles than programs
    return group, begin, size, at, tile - first, tl.program_id(0) % tiles_c


@jit
def _measure_groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    offs_ptr,  # [E]
    amax_ptr,  # int32, zeros: [E] of groups; or [R + E * C] of rows, then of columns
    R,
    C,
    E,
    ONE_SCALE: tl.constexpr,
    OF_ROWS: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    group, begin, size, _, tile_r, tile_c = _place(offs_ptr, R, C, E, GROUPS, BLOCK_R, BLOCK_C)
    if group < E:
        r = (tile_r * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        c = (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
        inside = (r[:, None] < size) & (c[None, :] < C)
        x = tl.load(x_ptr + (begin + r[:, None]) * C + c[None, :], mask=inside, other=0)
        bits = magnitude_bits(x)
        if ONE_SCALE:
            largest = float32_bits(tl.max(tl.max(bits, axis=1), axis=0), x.dtype)
            tl.atomic_max(amax_ptr + group, largest, sem="relaxed")
        else:
            if OF_ROWS:
                of_rows = float32_bits(tl.max(bits, axis=1), x.dtype)
                tl.atomic_max(amax_ptr + begin + r, of_rows, mask=r < size, sem="relaxed")
            if OF_COLUMNS:
                of_columns = float32_bits(tl.max(bits, axis=0), x.dtype)
                to = amax_ptr + R + group.to(tl.int64) * C + c
                tl.atomic_max(to, of_columns, mask=c < C, sem="relaxed")


@jit
def _cast_groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    offs_ptr,  # [E]
    amax_ptr,  # as above
    row_ptr,  # [R, Cp]
    row_scale_ptr,  # [R]
    col_ptr,  # [Cp, width]
    col_scale_ptr,  # [E, Cp]
    ends_ptr,  # [E]
    R,
    C,
    E,
    width,
    ONE_SCALE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    Cp = tl.cdiv(C, 16) * 16
    group, begin, size, at, tile_r, tile_c = _place(offs_ptr, R, C, E, GROUPS, BLOCK_R, BLOCK_C)
    quad, c = quads.quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    x_ptr += begin.to(tl.int64) * C + c
    inside = quads.inside_of(quad, c, tl.where(group < E, size, 0), C)
    v = quads.to_float32s(quads.load_rows(x_ptr, quad, C, inside, False), HARDWARE)
    if ROW:
        r0, r1, r2, r3 = quads.rows_of(quad)
        if ONE_SCALE:
            of_group = tl.load(amax_ptr + group, mask=group < E, other=0)
            m0 = tl.where(r0 < size, of_group, 0)
            m1, m2, m3 = m0, m0, m0
        else:
            amax_of_row = amax_ptr + begin
            m0 = tl.load(amax_of_row + r0, mask=r0 < size, other=0)
            m1 = tl.load(amax_of_row + r1, mask=r1 < size, other=0)
            m2 = tl.load(amax_of_row + r2, mask=r2 < size, other=0)
            m3 = tl.load(amax_of_row + r3, mask=r3 < size, other=0)
        s0 = scale_of_amax(m0, MANTISSA, POWER_OF_2, HARDWARE)
        s1 = scale_of_amax(m1, MANTISSA, POWER_OF_2, HARDWARE)
        s2 = scale_of_amax(m2, MANTISSA, POWER_OF_2, HARDWARE)
        s3 = scale_of_amax(m3, MANTISSA, POWER_OF_2, HARDWARE)
        if tile_c == 0:
            to = row_scale_ptr + begin
            tl.store(to + r0, s0, mask=r0 < size)
            tl.store(to + r1, s1, mask=r1 < size)
            tl.store(to + r2, s2, mask=r2 < size)
            tl.store(to + r3, s3, mask=r3 < size)
        i0, i1, i2, i3 = (
            reciprocal(s0, HARDWARE),
            reciprocal(s1, HARDWARE),
            reciprocal(s2, HARDWARE),
            reciprocal(s3, HARDWARE),
        )
        w = quads.times_inverses(v, inside, (i0, i1, i2, i3), False)
        to = row_ptr + begin.to(tl.int64) * Cp
        quads.store_along(to, w, quad, c, size, Cp, MANTISSA, HARDWARE, False)
    if COL:
        if group < E:
            if ONE_SCALE:
                bits = tl.load(amax_ptr + group) + tl.zeros(c.shape, tl.int32)
                bits = tl.where(c < C, bits, 0)
            else:
                of_column = amax_ptr + R + group.to(tl.int64) * C + c
                bits = tl.load(of_column, mask=c < C, other=0)
            scale = scale_of_amax(bits, MANTISSA, POWER_OF_2, HARDWARE)
            padded = tl.cdiv(size, 128) * 128
            if tile_r == 0:
                tl.store(col_scale_ptr + group * Cp + c, scale, mask=c < Cp)
                if tile_c == 0:
                    tl.store(ends_ptr + group, at + padded)
            # Names of their own: none may change its type in a branch that a value decides.
            q = quads.times_inverse(v, inside, reciprocal(scale, HARDWARE), False)
            words = to_float8_words(q[0], q[1], q[2], q[3], MANTISSA, HARDWARE)
            c_t, quad_t = tl.trans(c), tl.trans(quad)
            to_t = col_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + (at // 4 + quad_t)
            inside_t = (c_t < Cp) & (quad_t < padded // 4)
            tl.store(to_t + c_t * (width // 4), tl.trans(words), mask=inside_t)


register(
    "cast_groups",
    cast_groups_reference,
    triton=_cast_groups_triton,
    fake=cast_groups_fake,
)
