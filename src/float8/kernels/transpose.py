"""Zero-padded, transposed copies of 1-byte data, which make column data of row data."""

import functools

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX, ceil16
from float8.kernels import tiles
from float8.kernels.amax import describe
from float8.kernels.numeric import pack_words
from float8.kernels.runtime.launch import Launch, allocator, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl

BYTE_DTYPES = (*FLOAT8_MAX, torch.uint8, torch.int8)


def transpose_bytes(data: Tensor, *, after: Tensor | None = None) -> Tensor:
    """Return a contiguous copy [C, R] of ``data`` [R, C], C and R zero-padded to multiples of 16.

    ``data``: 2-D, any strides, float8_e4m3fn, float8_e5m2, uint8 or int8; else raises `TypeError`.
    ``after``: a tensor that compiled code must compute first, e.g. to keep the copy in backward.
    """
    if data.dtype not in BYTE_DTYPES or data.dim() != 2:
        raise TypeError(
            f"transpose_bytes: data is {describe(data)}; expected a matrix [R, C] of "
            f"{BYTE_DTYPES}: data.t().contiguous() does for wider elements"
        )
    if data.is_cuda and takes_triton_directly(data):
        return _transpose_triton(data)  # eager code needs no `after`
    return torch.ops.float8.transpose.default(data, after)  # type: ignore[no-any-return]


def transpose_reference(data: Tensor, after: Tensor | None = None) -> Tensor:
    """Return a copy [C, R] of ``data`` [R, C], zero-padded to multiples of 16; ignore ``after``."""
    # As uint8, because not every backend implements copies of float8.
    (R, C), codes = data.shape, data.view(torch.uint8)
    out = codes.new_zeros((C + -C % 16, R + -R % 16))
    out[:C, :R] = codes.t()
    return out.view(data.dtype)


def _transpose_triton(data: Tensor, after: Tensor | None = None) -> Tensor:
    R, C = data.shape
    Rp, Cp = ceil16(R), ceil16(C)
    out = allocator(data.device)((Cp, Rp), (Rp, 1), data.dtype)
    if R * C:
        _launch(data.dtype, data.device, R, C, *data.stride())(data, out)
    return out


@functools.lru_cache(maxsize=4096)
def _launch(dtype: torch.dtype, device: torch.device, *integers: int) -> Launch:
    return tiles.tiled(_transpose_kernel, tiles.COL_TILES, device, integers)


@jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    in_ptr,  # [R, C]
    out_ptr,  # [Cp, Rp], padded to multiples of 16
    R, C, stride_r, stride_c,  # sizes and strides of the input; EVEN: tiles fill it, without masks
    EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Copy one tile of bytes to its place in the transposed matrix, and store zeros as padding."""
    tile_r, tile_c = tiles.tile_at(tiles.reversed_tile(), R, C, BLOCK_R, BLOCK_C, GROUP)
    quad, c = tiles.tile_quads(tile_r, tile_c, BLOCK_R, BLOCK_C)  # groups of 4 rows, columns
    in_ptr = in_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + c * stride_c
    r = tiles.quad_rows(quad)
    inside = [(row < R) & (c < C) for row in r]
    codes = tiles.load_rows(in_ptr, r, stride_r, inside, EVEN)  # 0 outside, as padding
    words = pack_words(codes[0], codes[1], codes[2], codes[3])
    columns = tl.cdiv(C, 16) * 16
    tiles.store_col_data(out_ptr, words, quad, c, columns, tl.cdiv(R, 16) * 4, EVEN)  # Rp / 4 words


register(
    "transpose",
    transpose_reference,
    triton=_transpose_triton,
    fake=lambda data, after=None: data.new_empty((ceil16(data.shape[1]), ceil16(data.shape[0]))),
)
