"""Float8Tensor: what it holds, casting there and back, its gradients and products."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tolerances
from float8 import Float8LinearConfig, Float8Tensor, linear
from float8.config import CastConfig, ScalingGranularity
from float8.kernels.dequantize import fits_kernel
from float8.linear.plan import plan_linear
from float8.quantize import Cast
from float8.scales import Operand
from float8.tensor.float8_tensor import to_float8
from float8.tensor.weights import in_float8_only
from sqnr import same_bits, sqnr
from support.copies import through_file
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.errors import require_errors
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
@pytest.mark.parametrize("shape", [(16, 48), (16, 1)], ids=str)
def test_rows_with_scales_are_dequantised_the_other_way_round_too(
    device: str, shape: tuple[int, int]
) -> None:
    """Their scales are those of columns then, also where the data are copied, or one row."""
    x = seeded(0, *shape, device=device)
    of = ScalingGranularity.AXISWISE
    t = to_float8(x, Cast(CastConfig(scaling_granularity=of)))
    assert fits_kernel(Operand(t._data, t._scale), of)
    for turned in (t.t(), t.t().contiguous()):
        assert same_bits(turned.to_original_precision().t(), t.to_original_precision())
        assert not fits_kernel(Operand(turned._data, turned._scale), of)


@on_devices
def test_every_shape_and_stride(device: str) -> None:
    for shape in ((), (1,), (7,), (3, 5), (2, 3, 5), (0, 4), (4, 0), (2, 0, 3)):
        t = Float8Tensor.from_high_precision(seeded(0, *shape, device=device))
        assert t.shape == t._data.shape == t.to_original_precision().shape == shape
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
    t = Float8Tensor.from_high_precision(x).reshape(8, 64).t()
    t.to_original_precision()[3].sum().backward()
    wanted = torch.zeros(8, 64, dtype=dtype)
    wanted[:, 3] = 1
    assert torch.equal(x.grad.cpu(), wanted.reshape(16, 32))


@pytest.mark.filterwarnings("ignore:.*rounded to float8")
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
    data, scale, f32 = torch.zeros(4, 4).to(E4M3), torch.tensor(1.0), torch.float32
    f64, integers, cast = torch.float64, torch.ones(4).long(), Float8Tensor.from_high_precision
    rows, make = (f32, ScalingGranularity.AXISWISE), Float8Tensor
    require_errors(
        ("TypeError: data: got dtype torch.float32, .*e4m3fn", make, [data.float(), scale, f32]),
        ("TypeError: scale: .*float64, expected torch.fl", make, [data, scale.double(), f32]),
        (r"ValueError: shape \(4,\) .*, expected one element", make, [data, torch.ones(4), f32]),
        ("TypeError: orig_dtype: got torch.float64, expected one of", make, [data, scale, f64]),
        (r"ValueError: scale: .* \(\) .*expected shape \(4, 1\)", make, [data, scale, *rows]),
        (r"ValueError: \(4, 2\), .* contig", make, [data[:, ::2], torch.ones(4, 1), *rows]),
        ("TypeError: torch.int64.*expected .*bfloat16", cast, [integers]),
        (
            "TypeError: got dtype torch.bfloat16, .*torch.float8_e4m3fn",
            cast,
            [scale, torch.bfloat16],
        ),
    )


def test_repr_shows_all_fields() -> None:
    text = repr(Float8Tensor.from_high_precision(torch.ones(2, 2, dtype=torch.bfloat16)))
    for part in ("Float8Tensor", "data=", "scale=", "orig_dtype=torch.bfloat16", "tensorwise"):
        assert part in text


def bias_of(a: Tensor) -> Tensor:
    return seeded(2, 48, dtype=a.dtype, device=a.device)


def added(beta: float, alpha: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: torch.addmm(bias_of(a), a, b, beta=beta, alpha=alpha)


PRODUCTS = {
    "mm": (torch.mm, (16, 32), (32, 48)),
    "matmul": (torch.matmul, (16, 32), (32, 48)),
    "odd-dims": (torch.matmul, (5, 33), (33, 7)),
    "one-row": (torch.matmul, (1, 16), (16, 1)),
    "transposed": (lambda a, b: a.t() @ b.t(), (32, 16), (48, 32)),
    "matmul-3d": (torch.matmul, (2, 8, 32), (32, 48)),
    "linear": (F.linear, (16, 32), (48, 32)),
    "linear-3d": (F.linear, (2, 8, 32), (48, 32)),
    "linear-bias": (lambda a, b: F.linear(a, b, bias_of(a)), (2, 8, 32), (48, 32)),
    "addmm": (added(1, 1), (16, 32), (32, 48)),
    "addmm-scaled": (added(0.5, 2), (16, 32), (32, 48)),
    "addmm-without": (added(0, 1), (16, 32), (32, 48)),
}


@on_devices
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_the_values(device: str, name: str) -> None:
    product, shape_a, shape_b = PRODUCTS[name]
    for dtype, mode in itertools.product(DTYPES, (nullcontext, torch.inference_mode)):
        a = float8(0, *shape_a, device=device, dtype=dtype)
        b = float8(1, *shape_b, device=device, dtype=dtype, format=E5M2)
        wide_a, wide_b = a.to_original_precision(), b.to_original_precision()
        with OpCounter() as counter, mode():
            wanted = product(wide_a, wide_b)
            for pair in ((a, b), (a, wide_b), (wide_a, b)):
                with pytest.warns(UserWarning, match="are rounded to float8, in high precision"):
                    got = product(*pair)
                assert type(got) is torch.Tensor
                assert same_bits(got, wanted)
        assert counter.gemms == 0


@pytest.mark.filterwarnings("ignore:.*rounded to float8")
@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_a_scale_for_each_row(device: str, dtype) -> None:
    rows = Cast(CastConfig(target_dtype=E4M3, scaling_granularity=ScalingGranularity.AXISWISE))
    a, w = (seeded(n, n, 33, dtype=dtype, device=device) for n in (5, 7))
    a8, w8 = to_float8(a, rows).requires_grad_(), to_float8(w, rows).requires_grad_()
    wide_a, wide_w = (x.to_original_precision().detach().requires_grad_() for x in (a8, w8))
    y, wide_y = a8 @ w8.t(), wide_a @ wide_w.t()
    assert same_bits(y, wide_y)
    assert same_bits(a8.t() @ a8, wide_a.t() @ wide_a)
    y.sum().backward()
    wide_y.sum().backward()
    assert same_bits(w8.grad, wide_w.grad)


@on_devices
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_products_with_finer_scales(device: str, recipe: str, mode) -> None:
    """As multiplications lay out their operands: transposed, as one of a batch, or repeated."""
    for experts, shape, products in ((), (48, 160), MATRICES), ((3,), (48, 160), EXPERTS):
        w = in_float8(recipe, seeded(0, *experts, *shape, device=device))
        x = seeded(1, 3, 5, shape[1], device=device)
        for name, product in products.items():
            if recipe == "blockwise" and name == "einsum, by heads":
                with pytest.raises(ValueError, match="would cut what one scale covers"):
                    product(x, w)  # heads would share squares
                continue
            results = []
            for weight in (w, w.to_original_precision()):
                leaf = x.detach().requires_grad_(mode is nullcontext)
                warns = pytest.warns(UserWarning, match="rounded to float8, in high precision")
                with mode(), warns if weight is w else nullcontext():
                    y = product(leaf, weight)
                    if mode is nullcontext:
                        y.backward(torch.ones_like(y))
                results.append((y, leaf.grad))
            (got, grad), (wanted, wanted_grad) = results
            assert type(got) is Tensor, name
            assert sqnr(wanted, got) > 100, name  # the same sums, in another order
            assert grad is None or sqnr(wanted_grad, grad) > 100, name


def in_float8(recipe: str, w: Tensor) -> Float8Tensor:
    plan = plan_linear(Float8LinearConfig.from_recipe_name(recipe))
    return in_float8_only(w, plan.casts.weight)


MATRICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "matmul": lambda x, w: x @ w.t(),
    "w first": lambda x, w: w @ x.mT,
    "vector": lambda x, w: w @ x[0, 0],
    "addmm": lambda x, w: torch.addmm(x.new_ones(48), x[0], w.mT, alpha=2),
    "einsum": lambda x, w: torch.einsum("...k,nk->...n", x, w),
    "einsum, transposed": lambda x, w: torch.einsum("abk,kn->abn", x, w.permute(1, 0)),
    "einsum, by heads": lambda x, w: torch.einsum("abk,hvk->habv", x, w.view(4, 12, -1)),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([2], [1])),
    "by itself": lambda x, w: x @ (w.t() @ w),
}
EXPERTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda x, w: torch.bmm(x, w.transpose(1, 2)),
    "w first": lambda x, w: torch.bmm(w, x.mT),
    "baddbmm": lambda x, w: torch.baddbmm(x.new_ones(3, 5, 48), x, w.mT),
    "einsum": lambda x, w: torch.einsum("ecd,ehd->ech", x, w),
    "one": lambda x, w: F.linear(x[1], w[1]),
}


@on_devices
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_blocks_of_any_shape_are_dequantised_the_other_way_round_too(
    device: str, recipe: str
) -> None:
    for shape in ((512, 512), (33, 17), (1, 40), (40, 1), (1, 1), (2, 33, 17), (1, 128, 1)):
        w = in_float8(recipe, seeded(0, *shape, device=device))
        values, turned = w.to_original_precision(), w.mT
        for t in (turned, turned.clone(), copy.deepcopy(turned), through_file(turned)):
            assert same_bits(t.to_original_precision(), values.mT)
            assert same_bits(t.mT.to_original_precision(), values)
        if turned._is_transposed and len(shape) == 2:
            with pytest.raises(ValueError, match="transposed"):
                linear(seeded(1, 4, shape[0], device=device), turned, config=recipe)
        assert same_bits(turned.to_original_precision().relu_(), values.mT.relu())
    w = in_float8(recipe, seeded(0, 3, 33, 17, device=device))
    for take in (lambda t: t[1:], lambda t: t[2], lambda t: t.unbind()[1], lambda t: t.split(2)[1]):
        assert same_bits(take(w).to_original_precision(), take(w.to_original_precision()))
        assert same_bits(take(w.mT).to_original_precision(), take(w.to_original_precision().mT))
    for part in (lambda w: w[:32], lambda w: w.view(-1), lambda w: w.mT.contiguous()):
        with pytest.raises(ValueError, match="TENSORWISE"):
            part(in_float8(recipe, seeded(0, 512, 512, device=device)))
