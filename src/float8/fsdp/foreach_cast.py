"""Cast many tensors to float8 with one kernel, each with a separate scale."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig
from float8.formats import E4M3
from float8.kernels import numeric
from float8.kernels.runtime.launch import Launch, takes_triton_directly
from float8.kernels.runtime.triton import has_float8_conversion, jit, tl

BLOCK = 4096
"""The number of elements that a program casts; each result begins at a multiple of `BLOCK`."""
MAX_TENSORS = 1024  # of one launch, since each program loads the first programs of all tensors


def foreach_cast(
    tensors: Sequence[Tensor], scales: Sequence[Tensor], cast_config: CastConfig, via: torch.dtype
) -> list[Tensor]:
    """Round `tensors` to `via`, then cast tensor * (1 / scale) to float8; finite values saturate.

    `tensors`, one or more, share dtype and device. `scales` has a scale for each, 0-dim float32:
    views of one tensor, 16 bytes apart, as from `quantize.scales_of`. On GPUs in eager mode, if all
    are contiguous, and `via` is their dtype, or bfloat16 for float32, one kernel casts up to 1024
    tensors. Results have the shapes of `tensors`; those of one kernel are views of one tensor.
    """
    first, dtype = tensors[0], cast_config.dtype
    rounds = first.dtype == torch.float32 and via == torch.bfloat16
    kernel_fits = first.is_cuda and (rounds or via == first.dtype)  # it has no other rounding
    one_launch = kernel_fits and all(x.is_contiguous() for x in tensors)
    if not (one_launch and takes_triton_directly(*tensors)):  # False in compiled code
        pairs = zip(tensors, scales, strict=True)
        return [kernels.to_float8(x.to(via), scale, dtype) for x, scale in pairs]
    results: list[Tensor] = []
    for i in range(0, len(tensors), MAX_TENSORS):  # `scales[i]` is the first scale of the launch
        results += _cast_triton(tensors[i : i + MAX_TENSORS], scales[i], dtype, rounds)
    return results


def _cast_triton(
    tensors: Sequence[Tensor], first_scale: Tensor, float8_dtype: torch.dtype, rounds: bool
) -> list[Tensor]:
    """Cast `tensors`, via bfloat16 if `rounds`; `first_scale` and the others lie 16 bytes apart."""
    first, device, count = tensors[0], tensors[0].device, len(tensors)
    addresses = tuple([x.data_ptr() for x in tensors])
    table, starts = _table(addresses, tuple([x.numel() for x in tensors]), device)
    programs = starts[-1]
    out = torch.empty(programs * BLOCK, dtype=float8_dtype, device=device)
    aligned = not any(address % 16 for address in addresses)
    mantissa_bits, power_of_2 = (3 if float8_dtype == E4M3 else 2), 0  # 0: scales are given
    constants = rounds, aligned, mantissa_bits, power_of_2, has_float8_conversion(device)
    if programs:  # none if all tensors are empty
        _launch(first.dtype, device, programs, count, constants)(first, table, first_scale, out)
    pairs = zip(tensors, starts, strict=False)  # `starts` ends with the number of programs
    return [out.as_strided(x.shape, x.stride(), start * BLOCK) for x, start in pairs]


@functools.lru_cache(maxsize=64)
def _table(
    addresses: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, list[int]]:
    """Return (table, starts), by which a program of `_cast_kernel` finds the tensor it casts.

    `table`, int64 [3, count], has address, number of elements and first program of each tensor; a
    program casts `BLOCK` elements. `starts` has the first programs, then the number of programs.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // BLOCK))
    table = torch.tensor([addresses, sizes, starts[:-1]], pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), starts


@functools.lru_cache(maxsize=64)
def _launch(
    dtype: torch.dtype, device: torch.device, programs: int, count: int, constants: tuple[Any, ...]
) -> Launch:
    """Return a function, cached, that launches `programs` programs of `_cast_kernel`.

    It takes the first of `count` tensors of `dtype`, the table, the first scale and the output.
    `constants`: whether to round to bfloat16, whether addresses are multiples of 16, mantissa bits
    of the float8 format, 0 (scales are given), whether an instruction of the GPU casts to float8.
    """
    constants = (*constants, 1 << (count - 1).bit_length(), BLOCK)
    return Launch(_cast_kernel, device, programs, (count,), constants, num_warps=8)


@jit(do_not_specialize_on_alignment=["scales_ptr"])  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # the first tensor, of the same dtype as the others
    table_ptr,  # [3, count] int64: address, number of elements and first program of each tensor
    scales_ptr,  # [count, 4] float32: a scale for each tensor, then three values of padding
    out_ptr,  # [programs, BLOCK]
    count,  # number of tensors
    ROUNDED: tl.constexpr,  # whether values are rounded to bfloat16 first
    ALIGNED: tl.constexpr,  # whether all addresses are multiples of 16
    # The format's mantissa bits; 0, unused; whether an instruction of the GPU casts to float8.
    MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr, HARDWARE: tl.constexpr,
    COUNT: tl.constexpr,  # count, rounded up to a power of two
    BLOCK: tl.constexpr,  # elements that one program casts
):  # fmt: skip
    """Cast many tensors to float8: each program casts up to BLOCK elements of one tensor."""
    program = tl.program_id(0)
    entry = tl.arange(0, COUNT)
    starts = tl.load(table_ptr + 2 * count + entry, entry < count, 1 << 62)
    # The last tensor that starts here or before. Empty ones start where the next tensor does.
    index = tl.sum((starts <= program).to(tl.int32)) - 1
    start = tl.load(table_ptr + 2 * count + index)
    size = tl.load(table_ptr + count + index)
    address = tl.load(table_ptr + index)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    offset = (program - start) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(address.to(x_ptr.dtype) + offset, offset < size, 0.0)
    v = numeric.to_float32(x, HARDWARE)
    if ROUNDED:
        v = numeric.rounded_to_bfloat16(v, HARDWARE)
    # An Inf becomes NaN here: the scale is Inf or NaN, as it comes from an Inf amax.
    v = v * tl.div_rn(1.0, tl.load(scales_ptr + 4 * index))
    codes = numeric.to_float8_bits(v, (MANTISSA, POWER_OF_2, HARDWARE))
    out_ptr = out_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(out_ptr + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), codes)
