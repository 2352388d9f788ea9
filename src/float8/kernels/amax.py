"""The largest magnitude of a tensor: what a per-tensor scale is computed from."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from float8.kernels.checks import check_high_precision
from float8.kernels.runtime.device import sm_count
from float8.kernels.runtime.launch import Launch, empty, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl

Dims = tuple[tuple[int, int], ...]
"""(size, stride) pairs, in elements, largest stride first."""


def amax(x: Tensor) -> Tensor:
    """Return max(abs(x)).

    Under ``torch.compile`` this is plain torch code, row by row, which Inductor fuses into whatever
    produces ``x``; it may then see the producer's value before it is rounded to ``x.dtype``. In
    eager mode it is one kernel, ``torch.ops.float8.amax``.

    Args:
        x: any shape and strides; float32, bfloat16 or float16.

    Returns:
        A 0-dim float32 tensor on the same device: NaN if any element is NaN, else Inf if any is
        infinite, 0.0 if ``x`` is empty. No gradient flows through it.

    Raises:
        TypeError: ``x`` has another dtype.
    """
    check_high_precision("amax", x)
    if torch.compiler.is_compiling():
        x = x.detach().abs()
        return amax_reference(x.amax(dim=-1) if x.dim() > 1 and x.shape[-1] else x)
    if x.is_cuda and takes_triton_directly(x):
        return amax_triton(x)
    result: Tensor = torch.ops.float8.amax.default(x)
    return result


def amax_reference(x: Tensor) -> Tensor:
    """Plain-torch twin of the kernel; see :func:`amax`."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32)


def amax_triton(x: Tensor) -> Tensor:
    """Triton kernel; see :func:`amax`."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return join(measure(x))


def measure(x: Tensor, known_scale: Tensor | None = None) -> Tensor:
    """[P] float32: the amaxes of the parts of ``x`` that the programs of one kernel read.

    Their maximum, the amax of ``x``, is left to the kernel that follows, which needs it anyway: to
    join them here would take another launch. A tensor that is dense in any order of its dims is
    read flat, one with up to two strided dims where it lies, and one with more is copied first.
    Where ``known_scale`` is given and not 0, nothing is read and nothing is written.
    """
    dims, config, copy = _plan(x.shape, x.stride(), x.element_size(), x.device)
    parts = empty((config.programs,), torch.float32, x)
    launch_amax(x.contiguous() if copy else x, parts, dims, config, known_scale)
    return parts if config.programs <= MAX_PARTS else join(parts).reshape(1)


def join(parts: Tensor) -> Tensor:
    """The amax, 0-dim, of what :func:`measure` returns."""
    # As integers: magnitudes compare alike, and NaN lies above Inf.
    return parts.view(torch.int32).amax().view(torch.float32) if parts.numel() > 1 else parts[0]


MAX_PARTS = 2048
"""A kernel that joins parts reads all of them in each of its programs: few enough for that."""


@dataclasses.dataclass(frozen=True)
class AmaxLaunch:
    """Launch configuration: each program reads ``rounds * steps`` blocks [block_r, block_c]."""

    block_r: int  # elements along the outer dim; 1 where x is read flat
    block_c: int  # elements along the inner dim
    steps: int  # blocks that are read without waiting for each other
    rounds: int
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
        # 16 KiB at a time, by 16 warps: two loads of 16 bytes per thread and step.
        shares = even_shares(dims[0][0], 16384 // itemsize, sms, steps=2, programs_per_sm=8)
        block, steps, rounds, programs = shares
        return AmaxLaunch(1, block, steps, rounds, num_warps=16, programs=programs)
    (n_r, _), (n_c, _) = _two(dims)
    block_c = min(max(_next_power_of_2(n_c), 16), 256)
    block_r = min(max(_next_power_of_2(n_r), 1), 8192 // block_c)
    programs = -(-n_r // block_r) * -(-n_c // block_c)
    return AmaxLaunch(block_r, block_c, 1, 1, num_warps=8, programs=programs)


def even_shares(
    n: int, block: int, sms: int, *, steps: int = 4, programs_per_sm: int = 4
) -> tuple[int, int, int, int]:
    """Share ``n`` elements among as many programs as run at once, or few times as many.

    Returns (block, steps, rounds, programs): each program reads ``steps * rounds`` blocks.
    """
    blocks = -(-n // block)
    if blocks < 8 * sms:
        steps = 1
    rounds = -(-blocks // (steps * programs_per_sm * sms))
    return block, steps, rounds, -(-blocks // (steps * rounds))


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


def launch_amax(
    x: Tensor, parts: Tensor, dims: Dims, config: AmaxLaunch, known_scale: Tensor | None = None
) -> None:
    """Run the kernel under one launch configuration, into ``parts`` [programs]."""
    launch = _launch(dims, x.dtype, x.device, known_scale is not None, config)
    launch(x, parts, known_scale)


@functools.lru_cache(maxsize=4096)
def _launch(
    dims: Dims,
    dtype: torch.dtype,
    device: torch.device,
    only_if_unknown: bool,
    config: AmaxLaunch,
) -> Launch:
    if is_flat(dims):
        return Launch(
            _amax_flat_kernel,
            config.programs,
            device,
            (dims[0][0], config.rounds),
            (config.block_c, config.steps, only_if_unknown),
            config.num_warps,
        )
    (n_r, stride_r), (n_c, stride_c) = _two(dims)
    return Launch(
        _amax_strided_kernel,
        config.programs,
        device,
        (n_r, stride_r, n_c, stride_c),
        (config.block_r, config.block_c, only_if_unknown),
        config.num_warps,
    )


# The magnitude bits of a float compare as integers as the float does, and NaN above Inf. So an
# integer maximum carries NaN through, without min.NaN/max.NaN instructions.


@jit
def magnitude_bits(x):  # type: ignore[no-untyped-def]
    """Bits of abs(x) as int16 or int32."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@jit
def float32_bits(bits, element: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of a magnitude of dtype ``element`` -> those of the same float32, as int32."""
    bits = bits.to(tl.int32)
    if element == tl.bfloat16:
        bits = bits << 16
    elif element == tl.float16:
        half = bits.to(tl.int16).to(tl.float16, bitcast=True)
        bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@jit
def store_part(parts_ptr, bits, element: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the largest magnitude that this program saw, given as bits of ``element``."""
    parts_ptr = parts_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(parts_ptr + tl.program_id(0), float32_bits(bits, element))


@jit(do_not_specialize_on_alignment=["scale_ptr"])
def _amax_flat_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    parts_ptr,
    scale_ptr,
    n,
    rounds,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ONLY_IF_UNKNOWN: tl.constexpr,
):
    if ONLY_IF_UNKNOWN:
        if tl.load(scale_ptr) != 0.0:
            return
    offsets = tl.arange(0, BLOCK)
    largest = magnitude_bits(tl.zeros((BLOCK,), x_ptr.dtype.element_ty))
    turn = tl.program_id(0).to(tl.int64) * rounds
    end = turn + rounds
    while turn < end:  # Triton's interpreter (3.6) takes no range of tensors
        first = turn * (BLOCK * STEPS)
        left = n - first
        if left >= BLOCK * STEPS:
            for step in tl.static_range(STEPS):
                bits = magnitude_bits(tl.load(x_ptr + first + step * BLOCK + offsets))
                largest = tl.maximum(largest, bits)
        else:
            for step in tl.static_range(STEPS):
                at = step * BLOCK + offsets
                x = tl.load(x_ptr + first + at, mask=at < left, other=0.0)
                largest = tl.maximum(largest, magnitude_bits(x))
        turn += 1
    store_part(parts_ptr, tl.max(largest), x_ptr.dtype.element_ty)


@jit(do_not_specialize_on_alignment=["scale_ptr"])
def _amax_strided_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    parts_ptr,
    scale_ptr,
    n_r,
    stride_r,
    n_c,
    stride_c,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ONLY_IF_UNKNOWN: tl.constexpr,
):
    if ONLY_IF_UNKNOWN:
        if tl.load(scale_ptr) != 0.0:
            return
    blocks_c = tl.cdiv(n_c, BLOCK_C)
    r = (tl.program_id(0) // blocks_c) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    c = (tl.program_id(0) % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    offsets = r.to(tl.int64) * stride_r + c.to(tl.int64) * stride_c
    x = tl.load(x_ptr + offsets, mask=(r < n_r) & (c < n_c), other=0.0)
    largest = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    store_part(parts_ptr, largest, x_ptr.dtype.element_ty)


def _amax_fake(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


register("amax(Tensor x) -> Tensor", plain=amax_reference, triton=amax_triton, fake=_amax_fake)
