"""The Triton kernels of the backward of SwiGLU."""

from float8.kernels._cast_kernel import (
    choose_scale,
    raise_to_part,
    record_amax,
    scaled,
    store_across,
    store_along,
)
from float8.kernels._float8 import to_float32
from float8.kernels._producers import swiglu_backward
from float8.kernels._tiles import load, tile_at, tile_of_program
from float8.kernels._triton import jit, tl
from float8.kernels.amax import magnitude_bits, store_part


@jit(do_not_specialize_on_alignment=["gate_scale_ptr", "up_scale_ptr"])
def swiglu_backward_amax_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_ptr,
    up_ptr,
    parts_ptr,  # those of gate's gradient, then those of up's
    gate_scale_ptr,
    up_scale_ptr,
    n,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ONLY_IF_UNKNOWN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    if ONLY_IF_UNKNOWN:
        if (tl.load(gate_scale_ptr) != 0.0) & (tl.load(up_scale_ptr) != 0.0):
            return
    largest_gate = tl.zeros((BLOCK,), tl.int32)
    largest_up = tl.zeros((BLOCK,), tl.int32)
    for turn in range(ROUNDS):
        first = (tl.program_id(0).to(tl.int64) * ROUNDS + turn) * (BLOCK * STEPS)
        for step in tl.static_range(STEPS):
            at = first + step * BLOCK + tl.arange(0, BLOCK)
            grad = to_float32(tl.load(grad_ptr + at, mask=at < n, other=0.0), HARDWARE)
            gate = to_float32(tl.load(gate_ptr + at, mask=at < n, other=0.0), HARDWARE)
            up = to_float32(tl.load(up_ptr + at, mask=at < n, other=0.0), HARDWARE)
            grad_gate, grad_up, _ = swiglu_backward(grad, gate, up)
            largest_gate = tl.maximum(largest_gate, magnitude_bits(grad_gate))
            largest_up = tl.maximum(largest_up, magnitude_bits(grad_up))
    store_part(parts_ptr, tl.max(largest_gate), tl.float32)
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
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
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
    FLOAT8_MAX: tl.constexpr,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    RECORD: tl.constexpr,
    REPAIR: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    if REPAIR:  # as in _cast_kernel
        gate_scale = choose_scale(
            gate_scale_ptr, parts_ptr, parts, SOURCE, PARTS, FLOAT8_MAX, POWER_OF_2
        )
        up_scale = choose_scale(
            up_scale_ptr, parts_ptr + parts, parts, SOURCE, PARTS, FLOAT8_MAX, POWER_OF_2
        )
        if tl.program_id(0) == 0:
            tl.store(gate_scale_out_ptr, gate_scale)
            tl.store(up_scale_out_ptr, up_scale)
            if RECORD:
                raise_to_part(gate_amax_ptr, parts_ptr)
                raise_to_part(up_amax_ptr, parts_ptr + parts)
        if (gate_scale != tl.load(gate_scale_ptr)) | (up_scale != tl.load(up_scale_ptr)):
            tiles = tl.cdiv(tl.cdiv(R, 16) * 16, BLOCK_R) * tl.cdiv(tl.cdiv(C, 16) * 16, BLOCK_C)
            tile = tl.program_id(0)
            while tile < tiles:  # Triton's interpreter (3.6) takes no range of tensors
                _cast_tile(
                    tile, grad_ptr, gate_ptr, up_ptr, product_ptr, gate_row_ptr, up_row_ptr,
                    product_scale_ptr, parts_ptr, gate_scale_ptr, gate_scale_out_ptr, gate_amax_ptr,
                    up_scale_ptr, up_scale_out_ptr, up_amax_ptr, R, C, parts, PRODUCT_MANTISSA,
                    MANTISSA, FLOAT8_MAX, SOURCE, PARTS, POWER_OF_2, False, False, HARDWARE, EVEN,
                    BLOCK_R, BLOCK_C, GROUP,
                )  # fmt: skip
                tile += tl.num_programs(0)
    else:
        _cast_tile(
            tile_of_program(), grad_ptr, gate_ptr, up_ptr, product_ptr, gate_row_ptr, up_row_ptr,
            product_scale_ptr, parts_ptr, gate_scale_ptr, gate_scale_out_ptr, gate_amax_ptr,
            up_scale_ptr, up_scale_out_ptr, up_amax_ptr, R, C, parts, PRODUCT_MANTISSA, MANTISSA,
            FLOAT8_MAX, SOURCE, PARTS, POWER_OF_2, RECORD, True, HARDWARE, EVEN, BLOCK_R, BLOCK_C,
            GROUP,
        )  # fmt: skip


@jit
def _cast_tile(  # type: ignore[no-untyped-def]
    tile, grad_ptr, gate_ptr, up_ptr, product_ptr, gate_row_ptr, up_row_ptr, product_scale_ptr,
    parts_ptr, gate_scale_ptr, gate_scale_out_ptr, gate_amax_ptr, up_scale_ptr, up_scale_out_ptr,
    up_amax_ptr, R, C, parts, PRODUCT_MANTISSA: tl.constexpr, MANTISSA: tl.constexpr,
    FLOAT8_MAX: tl.constexpr, SOURCE: tl.constexpr, PARTS: tl.constexpr, POWER_OF_2: tl.constexpr,
    RECORD: tl.constexpr, PRODUCT: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Cast one tile of the gradients, by its number, and of the product if ``PRODUCT``."""
    Rp = tl.cdiv(R, 16) * 16
    Cp = tl.cdiv(C, 16) * 16
    tile_r, tile_c = tile_at(tile, Rp, Cp, BLOCK_R, BLOCK_C, GROUP)
    # The tile as four tiles of every fourth row: see _tiles. 64-bit, so that offsets are.
    quad = (tile_r * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)).to(tl.int64)[:, None]
    c = (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    r0, r1, r2, r3 = quad * 4, quad * 4 + 1, quad * 4 + 2, quad * 4 + 3
    in_c = c < C
    in0, in1, in2, in3 = (r0 < R) & in_c, (r1 < R) & in_c, (r2 < R) & in_c, (r3 < R) & in_c
    g0, u0, p0 = _load_row(grad_ptr, gate_ptr, up_ptr, r0 * C + c, in0, HARDWARE, EVEN)
    g1, u1, p1 = _load_row(grad_ptr, gate_ptr, up_ptr, r1 * C + c, in1, HARDWARE, EVEN)
    g2, u2, p2 = _load_row(grad_ptr, gate_ptr, up_ptr, r2 * C + c, in2, HARDWARE, EVEN)
    g3, u3, p3 = _load_row(grad_ptr, gate_ptr, up_ptr, r3 * C + c, in3, HARDWARE, EVEN)

    gate_scale = choose_scale(
        gate_scale_ptr, parts_ptr, parts, SOURCE, PARTS, FLOAT8_MAX, POWER_OF_2
    )
    up_scale = choose_scale(
        up_scale_ptr, parts_ptr + parts, parts, SOURCE, PARTS, FLOAT8_MAX, POWER_OF_2
    )
    if SOURCE != 0:
        if tl.program_id(0) == 0:
            tl.store(gate_scale_out_ptr, gate_scale)
            tl.store(up_scale_out_ptr, up_scale)
    if RECORD:
        record_amax(gate_amax_ptr, g0, g1, g2, g3)
        record_amax(up_amax_ptr, u0, u1, u2, u3)

    if PRODUCT:
        inverse = tl.div_rn(1.0, tl.load(product_scale_ptr))
        p0, p1 = scaled(p0, in0, inverse, EVEN), scaled(p1, in1, inverse, EVEN)
        p2, p3 = scaled(p2, in2, inverse, EVEN), scaled(p3, in3, inverse, EVEN)
        store_across(product_ptr, p0, p1, p2, p3, quad, c, Cp, Rp, PRODUCT_MANTISSA, HARDWARE, EVEN)

    inverse = tl.div_rn(1.0, gate_scale)
    g0, g1 = scaled(g0, in0, inverse, EVEN), scaled(g1, in1, inverse, EVEN)
    g2, g3 = scaled(g2, in2, inverse, EVEN), scaled(g3, in3, inverse, EVEN)
    store_along(gate_row_ptr, g0, g1, g2, g3, quad, c, R, Cp, MANTISSA, HARDWARE, EVEN)

    inverse = tl.div_rn(1.0, up_scale)
    u0, u1 = scaled(u0, in0, inverse, EVEN), scaled(u1, in1, inverse, EVEN)
    u2, u3 = scaled(u2, in2, inverse, EVEN), scaled(u3, in3, inverse, EVEN)
    store_along(up_row_ptr, u0, u1, u2, u3, quad, c, R, Cp, MANTISSA, HARDWARE, EVEN)


@jit
def _load_row(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, at, inside, HARDWARE: tl.constexpr, EVEN: tl.constexpr
):
    grad = to_float32(load(grad_ptr + at, inside, EVEN), HARDWARE)
    gate = to_float32(load(gate_ptr + at, inside, EVEN), HARDWARE)
    up = to_float32(load(up_ptr + at, inside, EVEN), HARDWARE)
    return swiglu_backward(grad, gate, up)
