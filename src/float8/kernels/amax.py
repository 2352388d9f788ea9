"""The largest magnitude of a tensor: what a per-tensor scale is computed from."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from float8.kernels._checks import check_high_precision
from float8.kernels._device import launch, sm_count
from float8.kernels._triton import jit, tl

Dims = tuple[tuple[int, int], ...]
"""(size, stride) pairs, in elements, largest stride first."""


def amax(x: Tensor) -> Tensor:
    """Return max(abs(x)).

    Under ``torch.compile`` this is plain torch code, which Inductor fuses into whatever produces
    ``x``; it may then see the producer's value before it is rounded to ``x.dtype``. In eager mode
    it is one kernel, ``torch.ops.float8.amax``.

    Args:
        x: any shape and strides; float32, bfloat16 or float16.

    Returns:
        A 0-dim float32 tensor on the same device: NaN if any element is NaN, else Inf if any is
        infinite, 0.0 if ``x`` is empty. No gradient flows through it.

    Raises:
        TypeError: ``x`` has another dtype.
    """
    if torch.compiler.is_compiling():
        return amax_reference(x.detach())
    result: Tensor = torch.ops.float8.amax.default(x)
    return result


def amax_reference(x: Tensor) -> Tensor:
    """Plain-torch twin of the kernel; see :func:`amax`."""
    check_high_precision("amax", x)
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32)


def amax_triton(x: Tensor) -> Tensor:
    """Triton kernel; see :func:`amax`.

    A tensor that is dense in any order of its dims is read flat, one with up to two strided dims
    is read where it lies, and one with more is copied first.
    """
    check_high_precision("amax", x)
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    dims, config, copy = _plan(x.shape, x.stride(), x.element_size(), x.device)
    return launch_amax(x.contiguous() if copy else x, dims, config)


@dataclasses.dataclass(frozen=True)
class AmaxLaunch:
    """Launch configuration: each program reads ``steps`` blocks of ``block_r`` x ``block_c``."""

    block_r: int  # elements along the outer dim; 1 where x is read flat
    block_c: int  # elements along the inner dim
    steps: int  # 1 unless x is read flat
    num_warps: int
    programs: int


def collapse(shape: Sequence[int], strides: Sequence[int]) -> Dims:
    """The fewest dims that reach the same elements.

    A dense tensor, whatever the order of its dims, gives ``((numel, 1),)``. Elements that a
    stride of 0 repeats are reached once, which a maximum allows.
    """
    dims: list[tuple[int, int]] = []
    moving = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1 and s != 0]
    for size, stride in sorted(moving, key=lambda dim: -dim[1]):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return tuple(dims) or ((1, 1),)


def launch_config(dims: Dims, itemsize: int, sms: int) -> AmaxLaunch:
    """Launch configuration for the elements that ``dims`` reach, on ``sms`` multiprocessors."""
    if is_flat(dims):
        # 16 KiB at a time: 64 bytes in flight per thread. Up to 8 times that per program, so that
        # few atomics meet, as long as all multiprocessors have 4 programs to overlap.
        n, block = dims[0][0], 16384 // itemsize
        steps = 8
        while steps > 1 and n < steps * block * 4 * sms:
            steps //= 2
        return AmaxLaunch(1, block, steps, num_warps=8, programs=-(-n // (block * steps)))
    (n_r, _), (n_c, _) = _two(dims)
    block_c = min(max(_next_power_of_2(n_c), 16), 256)
    block_r = min(max(_next_power_of_2(n_r), 1), 8192 // block_c)
    programs = -(-n_r // block_r) * -(-n_c // block_c)
    return AmaxLaunch(block_r, block_c, 1, num_warps=8, programs=programs)


def is_flat(dims: Dims) -> bool:
    """Whether the elements are one contiguous run."""
    return len(dims) == 1 and dims[0][1] == 1


def _two(dims: Dims) -> Dims:
    return dims if len(dims) == 2 else ((1, 0), *dims)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, device: torch.device
) -> tuple[Dims, AmaxLaunch, bool]:
    """Which elements to read, how, and whether from a contiguous copy."""
    dims = collapse(shape, strides)
    copy = len(dims) > 2
    if copy:
        dims = ((math.prod(shape), 1),)
    return dims, launch_config(dims, itemsize, sm_count(device)), copy


def launch_amax(x: Tensor, dims: Dims, config: AmaxLaunch) -> Tensor:
    """Run the kernel under one launch configuration."""
    # Several programs meet in one atomic maximum, which starts from zero: torch.zeros is one tiny
    # kernel, cheaper to launch than a second Triton kernel that would join partial results.
    single = config.programs == 1
    out = (torch.empty if single else torch.zeros)((), dtype=torch.float32, device=x.device)
    grid, device = config.programs, x.device
    if is_flat(dims):
        launch(
            _amax_flat_kernel,
            (grid, device),
            (x, out, dims[0][0]),
            BLOCK=config.block_c,
            STEPS=config.steps,
            SINGLE=single,
            num_warps=config.num_warps,
        )
    else:
        (n_r, stride_r), (n_c, stride_c) = _two(dims)
        launch(
            _amax_strided_kernel,
            (grid, device),
            (x, out, n_r, stride_r, n_c, stride_c),
            BLOCK_R=config.block_r,
            BLOCK_C=config.block_c,
            SINGLE=single,
            num_warps=config.num_warps,
        )
    return out


# The magnitude bits of a float compare as integers as the float does, and NaN above Inf. So an
# integer maximum carries NaN through, without min.NaN/max.NaN instructions.


@jit
def _magnitude_bits(x):  # type: ignore[no-untyped-def]
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@jit
def _store_amax(out_ptr, bits, element: tl.constexpr, SINGLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Join one program's maximum, as bits of ``element``, into the float32 at ``out_ptr``."""
    bits = bits.to(tl.int32)
    if element == tl.bfloat16:
        bits = bits << 16
    elif element == tl.float16:
        half = bits.to(tl.int16).to(tl.float16, bitcast=True)
        bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    out_ptr = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if SINGLE:
        tl.store(out_ptr, bits)
    else:
        tl.atomic_max(out_ptr, bits, sem="relaxed")


@jit
def _amax_flat_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, n, BLOCK: tl.constexpr, STEPS: tl.constexpr, SINGLE: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    left = n - first
    x_ptr += first
    if left >= BLOCK * STEPS:
        largest = _magnitude_bits(tl.load(x_ptr + offsets))
        for step in tl.static_range(1, STEPS):
            bits = _magnitude_bits(tl.load(x_ptr + step * BLOCK + offsets))
            largest = tl.maximum(largest, bits)
    else:
        largest = _magnitude_bits(tl.load(x_ptr + offsets, mask=offsets < left, other=0.0))
        for step in tl.static_range(1, STEPS):
            at = step * BLOCK + offsets
            bits = _magnitude_bits(tl.load(x_ptr + at, mask=at < left, other=0.0))
            largest = tl.maximum(largest, bits)
    _store_amax(out_ptr, tl.max(largest), x_ptr.dtype.element_ty, SINGLE)


@jit
def _amax_strided_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    n_r,
    stride_r,
    n_c,
    stride_c,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SINGLE: tl.constexpr,
):
    blocks_c = tl.cdiv(n_c, BLOCK_C)
    r = (tl.program_id(0) // blocks_c) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    c = (tl.program_id(0) % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    offsets = r.to(tl.int64) * stride_r + c.to(tl.int64) * stride_c
    x = tl.load(x_ptr + offsets, mask=(r < n_r) & (c < n_c), other=0.0)
    largest = tl.max(tl.max(_magnitude_bits(x), axis=1), axis=0)
    _store_amax(out_ptr, largest, x_ptr.dtype.element_ty, SINGLE)
