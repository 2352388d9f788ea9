"""Byte transpose: row data -> column data of the same per-tensor scale, exact."""

import functools

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX
from float8.kernels.checks import describe
from float8.kernels.runtime.device import sm_count
from float8.kernels.runtime.launch import Launch, empty, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import (
    TileLaunch,
    fitting,
    load,
    pack_words,
    store,
    tile_at,
    tile_of_program,
)

BYTE_DTYPES = (*FLOAT8_MAX, torch.uint8, torch.int8)


def transpose_bytes(data: Tensor, *, after: Tensor | None = None) -> Tensor:
    """Return the transpose of ``data`` as a contiguous copy.

    Args:
        data: [R, C] of a 1-byte dtype (float8_e4m3fn, float8_e5m2, uint8, int8); any strides.
        after: what a compiler must have computed first, as in :func:`cast`; not read.

    Returns:
        [C, R], contiguous, same dtype. No gradient flows through it.

    Raises:
        TypeError: the dtype is another one.
        ValueError: ``data`` is not 2-D.
    """
    check_transpose(data)
    if data.is_cuda and takes_triton_directly(data):
        return transpose_triton(data)
    result: Tensor = torch.ops.float8.transpose.default(data, after)
    return result


def check_transpose(data: Tensor) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what :func:`transpose_bytes` cannot take."""
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


def transpose_reference(data: Tensor, after: Tensor | None = None) -> Tensor:
    """Plain-torch twin of the kernel; see :func:`transpose_bytes`."""
    # A view as uint8 because float8 copies are not implemented on every backend, and clone
    # because contiguous() would return the input itself where its transpose is contiguous.
    flipped = data.view(torch.uint8).t().clone(memory_format=torch.contiguous_format)
    return flipped.view(data.dtype)


def transpose_triton(data: Tensor, after: Tensor | None = None) -> Tensor:
    """Triton kernel; see :func:`transpose_bytes`."""
    R, C = data.shape
    return launch_transpose(data, launch_config(R, C, sms=sm_count(data.device)))


@functools.lru_cache(maxsize=4096)
def launch_config(R: int, C: int, *, sms: int) -> TileLaunch:
    """Launch configuration for the transposition of [R, C] on ``sms`` multiprocessors."""
    # Bytes that do not go as words take four times the addresses: smaller tiles for them.
    largest = (128, 128, 8) if R % 4 == 0 else (64, 64, 8)
    return fitting(R, C, sms, (largest, (64, 64, 4), (32, 64, 4)))


def launch_transpose(data: Tensor, config: TileLaunch) -> Tensor:
    """Run the kernel under one launch configuration."""
    R, C = data.shape
    out = empty((C, R), data.dtype, data)
    if data.numel():
        launch = _launch(data.shape, data.stride(), data.dtype, data.device, config)
        launch(data, out)
    return out


@functools.lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    config: TileLaunch,
) -> Launch:
    return Launch(
        _transpose_kernel,
        config.programs,
        device,
        (*shape, *strides),
        (shape[0] % 4 == 0, config.even, config.block_r, config.block_c, config.group),
        config.num_warps,
    )


@jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    in_ptr,  # [R, C]
    out_ptr,  # [C, R]
    R,
    C,
    stride_r,
    stride_c,
    WORDS: tl.constexpr,  # R is a multiple of 4
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_r, tile_c = tile_at(tile_of_program(), R, C, BLOCK_R, BLOCK_C, GROUP)
    # 64-bit, so that offsets are.
    c = (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    c_out = tl.trans(c)
    in_ptr = in_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + c * stride_c
    if WORDS:
        # The tile as four tiles of every fourth row: see `tiles`.
        quad = (tile_r * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)).to(tl.int64)[:, None]
        inside = (quad < R // 4) & (c < C)
        b0 = load(in_ptr + (quad * 4) * stride_r, inside, EVEN)
        b1 = load(in_ptr + (quad * 4 + 1) * stride_r, inside, EVEN)
        b2 = load(in_ptr + (quad * 4 + 2) * stride_r, inside, EVEN)
        b3 = load(in_ptr + (quad * 4 + 3) * stride_r, inside, EVEN)
        quad_out = tl.trans(quad)
        out_ptr = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + quad_out
        inside_out = (c_out < C) & (quad_out < R // 4)
        store(out_ptr + c_out * (R // 4), tl.trans(pack_words(b0, b1, b2, b3)), inside_out, EVEN)
    else:
        r = (tile_r * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
        values = load(in_ptr + r * stride_r, (r < R) & (c < C), EVEN)
        r_out = tl.trans(r)
        out_ptr = out_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + r_out
        store(out_ptr + c_out * R, tl.trans(values), (c_out < C) & (r_out < R), EVEN)


def _transpose_fake(data: Tensor, *_: object) -> Tensor:
    R, C = data.shape
    return data.new_empty((C, R))


register(
    "transpose(Tensor data, Tensor? after=None) -> Tensor",
    plain=transpose_reference,
    triton=transpose_triton,
    fake=_transpose_fake,
)
