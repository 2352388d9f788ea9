"""Statistics of a cast: how many values underflowed, saturated or were not finite."""

import torch
from torch import Tensor

from float8.kernels.numeric import float32_bits, magnitude_bits
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, sm_count, tl


def count_reference(x: Tensor, data: Tensor, bound: Tensor, all_count: bool) -> Tensor:
    """Count the values of `x` that a cast to `data`, float8 of the same shape, changed most.

    `bound` is one float32 element, above which values saturate. Zeros are values if `all_count`.

    Returns:
        [6] float64: the amax, and the numbers of elements, of values, of values that became zero,
        of finite values that saturated, and of values that are not finite.
    """
    size, zero = x.abs(), data.view(torch.uint8) & 127 == 0
    values, finite = (size != 0) | all_count, size.isfinite()
    counts = values, values & zero, finite & (size.float() > bound.reshape(())), ~finite
    amax = size.amax() if size.numel() else size.new_zeros(())
    numbers = amax, torch.full_like(amax, size.numel(), dtype=torch.float64)
    return torch.stack([each.double() for each in (*numbers, *(kind.sum() for kind in counts))])


def _count_triton(x: Tensor, data: Tensor, bound: Tensor, all_count: bool) -> Tensor:
    if not (x.is_contiguous() and data.is_contiguous() and x.numel()):
        return count_reference(x, data, bound, all_count)
    out, block = torch.zeros(6, dtype=torch.int64, device=x.device), 4096
    blocks = -(-x.numel() // block)
    rounds = -(-blocks // (8 * sm_count(x.device)))
    _count_kernel[(-(-blocks // rounds),)](
        x, data.view(torch.uint8), bound, out, x.numel(), rounds, all_count, block, num_warps=8
    )
    return torch.cat([out[:1].int().view(torch.float32).double(), out[1:].double()])


@jit
def _count_kernel(  # type: ignore[no-untyped-def]
    x_ptr, data_ptr, bound_ptr,
    out_ptr,  # [6] int64, zeros; the first receives the bits of a float32
    n, rounds,  # elements; blocks per program
    ALL_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bound = magnitude_bits(tl.load(bound_ptr))  # which compare like the floats
    largest = tl.zeros((BLOCK,), tl.int32)
    values, lost, cut, bad = largest, largest, largest, largest
    first = tl.program_id(0).to(tl.int64) * rounds * BLOCK
    end = tl.minimum(first + rounds * BLOCK, n)
    while first < end:  # Triton's interpreter (3.6) takes no range of tensors
        at = first + tl.arange(0, BLOCK)
        inside = at < n
        bits = magnitude_bits(tl.load(x_ptr + at, mask=inside, other=0))
        bits = float32_bits(bits, x_ptr.dtype.element_ty)
        zero = tl.load(data_ptr + at, mask=inside, other=1) & 127 == 0
        value = inside if ALL_COUNT else bits != 0
        largest = tl.maximum(largest, bits)
        values += value.to(tl.int32)
        lost += (value & zero).to(tl.int32)
        cut += ((bits > bound) & (bits < 0x7F800000)).to(tl.int32)
        bad += (bits >= 0x7F800000).to(tl.int32)
        first += BLOCK
    tl.atomic_max(out_ptr, tl.max(largest, 0).to(tl.int64), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(out_ptr + 1, n)
    tl.atomic_add(out_ptr + 2, tl.sum(values, 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(out_ptr + 3, tl.sum(lost, 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(out_ptr + 4, tl.sum(cut, 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(out_ptr + 5, tl.sum(bad, 0).to(tl.int64), sem="relaxed")


register(
    "count",
    count_reference,
    triton=_count_triton,
    fake=lambda x, *_: x.new_empty((6,), dtype=torch.float64),
)

COUNT = torch.ops.float8.count.default


def tally_reference(numbers: Tensor, totals: Tensor, calls: Tensor, counted: bool) -> None:
    """Add `numbers`, a result of `count`, to `totals`, and increment `calls`; both in place.

    `calls`, 0-dim int64 on the CPU, is the number of calls so far. `totals` [8] float64 holds 1 / n
    of the first call and of the first one with a non-finite value (0 if there is none), n counted
    from 1; then the largest amax and the five sums of counts. Unless `counted`, only the first two
    change.
    """
    calls += 1
    numbers = numbers.to(totals.device)
    first_calls = totals.new_full((2,), 1 / int(calls))
    first_calls[1] *= numbers[5] > 0
    row = torch.cat([first_calls, numbers if counted else torch.zeros_like(numbers)])
    torch.maximum(totals[:3], row[:3], out=totals[:3])
    totals[3:] += row[3:]


register("tally", tally_reference, fake=lambda *_: None, writes=("totals", "calls"))

TALLY = torch.ops.float8.tally.default
