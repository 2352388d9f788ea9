"""MXFP8 scales in the layout that Blackwell's GEMMs read, in plain torch, which a compiler fuses.

The code has not run on a Blackwell GPU yet; tests compare its layout with torch's and torchao's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import Granularity
from float8.scales import Operand

RECIPE, SWIZZLE = [F.ScalingType.BlockWise1x32.value], [F.SwizzleType.SWIZZLE_32_4_4.value]
"""The values of torch's enums for 1x32 scales and for their swizzled layout."""


def scales_of_rows(operand: Operand, granularity: Granularity) -> Tensor:
    """Return MXFP8 scales [..., R, C / 32] of each row's blocks; those of squares are repeated."""
    R, C = operand.data.shape[-2:]
    if not granularity.square:
        return operand.scale
    return operand.scale.repeat_interleave(32, -2)[..., :R, : C // 32]  # cut padding


def swizzled(scale: Tensor) -> Tensor:
    """Convert MXFP8 scales [R, C / 32] to the layout that Blackwell's GEMMs read, [tiles, 512].

    `scale` is float32, powers of two or NaN; the result is float8_e8m0fnu. Tiles of 128 rows and 4
    columns are in row-major order, the last ones zero-padded. Each holds its rows 0, 32, 64 and 96,
    four bytes each, then rows 1, 33, 65, 97 and so on (cuBLAS, "1D block scaling factors layout").
    """
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    padded = F.pad(exponents, (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, 512).view(torch.float8_e8m0fnu)
