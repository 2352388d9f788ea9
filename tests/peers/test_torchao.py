"""torchao's layer on the same tensors: as accurate. Models that it converted, or is to quantise.

MXFP8 as torchao has it: bytes, exponents, their order, and the three products of a layer.
"""

import pytest
import torch
from torch import Tensor, nn

import float8
from float8 import (
    CastConfig,
    ScalingGranularity,
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    linear,
)
from float8.formats import E4M3
from float8.kernels.swizzle import swizzled
from float8.quantize import Cast, quantize
from sqnr import sqnr
from support.configs import of_recipe
from support.devices import GPU

peer = pytest.importorskip("torchao.float8")
quantization = pytest.importorskip("torchao.quantization")


def three(weight: Tensor, x: Tensor, grad: Tensor, recipe: str, library=None) -> list[Tensor]:
    """Return output and gradients of a layer in float8, or in high precision."""
    x = x.detach().requires_grad_()
    layer = nn.Linear(256, 192, bias=False, device=x.device, dtype=x.dtype)
    layer.weight.data.copy_(weight)
    if library is not None:
        config = library.Float8LinearConfig.from_recipe_name(recipe)
        take = {"module_filter_fn": all_linears}
        layer = library.convert_to_float8_training(nn.Sequential(layer), config=config, **take)[0]
    out = layer(x)
    return [out, *torch.autograd.grad(out, (x, layer.weight), grad)]


@pytest.mark.parametrize(
    ("device", "recipe"),
    [
        *(("cpu", recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
        pytest.param("cuda", "tensorwise", marks=GPU),
    ],
)
@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
def test_errors_are_those_of_torchao(outliers: bool, recipe: str, device: str) -> None:
    """Or less, with hot channels and tiny gradients of as many sizes as there are tokens."""
    options = {"device": device, "dtype": torch.bfloat16}
    weight = torch.randn(192, 256, **options) / 16
    x, grad = torch.randn(128, 256, **options), torch.randn(128, 192, **options)
    if outliers:
        x[::7, ::31] *= 50
        if recipe != "tensorwise":
            x[:, :4] *= 2.0**14
            weight[:, :4] /= 2.0**14
            grad *= 1e-10 * torch.exp(3 * x[:, 4:5].float())
    exact = three(weight.double(), x.double(), grad.double(), recipe)
    ours, theirs = (three(weight, x, grad, recipe, library) for library in (float8, peer))
    for a, b, reference in zip(ours, theirs, exact, strict=True):
        more = sqnr(reference, a) - sqnr(reference, b)
        assert more > (-0.05 if recipe == "tensorwise" else -0.1)
        assert more < 0.05 or recipe != "tensorwise"


def test_a_model_that_torchao_converted_stays_and_says_so() -> None:
    model = peer.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
    reason = "which torchao converted already, expected an nn.Linear: convert the plain model"
    for classes in ([], [type(model[0])]):
        with pytest.warns(UserWarning, match=reason):
            convert_to_float8_training(model, linear_classes=classes)
        assert reason in conversion_report(model).layers[0].skip_reason


def test_a_model_is_quantised_on_its_way_back_only() -> None:
    model, plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Sequential(nn.Linear(64, 64))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 64)
    message = r"got a weight of class Int8Tensor, expected .*; call convert_to_high_precision"
    with pytest.raises(TypeError, match=message):
        quantization.quantize_(
            convert_to_float8_training(model), quantization.Int8WeightOnlyConfig()
        )
    model(x).sum().backward()
    for each in (convert_to_high_precision(model), plain):
        quantization.quantize_(each, quantization.Int8WeightOnlyConfig())
    assert type(model[0].weight) is type(plain[0].weight)
    assert torch.equal(model[0](x), plain[0](x))


# ---------------------------------------------------------------- MXFP8

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
config = pytest.importorskip("torchao.prototype.mx_formats.config")
theirs = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
preference = pytest.importorskip("torchao.quantization.quantize_.common.kernel_preference")
utils = pytest.importorskip("torchao.prototype.mx_formats.utils")

RCEIL = config.ScaleCalculationMode.RCEIL
CAST = Cast(CastConfig(scaling_granularity=ScalingGranularity.BLOCK_1x32))


def wild() -> list[Tensor]:
    """All bfloat16 numbers; blocks of all sizes; zeros, NaN and Inf among others."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    sizes = torch.exp2(torch.randint(-149, 120, (256, 1)).float())
    holes = torch.randn(96, 160)
    holes[:40], holes[:, :40], holes[50, 60], holes[70, 80] = 0, -0.0, torch.nan, -torch.inf
    holes[90, 100] = 3e38
    return [every.view(256, 256).float(), torch.randn(256, 512) * sizes, holes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_bytes_and_exponents(dtype: torch.dtype) -> None:
    for x in wild():
        x = x.to(dtype)
        made = quantize(x, CAST, row=True, col=True)
        for y, ours in ((x, made.row), (x.t().contiguous(), made.col)):
            y = y.float() if dtype == torch.float16 else y  # which they do not take
            exponents, data = mx.to_mx(y, E4M3, 32, RCEIL)
            assert torch.equal(ours.data.view(torch.uint8), data.view(torch.uint8))
            of_ours = ours.scale.contiguous().view(torch.int32) >> 23
            assert torch.equal(of_ours, exponents.view(torch.uint8).view(of_ours.shape).int())


@pytest.mark.parametrize("shape", [(128, 4), (200, 6), (1, 1)], ids=str)
def test_the_order_of_exponents(shape: tuple[int, int]) -> None:
    exponents = torch.randint(0, 255, shape, dtype=torch.int32)
    ours = swizzled((exponents << 23).view(torch.float32)).view(torch.uint8).flatten()
    assert torch.equal(ours, utils.to_blocked(exponents.to(torch.uint8)))


def test_three_products() -> None:
    """In float32, where both emulate: gradients bit by bit; sums of the output in another order."""
    x, w, g = torch.randn(64, 96), torch.randn(128, 96), torch.randn(64, 128)
    emulated = preference.KernelPreference.EMULATED
    by_torch = config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH
    how = E4M3, E4M3, E4M3, 32, emulated, *by_torch, RCEIL, False
    made = []
    for call in (
        lambda a, b: linear(a, b, config=of_recipe("mxfp8")),
        lambda a, b: theirs.mx_mm.apply(a, b, *how),
    ):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = call(a, b)
        made.append([y, *torch.autograd.grad(y, (a, b), g)])
    ours, their = made
    assert sqnr(their[0], ours[0]) > 140
    assert torch.equal(ours[1], their[1])
    assert torch.equal(ours[2], their[2])
