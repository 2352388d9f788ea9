"""The amax of a tensor, max(abs(x)), from which its scale is computed."""

import functools

import torch
from torch import Tensor

from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.numeric import float32_bits, magnitude_bits
from float8.kernels.runtime.launch import Launch, allocator, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.private import surely
from float8.kernels.runtime.triton import jit, sm_count, tl


def amax(x: Tensor) -> Tensor:
    """Return max(abs(x)), 0-dim float32 without a gradient; 0 for an empty tensor.

    The result is NaN if an element is NaN, else Inf if one is infinite. ``x`` is float32, bfloat16
    or float16 of any shape and strides; other dtypes raise `TypeError`. In compiled code plain
    torch computes it, which Inductor fuses into the producer of ``x``, and which may read values
    not yet rounded to ``x.dtype``. In eager mode, or if ``x`` may be empty, the op `amax` runs.
    """
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"amax: x is {describe(x)}; expected a {HIGH_PRECISION}")
    if torch.compiler.is_compiling() and surely(x.numel() != 0):
        x = x.detach()
        if x.dim() > 1:
            x = x.abs().amax(dim=-1)  # rows first, which fuses into producers of any shape
        return x.abs().amax().to(torch.float32)
    if x.is_cuda and takes_triton_directly(x):
        return amax_triton(x)
    return torch.ops.float8.amax.default(x)  # type: ignore[no-any-return]


def describe(x: Tensor) -> str:
    """Return dtype, shape and device of a tensor as text for an error message."""
    return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"


HIGH_PRECISION = "float32, bfloat16 or float16 tensor. Convert it first, e.g. x.to(torch.bfloat16)."
"""The dtypes that an error message says are expected, and how to get one."""


def amax_reference(x: Tensor) -> Tensor:
    """Return the amax of ``x`` in plain torch, the twin of the kernel; see :func:`amax`."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32)


def amax_triton(x: Tensor) -> Tensor:
    """Return the amax of ``x`` by the Triton kernel; see :func:`amax`."""
    if x.numel() == 0:
        return amax_reference(x)
    if not is_dense(x.shape, x.stride()):
        x = x.contiguous()
    measure = amax_plan(x.numel(), x.dtype, x.device)
    amaxes = allocator(x.device)((measure.programs,), (1,), torch.float32)
    measure(x, amaxes, None)
    # As integers: bits of magnitudes have the order of the numbers, and NaN lies above Inf.
    return amaxes.view(torch.int32).amax().view(torch.float32) if len(amaxes) > 1 else amaxes[0]


@functools.lru_cache(maxsize=4096)
def amax_plan(n: int, dtype: torch.dtype, device: torch.device, unless_set: bool = False) -> Launch:
    """Return the launch of a kernel that measures the amax of a tensor of ``n`` > 0 elements.

    Call it with a tensor without gaps, as `is_dense` tells; a float32 vector of `Launch.programs`
    elements, which receives the amax of each program; and a scale or None. With ``unless_set`` the
    kernel returns at once if the scale is not 0. Each program of `cast_kernel` reads all of the
    amaxes, which saves a launch; therefore `Launch.programs` is at most 8 * `sm_count`.
    """
    # A block is what one step reads: 16 KiB, which for 16 warps is two loads of 16 bytes a thread.
    block, most_programs = 16384 // dtype.itemsize, 8 * sm_count(device)
    blocks = -(-n // block)
    steps = 1 if blocks < most_programs else 2  # blocks per round; one if there are few
    rounds = -(-blocks // (steps * most_programs))  # of ``steps`` blocks each, per program
    programs = -(-blocks // (steps * rounds))
    constants = (block, steps, unless_set)
    return Launch(_amax_kernel, device, programs, (n, rounds), constants, num_warps=16)


@functools.lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a tensor fills memory without gaps or overlaps, in any order of its dims."""
    expected = 1
    strided = [(stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1]
    for stride, size in sorted(strided):
        if stride != expected:
            return False
        expected *= size
    return True


@jit(do_not_specialize_on_alignment=["scale_ptr"])  # type: ignore[untyped-decorator]
def _amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amaxes_ptr, scale_ptr, n, rounds,  # n elements; rounds of STEPS blocks per program
    BLOCK: tl.constexpr, STEPS: tl.constexpr, UNLESS_SET: tl.constexpr,
):  # fmt: skip
    """Store the amax of ``rounds`` * STEPS blocks of BLOCK elements, one amax per program."""
    if UNLESS_SET:  # a scale is set if it is not 0
        if tl.load(scale_ptr) != 0.0:
            return
    element: tl.constexpr = x_ptr.dtype.element_ty
    offsets = tl.arange(0, BLOCK)
    largest = magnitude_bits(tl.zeros((BLOCK,), element))
    step_round = tl.program_id(0).to(tl.int64) * rounds
    end = step_round + rounds
    while step_round < end:  # Triton's interpreter (3.6) takes no range of tensors
        first = step_round * (BLOCK * STEPS)
        remaining = n - first
        if remaining >= BLOCK * STEPS:
            for step in tl.static_range(STEPS):
                bits = magnitude_bits(tl.load(x_ptr + first + step * BLOCK + offsets))
                largest = tl.maximum(largest, bits)
        else:
            for step in tl.static_range(STEPS):
                offset = step * BLOCK + offsets
                x = tl.load(x_ptr + first + offset, mask=offset < remaining, other=0.0)
                largest = tl.maximum(largest, magnitude_bits(x))
        step_round += 1
    amaxes_ptr = amaxes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(amaxes_ptr + tl.program_id(0), float32_bits(tl.max(largest), element))


register(
    "amax", amax_reference, triton=amax_triton, fake=lambda x: x.new_empty((), dtype=torch.float32)
)
