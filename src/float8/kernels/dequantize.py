"""The Triton kernel that dequantizes float8 data, twin of `scales.dequantised`."""

import torch
from torch import Tensor

from float8.config import Granularity
from float8.formats import E4M3
from float8.kernels.runtime.launch import takes_triton_directly
from float8.kernels.runtime.triton import jit, tl
from float8.scales import Operand, dequantised

_BLOCK_R, _BLOCK_C = 16, 256


def dequantised_by_kernel(operand: Operand, granularity: Granularity, dtype: torch.dtype) -> Tensor:
    """Return `data * scale` in `dtype`; eager code on a GPU may use Triton, if `fits_kernel`."""
    data = operand.data
    if data.is_cuda and takes_triton_directly(*operand) and fits_kernel(operand, granularity):
        return dequantised_triton(operand, granularity, dtype)
    return dequantised(operand, granularity, dtype)


def fits_kernel(operand: Operand, granularity: Granularity) -> bool:
    """Return whether the Triton kernel can dequantize `operand`, a tuple (data, scale).

    The data must be 2-D or 3-D, not empty and contiguous along the last dim. Scales per row must
    have the shape [..., R, 1], not [..., 1, C] as in a transposed operand; scales of blocks must
    have as many dims as the data.
    """
    data, scale = operand
    per_row = scale.shape == (*data.shape[:-1], 1)
    fits = per_row if granularity.by_rows else granularity.one_scale or scale.dim() == data.dim()
    return fits and data.dim() in (2, 3) and data.stride(-1) == 1 and data.numel() > 0


def dequantised_triton(operand: Operand, granularity: Granularity, dtype: torch.dtype) -> Tensor:
    """Return `data * scale` as a new contiguous tensor of `dtype`; `fits_kernel` must be True."""
    data, scale = operand
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    codes = data.view(torch.uint8).view(-1, *data.shape[-2:])
    E, R, C = codes.shape
    # Strides of the scales along E, R and C, 0 if one scale serves all of a dim; 2-D data have E 1.
    strides = [0, 0, 0] if granularity.one_scale else [0, *scale.stride()][-3:]
    if granularity.by_rows:
        strides[2] = 0
    _dequantise_kernel[(E * -(-R // _BLOCK_R), -(-C // _BLOCK_C))](
        codes, scale, out, R, C, *codes.stride()[:2], *strides, granularity.height or R,
        granularity.width or _BLOCK_C, data.dtype == E4M3, _BLOCK_R, _BLOCK_C, num_warps=4,
    )  # fmt: skip
    return out


@jit
def _dequantise_kernel(  # type: ignore[no-untyped-def]
    data_ptr,  # [E, R, C] uint8
    scale_ptr,  # one float32 per block of each matrix
    out_ptr,  # [E, R, C]
    R, C, stride_e, stride_r, scale_e, scale_r, scale_c,  # strides of data; of scales (0: shared)
    height,  # rows of a block; R if one scale serves all rows
    WIDTH: tl.constexpr,  # columns of a block; BLOCK_C if one scale serves whole rows
    E4M3: tl.constexpr,  # else e5m2
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store data * scale for one tile of BLOCK_R x BLOCK_C elements of one of E matrices [R, C]."""
    tiles_r, tile = tl.cdiv(R, BLOCK_R), tl.program_id(0)
    e = (tile // tiles_r).to(tl.int64)
    r = (tile % tiles_r * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None, None]
    run = tl.program_id(1) * (BLOCK_C // WIDTH) + tl.arange(0, BLOCK_C // WIDTH)[None, :, None]
    c = run * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    inside = (r < R) & (c < C)  # [rows, runs, WIDTH]; the elements of a run share a scale
    code = tl.load(data_ptr + e * stride_e + r * stride_r + c, mask=inside, other=0).to(tl.int32)
    offset = e * scale_e + r // height * scale_r + run * scale_c
    scale = tl.load(scale_ptr + offset, mask=(r < R) & (run * WIDTH < C), other=0)
    magnitude = code & 0x7F
    # A shifted magnitude is a float32 whose exponent has the bias of float8. A multiplication by a
    # power of two corrects the bias, also of subnormal numbers.
    bits = magnitude << (20 if E4M3 else 21)
    v = bits.to(tl.float32, bitcast=True) * (2.0**120 if E4M3 else 2.0**112)
    if E4M3:
        v = tl.where(magnitude == 0x7F, float("nan"), v)
    else:  # Inf and NaN
        special = (bits | 0x7F800000).to(tl.float32, bitcast=True)
        v = tl.where(magnitude >= 0x7C, special, v)
    v = tl.where(code >= 0x80, -v, v) * scale
    tl.store(out_ptr + (e * R + r) * C + c, v.to(out_ptr.dtype.element_ty), mask=inside)
