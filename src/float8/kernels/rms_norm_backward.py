"""The backward of RMSNorm, with the sum of the gradients that come together there."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from float8.kernels.checks import check_high_precision, check_same, describe
from float8.kernels.numeric import to_float32
from float8.kernels.rms_norm import WIDEST_NORM, whole_row
from float8.kernels.runtime.device import has_float8_conversion, sm_count
from float8.kernels.runtime.launch import Launch, empty, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl

_MOST_GRADS = 3  # that one launch sums up


def rms_norm_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight of ``x * rstd * weight``; see `rms_norm_cast`.

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
    check_rms_norm_backward(grads, x, weight, rstd, residual_grad)
    args = (list(grads), x, weight, rstd, residual_grad)
    if x.is_cuda and takes_triton_directly(x, weight, rstd, residual_grad, *grads):
        return rms_norm_backward_triton(*args)
    out: tuple[Tensor, Tensor] = torch.ops.float8.rms_norm_backward.default(*args)
    return out


def check_rms_norm_backward(
    grads: Sequence[Tensor], x: Tensor, weight: Tensor, rstd: Tensor, residual_grad: Tensor | None
) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what :func:`rms_norm_backward` cannot take."""
    if not grads:
        raise ValueError("rms_norm_backward: got no gradient, expected one or more")
    for grad in grads:
        check_same("rms_norm_backward", x=x, grad=grad)
    if residual_grad is not None:
        check_same("rms_norm_backward", x=x, residual_grad=residual_grad)
    check_high_precision("rms_norm_backward", weight)
    R, C = x.shape
    if weight.shape != (C,) or rstd.shape != (R,) or C > WIDEST_NORM:
        raise ValueError(
            f"rms_norm_backward: x is {describe(x)}, weight {describe(weight)}, rstd "
            f"{describe(rstd)}; expected [R, C], [C] and [R], C at most {WIDEST_NORM}"
        )


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
    tensors = [grad.contiguous() for grad in grads]
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual_grad is None else residual_grad.contiguous()
    dtypes = x.dtype, weight.dtype, grads[-1].dtype
    launch = _launch(x.shape, dtypes, x.device, len(grads), residual is not None)
    grad_x = empty(x.shape, x.dtype, x)
    parts = empty((launch.programs, x.shape[1]), torch.float32, x)
    absent = [None] * (_MOST_GRADS - len(tensors))
    launch(*tensors, *absent, x, residual, weight, rstd, grad_x, parts)
    return grad_x, parts.sum(dim=0).to(weight.dtype)


@functools.lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    grads: int,
    residual: bool,
) -> Launch:
    R, C = shape
    # Two programs for each multiprocessor: each leaves a row of partial sums behind.
    rows = -(-R // (2 * sm_count(device)))
    block, num_warps = whole_row(C)
    return Launch(
        _rms_norm_backward_kernel,
        -(-R // rows),
        device,
        (R, C, rows),
        (grads, residual, block, has_float8_conversion(device)),
        num_warps,
        inputs=grads + residual + 3,
    )


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
        inside = (c < C) & (r < R)
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
    "rms_norm_backward",
    rms_norm_backward_reference,
    triton=rms_norm_backward_triton,
    fake=lambda grads, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
