"""MXFP8 scales in the layout that Blackwell's GEMMs read, and the grouped GEMM that reads them.

All of it is plain torch, which a compiler fuses. It has not run on a Blackwell GPU yet; tests
compare the layout with those of torch and torchao.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import Granularity
from float8.kernels.cast_groups import ends_of_groups, places_of_rows
from float8.scales import Operand

RECIPE, SWIZZLE = [F.ScalingType.BlockWise1x32.value], [F.SwizzleType.SWIZZLE_32_4_4.value]
"""The numbers by which torch's GEMMs take 1x32 scales and their swizzled layout."""


def scales_of_rows(operand: Operand, granularity: Granularity) -> Tensor:
    """Return scales [..., R, C / 32] of data [..., R, C], repeating scales of squares per row."""
    R, C = operand.data.shape[-2:]
    if not granularity.square:
        return operand.scale
    return operand.scale.repeat_interleave(32, -2)[..., :R, : C // 32]


def swizzled(scale: Tensor) -> Tensor:
    """Convert scales [R, runs], powers of two, to swizzled exponents [tiles, 512], float8_e8m0fnu.

    A tile holds 128 rows and 4 runs; tiles are in row-major order, the last ones zero-padded.
    Within a tile come rows 0, 32, 64 and 96, four bytes each, then 1, 33, 65, 97, and so on
    (cuBLAS, "1D block scaling factors layout"). The exponent of NaN is 255.
    """
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    padded = F.pad(exponents, (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, 512).view(torch.float8_e8m0fnu)


def swizzled_rows(scale: Tensor, ends: Tensor) -> Tensor:
    """Swizzle scales [R, runs] of grouped rows, each group padded to a multiple of 128 rows.

    Returns [rows, runs to 4], with as many rows as groups of any sizes may need.
    """
    R, runs = scale.shape
    _, places, padded_ends = places_of_rows(ends, R)
    rows = (R + 127 * len(padded_ends)) // 128 * 128
    moved = scale.new_zeros(rows, runs).index_copy(0, places, scale)
    return swizzled(moved).view(rows, -1)


def swizzled_tokens(scale: Tensor, ends: Tensor) -> Tensor:
    """Swizzle scales [N, runs] of column data [N, T], one for each run of 32 tokens.

    `ends` are multiples of 128 tokens. Returns [N to 128, runs], a group's tiles adjacent.
    """
    tiles, tile_rows = swizzled(scale).view(torch.uint8), -(-scale.shape[0] // 128)
    tile_column = torch.arange(len(tiles) // tile_rows, device=scale.device)
    group = torch.bucketize(tile_column, ends // 128, right=True)
    order = group.repeat(tile_rows).argsort(stable=True)
    return tiles[order].view(torch.float8_e8m0fnu).view(tile_rows * 128, -1)


def grouped_mm(
    a: Operand,
    b: Operand,
    ends: Tensor,
    granularities: tuple[Granularity, Granularity],
    out_dtype: torch.dtype,
) -> Tensor:
    """Run torch's grouped GEMM, which rounds to bfloat16; see `experts.grouped.grouped_matmul`."""
    scale_a, scale_b = map(scales_of_rows, (a, b), granularities)
    ends = ends_of_groups(ends, a.data.shape[0 if b.data.dim() == 3 else 1])
    if b.data.dim() == 3:
        E, N, runs = scale_b.shape
        padded = F.pad(scale_b, (0, 0, 0, -N % 128)).reshape(-1, runs)
        scales = swizzled_rows(scale_a, ends), swizzled(padded).view(E, -1)
        in_group = torch.arange(len(scale_a), device=ends.device)[:, None] < ends[-1]
    else:
        scales = swizzled_tokens(scale_a, ends), swizzled_tokens(scale_b, ends)
        in_group = (ends.diff(prepend=ends.new_zeros(1)) > 0)[:, None, None]
    y = torch.ops.aten._scaled_grouped_mm_v2.default(
        a.data, b.data.mT, [scales[0]], RECIPE, SWIZZLE, [scales[1]], RECIPE, SWIZZLE, ends, None,
        torch.bfloat16, [], False,
    )  # fmt: skip
    return torch.where(in_group, y, 0).to(out_dtype)
