"""SwiGLU -> float8 in one kernel: the product never exists in high precision."""

import functools

import torch
from torch import Tensor

from float8.kernels.amax import even_shares, magnitude_bits, store_part
from float8.kernels.cast import (
    HISTORY,
    MEASURED,
    SWIGLU,
    Kind,
    cast_dynamic_fake,
    launch_cast,
    rows_reference,
    swiglu,
)
from float8.kernels.checks import check_same, check_state
from float8.kernels.numeric import to_float32
from float8.kernels.runtime.device import has_float8_conversion, sm_count
from float8.kernels.runtime.launch import Launch, empty, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.quantize.history import NO_STATE, DelayedScale
from float8.quantize.spec import CastSpec, Part


def swiglu_cast(
    gate: Tensor,
    up: Tensor,
    spec: CastSpec,
    state: DelayedScale | None = None,
    *,
    record: bool = False,
) -> Part:
    """Cast ``silu(gate) * up``, computed in float32, to row data.

    Args:
        gate: [R, C] float32, bfloat16 or float16.
        up: as ``gate``.
        spec: format, and whether a scale from the amax is rounded up to a power of two.
        state: of delayed scaling, as in `cast_delayed`; None: the scale is taken from the amax of
            the product.
        record: whether to raise the amax of ``state``.

    Returns:
        Row data [R, ceil16(C)], and the scale used.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes, strides or devices do not fit together.
    """
    check_same("swiglu_cast", gate=gate, up=up)
    check_state(state, gate)
    scale, amax = state or NO_STATE
    args = (gate, up, spec.dtype, scale, amax, spec.power_of_2, record)
    if gate.is_cuda and takes_triton_directly(gate, up, scale, amax):
        out = _swiglu_cast_triton(*args)
    else:
        out = torch.ops.float8.swiglu_cast.default(*args)
    return Part(out[1], out[0])


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32."""
    gate = gate.to(torch.float32)
    return gate * torch.sigmoid(gate) * up.to(torch.float32)


def swiglu_cast_reference(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    power_of_2: bool,
    record: bool,
) -> tuple[Tensor, Tensor]:
    """Plain-torch twin of :func:`swiglu_cast`: the scale used, row data."""
    product = swiglu_reference(gate, up)
    return rows_reference(product, dtype, scale, amax, power_of_2, record)


def _swiglu_cast_triton(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    power_of_2: bool,
    record: bool,
) -> tuple[Tensor, ...]:
    gate, up = gate.contiguous(), up.contiguous()
    parts = _measure(gate, up, scale)
    kind = Kind(
        MEASURED if scale is None else HISTORY,
        parts.shape[0],
        dtype,
        row=True,
        col=False,
        power_of_2=power_of_2,
        record=record and amax is not None,
        producer=SWIGLU,
    )
    return tuple(launch_cast(gate, kind, scale=scale, parts=parts, amax=amax, y=up))


def _measure(gate: Tensor, up: Tensor, known_scale: Tensor | None) -> Tensor:
    """The amaxes of the parts of ``silu(gate) * up``; see `amax.measure`."""
    launch = _launch(gate.numel(), gate.dtype, gate.device, known_scale is not None)
    parts = empty((launch.programs,), torch.float32, gate)
    launch(gate, up, parts, known_scale)
    return parts


@functools.lru_cache(maxsize=4096)
def _launch(n: int, dtype: torch.dtype, device: torch.device, only_if_unknown: bool) -> Launch:
    block, steps, rounds, programs = even_shares(n, 4096, sm_count(device))
    constants = (block, steps, only_if_unknown, has_float8_conversion(device))
    return Launch(
        _swiglu_amax_kernel, programs, device, (n, rounds), constants, num_warps=8, inputs=2
    )


@jit(do_not_specialize_on_alignment=["scale_ptr"])
def _swiglu_amax_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    parts_ptr,
    scale_ptr,
    n,
    rounds,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ONLY_IF_UNKNOWN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    if ONLY_IF_UNKNOWN:
        if tl.load(scale_ptr) != 0.0:
            return
    largest = tl.zeros((BLOCK,), tl.int32)
    turn = tl.program_id(0).to(tl.int64) * rounds
    end = turn + rounds
    while turn < end:  # Triton's interpreter (3.6) takes no range of tensors
        first = turn * (BLOCK * STEPS)
        for step in tl.static_range(STEPS):
            at = first + step * BLOCK + tl.arange(0, BLOCK)
            gate = to_float32(tl.load(gate_ptr + at, mask=at < n, other=0.0), HARDWARE)
            up = to_float32(tl.load(up_ptr + at, mask=at < n, other=0.0), HARDWARE)
            largest = tl.maximum(largest, magnitude_bits(swiglu(gate, up)))
        turn += 1
    store_part(parts_ptr, tl.max(largest), tl.float32)


register(
    "swiglu_cast",
    swiglu_cast_reference,
    triton=_swiglu_cast_triton,
    fake=lambda gate, up, dtype, *_: tuple(cast_dynamic_fake(gate, dtype, True, False)),
    writes=("amax",),
)
