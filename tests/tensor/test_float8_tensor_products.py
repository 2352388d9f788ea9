"""Matrix products with a Float8Tensor."""

import pytest
import torch

import tolerances
from float8 import Float8Tensor
from float8.config import ScalingGranularity
from float8.quantize.quantize import Cast
from float8.quantize.spec import CastSpec
from float8.tensor.float8_tensor import to_float8
from sqnr import same_bits, sqnr
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded
from support.spies import OpCounter
from support.tensors import float8

PRODUCTS = {
    "mm": (lambda a, b: torch.mm(a, b), (16, 32), (32, 48)),
    "matmul": (lambda a, b: a @ b, (16, 32), (32, 48)),
    "odd-dims": (lambda a, b: a @ b, (5, 33), (33, 7)),
    "one-row": (lambda a, b: a @ b, (1, 16), (16, 1)),
    "transposed": (lambda a, b: a.t() @ b.t(), (32, 16), (48, 32)),
    "matmul-3d": (lambda a, b: torch.matmul(a, b), (2, 8, 32), (32, 48)),
    "linear": (lambda a, b: torch.nn.functional.linear(a, b), (16, 32), (48, 32)),
    "linear-3d": (lambda a, b: torch.nn.functional.linear(a, b), (2, 8, 32), (48, 32)),
}


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_two_run_as_one_float8_gemm(device: str, name: str, dtype: torch.dtype) -> None:
    product, shape_a, shape_b = PRODUCTS[name]
    a = float8(0, *shape_a, device=device, dtype=dtype)
    b = float8(1, *shape_b, device=device, dtype=dtype)
    with OpCounter() as counter:
        got = product(a, b)
    assert counter.gemms == 1
    assert type(got) is torch.Tensor
    assert got.dtype == dtype
    wanted = product(*(t._data.double() * t._scale.double() for t in (a, b)))
    assert sqnr(wanted, got) > tolerances.GEMM


@on_devices
@pytest.mark.parametrize(("format_a", "format_b"), [(E4M3, E5M2), (E5M2, E4M3)])
def test_products_of_different_formats(device: str, format_a, format_b) -> None:
    a = float8(0, 16, 32, device=device, format=format_a)
    b = float8(1, 32, 16, device=device, format=format_b)
    wanted = a.to_original_precision().double() @ b.to_original_precision().double()
    assert sqnr(wanted, a @ b) > tolerances.GEMM


@on_devices
@pytest.mark.parametrize("float8_side", ["left", "right"])
def test_products_with_a_high_precision_tensor_dequantise(device: str, float8_side: str) -> None:
    a, b = float8(0, 16, 32, device=device), float8(1, 32, 48, device=device)
    wanted = a.to_original_precision() @ b.to_original_precision()
    if float8_side == "left":
        b = b.to_original_precision()
    else:
        a = a.to_original_precision()
    with OpCounter() as counter:
        got = a @ b
    assert counter.gemms == 0
    assert same_bits(got, wanted)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2), (0, 1)])
def test_addmm(device: str, dtype: torch.dtype, beta: float, alpha: float) -> None:
    a = float8(0, 16, 32, device=device, dtype=dtype)
    b = float8(1, 32, 48, device=device, dtype=dtype)
    bias = seeded(2, 48, device=device, dtype=dtype)
    got = torch.addmm(bias, a, b, beta=beta, alpha=alpha)
    assert got.dtype == dtype
    wanted = torch.addmm(
        bias.double(),
        *(t._data.double() * t._scale.double() for t in (a, b)),
        beta=beta,
        alpha=alpha,
    )
    assert sqnr(wanted, got) > tolerances.GEMM
    if beta == 0:
        nan = torch.full_like(bias, torch.nan)
        assert same_bits(torch.addmm(nan, a, b, beta=0, alpha=alpha), got)


@on_devices
def test_linear_with_bias(device: str) -> None:
    x, w = float8(0, 4, 8, 32, device=device), float8(1, 48, 32, device=device)
    bias = seeded(2, 48, device=device)
    got = torch.nn.functional.linear(x, w, bias)
    wanted = x.to_original_precision() @ w.to_original_precision().t() + bias
    assert got.shape == (4, 8, 48)
    assert sqnr(wanted, got) > tolerances.GEMM


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("M", "K", "N"), [(16, 32, 48), (5, 33, 7), (1, 1, 1)])
def test_products_with_a_scale_for_each_row(device: str, dtype, M: int, K: int, N: int) -> None:
    rows = Cast(CastSpec(E4M3, ScalingGranularity.AXISWISE))
    a, w = seeded(0, M, K, dtype=dtype, device=device), seeded(1, N, K, dtype=dtype, device=device)
    a8, w8 = to_float8(a, rows).requires_grad_(), to_float8(w, rows).requires_grad_()
    one = Float8Tensor.from_high_precision(w)
    for left, right in ((a8, w8), (a8, one), (Float8Tensor.from_high_precision(a), w8)):
        wanted = left.to_original_precision().double() @ right.to_original_precision().double().t()
        for got in (left @ right.t(), torch.nn.functional.linear(left, right)):
            assert type(got) is torch.Tensor
            assert got.dtype == dtype
            assert sqnr(wanted, got) > tolerances.GEMM
    (a8 @ w8.t()).sum().backward()
    assert sqnr(a8.detach().to_original_precision().sum(0).expand(N, K), w8.grad) > tolerances.GEMM
    if K > 1:
        with pytest.raises(ValueError, match=r"mm: got .*by columns .*expected TENSORWISE"):
            a8.t() @ a8


def test_products_refuse_other_dtypes_and_two_e5m2_operands() -> None:
    """Tensor cores have no e5m2 x e5m2: the CPU must not quietly compute what a GPU cannot."""
    with pytest.raises(ValueError, match=r"bfloat16 and .*float32, expected equal"):
        float8(0, 4, 16, dtype=torch.bfloat16) @ float8(1, 16, 4)
    with pytest.raises(ValueError, match=r"(?s)e5m2.*expected"):
        float8(0, 16, 32, format=E5M2) @ float8(1, 32, 16, format=E5M2)
