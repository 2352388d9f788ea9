"""The largest magnitude of a tensor: what a per-tensor scale is computed from."""

import functools
import math

import torch
from torch import Tensor

from float8.kernels.checks import check_high_precision
from float8.kernels.runtime.device import sm_count
from float8.kernels.runtime.launch import Launch, Program, Slot, new, planned, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.private import surely
from float8.kernels.runtime.triton import jit, tl


def amax(x: Tensor) -> Tensor:
    """Return max(abs(x)).

    Under ``torch.compile`` this is plain torch code, which Inductor fuses into whatever produces
    ``x``; it may then see the producer's value before it is rounded to ``x.dtype``. In eager mode,
    and where ``x`` may turn out to be empty, it is one kernel, ``torch.ops.float8.amax``.

    Args:
        x: any shape and strides; float32, bfloat16 or float16.

    Returns:
        A 0-dim float32 tensor on the same device: NaN if any element is NaN, else Inf if any is
        infinite, 0.0 if ``x`` is empty. No gradient flows through it.

    Raises:
        TypeError: ``x`` has another dtype.
    """
    check_high_precision("amax", x)
    if torch.compiler.is_compiling() and surely(x.numel() != 0):
        x = x.detach()
        if x.dim() > 1:
            x = x.abs().amax(dim=-1)  # of rows first: that fuses into producers of any shape
        return x.abs().amax().to(torch.float32)
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
    if not is_dense(x.shape, x.stride()):
        x = x.contiguous()
    (parts,) = _program(x)(x)
    # As integers: magnitudes compare alike, and NaN lies above Inf.
    return parts.view(torch.int32).amax().view(torch.float32) if len(parts) > 1 else parts[0]


@planned
def _program(x: Slot) -> Program:
    parts, launch = measuring(x)
    return Program([x], [parts], [launch])


def measuring(x: Slot, known_scale: Slot | None = None) -> tuple[Slot, Launch]:
    """Plan the launch that measures ``x``, not empty and dense in any order of its dims.

    Its result [P] float32 is the amaxes of the parts of ``x`` that its programs read. Their
    maximum, the amax of ``x``, is left to the kernel that follows, which needs it anyway: to join
    them here would take another launch. Where ``known_scale`` is given and not 0, nothing is read
    and nothing is written.
    """
    n = math.prod(x.shape)
    # 16 KiB at a time, by 16 warps: two loads of 16 bytes per thread and step.
    block = 16384 // x.dtype.itemsize
    steps, rounds, programs = even_shares(n, block, sm_count(x.device))
    parts = new((programs,), torch.float32)
    constants = (block, steps, known_scale is not None)
    slots = (x, parts, known_scale)
    return parts, Launch(_amax_kernel, programs, slots, (n, rounds), constants, num_warps=16)


MAX_PARTS = 2048
"""A kernel that joins parts reads all of them in each of its programs: few enough for that."""


@functools.lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether the elements are one run of memory, in whatever order of their dims."""
    expected = 1
    moving = [(stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1]
    for stride, size in sorted(moving):
        if stride != expected:
            return False
        expected *= size
    return True


def even_shares(n: int, block: int, sms: int) -> tuple[int, int, int]:
    """Share ``n`` elements among as many programs as run at once, or few times as many.

    Returns (steps, rounds, programs): each program reads ``steps * rounds`` blocks.
    """
    blocks = -(-n // block)
    steps = 1 if blocks < 8 * sms else 2
    rounds = -(-blocks // (steps * 8 * sms))
    return steps, rounds, -(-blocks // (steps * rounds))


# The magnitude bits of a float compare as integers as the float does, and NaN above Inf. So an
# integer maximum carries NaN through, without min.NaN/max.NaN instructions.


@jit
def magnitude_bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of abs(x) as int16 or int32."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@jit
def float32_bits(bits, element: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn bits of a magnitude of dtype ``element`` into those of the same float32, as int32."""
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
def _amax_kernel(  # type: ignore[no-untyped-def]
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


register(
    "amax",
    amax_reference,
    triton=amax_triton,
    fake=lambda x: x.new_empty((), dtype=torch.float32),
)
