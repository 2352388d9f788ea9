"""Float8Tensor: what it holds, casting there and back, its gradients and products."""

import pytest
import torch
from torch import nn

import tolerances
from float8 import Float8Tensor
from float8.config import CastConfig, ScalingGranularity
from float8.quantize import Cast
from float8.tensor.float8_tensor import to_float8
from sqnr import same_bits, sqnr
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded
from support.reference import reference_cast, reference_scale
from support.spies import OpCounter
from support.tensors import float8

FORMATS = pytest.mark.parametrize(
    ("format", "bound"),
    [(E4M3, tolerances.CAST_E4M3), (E5M2, tolerances.CAST_E5M2)],
    ids=["e4m3", "e5m2"],
)


@on_devices
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(device: str, format: torch.dtype, bound: float, dtype: torch.dtype) -> None:
    x = seeded(0, 64, 128, dtype=dtype, device=device)
    t = Float8Tensor.from_high_precision(x, format)
    assert (t.shape, t.dtype, t.device, t.stride()) == (x.shape, dtype, x.device, x.stride())
    assert (t._orig_dtype, t._granularity) == (dtype, ScalingGranularity.TENSORWISE)
    assert same_bits(t._scale, reference_scale(x, format))
    assert same_bits(t._data, reference_cast(x, t._scale, format))
    back = t.to_original_precision()
    assert type(back) is torch.Tensor
    assert back.dtype == dtype
    assert sqnr(x, back) > bound
    wanted = (t._data.cpu().double() * t._scale.cpu().double()).to(torch.float32).to(dtype)
    assert same_bits(back, wanted)


@on_devices
def test_the_scale_can_be_given_or_a_power_of_two(device: str) -> None:
    x = seeded(0, 16, 16, device=device)
    scale = torch.tensor(0.25, device=device)
    t = Float8Tensor.from_high_precision(x, scale=scale)
    assert t._scale.item() == 0.25
    assert same_bits(t._data, reference_cast(x, scale, E4M3))
    for format in (E4M3, E5M2):
        t = Float8Tensor.from_high_precision(x, format, round_scales_to_power_of_2=True)
        assert same_bits(t._scale, reference_scale(x, format, power_of_2=True))
        again = Float8Tensor.from_high_precision(t.to_original_precision(), format, scale=t._scale)
        assert same_bits(again._data, t._data)


@on_devices
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 5), (0, 4), (4, 0), (2, 0, 3)])
def test_every_shape(device: str, shape: tuple[int, ...]) -> None:
    x = seeded(0, *shape, device=device)
    t = Float8Tensor.from_high_precision(x)
    assert t.shape == t._data.shape == shape
    assert t.to_original_precision().shape == shape


@on_devices
def test_every_stride(device: str) -> None:
    base = seeded(0, 12, 20, device=device)
    for x in (base.t(), base[::2, ::3], base[:1].expand(4, 20), base.reshape(3, 4, 20).mT):
        t = Float8Tensor.from_high_precision(x)
        assert same_bits(t._data, reference_cast(x, reference_scale(x, E4M3), E4M3))


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_pass_both_casts_unchanged(device: str, dtype: torch.dtype) -> None:
    x = seeded(0, 16, 32, dtype=dtype, device=device).requires_grad_()
    g = seeded(1, 16, 32, dtype=dtype, device=device)
    t = Float8Tensor.from_high_precision(x)
    assert t.requires_grad
    t.to_original_precision().backward(g)
    assert x.grad.dtype == x.dtype == t.dtype
    assert same_bits(x.grad, g)
    x.grad = None  # through views between the casts
    Float8Tensor.from_high_precision(x).reshape(8, 64).t().to_original_precision()[
        3
    ].sum().backward()
    wanted = torch.zeros(8, 64, dtype=dtype)
    wanted[:, 3] = 1
    assert torch.equal(x.grad.cpu(), wanted.reshape(16, 32))


@on_devices
def test_gradients_of_a_product_go_to_the_high_precision_tensors(device: str) -> None:
    a = seeded(0, 16, 32, device=device).requires_grad_()
    b = seeded(1, 32, 48, device=device).requires_grad_()
    g = seeded(2, 16, 48, device=device)
    a8, b8 = Float8Tensor.from_high_precision(a), Float8Tensor.from_high_precision(b)
    (a8 @ b8).backward(g)
    assert sqnr(g @ b8.to_original_precision().t(), a.grad) > tolerances.GEMM
    assert sqnr(a8.to_original_precision().t() @ g, b.grad) > tolerances.GEMM


def test_wrong_arguments_say_what_was_expected() -> None:
    data, scale = torch.zeros(4, 4).to(E4M3), torch.tensor(1.0)
    with pytest.raises(TypeError, match=r"data: got dtype torch.float32, expected one of .*e4m3fn"):
        Float8Tensor(torch.zeros(4, 4), scale, torch.float32)
    with pytest.raises(TypeError, match=r"scale: got dtype torch.float64, expected torch.float32"):
        Float8Tensor(data, scale.double(), torch.float32)
    with pytest.raises(ValueError, match=r"scale: got shape \(4,\) .*, expected one element"):
        Float8Tensor(data, torch.ones(4), torch.float32)
    with pytest.raises(TypeError, match=r"orig_dtype: got torch.float64, expected one of"):
        Float8Tensor(data, scale, torch.float64)
    with pytest.raises(ValueError, match=r"scale: got shape \(\) .*expected shape \(4, 1\)"):
        Float8Tensor(data, scale, torch.float32, ScalingGranularity.AXISWISE)
    with pytest.raises(ValueError, match=r"strides \(4, 2\), expected a contiguous matrix"):
        Float8Tensor(data[:, ::2], torch.ones(4, 1), torch.float32, ScalingGranularity.AXISWISE)
    with pytest.raises(TypeError, match=r"torch.int64.*expected .*bfloat16"):
        Float8Tensor.from_high_precision(torch.ones(4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"dtype is torch.bfloat16; expected torch.float8_e4m3fn"):
        Float8Tensor.from_high_precision(torch.ones(4), torch.bfloat16)


def test_repr_shows_all_fields() -> None:
    text = repr(Float8Tensor.from_high_precision(torch.ones(2, 2, dtype=torch.bfloat16)))
    for part in ("Float8Tensor", "data=", "scale=", "orig_dtype=torch.bfloat16", "tensorwise"):
        assert part in text


@on_devices
def test_it_can_be_a_parameter(device: str) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(
        Float8Tensor.from_high_precision(seeded(0, 16, 32, device=device)), requires_grad=True
    )
    assert isinstance(module.weight, nn.Parameter)
    assert isinstance(module.weight, Float8Tensor)
    assert list(dict(module.named_parameters())) == ["weight"]
    x = seeded(1, 4, 32, device=device)
    nn.functional.linear(x, module.weight).sum().backward()
    assert module.weight.grad.dtype == module.weight.dtype
    assert sqnr(x.sum(0).expand(16, 32), module.weight.grad) > tolerances.GEMM


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
    rows = Cast(CastConfig(target_dtype=E4M3, scaling_granularity=ScalingGranularity.AXISWISE))
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
