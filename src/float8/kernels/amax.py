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
    """Return max(abs(x)) as a 0-dim float32 tensor without a gradient; 0 if ``x`` is empty.

    The result is NaN if an element is NaN, else Inf if one is infinite. ``x`` is float32, bfloat16
    or float16 of any shape and strides; other dtypes raise `TypeError`. In compiled code, Inductor
    can fuse the reduction into the code that computes ``x``, and may then read values not yet
    rounded to ``x.dtype``. In eager mode, and if ``x`` may be empty, separate kernels do it.
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
    """Return text such as "a torch.int8 tensor of shape (2, 3) on cpu", for an error message."""
    return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"


HIGH_PRECISION = "float32, bfloat16 or float16 tensor. Convert it first, e.g. x.to(torch.bfloat16)."


def amax_reference(x: Tensor) -> Tensor:
    """Return max(abs(x)) as 0-dim float32, 0 if ``x`` is empty, by plain PyTorch ops."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32)


def amax_triton(x: Tensor) -> Tensor:
    """Return max(abs(x)) as 0-dim float32, 0 if ``x`` is empty, by a Triton kernel."""
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
    """Return the launch of a kernel, called with (x, amaxes, scale), that measures amaxes of ``x``.

    ``x`` has ``n`` > 0 elements, this dtype and device, and no gaps or overlaps (`is_dense`). Each
    program of the kernel stores the amax of its part of ``x`` in ``amaxes``, float32
    [launch.programs]; the caller takes their maximum. Every program of `cast_kernel` does so, hence
    there are at most 8 amaxes per multiprocessor. With ``unless_set`` the kernel does nothing if
    ``scale``, one float32 element, is not 0; without it, pass None as ``scale``.
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
    """Return whether a tensor fills memory without gaps or overlaps; its dims may be permuted."""
    expected = 1
    strided = [(stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1]
    for stride, size in sorted(strided):
        if stride != expected:
            return False
        expected *= size
    return True


@jit(do_not_specialize_on_alignment=["scale_ptr"])  # type: ignore[untyped-decorator]
def _amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amaxes_ptr, scale_ptr, n, rounds,  # x: n elements; amaxes: one float32 per program
    BLOCK: tl.constexpr, STEPS: tl.constexpr, UNLESS_SET: tl.constexpr,  # return if scale is not 0
):  # fmt: skip
    """Store the amax of ``rounds`` * STEPS blocks of BLOCK elements at amaxes_ptr + program_id."""
    if UNLESS_SET:
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
