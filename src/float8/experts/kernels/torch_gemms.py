"""Grouped GEMMs of torch: in bfloat16, and in MXFP8 on Blackwell, which reads swizzled scales.

The MXFP8 GEMM has not run on a Blackwell GPU yet; tests compare the layouts of scales with those of
torch and torchao.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import Granularity, ScalingGranularity
from float8.experts.kernels.cast_groups import ends_of_groups, most_padded, places_of_rows
from float8.formats import GROUP_ALIGNMENT
from float8.kernels.dequantize import dequantised_by_kernel
from float8.kernels.swizzle import RECIPE, SWIZZLE, scales_of_rows, swizzled
from float8.scales import Operand

Granularities = tuple[Granularity, Granularity]


def multiply_in_bfloat16(
    a: Operand, b: Operand, ends: Tensor, granularities: Granularities
) -> Tensor:
    """Multiply groups of rows of `a` by `b[e].T`, [R, N], or contract each group of columns.

    Computes in bfloat16, which holds dequantized values exactly: the scales, of `granularities`,
    must be powers of two. `a` is [R, C]; `b` is [E, N, C] for groups of rows, else [N, C] for a
    result [E, R, N]. `ends` [E] are one past the last row or column of each group.
    """
    result_scales, (granularity_a, _) = None, granularities
    if not granularity_a.by_blocks:  # nor has `b` blocks: `Float8LinearConfig` refuses such pairs
        if b.data.dim() == 2:  # groups split C; rows have a scale per group: scale the results
            result_scales = a.scale, b.scale  # [E, R], [E, N]
            granularity = ScalingGranularity.TENSORWISE
            a, b = (Operand(x.data, x.scale.new_ones(())) for x in (a, b))
        else:
            granularity = ScalingGranularity.AXISWISE
            a, b = (Operand(x.data, x.scale.unsqueeze(-1)) for x in (a, b))  # [..., R, 1]
        granularities = granularity, granularity
    pairs = zip((a, b), granularities, strict=True)
    left, right = (dequantised_by_kernel(*pair, torch.bfloat16) for pair in pairs)
    ends = _clamped_ends(left, right, ends)
    y = F.grouped_mm(left, right.mT, offs=ends)
    if result_scales is not None:  # powers of 2, so the result stays exact
        y = (y * result_scales[0][:, :, None]).mul_(result_scales[1][:, None]).to(y.dtype)
    return _zero_outside(y, ends)


def multiply_mx(a: Operand, b: Operand, ends: Tensor, granularities: Granularities) -> Tensor:
    """Multiply MXFP8 groups: rows of `a` by `b[e].T`, or columns of `a` and `b`; to bfloat16."""
    scale_a, scale_b = map(scales_of_rows, (a, b), granularities)
    ends = _clamped_ends(a.data, b.data, ends)
    if b.data.dim() == 3:  # groups of rows, each with a matrix of `b`
        E, N, runs = scale_b.shape  # a run: 32 elements that share a scale
        padded = F.pad(scale_b, (0, 0, 0, -N % 128)).reshape(-1, runs)  # [E * ceil128(N), runs]
        scale_a, scale_b = swizzled_rows(scale_a, ends), swizzled(padded).view(E, -1)
    else:
        scale_a, scale_b = swizzled_tokens(scale_a, ends), swizzled_tokens(scale_b, ends)
    y = torch.ops.aten._scaled_grouped_mm_v2.default(
        a.data, b.data.mT, [scale_a], RECIPE, SWIZZLE, [scale_b], RECIPE, SWIZZLE, ends, None,
        torch.bfloat16, [], False,  # None: bias; out_dtype, contraction_dim, use_fast_accum
    )  # fmt: skip
    return _zero_outside(y, ends)


def _clamped_ends(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return ends_of_groups(ends, a.shape[0 if b.dim() == 3 else 1])  # groups of rows, or of columns


def _zero_outside(y: Tensor, ends: Tensor) -> Tensor:
    """Return `y` with zeros in rows of no group, if [R, N], or in empty groups, if [E, R, N]."""
    if y.dim() == 2:
        in_group = torch.arange(len(y), device=ends.device)[:, None] < ends[-1]
    else:
        in_group = (ends.diff(prepend=ends.new_zeros(1)) > 0)[:, None, None]
    return torch.where(in_group, y, 0)


def swizzled_rows(scale: Tensor, ends: Tensor) -> Tensor:
    """Swizzle MXFP8 scales [R, runs] of grouped rows, a run being 32 elements with one scale.

    `ends` [E] are one past each group's last row. Pads each group to a multiple of 128 rows, and
    `runs` to a multiple of 4. Returns float8_e8m0fnu [padded rows or more, padded runs].
    """
    R, runs = scale.shape
    _, places, padded_ends = places_of_rows(ends, R)
    rows = most_padded(R, len(padded_ends))
    padded = scale.new_zeros(rows, runs).index_copy(0, places, scale)
    return swizzled(padded).view(rows, -1)


def swizzled_tokens(scale: Tensor, ends: Tensor) -> Tensor:
    """Swizzle MXFP8 scales [N, T / 32] of a transposed copy [N, T] of T grouped tokens.

    `ends` [E] are one past each group's last token, multiples of 128. Returns float8_e8m0fnu [N
    padded to 128, T / 32]: tiles of 128 x 4 scales, those of the first group first, and so on.
    """
    tiles, tile_rows = swizzled(scale).view(torch.uint8), -(-scale.shape[0] // 128)
    tile_column = torch.arange(len(tiles) // tile_rows, device=scale.device)
    group = torch.bucketize(tile_column, ends // GROUP_ALIGNMENT, right=True)
    order = group.repeat(tile_rows).argsort(stable=True)
    return tiles[order].view(torch.float8_e8m0fnu).view(tile_rows * 128, -1)
