"""SwiGLU with its casts: neither the product nor its gradients exist in high precision."""

import math
from typing import Any

import torch
from torch import Tensor

from float8.formats import ceil16
from float8.kernels import quads
from float8.kernels.amax import even_shares, magnitude_bits, store_part
from float8.kernels.cast import cast_fake, cast_reference, check_cast, rows_reference
from float8.kernels.cast_kernel import (
    HISTORY,
    MEASURED,
    casting,
    choose_scale,
    mantissa,
    power_of_2_above,
    swiglu,
)
from float8.kernels.numeric import to_float32
from float8.kernels.runtime.device import has_float8_conversion, sm_count
from float8.kernels.runtime.launch import Launch, Program, Slot, new, planned, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import load, tile_at, tile_of_program, tiled
from float8.quantize.history import NO_STATE, DelayedScale
from float8.quantize.spec import CastSpec, Operand


def swiglu_cast(
    gate: Tensor,
    up: Tensor,
    spec: CastSpec,
    state: DelayedScale | None = None,
    *,
    record: bool = False,
) -> Operand:
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
    scale, amax = state or NO_STATE
    scalars = {"scale": scale, "amax": amax}
    check_cast("swiglu_cast", gate, spec.dtype, scalars=scalars, alike={"up": up})
    args = (gate, up, spec.dtype, scale, amax, spec.power_of_2, record)
    direct = gate.is_cuda and takes_triton_directly(gate, up, scale, amax)
    out = (_swiglu_cast_triton if direct else torch.ops.float8.swiglu_cast.default)(*args)
    return Operand(out[1], out[0])


def swiglu_backward_cast(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    product_scale: Tensor,
    product_dtype: torch.dtype,
    spec: CastSpec,
    gate_state: DelayedScale | None = None,
    up_state: DelayedScale | None = None,
    *,
    record: bool = False,
) -> tuple[Operand, Operand, Operand]:
    """Cast the gradients of ``gate`` and ``up`` to row data, and the product once more.

    The product ``silu(gate) * up`` is needed as column data only now, so forward need not keep it.
    The gradients' column data are left to `transpose_bytes`, which needs no memory for them before
    that of ``grad``, ``gate`` and ``up`` is free: this is where a training step needs most.

    Args:
        grad: [R, C], gradient of the product; float32, bfloat16 or float16.
        gate: as ``grad``.
        up: as ``grad``.
        product_scale: 0-dim float32, the scale that forward cast the product with.
        product_dtype: float8 format of the product.
        spec: of the gradients: format, and whether scales from amaxes are rounded up to powers of
            two.
        gate_state: of delayed scaling of gate's gradient; None (both): scales are taken from the
            amaxes.
        up_state: of up's.
        record: whether to raise the amaxes of the states.

    Returns:
        Column data of the product [ceil16(C), ceil16(R)]; row data [R, ceil16(C)] of the gradients
        of gate and of up.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes or devices do not fit together, or only one state is given.
    """
    if (gate_state is None) != (up_state is None):
        raise ValueError("swiglu_backward_cast: got one state, expected one for each, or none")
    states = (*(gate_state or NO_STATE), *(up_state or NO_STATE))
    names = ("gate_scale", "gate_amax", "up_scale", "up_amax")
    scalars = dict(zip(names, states, strict=True), product_scale=product_scale)
    alike = {"gate": gate, "up": up}
    check_cast("swiglu_backward_cast", grad, spec.dtype, scalars=scalars, alike=alike)
    tensors = (grad, gate, up, product_scale)
    args = (*tensors, product_dtype, spec.dtype, *states, spec.power_of_2, record)
    direct = grad.is_cuda and takes_triton_directly(*tensors, *states)
    op = _backward_triton if direct else torch.ops.float8.swiglu_backward_cast.default
    product, gate_used, gate_row, up_used, up_row = op(*args)
    return Operand(product, product_scale), Operand(gate_row, gate_used), Operand(up_row, up_used)


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
    gate = gate.to(torch.float32)
    product = gate * torch.sigmoid(gate) * up.to(torch.float32)
    return rows_reference(product, dtype, scale, amax, power_of_2, record)


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
    power_of_2: bool,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Plain-torch twin of :func:`swiglu_backward_cast`.

    Column data of the product; scale used and row data of gate's gradient, then of up's.
    """
    grad, gate, up = grad.to(torch.float32), gate.to(torch.float32), up.to(torch.float32)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid

    (product,) = cast_reference(silu * up, product_scale, product_dtype, False, True)
    grad_gate, grad_up = grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu
    of_gate = rows_reference(grad_gate, dtype, gate_scale, gate_amax, power_of_2, record)
    of_up = rows_reference(grad_up, dtype, up_scale, up_amax, power_of_2, record)
    return product, *of_gate, *of_up


# ---------------------------------------------------------------- Triton

# Each takes what its twin takes.


def _swiglu_cast_triton(gate: Tensor, up: Tensor, *how: Any) -> tuple[Tensor, ...]:
    dtype, scale, amax, power_of_2, record = how
    gate, up = gate.contiguous(), up.contiguous()
    state = () if scale is None else (scale, amax)
    record = record and bool(state)
    made = _program(gate, dtype, bool(state), power_of_2, record)(gate, up, *state)
    if record:
        torch.autograd.graph.increment_version(amax)  # as PyTorch does
    return tuple(made)


def _backward_triton(
    grad: Tensor, gate: Tensor, up: Tensor, product_scale: Tensor, *how: Any
) -> tuple[Tensor, ...]:
    *dtypes, gate_scale, gate_amax, up_scale, up_amax, power_of_2, record = how
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    states = () if gate_scale is None else (gate_scale, gate_amax, up_scale, up_amax)
    record = record and bool(states)
    program = _backward_program(grad, *dtypes, bool(states), power_of_2, record)
    made = program(grad, gate, up, product_scale, *states)
    if record:
        torch.autograd.graph.increment_version([gate_amax, up_amax])  # as PyTorch does
    return tuple(made)


@planned
def _program(
    gate: Slot, dtype: torch.dtype, known: bool, power_of_2: bool, record: bool
) -> Program:
    """Measure the product, unless a history is ``known``, and cast it."""
    up = Slot(gate.dtype)
    scale, amax = state = [Slot(torch.float32) if known else None for _ in range(2)]
    parts, measure = _measuring(None, gate, up, scale, None)
    how: dict[str, Any] = {"power_of_2": power_of_2, "parts": parts, "scale": scale, "y": up}
    results, launches = casting(gate, dtype, True, False, amax=amax if record else None, **how)
    return Program([gate, up, *state], results, [measure, *launches], anywhere=2 * known)


def _measuring(
    grad: Slot | None, gate: Slot, up: Slot, scale: Slot | None, up_scale: Slot | None
) -> tuple[Slot, Launch]:
    """Measure the amaxes of parts: of the product; with ``grad`` gate's gradient's, then up's."""
    backward = grad is not None
    n = math.prod(gate.shape)
    block, steps, rounds, programs = even_shares(
        n, 2048 if backward else 4096, sm_count(gate.device)
    )
    constants = (block, steps, backward, scale is not None, has_float8_conversion(gate.device))
    parts = new((programs * (1 + backward),), torch.float32)
    slots = (grad, gate, up, parts, scale, up_scale)
    return parts, Launch(_amax_kernel, programs, slots, (n, rounds), constants, num_warps=8)


@planned
def _backward_program(
    grad: Slot,
    product_dtype: torch.dtype,
    dtype: torch.dtype,
    known: bool,
    power_of_2: bool,
    record: bool,
) -> Program:
    R, C = grad.shape
    gate, up = Slot(grad.dtype, grad.shape, device=grad.device), Slot(grad.dtype)
    product_scale = Slot(torch.float32)
    states = [Slot(torch.float32) if known else None for _ in range(4)]
    gate_scale, gate_amax, up_scale, up_amax = states
    parts, measure = _measuring(grad, gate, up, gate_scale, up_scale)
    product = new((ceil16(C), ceil16(R)), product_dtype)
    gate_used, up_used = new((), torch.float32), new((), torch.float32)
    gate_row, up_row = new((R, ceil16(C)), dtype), new((R, ceil16(C)), dtype)
    # To keep the amaxes takes registers, which large tiles have not: 489 us instead of 642 on an
    # H100 at [8192, 14336]. Without, 701 us (with the amaxes before) instead of 712.
    tiles = ((32, 64, 4),) if record else ((64, 128, 8), (64, 64, 4), (32, 64, 4))
    constants = (
        mantissa(product_dtype),
        mantissa(dtype),
        HISTORY if known else MEASURED,
        power_of_2_above(measure.programs),
        power_of_2,
        record,
        has_float8_conversion(gate.device),
    )
    slots = (
        *(grad, gate, up, product, gate_row, up_row, product_scale, parts),
        *(gate_scale, gate_used, gate_amax, up_scale, up_used, up_amax),
    )
    integers = (R, C, measure.programs)
    cast = tiled(_backward_kernel, tiles, gate.device, slots, integers, constants)
    given = [grad, gate, up, product_scale, *states]
    results = [product, gate_used, gate_row, up_used, up_row]
    return Program(given, results, [measure, cast], anywhere=1 + 4 * known)


@jit(do_not_specialize_on_alignment=["scale_ptr", "up_scale_ptr"])
def _amax_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # if BACKWARD
    gate_ptr,
    up_ptr,
    parts_ptr,  # of the product; if BACKWARD those of gate's gradient, then those of up's
    scale_ptr,
    up_scale_ptr,
    n,
    rounds,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    BACKWARD: tl.constexpr,
    ONLY_IF_UNKNOWN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    if ONLY_IF_UNKNOWN:
        known = tl.load(scale_ptr) != 0.0
        if BACKWARD:
            known = known & (tl.load(up_scale_ptr) != 0.0)
        if known:
            return
    largest = tl.zeros((BLOCK,), tl.int32)
    largest_up = tl.zeros((BLOCK,), tl.int32)
    turn = tl.program_id(0).to(tl.int64) * rounds
    end = turn + rounds
    while turn < end:  # Triton's interpreter (3.6) takes no range of tensors
        first = turn * (BLOCK * STEPS)
        for step in tl.static_range(STEPS):
            at = first + step * BLOCK + tl.arange(0, BLOCK)
            inside = at < n
            if BACKWARD:
                values, of_up, _ = _gradients_at(
                    grad_ptr, gate_ptr, up_ptr, at, inside, HARDWARE, False
                )
            else:
                gate = to_float32(load(gate_ptr + at, inside, False), HARDWARE)
                values = swiglu(gate, to_float32(load(up_ptr + at, inside, False), HARDWARE))
            largest = tl.maximum(largest, magnitude_bits(values))
            if BACKWARD:
                largest_up = tl.maximum(largest_up, magnitude_bits(of_up))
        turn += 1
    store_part(parts_ptr, tl.max(largest), tl.float32)
    if BACKWARD:
        store_part(parts_ptr + tl.num_programs(0), tl.max(largest_up), tl.float32)


@jit(
    do_not_specialize_on_alignment=[
        "product_scale_ptr",
        "gate_scale_ptr",
        "gate_amax_ptr",
        "up_scale_ptr",
        "up_amax_ptr",
    ]
)
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # [R, C], as gate and up
    gate_ptr,
    up_ptr,
    product_ptr,  # transposed
    gate_row_ptr,
    up_row_ptr,
    product_scale_ptr,
    parts_ptr,
    gate_scale_ptr,
    gate_scale_out_ptr,
    gate_amax_ptr,
    up_scale_ptr,
    up_scale_out_ptr,
    up_amax_ptr,
    R,
    C,
    parts,
    PRODUCT_MANTISSA: tl.constexpr,
    MANTISSA: tl.constexpr,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    RECORD: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    Rp = tl.cdiv(R, 16) * 16
    Cp = tl.cdiv(C, 16) * 16
    tile_r, tile_c = tile_at(tile_of_program(), Rp, Cp, BLOCK_R, BLOCK_C, GROUP)
    quad, c = quads.quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    inside = quads.inside_of(quad, c, R, C)
    r0, r1, r2, r3 = quads.rows_of(quad)
    g0, u0, p0 = _gradients_at(grad_ptr, gate_ptr, up_ptr, r0 * C + c, inside[0], HARDWARE, EVEN)
    g1, u1, p1 = _gradients_at(grad_ptr, gate_ptr, up_ptr, r1 * C + c, inside[1], HARDWARE, EVEN)
    g2, u2, p2 = _gradients_at(grad_ptr, gate_ptr, up_ptr, r2 * C + c, inside[2], HARDWARE, EVEN)
    g3, u3, p3 = _gradients_at(grad_ptr, gate_ptr, up_ptr, r3 * C + c, inside[3], HARDWARE, EVEN)
    grad_gate, grad_up, product = (g0, g1, g2, g3), (u0, u1, u2, u3), (p0, p1, p2, p3)

    gate_scale = choose_scale(gate_scale_ptr, parts_ptr, parts, SOURCE, PARTS, MANTISSA, POWER_OF_2)
    up_scale = choose_scale(
        up_scale_ptr, parts_ptr + parts, parts, SOURCE, PARTS, MANTISSA, POWER_OF_2
    )
    if SOURCE != 0:
        if tl.program_id(0) == 0:
            tl.store(gate_scale_out_ptr, gate_scale)
            tl.store(up_scale_out_ptr, up_scale)
    if RECORD:
        quads.record_amax(gate_amax_ptr, grad_gate)
        quads.record_amax(up_amax_ptr, grad_up)

    product = quads.scaled(product, inside, tl.div_rn(1.0, tl.load(product_scale_ptr)), EVEN)
    quads.store_across(product_ptr, product, quad, c, Cp, Rp, PRODUCT_MANTISSA, HARDWARE, EVEN)
    grad_gate = quads.scaled(grad_gate, inside, tl.div_rn(1.0, gate_scale), EVEN)
    quads.store_along(gate_row_ptr, grad_gate, quad, c, R, Cp, MANTISSA, HARDWARE, EVEN)
    grad_up = quads.scaled(grad_up, inside, tl.div_rn(1.0, up_scale), EVEN)
    quads.store_along(up_row_ptr, grad_up, quad, c, R, Cp, MANTISSA, HARDWARE, EVEN)


@jit
def _gradients_at(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, at, inside, HARDWARE: tl.constexpr, EVEN: tl.constexpr
):
    """Return the gradients of gate and up, and ``silu(gate) * up`` again; float32."""
    grad = to_float32(load(grad_ptr + at, inside, EVEN), HARDWARE)
    gate = to_float32(load(gate_ptr + at, inside, EVEN), HARDWARE)
    up = to_float32(load(up_ptr + at, inside, EVEN), HARDWARE)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu, silu * up


register(
    "swiglu_cast",
    swiglu_cast_reference,
    triton=_swiglu_cast_triton,
    fake=lambda gate, up, dtype, *_: tuple(cast_fake(gate, None, dtype, True, False)),
    writes=("amax",),
)
register(
    "swiglu_backward_cast",
    swiglu_backward_cast_reference,
    triton=_backward_triton,
    fake=lambda grad, gate, up, scale, product_dtype, dtype, *_: (
        *cast_fake(grad, scale, product_dtype, False, True),
        *cast_fake(grad, None, dtype, True, False),
        *cast_fake(grad, None, dtype, True, False),
    ),
    writes=("gate_amax", "up_amax"),
)
