"""SwiGLU -> float8 in one kernel: the product never exists in high precision."""

import functools

import torch
from torch import Tensor

from float8.kernels._cast_launch import (
    HISTORY,
    MEASURED,
    SWIGLU,
    Options,
    cast_speculatively,
    launch_cast,
)
from float8.kernels._checks import check_same, check_scalar
from float8.kernels._device import has_float8_conversion, sm_count
from float8.kernels._direct import takes_triton_directly
from float8.kernels._float8 import to_float32
from float8.kernels._launch import Launch
from float8.kernels._memory import empty
from float8.kernels._producers import swiglu
from float8.kernels._triton import jit, tl
from float8.kernels.amax import amax_reference, even_shares, magnitude_bits, store_part
from float8.kernels.cast import Cast, cast_reference
from float8.kernels.cast_delayed import choose_scale_reference


def swiglu_cast(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    round_to_power_of_2: bool = False,
    record: bool = False,
    speculative: bool = False,
) -> Cast:
    """Cast ``silu(gate) * up``, computed in float32, to row data.

    One opaque op, ``torch.ops.float8.swiglu_cast``.

    Args:
        gate: [R, C] float32, bfloat16 or float16.
        up: as ``gate``.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scale: 0-dim float32, the decode scale from the history, 0 where unknown; None: the scale
            is taken from the amax of the product.
        amax: 0-dim float32, raised in place to the amax of the product; needed with ``scale``.
        round_to_power_of_2: round a scale from the amax up to a power of two.
        record: whether to write ``amax``.
        speculative: take ``scale`` for a guess: the scale from the amax is used where it is larger,
            or not a number, so that nothing saturates.

    Returns:
        The scale used, row data [R, ceil16(C)], and None.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes, strides or devices do not fit together.
    """
    args = (gate, up, dtype, scale, amax, round_to_power_of_2, record, speculative)
    if takes_triton_directly(gate, up, scale, amax):
        out = swiglu_cast_triton(*args)
    else:
        out = torch.ops.float8.swiglu_cast.default(*args)
    return Cast(out[0], out[1], None)


def check_swiglu(gate: Tensor, up: Tensor, scale: Tensor | None, amax: Tensor | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what :func:`swiglu_cast` cannot take."""
    check_same("swiglu_cast", gate=gate, up=up)
    if (scale is None) != (amax is None):
        raise ValueError("swiglu_cast: got only one of scale and amax, expected both or neither")
    if scale is not None and amax is not None:
        check_scalar("scale", scale, gate)
        check_scalar("amax", amax, gate)


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
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """Plain-torch twin of the kernel; see :func:`swiglu_cast`."""
    check_swiglu(gate, up, scale, amax)
    product = swiglu_reference(gate, up)
    own = amax_reference(product)
    used = choose_scale_reference(own, dtype, scale, amax, round_to_power_of_2, record, speculative)
    row, _ = cast_reference(product, used, dtype, row=True, col=False)
    assert row is not None
    return [used, row]


def swiglu_cast_triton(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """Triton kernels; see :func:`swiglu_cast`."""
    check_swiglu(gate, up, scale, amax)
    gate, up = gate.contiguous(), up.contiguous()
    options = Options(
        dtype,
        row=True,
        col=False,
        pad_rows=False,
        round_to_power_of_2=round_to_power_of_2,
        record=record and scale is not None,
        producer=SWIGLU,
    )
    if speculative and scale is not None and amax is not None:
        used, (row, _) = cast_speculatively(gate, options, scale, amax, up)
    else:
        parts = _measure(gate, up, scale)
        used = empty((), torch.float32, gate.device)
        source = MEASURED if scale is None else HISTORY
        options = options._replace(source=source, parts=parts.numel())
        row, _ = launch_cast(
            gate, options, scale=scale, parts=parts, scale_out=used, amax=amax, y=up
        )
    assert row is not None
    if options.record:
        assert amax is not None
        torch.autograd.graph.increment_version(amax)
    return [used, row]


def _measure(gate: Tensor, up: Tensor, known_scale: Tensor | None) -> Tensor:
    """The amaxes of the parts of ``silu(gate) * up``; see `amax.measure`."""
    launch = _launch(gate.numel(), gate.dtype, gate.device, known_scale is not None)
    parts = empty((launch.programs,), torch.float32, gate.device)
    launch(gate, up, parts, parts if known_scale is None else known_scale)
    return parts


@functools.lru_cache(maxsize=4096)
def _launch(n: int, dtype: torch.dtype, device: torch.device, only_if_unknown: bool) -> Launch:
    block, steps, rounds, programs = even_shares(n, 4096, sm_count(device))
    constants = (block, steps, rounds, only_if_unknown, has_float8_conversion(device))
    return Launch(_swiglu_amax_kernel, programs, device, (n,), constants, num_warps=8, inputs=2)


@jit(do_not_specialize_on_alignment=["scale_ptr"])
def _swiglu_amax_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    parts_ptr,
    scale_ptr,
    n,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ONLY_IF_UNKNOWN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    if ONLY_IF_UNKNOWN:
        if tl.load(scale_ptr) != 0.0:
            return
    largest = tl.zeros((BLOCK,), tl.int32)
    for turn in range(ROUNDS):
        first = (tl.program_id(0).to(tl.int64) * ROUNDS + turn) * (BLOCK * STEPS)
        for step in tl.static_range(STEPS):
            at = first + step * BLOCK + tl.arange(0, BLOCK)
            gate = to_float32(tl.load(gate_ptr + at, mask=at < n, other=0.0), HARDWARE)
            up = to_float32(tl.load(up_ptr + at, mask=at < n, other=0.0), HARDWARE)
            largest = tl.maximum(largest, magnitude_bits(swiglu(gate, up)))
    store_part(parts_ptr, tl.max(largest), tl.float32)
