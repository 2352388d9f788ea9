"""The backward of SwiGLU straight to float8: no gradient of gate or up in high precision."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX
from float8.kernels._cast_launch import GIVEN, HISTORY, MEASURED, SPECULATIVE
from float8.kernels._checks import check_same, check_scalar
from float8.kernels._device import has_float8_conversion, sm_count
from float8.kernels._direct import takes_triton_directly
from float8.kernels._launch import Launch
from float8.kernels._memory import empty
from float8.kernels._swiglu_backward_kernel import (
    swiglu_backward_amax_kernel,
    swiglu_backward_kernel,
)
from float8.kernels._tiles import fitting, repair_programs
from float8.kernels.amax import amax_reference, even_shares
from float8.kernels.cast import Cast, cast_reference
from float8.kernels.cast_delayed import choose_scale_reference
from float8.kernels.layout import ceil16


class SwigluGradients(NamedTuple):
    """What the backward of a SwiGLU feed-forward multiplies."""

    product: Tensor
    """[ceil16(C), ceil16(R)] float8: column data of ``silu(gate) * up``."""

    gate: Cast
    """The gradient of gate: row data [R, ceil16(C)]."""

    up: Cast
    """The gradient of up, likewise."""


def swiglu_backward_cast(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    product_scale: Tensor,
    product_dtype: torch.dtype,
    dtype: torch.dtype,
    *,
    gate_scale: Tensor | None = None,
    gate_amax: Tensor | None = None,
    up_scale: Tensor | None = None,
    up_amax: Tensor | None = None,
    round_to_power_of_2: bool = False,
    record: bool = False,
    speculative: bool = False,
) -> SwigluGradients:
    """Cast the gradients of ``gate`` and ``up`` to row data, and the product once more.

    The product ``silu(gate) * up`` is needed as column data only now, so forward need not keep it.
    The gradients' column data are left to `transpose_bytes`, which needs no memory for them before
    that of ``grad``, ``gate`` and ``up`` is free: this is where a training step needs most.
    One opaque op, ``torch.ops.float8.swiglu_backward_cast``.

    Args:
        grad: [R, C], gradient of the product; float32, bfloat16 or float16.
        gate: as ``grad``.
        up: as ``grad``.
        product_scale: 0-dim float32, the scale that forward cast the product with.
        product_dtype: float8 format of the product.
        dtype: float8 format of the gradients.
        gate_scale: 0-dim float32, the decode scale of gate's gradient from the history, 0 where
            unknown; None (all four): scales are taken from the amaxes.
        gate_amax: 0-dim float32, raised in place to the amax of gate's gradient.
        up_scale: as ``gate_scale``.
        up_amax: as ``gate_amax``.
        round_to_power_of_2: round scales from amaxes up to powers of two.
        record: whether to write the amaxes.
        speculative: take ``gate_scale`` and ``up_scale`` for guesses: the scale from the amax is
            used where it is larger, or not a number, so that nothing saturates.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes or devices do not fit together.
    """
    args = (
        *(grad, gate, up, product_scale, product_dtype, dtype),
        *(gate_scale, gate_amax, up_scale, up_amax, round_to_power_of_2, record, speculative),
    )
    tensors = (grad, gate, up, product_scale, gate_scale, gate_amax, up_scale, up_amax)
    if takes_triton_directly(*tensors):
        out = swiglu_backward_cast_triton(*args)
    else:
        out = torch.ops.float8.swiglu_backward_cast.default(*args)
    product, gate_used, gate_row, up_used, up_row = out
    return SwigluGradients(product, Cast(gate_used, gate_row, None), Cast(up_used, up_row, None))


def check_swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    product_scale: Tensor,
    states: tuple[Tensor | None, ...],
) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what :func:`swiglu_backward_cast` cannot take."""
    check_same("swiglu_backward_cast", grad=grad, gate=gate, up=up)
    check_scalar("product_scale", product_scale, grad)
    given = [state for state in states if state is not None]
    if len(given) not in (0, 4):
        raise ValueError(
            f"swiglu_backward_cast: got {len(given)} of gate_scale, gate_amax, up_scale and "
            f"up_amax, expected all or none"
        )
    for state in given:
        check_scalar("scale or amax", state, grad)


def swiglu_backward_cast_reference(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    product_scale: Tensor,
    product_dtype: torch.dtype,
    dtype: torch.dtype,
    gate_scale: Tensor | None,
    gate_amax: Tensor | None,
    up_scale: Tensor | None,
    up_amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """Plain-torch twin of the kernel; see :func:`swiglu_backward_cast`."""
    states = (gate_scale, gate_amax, up_scale, up_amax)
    check_swiglu_backward(grad, gate, up, product_scale, states)
    grad, gate, up = (x.to(torch.float32) for x in (grad, gate, up))
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    _, product = cast_reference(silu * up, product_scale, product_dtype, row=False, col=True)
    assert product is not None
    out = [product]
    grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    for x, scale, amax in ((grad_gate, *states[:2]), (grad * silu, *states[2:])):
        own = amax_reference(x)
        used = choose_scale_reference(
            own, dtype, scale, amax, round_to_power_of_2, record, speculative
        )
        row, _ = cast_reference(x, used, dtype, row=True, col=False)
        assert row is not None
        out += [used, row]
    return out


def swiglu_backward_cast_triton(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    product_scale: Tensor,
    product_dtype: torch.dtype,
    dtype: torch.dtype,
    gate_scale: Tensor | None,
    gate_amax: Tensor | None,
    up_scale: Tensor | None,
    up_amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """Triton kernels; see :func:`swiglu_backward_cast`."""
    states = (gate_scale, gate_amax, up_scale, up_amax)
    check_swiglu_backward(grad, gate, up, product_scale, states)
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    out = allocate_gradients(grad, product_dtype, dtype)
    product, (gate_used, gate_row), (up_used, up_row) = out[0], out[1:3], out[3:5]
    known = gate_scale is not None
    kind = _Kind(product_dtype, dtype, round_to_power_of_2, record and known)

    def cast(kind: _Kind, parts: Tensor, *states: Tensor | None) -> None:
        # Any pointer of the same type stands in for one that is absent.
        gate_known, gate_out, up_known, up_out = (parts if x is None else x for x in states)
        _cast_launch(grad.shape, grad.dtype, grad.device, kind)(
            *(grad, gate, up, product, gate_row, up_row, product_scale, parts),
            *(gate_known, gate_used, gate_out, up_known, up_used, up_out),
        )

    if speculative and known:
        # As `cast_speculatively`, with two scales.
        own = torch.zeros(2, dtype=torch.float32, device=grad.device)
        gate_own, up_own = own.unbind()
        cast(kind._replace(record=True), own, gate_scale, gate_own, up_scale, up_own)
        cast(kind._replace(source=SPECULATIVE, parts=1, repair=True), own, *states)
    else:
        measure = _measure_launch(grad.numel(), grad.dtype, grad.device, known)
        parts = empty((2 * measure.programs,), torch.float32, grad.device)
        measure(grad, gate, up, parts, *(parts if x is None else x for x in states[::2]))
        source = HISTORY if known else MEASURED
        cast(kind._replace(source=source, parts=measure.programs), parts, *states)
    if kind.record:
        assert gate_amax is not None
        assert up_amax is not None
        torch.autograd.graph.increment_version([gate_amax, up_amax])
    return out


def allocate_gradients(
    grad: Tensor, product_dtype: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    """Uninitialised outputs of :func:`swiglu_backward_cast`; also its fake."""
    R, C = grad.shape
    row, col = (R, ceil16(C)), (ceil16(C), ceil16(R))
    out = [grad.new_empty(col, dtype=product_dtype)]
    for _ in range(2):
        out.append(grad.new_empty((), dtype=torch.float32))
        out.append(grad.new_empty(row, dtype=dtype))
    return out


class _Kind(NamedTuple):
    """What a launch of the casting kernel does."""

    product_dtype: torch.dtype
    dtype: torch.dtype
    round_to_power_of_2: bool
    record: bool
    source: int = GIVEN
    parts: int = 0
    repair: bool = False


@functools.lru_cache(maxsize=4096)
def _measure_launch(n: int, dtype: torch.dtype, device: torch.device, known: bool) -> Launch:
    block, steps, rounds, parts = even_shares(n, 2048, sm_count(device))
    constants = (block, steps, rounds, known, has_float8_conversion(device))
    return Launch(
        swiglu_backward_amax_kernel, parts, device, (n,), constants, num_warps=8, inputs=3
    )


@functools.lru_cache(maxsize=4096)
def _cast_launch(
    shape: tuple[int, int], x_dtype: torch.dtype, device: torch.device, kind: _Kind
) -> Launch:
    (R, C), sms = shape, sm_count(device)
    # To keep the amaxes takes registers, which large tiles have not: 489 us instead of 642 on an
    # H100 at [8192, 14336]. Without, 701 us (with the amaxes before) instead of 712.
    tiles = ((32, 64, 4),) if kind.record else ((64, 128, 8), (64, 64, 4), (32, 64, 4))
    config = fitting(R, C, sms, tiles)
    return Launch(
        swiglu_backward_kernel,
        repair_programs(config, sms) if kind.repair else config.programs,
        device,
        (R, C, kind.parts),
        (
            3 if kind.product_dtype == torch.float8_e4m3fn else 2,
            3 if kind.dtype == torch.float8_e4m3fn else 2,
            FLOAT8_MAX[kind.dtype],
            kind.source,
            1 << (kind.parts - 1).bit_length() if kind.parts else 1,
            kind.round_to_power_of_2,
            kind.record,
            kind.repair,
            has_float8_conversion(device),
            config.even,
            config.block_r,
            config.block_c,
            config.group,
        ),
        config.num_warps,
        inputs=3,
    )
