"""RMSNorm -> float8: one pass for the statistics, one for the cast; and its backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8.kernels.amax import MAX_PARTS, magnitude_bits, store_part
from float8.kernels.cast import cast_fake, cast_reference, check_cast, rows_reference
from float8.kernels.cast_kernel import casting
from float8.kernels.checks import check_high_precision, describe
from float8.kernels.numeric import to_float32
from float8.kernels.runtime.device import has_float8_conversion, sm_count
from float8.kernels.runtime.launch import Launch, Program, Slot, new, planned, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.quantize.history import NO_STATE, DelayedScale
from float8.quantize.spec import CastSpec, Operand

WIDEST_NORM = 32768
"""Each program holds a whole row; wider ones would not fit into registers."""

_MOST_GRADS = 3  # that one launch of the backward sums up


def rms_norm_cast(
    x: Tensor,
    weight: Tensor,
    eps: float,
    spec: CastSpec,
    state: DelayedScale | None = None,
    *,
    record: bool = False,
) -> tuple[Tensor, Operand]:
    """Cast ``x * rstd * weight``, computed in float32 (Zhang and Sennrich, 2019, eq. 4).

    To row data only: :func:`rms_norm_recast` makes the column data when backward needs them.

    Args:
        x: [R, C] float32, bfloat16 or float16, C at most `WIDEST_NORM`.
        weight: [C] float32, bfloat16 or float16.
        eps: added to the mean square.
        spec: format, and whether a scale from the amax is rounded up to a power of two.
        state: of delayed scaling, as in `cast_delayed`; None: the scale is taken from the amax of
            the product.
        record: whether to raise the amax of ``state``.

    Returns:
        rstd [R] float32, ``1 / sqrt(mean(x ** 2) + eps)``; and row data [R, ceil16(C)].

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes or devices do not fit together.
    """
    scale, amax = state or NO_STATE
    check_cast("rms_norm_cast", x, spec.dtype, scalars={"scale": scale, "amax": amax})
    check_norm(x, weight)
    args = (x, weight, eps, spec.dtype, scale, amax, spec.power_of_2, record)
    direct = x.is_cuda and takes_triton_directly(x, weight, scale, amax)
    op = _rms_norm_cast_triton if direct else torch.ops.float8.rms_norm_cast.default
    rstd, used, row = op(*args)
    return rstd, Operand(row, used)


def rms_norm_recast(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Make column data of what :func:`rms_norm_cast` made row data of, with the same scale.

    For backward, which has x anyway and so need not keep them: [ceil16(C), ceil16(R)] from what
    :func:`rms_norm_cast` was given and returned.
    """
    check_cast("rms_norm_recast", x, dtype, scalars={"scale": scale})
    check_norm(x, weight, rstd)
    args = (x, weight, rstd, scale, dtype)
    direct = x.is_cuda and takes_triton_directly(x, weight, rstd, scale)
    op = _rms_norm_recast_triton if direct else torch.ops.float8.rms_norm_recast.default
    return op(*args)


def rms_norm_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight of ``x * rstd * weight``; see `rms_norm_cast`.

    Several layers read a norm, and a residual connection goes around it: their gradients are
    summed in float32 in the same kernel.

    Args:
        grads: one or more gradients of the product, each as ``x``.
        x: [R, C] float32, bfloat16 or float16, C at most `WIDEST_NORM`.
        weight: [C] float32, bfloat16 or float16.
        rstd: [R] float32.
        residual_grad: as ``x``, a gradient of x itself that is added; None: none.

    Returns:
        The gradient of x, as ``x``; the gradient of weight, as ``weight``.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes or devices do not fit together, or there is no gradient.
    """
    if not grads:
        raise ValueError("rms_norm_backward: got no gradient, expected one or more")
    alike = {f"grads[{at}]": grad for at, grad in enumerate(grads)}
    if residual_grad is not None:
        alike["residual_grad"] = residual_grad
    check_cast("rms_norm_backward", x, alike=alike)
    check_norm(x, weight, rstd)
    args = (list(grads), x, weight, rstd, residual_grad)
    direct = x.is_cuda and takes_triton_directly(x, weight, rstd, residual_grad, *grads)
    op = rms_norm_backward_triton if direct else torch.ops.float8.rms_norm_backward.default
    return op(*args)


def check_norm(x: Tensor, weight: Tensor, rstd: Tensor | None = None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a norm of x [R, C] that the kernels cannot take."""
    check_high_precision("rms_norm", weight)
    if x.numel() == 0 or x.shape[1] > WIDEST_NORM:
        raise ValueError(
            f"rms_norm: x is {describe(x)}; expected [R, C], not empty, C at most {WIDEST_NORM}"
        )
    for name, of_x, shape in (("weight", weight, x.shape[1:]), ("rstd", rstd, x.shape[:1])):
        if of_x is not None and (of_x.shape != shape or of_x.device != x.device):
            raise ValueError(
                f"rms_norm: {name} is {describe(of_x)} and x {describe(x)}; expected "
                f"{tuple(shape)} on the device of x"
            )


def rms_norm_cast_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    power_of_2: bool,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain-torch twin of :func:`rms_norm_cast`: rstd, the scale used, row data."""
    x = x.to(torch.float32)
    rstd = torch.rsqrt(x.square().mean(dim=1) + eps)
    normed = x * rstd[:, None] * weight.to(torch.float32)
    return rstd, *rows_reference(normed, dtype, scale, amax, power_of_2, record)


def rms_norm_recast_reference(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Plain-torch twin of :func:`rms_norm_recast`."""
    normed = x.to(torch.float32) * rstd[:, None] * weight.to(torch.float32)
    return cast_reference(normed, scale, dtype, False, True)[0]


def rms_norm_backward_reference(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Plain-torch twin of the kernel; see :func:`rms_norm_backward`."""
    grad = grads[0].to(torch.float32)
    for other in grads[1:]:
        grad = grad + other.to(torch.float32)
    normed = x.to(torch.float32) * rstd[:, None]
    weighted = grad * weight.to(torch.float32)
    along = (weighted * normed).mean(dim=1, keepdim=True)
    grad_x = (weighted - normed * along) * rstd[:, None]
    if residual_grad is not None:
        grad_x = grad_x + residual_grad.to(torch.float32)
    grad_x = grad_x.to(x.dtype).contiguous()
    return grad_x, (grad * normed).sum(dim=0).to(weight.dtype)


def _rms_norm_cast_triton(x: Tensor, weight: Tensor, *how: Any) -> tuple[Tensor, ...]:
    eps, dtype, scale, amax, power_of_2, record = how  # as its twin takes them
    x, weight = x.contiguous(), weight.contiguous()
    state = () if scale is None else (scale, amax)
    record = record and bool(state)
    program = _program(x, weight.dtype, eps, dtype, bool(state), power_of_2, record)
    made = program(x, weight, *state)
    if record:
        torch.autograd.graph.increment_version(amax)  # as PyTorch does
    return tuple(made)


@planned
def _program(
    x: Slot,
    weight_dtype: torch.dtype,
    eps: float,
    dtype: torch.dtype,
    known: bool,
    power_of_2: bool,
    record: bool,
) -> Program:
    """Find rstd and measure the product, and cast it; the scale of a history may be ``known``."""
    (R, C), weight = x.shape, Slot(weight_dtype)
    scale, amax = state = [Slot(torch.float32) if known else None for _ in range(2)]
    rows = -(-R // MAX_PARTS)
    programs = -(-R // rows)
    rstd, parts = new((R,), torch.float32), new((programs,), torch.float32)
    block, num_warps = _whole_row(C)
    # The statistics know the amax before the cast: nothing has to be done twice.
    statistics = Launch(
        _rms_norm_kernel,
        programs,
        (x, weight, rstd, parts),
        (R, C, rows),
        (eps, block, has_float8_conversion(x.device)),
        num_warps,
    )
    how: dict[str, Any] = {"power_of_2": power_of_2, "parts": parts, "scale": scale}
    how |= {"rstd": rstd, "weight": weight, "amax": amax if record else None}
    results, launches = casting(x, dtype, True, False, **how)
    given, made = [x, weight, *state], [rstd, *results]
    return Program(given, made, [statistics, *launches], anywhere=2 * known)


def _rms_norm_recast_triton(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    return _recast_program(x, weight.dtype, dtype)(x, weight, rstd, scale)[0]


@planned
def _recast_program(x: Slot, weight_dtype: torch.dtype, dtype: torch.dtype) -> Program:
    weight, rstd, scale = Slot(weight_dtype), Slot(torch.float32), Slot(torch.float32)
    made = casting(x, dtype, row=False, col=True, scale=scale, rstd=rstd, weight=weight)
    return Program([x, weight, rstd, scale], *made, anywhere=1)


def rms_norm_backward_triton(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Triton kernel; see :func:`rms_norm_backward`."""
    if len(grads) > _MOST_GRADS:
        first, *others = grads[_MOST_GRADS - 1 :]
        rest = first.to(torch.float32)
        for other in others:
            rest = rest + other
        grads = [*grads[: _MOST_GRADS - 1], rest]
    dtypes = tuple(grad.dtype for grad in grads)
    program = _backward_program(x, weight.dtype, dtypes, residual_grad is not None)
    residual = [] if residual_grad is None else [residual_grad]
    tensors = (*grads, x, *residual, weight, rstd)
    grad_x, parts = program(*(tensor.contiguous() for tensor in tensors))
    return grad_x, parts.sum(dim=0).to(weight.dtype)


def _whole_row(C: int) -> tuple[int, int]:
    """Choose block size and warps of a program that holds a row of C elements in registers."""
    block = max(1 << (C - 1).bit_length(), 16)
    return block, 4 if block <= 2048 else 8 if block <= 8192 else 16


@planned
def _backward_program(
    x: Slot, weight_dtype: torch.dtype, grads: tuple[torch.dtype, ...], has_residual: bool
) -> Program:
    R, C = x.shape
    # Two programs for each multiprocessor: each leaves a row of partial sums behind.
    rows = -(-R // (2 * sm_count(x.device)))
    programs = -(-R // rows)
    read = [*map(Slot, grads)]
    weight, rstd = Slot(weight_dtype), Slot(torch.float32)
    residual = Slot(x.dtype) if has_residual else None
    grad_x, parts = new(x.shape, x.dtype), new((programs, C), torch.float32)
    block, num_warps = _whole_row(C)
    absent = [None] * (_MOST_GRADS - len(grads))
    launch = Launch(
        _rms_norm_backward_kernel,
        programs,
        (*read, *absent, x, residual, weight, rstd, grad_x, parts),
        (R, C, rows),
        (len(grads), has_residual, block, has_float8_conversion(x.device)),
        num_warps,
    )
    return Program([*read, x, residual, weight, rstd], [grad_x, parts], [launch])


@jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    weight_ptr,  # [C]
    rstd_ptr,  # [R]
    parts_ptr,
    R,
    C,
    rows,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    c = tl.arange(0, BLOCK)
    weight = to_float32(tl.load(weight_ptr + c, mask=c < C, other=0.0), HARDWARE)
    largest = tl.zeros((BLOCK,), tl.int32)
    r = tl.program_id(0).to(tl.int64) * rows
    end = r + rows
    while r < end:  # Triton's interpreter (3.6) takes no range of tensors
        inside = (c < C) & (tl.broadcast_to(r, (BLOCK,)) < R)
        x = to_float32(tl.load(x_ptr + r * C + c, mask=inside, other=0.0), HARDWARE)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x) / C + EPS)
        largest = tl.maximum(largest, magnitude_bits(x * rstd * weight))
        tl.store(rstd_ptr + r, rstd, mask=r < R)
        r += 1
    store_part(parts_ptr, tl.max(largest), tl.float32)


@jit
def _rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    g0_ptr,  # [R, C], all but the next two and the last
    g1_ptr,
    g2_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,  # [C]
    rstd_ptr,  # [R]
    grad_x_ptr,
    parts_ptr,  # [programs, C]
    R,
    C,
    rows,
    GRADS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    c = tl.arange(0, BLOCK)
    weight = to_float32(tl.load(weight_ptr + c, mask=c < C, other=0.0), HARDWARE)
    total = tl.zeros((BLOCK,), tl.float32)
    r = tl.program_id(0).to(tl.int64) * rows
    end = r + rows
    while r < end:  # Triton's interpreter (3.6) takes no range of tensors
        inside = (c < C) & (tl.broadcast_to(r, (BLOCK,)) < R)
        at = r * C + c
        grad = to_float32(tl.load(g0_ptr + at, mask=inside, other=0.0), HARDWARE)
        if GRADS > 1:
            grad += to_float32(tl.load(g1_ptr + at, mask=inside, other=0.0), HARDWARE)
        if GRADS > 2:
            grad += to_float32(tl.load(g2_ptr + at, mask=inside, other=0.0), HARDWARE)
        rstd = tl.load(rstd_ptr + r, mask=r < R, other=0.0)
        normed = to_float32(tl.load(x_ptr + at, mask=inside, other=0.0), HARDWARE) * rstd
        weighted = grad * weight
        along = tl.sum(weighted * normed) / C
        grad_x = (weighted - normed * along) * rstd
        if RESIDUAL:
            grad_x += to_float32(tl.load(residual_ptr + at, mask=inside, other=0.0), HARDWARE)
        total += grad * normed
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        r += 1
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * C + c, total, mask=c < C)


register(
    "rms_norm_cast",
    rms_norm_cast_reference,
    triton=_rms_norm_cast_triton,
    fake=lambda x, weight, eps, dtype, *_: (
        x.new_empty(x.shape[0], dtype=torch.float32),
        *cast_fake(x, None, dtype, True, False),
    ),
    writes=("amax",),
)
register(
    "rms_norm_recast",
    rms_norm_recast_reference,
    triton=_rms_norm_recast_triton,
    fake=lambda x, weight, rstd, scale, dtype: cast_fake(x, scale, dtype, False, True)[0],
)
register(
    "rms_norm_backward",
    rms_norm_backward_reference,
    triton=rms_norm_backward_triton,
    fake=lambda grads, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
