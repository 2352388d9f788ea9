"""Scales of MXFP8 in the order in which Blackwell's GEMMs read them, and its grouped GEMM.

Plain torch, which a compiler fuses. No GPU of ours has run it; tests compare the order with that of
torch and torchao.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import Granularity
from float8.kernels.cast_groups import ends_of_groups, places_of_rows
from float8.scales import Operand

RECIPE, SWIZZLE = [F.ScalingType.BlockWise1x32.value], [F.SwizzleType.SWIZZLE_32_4_4.value]
"""Torch's numbers for these scales and their order, as its GEMMs take them."""


def scales_of_rows(operand: Operand, covers: Granularity) -> Tensor:
    """Return the scales [..., R, C / 32] of data [..., R, C], those of squares for each row."""
    R, C = operand.data.shape[-2:]
    if not covers.square:
        return operand.scale
    return operand.scale.repeat_interleave(32, -2)[..., :R, : C // 32]


def swizzled(scale: Tensor) -> Tensor:
    """Return scales [R, runs], powers of two, as exponents: float8_e8m0fnu, [tiles, 512].

    Tiles of 128 rows and 4 runs follow each other, row by row. Of one there are first the rows 0,
    32, 64 and 96, four bytes each, then 1, 33, 65, 97, and so on (cuBLAS, "1D block scaling factors
    layout"). The last ones are filled up with zero bytes. That of NaN is 255.
    """
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    padded = F.pad(exponents, (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, 512).view(torch.float8_e8m0fnu)


def swizzled_rows(scale: Tensor, ends: Tensor) -> Tensor:
    """Return the scales [R, runs] of groups of rows, each from a new tile on; [rows, runs to 4].

    There are as many rows as groups of any sizes need.
    """
    R, runs = scale.shape
    _, places, behind = places_of_rows(ends, R)
    most = (R + 127 * len(behind)) // 128 * 128
    moved = scale.new_zeros(most, runs).index_copy(0, places, scale)
    return swizzled(moved).view(most, -1)


def swizzled_tokens(scale: Tensor, ends: Tensor) -> Tensor:
    """Return the scales [N, runs] of groups of runs, which end at multiples of 128 elements.

    The tiles of a group follow each other: [N to 128, runs].
    """
    tiles, down = swizzled(scale).view(torch.uint8), -(-scale.shape[0] // 128)
    column = torch.arange(len(tiles) // down, device=scale.device)
    group = torch.bucketize(column, ends // 128, right=True)
    order = group.repeat(down).argsort(stable=True)
    return tiles[order].view(torch.float8_e8m0fnu).view(down * 128, -1)


def grouped_mm(
    a: Operand,
    b: Operand,
    ends: Tensor,
    covers: tuple[Granularity, Granularity],
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply as `gemm.grouped_matmul`, by torch's grouped GEMM, rounded to bfloat16."""
    of_a, of_b = (scales_of_rows(x, of) for x, of in zip((a, b), covers, strict=True))
    ends = ends_of_groups(ends, a.data.shape[0 if b.data.dim() == 3 else 1])
    if b.data.dim() == 3:
        E, N, runs = of_b.shape
        filled = F.pad(of_b, (0, 0, 0, -N % 128)).reshape(-1, runs)
        scales = swizzled_rows(of_a, ends), swizzled(filled).view(E, -1)
        there = torch.arange(len(of_a), device=ends.device)[:, None] < ends[-1]
    else:
        scales = swizzled_tokens(of_a, ends), swizzled_tokens(of_b, ends)
        there = (ends.diff(prepend=ends.new_zeros(1)) > 0)[:, None, None]
    y = torch.ops.aten._scaled_grouped_mm_v2.default(
        a.data, b.data.mT, [scales[0]], RECIPE, SWIZZLE, [scales[1]], RECIPE, SWIZZLE, ends, None,
        torch.bfloat16, [], False,
    )  # fmt: skip
    return torch.where(there, y, 0).to(out_dtype)
