"""Byte transpose: row data -> column data of the same per-tensor scale, exact, padded."""

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX, ceil16
from float8.kernels import quads
from float8.kernels.checks import describe
from float8.kernels.runtime.launch import Program, Slot, new, planned, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import (
    ALONG_AND_ACROSS,
    pack_words,
    store,
    tile_at,
    tile_of_program,
    tiled,
)

BYTE_DTYPES = (*FLOAT8_MAX, torch.uint8, torch.int8)


def transpose_bytes(data: Tensor, *, after: Tensor | None = None) -> Tensor:
    """Return the transpose of ``data`` as a contiguous copy, padded as :func:`cast` pads.

    Args:
        data: [R, C] of a 1-byte dtype (float8_e4m3fn, float8_e5m2, uint8, int8); any strides.
        after: what a compiler must have computed first, as in :func:`cast`; not read.

    Returns:
        [ceil16(C), ceil16(R)], contiguous, same dtype; padding is zero. No gradient flows through
        it.

    Raises:
        TypeError: the dtype is another one.
        ValueError: ``data`` is not 2-D.
    """
    if not isinstance(data, Tensor) or data.dtype not in BYTE_DTYPES:
        raise TypeError(
            f"transpose_bytes: data is {describe(data)}; expected float8_e4m3fn, float8_e5m2, "
            f"uint8 or int8. For wider elements use data.t().contiguous()."
        )
    if data.dim() != 2:
        raise ValueError(
            f"transpose_bytes: data is {describe(data)}; expected 2 dimensions [R, C]. "
            f"Flatten the leading dimensions first: data.reshape(-1, data.shape[-1])."
        )
    if data.is_cuda and takes_triton_directly(data):
        return transpose_triton(data)
    result: Tensor = torch.ops.float8.transpose.default(data, after)
    return result


def transpose_reference(data: Tensor, after: Tensor | None = None) -> Tensor:
    """Plain-torch twin of the kernel; see :func:`transpose_bytes`."""
    # As uint8, because float8 copies are not implemented on every backend.
    (R, C), codes = data.shape, data.view(torch.uint8)
    out = codes.new_zeros((C + -C % 16, R + -R % 16))
    out[:C, :R] = codes.t()
    return out.view(data.dtype)


def transpose_triton(data: Tensor, after: Tensor | None = None) -> Tensor:
    """Triton kernel; see :func:`transpose_bytes`."""
    return _program(data)(data)[0]


@planned
def _program(data: Slot) -> Program:
    R, C = data.shape
    out = new((ceil16(C), ceil16(R)), data.dtype)
    if R * C == 0:
        return Program([data], [out], [])
    integers = (R, C, *data.strides)
    launch = tiled(_transpose_kernel, ALONG_AND_ACROSS, data.device, (data, out), integers)
    return Program([data], [out], [launch])


@jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    in_ptr,  # [R, C]
    out_ptr,  # [Cp, Rp], padded to multiples of 16
    R,
    C,
    stride_r,
    stride_c,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_r, tile_c = tile_at(tile_of_program(), R, C, BLOCK_R, BLOCK_C, GROUP)
    quad, c = quads.quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    in_ptr = in_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + c * stride_c
    b0, b1, b2, b3 = quads.load_rows(in_ptr, quad, stride_r, quads.inside_of(quad, c, R, C), EVEN)
    c, quad = tl.trans(c), tl.trans(quad)
    words, Cp = tl.cdiv(R, 16) * 4, tl.cdiv(C, 16) * 16
    out_ptr = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + c * words + quad
    store(out_ptr, tl.trans(pack_words(b0, b1, b2, b3)), (c < Cp) & (quad < words), EVEN)


register(
    "transpose",
    transpose_reference,
    triton=transpose_triton,
    fake=lambda data, after=None: data.new_empty((ceil16(data.shape[1]), ceil16(data.shape[0]))),
)
