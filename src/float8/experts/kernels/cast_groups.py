"""Casts to float8 of a tensor whose rows form groups, such as tokens sorted by expert.

One kernel measures all amaxes in one read, and a second kernel casts. Under 1 x 32 and 1 x 128
blocks the second does both: a block lies within one of its tiles, which have 128 rows of one group.
In column data each group begins at a multiple of 128, since GEMMs over its rows take steps of 128.
Group e has the rows ``ends[e - 1]:ends[e]``. ``ends`` are ``offs`` [E] int32, read on the device
without a sync, and clamped to the number of rows and to their running maximum, so that each row is
in one group at most and no kernel leaves its tensors.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import E4M3, GROUP_ALIGNMENT, HIGH_PRECISION_DTYPES
from float8.kernels import numeric, tiles
from float8.kernels.cast import cast as cast_matrix
from float8.kernels.cast import cast_reference, refusal, refused_scale, to_float8
from float8.kernels.cast_kernels import store_run_scales
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import has_float8_conversion, jit, tl
from float8.kernels.tiles import load
from float8.quantize import Cast
from float8.scales import Operand, Quantized, amax_to_scale


class Columns(NamedTuple):
    """The float8 transpose of groups of rows, its scales, and the groups' ends in its columns."""

    data: Tensor
    scale: Tensor
    ends: Tensor  # [E] int32: one past the last column of each group, a multiple of 128
    tokens: int  # the number of rows without padding, for FLOP counting


def cast_groups(
    x: Tensor,  # [R, C] float32, bfloat16 or float16
    cast: Cast,  # format and granularity; `scale`: None or, if one covers a group, [E] to use
    offs: Tensor,  # [E] int32, ascending: one past the last row of each group, which may be empty
    *,
    row: bool = False,  # whether to return row data
    col: bool = False,  # whether to return column data, the transposed copy, as `Columns`
    width: int | None = None,  # of column data, >= the sum of padded group sizes; None: enough
    after: Tensor | None = None,  # a tensor that compiled code must compute before the cast
    **_: Any,  # `traced` of `quantize`, which has no effect here
) -> Quantized:
    """Cast ``x`` [R, C], whose rows form E groups, to float8 under separate scales per group.

    Row data are [R, ceil16(C)] with scales [R], undefined for rows in no group: those from
    ``offs[-1]`` on. Column data are [ceil16(C), width] with scales [E, ceil16(C)]; each group is
    zero-padded to a multiple of 128 columns. ceil16 pads to a multiple of 16. Under 1 x k blocks
    row data are [R, ceil_k(C)] with scales [R, ceil(C / k)], also defined for rows in no group, and
    column data have scales [ceil16(C), width / k]. Elements are ``x.float() * (1 / scale)``,
    saturated, rounded to nearest even; one that is not finite affects its group only.

    Raises a `TypeError` for another dtype, and a `ValueError` if ``x`` is not 2-D, neither layout
    is requested, or ``cast.scale`` is given under more than one scale per group.
    """
    assert (cast.source, cast.reduce) == (None, None)  # each group has its own scale
    if x.dtype not in HIGH_PRECISION_DTYPES or x.dim() != 2 or not (row or col):
        raise refusal(x)
    (R, E), x = (x.shape[0], offs.shape[0]), x.contiguous()
    cast_config, granularity = cast.config, cast.config.scaling_granularity
    if cast.scale is not None and not granularity.one_scale:
        raise refused_scale(cast.scale, x, granularity)
    if not col and granularity.height == 1:  # scales of rows do not depend on groups
        operand: Any = cast_matrix(x, cast_config, row=True, col=False, after=after)[0]
        if granularity.by_rows:
            return Quantized(Operand(operand.data, operand.scale.view(-1)))
        return Quantized(Operand(operand.data[:R], operand.scale[:R]))  # blocks pad the rows, too
    width = most_padded(R, E) if width is None else width
    layout = granularity.width, cast_config.dtype, row, col, width
    scaling = granularity.one_scale, cast_config.power_of_2, cast.scale
    out = torch.ops.float8.cast_groups.default(x, offs, *layout, *scaling, after)
    row_data = Operand(out[0], out[1]) if row else None
    return Quantized(row_data, Columns(out[-3], out[-2], out[-1], R) if col else None)


def most_padded(rows: int, groups: int) -> int:
    """Return an upper bound of ``rows`` in ``groups`` groups, each padded to a multiple of 128."""
    return (rows + (GROUP_ALIGNMENT - 1) * groups) // GROUP_ALIGNMENT * GROUP_ALIGNMENT


def ends_of_groups(offs: Tensor, rows: int) -> Tensor:
    """Return the groups' ends: ``offs`` [E] clamped to 0..``rows`` and to its running maximum."""
    return offs.clamp(0, rows).cummax(0).values


def places_of_rows(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each of ``rows`` rows lies if each group is padded to a multiple of 128 rows.

    ``ends`` [E] are one past the last row of each group; the rows after them are group E. Returns
    the group of each row [rows], its index in the padded layout [rows], and padded ends [E + 1].
    """
    ends = torch.cat([ends, ends.new_full((1,), rows)])  # group E ends at the last row
    sizes = ends.diff(prepend=ends.new_zeros(1))
    padded = -(-sizes // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
    padded_ends, row = padded.cumsum(0), torch.arange(rows, device=ends.device)
    group = torch.bucketize(row, ends, right=True)
    shifts = padded_ends - padded - ends + sizes  # a padded group's begin minus the group's begin
    return group, row + shifts[group], padded_ends


def check_offs(offs: Tensor, rows: int) -> None:
    """Raise ``ValueError`` unless ``offs`` ascend within 0..``rows``; syncs with the device."""
    ends = [0, *offs.tolist(), rows]
    if ends != sorted(ends):
        raise ValueError(
            f"grouped_linear: got offs {ends[1:-1]} for {rows} rows, expected numbers from 0 to "
            f"{rows} that do not descend, as sizes.cumsum(0, dtype=torch.int32) of experts are"
        )


def cast_groups_reference(
    x: Tensor,  # [R, C], whose rows form E groups
    offs: Tensor,  # [E] int32: one past the last row of each group
    run: int | None,  # the width of blocks of one row; None: one scale per group or row
    dtype: torch.dtype,  # e4m3 or e5m2
    row: bool,  # whether to return row data and their scales
    col: bool,  # whether to return column data (the transposed copy), scales, and ends of groups
    width: int,  # of column data, in which each group is padded to a multiple of 128
    one_scale: bool,  # per group; False: per row
    power_of_2: bool,  # whether to round scales up to powers of two
    scale: Tensor | None = None,  # [E] scales to use; None: from amaxes
    after: Tensor | None = None,  # not read: makes a compiler compute it before the op
) -> list[Tensor]:
    """Cast groups in plain torch: [row data, scales] and/or [column data, scales, group ends]."""
    (R, C), E = x.shape, offs.shape[0]
    out = cast_groups_fake(x, offs, run, dtype, row, col, width)  # out[:2]: row, out[-3:]: col
    group, places, padded_ends = places_of_rows(ends_of_groups(offs, R), R)
    in_groups = (group < E).nonzero().view(-1)  # indices of the rows that are in groups
    columns = places[in_groups]  # their columns in column data
    if col:
        out[-1].copy_(padded_ends[:E])
    if run is not None:  # `col` is True: row data alone are cast without groups
        padded = x.new_zeros((width, C)).index_copy(0, columns, x[in_groups])
        block = None, 1, run, dtype  # arguments scale, height, width and dtype
        data, scales = cast_reference(padded, *block, row=False, col=True, power_of_2=power_of_2)
        # Padding in a run with a NaN has become NaN, so only the columns of rows are copied.
        out[-3].view(torch.uint8).zero_()[:, columns] = data.view(torch.uint8)[:, columns]
        out[-2].copy_(scales)
        if row:
            data, scales = cast_reference(x, *block, row=True, col=False, power_of_2=power_of_2)
            out[0].copy_(data[:R])
            out[1].copy_(scales[:R])
        return out
    outside = (group == E)[:, None]
    magnitudes = x.to(torch.float32).abs().masked_fill(outside, 0)
    amaxes = magnitudes.new_zeros((E + 1, C + -C % 16))  # per group and column, also of padding
    amaxes[:, :C].scatter_reduce_(0, group[:, None].expand(R, C), magnitudes, "amax")
    if one_scale:
        amaxes[:, :C] = amaxes.amax(1, keepdim=True)
    scales = amax_to_scale(amaxes, dtype, power_of_2)
    if scale is not None:
        scales[:E] = scale[:, None]
    if row:
        row_scales = scales[group, :1]
        if not one_scale:
            row_scales = amax_to_scale(magnitudes.amax(1, keepdim=True), dtype, power_of_2)
        codes = to_float8(x, row_scales, dtype).view(torch.uint8)
        out[0].view(torch.uint8).zero_()[:, :C] = codes.masked_fill(outside, 0)
        out[1].copy_(row_scales[:, 0])
    if col:
        codes = to_float8(x[in_groups], scales[group[in_groups], :C], dtype).view(torch.uint8)
        out[-3].view(torch.uint8).zero_()[:C, columns] = codes.t()
        out[-2].copy_(scales[:E])
    return out


def cast_groups_fake(
    x: Tensor, offs: Tensor, run: int | None, dtype: Any, row: bool, col: bool, width: int, *_: Any
) -> list[Tensor]:  # run: elements per block scale, or None; _: what affects values only
    """Allocate [row data, scales] if ``row``, plus [column data, scales, ends] if ``col``."""
    (R, C), E, k, out = x.shape, offs.shape[0], run or 16, list[Tensor]()
    Ck, Cp = (C + k - 1) // k * k, (C + 15) // 16 * 16  # row data [R, Ck], column data [Cp, width]
    layouts = (row, R, Ck, (R,)), (col, Cp, width, (E, Cp))
    for requested, rows, columns, scale_shape in layouts:
        if requested:
            shape = scale_shape if run is None else (columns // run, rows)
            scales = x.new_empty(shape, dtype=torch.float32)
            scales = scales if run is None else scales.t()  # [rows, columns / run], column-major
            out += [x.new_empty((rows, columns), dtype=dtype), scales]
    return [*out, x.new_empty((E,), dtype=torch.int32)] if col else out  # ends of padded groups


ALIGN = tl.constexpr(GROUP_ALIGNMENT)


def vector_length(groups: int) -> int:
    """Return the length of vectors over groups: a power of two > ``groups``, at least 16."""
    return max(1 << groups.bit_length(), 16)


def _cast_groups_triton(
    x: Tensor, offs: Tensor, run: int | None, dtype: torch.dtype, row: bool, col: bool, width: int,
    one_scale: bool, power_of_2: bool, scale: Tensor | None = None, after: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Cast like `cast_groups_reference`, in Triton; measure amaxes without `run` and `scale`."""
    layout = run, dtype, row, col, width
    if x.numel() == 0:
        return cast_groups_reference(x, offs, *layout, one_scale, power_of_2, scale)
    (R, C), E = x.shape, offs.shape[0]
    out, amaxes = cast_groups_fake(x, offs, *layout), x  # with runs, kernels read no amaxes: pass x
    # The grid is sized before groups are known, so `row_tiles` is an upper bound: `_place` pads
    # groups to 128 rows, gives each at least one tile, and has the other rows as group E.
    lanes, mantissa_bits = vector_length(E), 3 if dtype == E4M3 else 2
    if scale is not None:
        amaxes = scale.contiguous().view(torch.int32)  # the kernel reads them if GIVEN
    elif run is None:
        amaxes = torch.zeros(E if one_scale else R + E * C, dtype=torch.int32, device=x.device)
        rows, block_c, strips = tiles.strips_of(R, C, x.dtype, x.device)  # rows: 64 or more
        row_tiles = -(-R // rows) + 2 * E + 1
        _measure_groups_kernel[(row_tiles * strips,)](
            x, offs, amaxes, R, C, E, rows, one_scale, row, col, C % block_c == 0, lanes,
            tiles.STRIP_R, block_c, num_warps=tiles.STRIP_WARPS,
        )  # fmt: skip
    row_results = out[:2] if row else (x, x)  # data, scales; x if not written
    col_results = out[-3:] if col else (x, x, offs)  # data, scales, ends; not written without col
    granularity, block_r, warps = "group" if one_scale else "row", 64, 4
    row_tiles, block_c = -(-R // block_r) + 2 * E + 1, 128
    if run is not None:  # tiles of 128 rows: only the last of each group may be partly filled
        granularity, block_r, warps, row_tiles = "run", 128, 8, R // 128 + E + 1
    rounding = 2 if run == 32 else int(power_of_2)  # 2: 8-bit exponents, as in MXFP8
    _cast_groups_kernel[(row_tiles * -(-C // block_c),)](
        x, offs, amaxes, *row_results, *col_results, R, C, E, width, granularity, run or 1,
        scale is not None, row, col, mantissa_bits, rounding, has_float8_conversion(x.device),
        C % block_c == 0, lanes, block_r, block_c, num_warps=warps,
    )  # fmt: skip
    return out


@jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@jit
def groups_of(offs_ptr, R, E, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return begins and ends of E groups; entry E: rows after them. GROUPS > E: vector length."""
    g = tl.arange(0, GROUPS)
    before = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= E), other=0)
    begins = tl.associative_scan(tl.minimum(tl.maximum(before, 0), R), 0, _larger)
    ends = tl.load(offs_ptr + g, mask=g < E, other=0)
    return begins, tl.where(g < E, tl.maximum(begins, tl.minimum(ends, R)), R)


@jit
def _place(tile, offs_ptr, R, E, rows, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Locate tile ``tile``: each group is cut into one or more tiles of ``rows`` rows.

    ``offs_ptr`` has the ends of E groups of R rows, group E the rows after them; GROUPS is a power
    of two > E. Returns the group (E + 1: no such tile); its first row and size; the tile's first
    row, counted from that of the group; and the group's first column in the transposed copy.
    """
    g = tl.arange(0, GROUPS)
    begins, ends = groups_of(offs_ptr, R, E, GROUPS)
    sizes = tl.where(g <= E, ends - begins, 0)
    padded = tl.cdiv(sizes, ALIGN) * ALIGN  # sizes in column data
    counts = tl.where(g <= E, tl.maximum(tl.cdiv(padded, rows), 1), 0)  # 1 if empty, for scales
    tile_ends = tl.cumsum(counts, 0)  # one past the last tile of each group
    group = tl.sum(((tile_ends <= tile) & (g <= E)).to(tl.int32), 0)  # groups before the tile
    is_group = g == group  # a sum over this mask reads the group's entry
    first_tile = tl.sum(tl.where(is_group, tile_ends - counts, 0), 0)
    col_begin = tl.sum(tl.where(g < group, padded, 0), 0)
    begin = tl.sum(tl.where(is_group, begins, 0), 0)
    size = tl.sum(tl.where(is_group, sizes, 0), 0)  # 0 past the last tile
    return group, begin, size, (tile - first_tile) * rows, col_begin


@jit
def _measure_groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    offs_ptr,  # [E]
    amax_ptr,  # int32, zeros: [E] of groups; or [R + E * C] of rows, then of groups' columns
    R, C, E, rows,  # rows: the number of rows that one program reads
    ONE_SCALE: tl.constexpr,  # one amax per group; else per row if ROW, and per column if COL
    ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,  # EVEN: BLOCK_C divides C
    GROUPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,  # GROUPS: vector length > E
):  # fmt: skip
    """Update amaxes of a group, or of its rows and columns, by those of one tile of its rows."""
    strips = tl.cdiv(C, BLOCK_C)
    tile, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    group, begin, size, row, _ = _place(tile, offs_ptr, R, E, rows, GROUPS)
    end = tl.minimum(row + rows, size)
    if group < E:  # else the rows are in no group
        if row < end:  # else the tile has no rows
            x_ptr += begin.to(tl.int64) * C
            row_amax_ptr = amax_ptr + (group if ONE_SCALE else begin)
            col_amax_ptr = amax_ptr + R + group.to(tl.int64) * C
            tiles.measure_strip(
                x_ptr, row_amax_ptr, col_amax_ptr, row, end, strip, C, C, 1,  # C, then strides
                ROW and not ONE_SCALE, COL and not ONE_SCALE, ONE_SCALE, EVEN, BLOCK_R, BLOCK_C,
            )  # fmt: skip


@jit
def _scale_of(bits, GIVEN: tl.constexpr, ARITHMETIC: tl.constexpr):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True) if GIVEN else numeric.scale_of_amax(bits, ARITHMETIC)


@jit
def group_byte_mask(r, size):  # type: ignore[no-untyped-def]
    """Return uint32 masks that clear byte i of a word where ``r[i]`` >= ``size``, for i 0 to 3."""
    low = tl.where(r[0] < size, 0xFF, 0) | tl.where(r[1] < size, 0xFF00, 0)
    high = tl.where(r[2] < size, 0xFF0000, 0) | tl.where(r[3] < size, -0x1000000, 0)
    return (low | high).to(tl.uint32, bitcast=True)


@jit
def _cast_groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    offs_ptr,  # [E]
    amax_ptr,  # int32 bits, [E] or [R + E * C]: rows, then groups' columns; not read if "run"
    row_ptr,  # [R, Ck]: Ck is C padded to 16, but "run": to WIDTH
    row_scale_ptr,  # [R]; "run": [Ck / WIDTH, R]
    col_ptr,  # [Cp, width]: Cp is C padded to 16
    col_scale_ptr,  # [E, Cp]; "run": [width / WIDTH, Cp]
    ends_ptr,  # [E]: written, the end of each group in column data
    R, C, E, width,
    GRANULARITY: tl.constexpr,  # one scale covers a "group", a "row", or a "run" of WIDTH elements
    WIDTH: tl.constexpr, GIVEN: tl.constexpr,  # GIVEN: `amax_ptr` has [E] scales to use
    ROW: tl.constexpr, COL: tl.constexpr, MANTISSA: tl.constexpr,  # the format's mantissa bits
    POWER_OF_2: tl.constexpr,  # scales are rounded up: 0: not, 1: to powers of 2, 2: to exponents
    HARDWARE: tl.constexpr, EVEN: tl.constexpr,  # the GPU converts to float8; BLOCK_C divides C
    GROUPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,  # GROUPS: vector length > E
):  # fmt: skip
    """Cast a tile of rows of one group to row data if ROW, to column data (transposed) if COL."""
    ARITHMETIC: tl.constexpr = (MANTISSA, POWER_OF_2, HARDWARE)
    RUNS: tl.constexpr = GRANULARITY == "run"
    K: tl.constexpr = WIDTH if RUNS else 16  # pads C to Ck
    Cp, Ck, tiles_c = tl.cdiv(C, 16) * 16, tl.cdiv(C, K) * K, tl.cdiv(C, BLOCK_C)
    tile, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    group, begin, size, first, col_begin = _place(tile, offs_ptr, R, E, BLOCK_R, GROUPS)
    quad, c = tiles.tile_quads(first // BLOCK_R, tile_c, BLOCK_R, BLOCK_C)
    r = tiles.quad_rows(quad)  # rows of the four tensors that hold the tile, from the group's first
    row_ptr += begin.to(tl.int64) * Ck
    # Group E, the rows outside all groups, is cast to row data if RUNS, and is zero otherwise.
    if group < (E + 1 if RUNS else E):
        # Rows past the end of the group are read, which avoids masks, but not measured or stored;
        # past the end of x the last row is read.
        in_c = c < C
        inside = in_c, in_c, in_c, in_c
        read_rows = [tl.minimum(row, R - 1 - begin) for row in r]
        x = tiles.load_rows(x_ptr + begin.to(tl.int64) * C + c, read_rows, C, inside, EVEN)
        v = [numeric.to_float32(values, HARDWARE) for values in x]
        element: tl.constexpr = x_ptr.dtype.element_ty
        if RUNS:
            bits = [tl.where(r[i] < size, numeric.magnitude_bits(x[i]), 0) for i in (0, 1, 2, 3)]
        if ROW:
            if RUNS:
                ptr = row_scale_ptr + tile_c.to(tl.int64) * (BLOCK_C // WIDTH) * R + begin
                runs = (Ck - tile_c * BLOCK_C) // WIDTH
                row_inverse = [
                    store_run_scales(
                        ptr, bits[i], r[i], 0, size, R, runs, 1, WIDTH, element, ARITHMETIC
                    )
                    for i in (0, 1, 2, 3)
                ]
            else:
                if GRANULARITY == "group":
                    group_bits = tl.load(amax_ptr + group) + tl.zeros(quad.shape, tl.int32)
                    row_bits = [group_bits, group_bits, group_bits, group_bits]
                else:
                    row_bits = [tl.load(amax_ptr + begin + row) for row in read_rows]
                row_scales = [_scale_of(amax, GIVEN, ARITHMETIC) for amax in row_bits]
                if tile_c == 0:
                    tiles.store_row_scales(row_scale_ptr + begin, quad, row_scales, size)
                row_inverse = [numeric.reciprocal(scale, HARDWARE) for scale in row_scales]
            row_values = tiles.times(v, row_inverse, inside, EVEN)
            tiles.store_row_data(row_ptr, row_values, quad, c, size, Ck, ARITHMETIC, False, EVEN)
        if COL:
            padded = tl.where(group < E, tl.cdiv(size, ALIGN) * ALIGN, 0)
            if (first + tile_c == 0) & (group < E):
                tl.store(ends_ptr + group, col_begin + padded)
            if not RUNS:
                if GRANULARITY == "group":
                    col_bits = tl.load(amax_ptr + group) + tl.zeros(c.shape, tl.int32)
                    col_bits = tl.where(in_c | GIVEN, col_bits, 0)
                else:
                    col_bits = load(amax_ptr + R + group.to(tl.int64) * C + c, in_c, EVEN)
                col_scale = _scale_of(col_bits, GIVEN, ARITHMETIC)
                if first == 0:
                    tl.store(col_scale_ptr + group * Cp + c, col_scale, mask=c < Cp)
            if first < padded:
                if RUNS:
                    largest = tl.maximum(tl.maximum(bits[0], bits[1]), tl.maximum(bits[2], bits[3]))
                    col_inverse = store_run_scales(
                        col_scale_ptr, largest, c, (col_begin + first) // WIDTH, Cp, Cp,
                        (col_begin + padded) // WIDTH, WIDTH // 4, 1, element, ARITHMETIC,
                    )  # fmt: skip
                else:
                    col_inverse = numeric.reciprocal(col_scale, HARDWARE)
                # A new name, as Triton lets no variable change its type in a branch on a tensor.
                col_values = tiles.times(v, [col_inverse for _ in v], inside, EVEN)
                words = numeric.to_float8_words(col_values, ARITHMETIC) & group_byte_mask(r, size)
                tiles.store_col_data(col_ptr + col_begin, words, quad, c, Cp, width // 4, EVEN)
    elif ROW and not RUNS:  # rows in no group are zero
        zero, amaxes = tl.zeros((BLOCK_R // 4, BLOCK_C), tl.float32), tl.zeros(quad.shape, tl.int32)
        zeros = zero, zero, zero, zero
        tiles.store_row_data(row_ptr, zeros, quad, c, size, Ck, ARITHMETIC, False, EVEN)
        if tile_c == 0:
            zero_scale = numeric.scale_of_amax(amaxes, ARITHMETIC)
            zero_scales = zero_scale, zero_scale, zero_scale, zero_scale
            tiles.store_row_scales(row_scale_ptr + begin, quad, zero_scales, size)


register("cast_groups", cast_groups_reference, triton=_cast_groups_triton, fake=cast_groups_fake)
