"""Kernels that compute and cast in one: against their twins, which differ in exp's last bits."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from float8 import kernels
from float8.kernels.runtime import ops
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import columns
from float8.quantize.spec import CastSpec, Operand
from kernels.float8_codes import FORMATS

E4M3, E5M2 = FORMATS
SHAPES = [(37, 50), (64, 128)]

source = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
known = pytest.mark.parametrize("scale", [None, 0.0, 0.01], ids=["dynamic", "unknown", "known"])


def inputs(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).to(device) for _ in range(3)]


def state(scale: float | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    if scale is None:
        return None, None
    return torch.tensor(scale, device=device), torch.zeros((), device=device)


def assert_close(got: Tensor | None, want: Tensor | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    got, want = got.cpu(), want.cpu()
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if got.dtype.itemsize > 1:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)
        return
    # A product that lies on a rounding boundary may fall to either side: one code apart.
    codes, other = got.view(torch.uint8).int(), want.view(torch.uint8).int()
    assert (codes - other).abs().max() <= 1
    assert (codes != other).float().mean() < 0.005


def check(op: str, *args: Any, states: Sequence[Any] = (), record: bool = False) -> list[Tensor]:
    """Run kernel and twin, each on states of its own; returns what the kernel made."""
    mine, theirs = ([None if x is None else x.clone() for x in states] for _ in range(2))
    got = getattr(ops.cuda, op)(*args, *mine, False, record)
    want = getattr(ops.cpu, op)(*args, *theirs, False, record)
    for pair in zip((*got, *mine), (*want, *theirs), strict=True):
        assert_close(*pair)
    return got


@source
@known
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_what_twins_do(shape, scale: float | None, dtype, triton_device) -> None:
    grad, gate, up = inputs(shape, dtype, triton_device)
    one = state(scale, triton_device)
    check("swiglu_cast", gate, up, E4M3, states=one, record=True)
    product_scale = torch.tensor(0.02, device=triton_device)
    args = (grad, gate, up, product_scale, E4M3, E5M2)
    check("swiglu_backward_cast", *args, states=one * 2, record=True)
    for weight_dtype in {torch.float32, dtype}:
        weight = torch.rand(shape[1], device=triton_device).to(weight_dtype)
        check("rms_norm_cast", gate * 3, weight, 1e-5, E4M3, states=one, record=True)


def test_rms_norm_of_one_column_that_lies_as_a_row(triton_device: torch.device) -> None:
    x = torch.randn(1, 33, device=triton_device).t()
    weight = torch.tensor([0.7], device=triton_device)
    rstd, scale, _ = check("rms_norm_cast", x, weight, 1e-5, E4M3, states=(None, None))
    col = ops.cuda.rms_norm_recast(x, weight, rstd, scale, E4M3)
    assert_close(col, ops.cpu.rms_norm_recast(x, weight, rstd, scale, E4M3))


@source
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_recast(shape, dtype, triton_device) -> None:
    """Backward makes the column data that forward left out: bitwise its row data, transposed."""
    x = inputs(shape, dtype, triton_device)[0] * 3
    weight = torch.rand(shape[1], device=triton_device)
    for cast, recast in (
        (ops.cuda.rms_norm_cast, ops.cuda.rms_norm_recast),
        (ops.cpu.rms_norm_cast, ops.cpu.rms_norm_recast),
    ):
        rstd, scale, row = cast(x, weight, 1e-5, E4M3, None, None, False, False)
        col = recast(x, weight, rstd, scale, E4M3)
        assert torch.equal(
            col.view(torch.uint8),
            columns(Operand(row, scale), CastSpec(E4M3)).data.view(torch.uint8),
        )


@source
@pytest.mark.parametrize(("grads", "residual"), [(1, False), (2, True), (3, False), (5, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_backward(shape, residual: bool, grads: int, dtype, triton_device) -> None:
    """Against autograd in float64."""
    x, other, _ = inputs(shape, dtype, triton_device)
    gradients = [torch.randn_like(x) for _ in range(grads)]
    weight = torch.rand(shape[1], device=triton_device)
    weight = weight.to(dtype) if residual else weight
    rstd = torch.rsqrt(x.float().square().mean(dim=1) + 1e-5)
    wide_x, wide_weight = (t.double().requires_grad_() for t in (x, weight))
    y = torch.nn.functional.rms_norm(wide_x, shape[1:], wide_weight, 1e-5)
    y.backward(sum(gradient.double() for gradient in gradients))
    assert wide_x.grad is not None
    want_x = wide_x.grad + other.double() if residual else wide_x.grad
    # Rounding of the result, and of the sums of up to 300 products in float32.
    bound = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for function in (ops.cuda.rms_norm_backward, ops.cpu.rms_norm_backward):
        got = function(gradients, x, weight, rstd, other if residual else None)
        for ours, wide, like in zip(got, (want_x, wide_weight.grad), (x, weight), strict=True):
            assert ours.dtype == like.dtype
            error = (ours.double() - wide).abs().max() / wide.abs().max()
            assert error < bound


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_codes_are_nan(bad: float, triton_device: torch.device) -> None:
    gate, up, grad = inputs((32, 32), torch.float32, triton_device)
    up[3, 5] = bad
    scale = torch.tensor(0.02, device=triton_device)
    amax = torch.zeros((), device=triton_device)
    _, row = ops.cuda.swiglu_cast(gate, up, E4M3, scale, amax, False, True)
    assert row.float()[3, 5].isnan()
    product, _, gate_row, *_ = ops.cuda.swiglu_backward_cast(
        grad, gate, up, scale, E4M3, E5M2, scale, amax, scale, amax.clone(), False, False
    )
    assert product.float()[5, 3].isnan()
    assert gate_row.float()[3, 5].isnan()


def test_strided_inputs(triton_device: torch.device) -> None:
    """Halves of one tensor, as a model with a joint gate-and-up projection has them."""
    joint = torch.randn(40, 96, device=triton_device)
    gate, up = joint.chunk(2, dim=1)
    args = (E4M3, None, None, False, False)
    for pair in zip(
        ops.cuda.swiglu_cast(gate, up, *args),
        ops.cuda.swiglu_cast(gate.contiguous(), up.contiguous(), *args),
        strict=True,
    ):
        assert_close(*pair)


@pytest.mark.gpu
def test_one_launch_serves_aligned_and_unaligned_tensors() -> None:
    flat = torch.rand(2 * 48 * 96 + 3, device="cuda").bfloat16()
    for offset in (0, 1, 0, 3):
        gate, up = (flat[o : o + 48 * 96].view(48, 96) for o in (0, offset))
        weight = flat[offset : offset + 96]
        check("swiglu_cast", gate, up, E4M3, states=(None, None))
        rstd, scale, _ = check("rms_norm_cast", gate, weight, 1e-5, E4M3, states=(None, None))
        args = (gate, weight, rstd, scale, E4M3)
        assert_close(ops.cuda.rms_norm_recast(*args), ops.cpu.rms_norm_recast(*args))


def test_wrong_input_says_what_to_do() -> None:
    x, spec = torch.randn(4, 16), CastSpec(E4M3)
    state = DelayedScale(torch.ones(()), torch.zeros(()))
    with pytest.raises(ValueError, match=r"up is .*\(4, 8\).*expected the same shape"):
        kernels.swiglu_cast(x, x[:, :8], spec)
    with pytest.raises(TypeError, match=r"amax is .*float64.*expected a float32"):
        kernels.swiglu_cast(x, x, spec, state._replace(amax=state.amax.double()))
    with pytest.raises(ValueError, match=r"weight is .*\(4,\)"):
        kernels.rms_norm_cast(x, x[0, :4], 1e-5, spec)
    with pytest.raises(ValueError, match=r"scale is .*\(4,\).*expected one element"):
        kernels.rms_norm_cast(x, x[0], 1e-5, spec, state._replace(scale=torch.ones(4)))
    with pytest.raises(ValueError, match="got one state, expected one for each, or none"):
        kernels.swiglu_backward_cast(x, x, x, state.scale, E4M3, spec, state)
    with pytest.raises(ValueError, match=r"gate is .*\(4, 8\).*expected the same shape"):
        kernels.swiglu_backward_cast(x, x[:, :8], x, state.scale, E4M3, spec)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (512, 14336), (1000, 1050)], ids=str)
def test_large_on_the_gpu(shape: tuple[int, int]) -> None:
    for scale in (None, 0.0, 0.01):
        test_kernels_compute_what_twins_do(shape, scale, torch.bfloat16, torch.device("cuda"))
