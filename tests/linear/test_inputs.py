"""Every input that `nn.Linear` takes, and one clear error for every other."""

import pytest
import torch
from torch import nn

from float8 import Float8Linear, Float8LinearConfig, conversion_report, convert_to_float8_training
from sqnr import same_bits
from support.configs import delayed, tensorwise
from support.devices import DTYPES, E4M3, on_devices
from support.models import forward_backward, seeded
from support.reference import reference_cast, reference_scale
from support.spies import GemmSpy

CONFIGS = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
K, N = 32, 48


@on_devices
@CONFIGS
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (3, 1, 2)], ids=["1d", "2d", "3d", "4d"])
def test_ranks_give_the_values_of_the_flattened_input(
    device: str, config: Float8LinearConfig, shape: tuple[int, ...]
) -> None:
    layer = Float8Linear(K, N, device=device, config=config)
    x, g = seeded(0, *shape, K, device=device), seeded(1, *shape, N, device=device)
    got = forward_backward(layer, x, g)
    flat = forward_backward(layer, x.reshape(-1, K), g.reshape(-1, N))
    assert got["output"].shape == (*shape, N)
    assert got["input"].shape == (*shape, K)
    assert all(same_bits(got[name].reshape(flat[name].shape), flat[name]) for name in flat)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["2d", "3d"])
def test_the_output_is_no_view_as_nn_linears(shape: tuple[int, ...]) -> None:
    """It can be written into in place, and FSDP2 does not warn of it."""
    x = seeded(0, *shape, K).requires_grad_()
    assert not nn.Linear(K, N, bias=False)(x)._is_view()
    y = Float8Linear(K, N, bias=False)(x)
    assert not y._is_view()
    y.mul_(2).sum().backward()


@on_devices
@CONFIGS
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_change_the_values(
    device: str, dtype: torch.dtype, config: Float8LinearConfig
) -> None:
    layer = Float8Linear(K, N, device=device, dtype=dtype, config=config)
    g = seeded(1, 12, N, dtype=dtype, device=device)
    transposed = seeded(0, K, 12, dtype=dtype, device=device).t()
    strided = seeded(0, 24, 2 * K, dtype=dtype, device=device)[::2, ::2]
    expanded = seeded(0, 1, K, dtype=dtype, device=device).expand(12, K)
    permuted = seeded(0, 3, K, 4, dtype=dtype, device=device).permute(0, 2, 1)
    for x in (transposed, strided, expanded, permuted):
        assert not x.is_contiguous()
        g = g.reshape(*x.shape[:-1], N)
        got = forward_backward(layer, x, g)
        wanted = forward_backward(layer, x.contiguous(), g)
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


@on_devices
@CONFIGS
def test_strides_of_the_gradient_do_not_change_the_values(
    device: str, config: Float8LinearConfig
) -> None:
    # The gradient of a bias is torch's own sum, whose order depends on strides.
    layer = Float8Linear(K, N, bias=False, device=device, config=config)
    x = seeded(0, 12, K, device=device)
    gradients = (
        seeded(1, N, 12, device=device).t(),
        seeded(1, 24, N, device=device)[::2],
        torch.ones((), device=device).expand(12, N),  # what sum().backward() sends
        seeded(1, 1, N, device=device).expand(12, N),
    )
    for g in gradients:
        got = forward_backward(layer, x, g)
        wanted = forward_backward(layer, x, g.contiguous())
        assert [name for name in wanted if not same_bits(got[name], wanted[name])] == []


@on_devices
@CONFIGS
@pytest.mark.parametrize("way", ["in place", "data", "data in place", "strides", "numpy"])
def test_an_activation_written_between_two_layers_takes_effect(
    device: str, config: Float8LinearConfig, way: str
) -> None:
    """Even where no version counter tells of it: nothing is remembered of an input."""
    if way == "numpy" and device != "cpu":
        pytest.skip("NumPy writes the CPU's memory only")
    first, second = (Float8Linear(K, N, bias=False, device=device, config=config) for _ in "ab")
    x = seeded(0, 16, K, device=device).requires_grad_() * 1
    first(x)
    with torch.no_grad():
        if way == "in place":
            x.mul_(3)
        elif way == "data":
            x.data = 3 * x.data
        elif way == "data in place":
            x.data.mul_(3)
        elif way == "strides":
            x.data = (3 * x.data).t().contiguous().t()
        else:
            x.detach().numpy()[:] *= 3
    with GemmSpy() as spy:
        second(x)
    (gemm,) = spy.gemms
    wanted = 3 * seeded(0, 16, K, device=device)
    scale = reference_scale(wanted, E4M3)
    assert same_bits(gemm[0], reference_cast(wanted, scale, E4M3))
    assert same_bits(gemm[1], scale)


@on_devices
@CONFIGS
def test_sum_backward(device: str, config: Float8LinearConfig) -> None:
    layer = Float8Linear(K, N, device=device, config=config)
    x = seeded(0, 2, 6, K, device=device).requires_grad_()
    layer(x).sum().backward()
    wanted = forward_backward(layer, x, torch.ones(2, 6, N, device=device))
    assert same_bits(x.grad, wanted["input"])


@on_devices
@CONFIGS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3)])
def test_zero_rows(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], config: Float8LinearConfig
) -> None:
    layer = Float8Linear(K, N, device=device, dtype=dtype, config=config)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    x = torch.empty(*shape, K, device=device, dtype=dtype)
    results = forward_backward(layer, x, torch.empty(*shape, N, device=device, dtype=dtype))
    assert results["output"].shape == (*shape, N)
    assert results["output"].dtype == results["input"].dtype == dtype
    assert results["input"].shape == x.shape
    assert results["weight"].shape == (N, K)
    assert results["weight"].abs().max() == 0
    assert results["bias"].abs().max() == 0
    assert all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())


@on_devices
@CONFIGS
def test_zero_rows_under_autocast(device: str, config: Float8LinearConfig) -> None:
    layer = Float8Linear(K, N, device=device, config=config)
    x = torch.empty(0, K, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.abs().max() == 0


@on_devices
@CONFIGS
def test_all_zeros_give_zeros(device: str, config: Float8LinearConfig) -> None:
    layer = Float8Linear(K, N, bias=False, device=device, config=config)
    zeros = torch.zeros(8, K, device=device)
    results = forward_backward(layer, zeros, torch.zeros(8, N, device=device))
    assert all(result.abs().max() == 0 for result in results.values())


# ---------------------------------------------------------------- errors


@on_devices
@CONFIGS
class TestWrongInput:
    def test_inner_dim(self, device: str, config: Float8LinearConfig) -> None:
        layer = Float8Linear(K, N, device=device, config=config)
        with pytest.raises(
            ValueError, match=r"got input of shape \(4, 31\), expected \[\.\.\., 32"
        ):
            layer(torch.randn(4, K - 1, device=device))

    def test_inner_dim_of_an_empty_input(self, device: str, config: Float8LinearConfig) -> None:
        layer = Float8Linear(K, N, device=device, config=config)
        with pytest.raises(
            ValueError, match=r"got input of shape \(0, 31\), expected \[\.\.\., 32"
        ):
            layer(torch.randn(0, K - 1, device=device))

    def test_zero_dims(self, device: str, config: Float8LinearConfig) -> None:
        layer = Float8Linear(K, N, device=device, config=config)
        with pytest.raises(ValueError, match=r"got input of shape \(\), expected \[\.\.\., 32\]"):
            layer(torch.tensor(1.0, device=device))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
    @pytest.mark.parametrize("autocast", [False, True])
    def test_no_floating_point(
        self, device: str, config: Float8LinearConfig, dtype: torch.dtype, autocast: bool
    ) -> None:
        layer = Float8Linear(K, N, device=device, config=config)
        with (
            torch.autocast(device, torch.bfloat16, enabled=autocast),
            pytest.raises(TypeError, match=f"got input of dtype {dtype}.*expected"),
        ):
            layer(torch.ones(4, K, device=device).to(dtype))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtype_differs_from_the_weight(
        self, device: str, config: Float8LinearConfig, dtype: torch.dtype
    ) -> None:
        layer = Float8Linear(K, N, device=device, config=config)
        with pytest.raises(
            TypeError, match=f"got input of dtype {dtype} and weight of dtype torch.float32"
        ):
            layer(torch.randn(4, K, device=device, dtype=dtype))

    def test_layer_turned_float64(self, device: str, config: Float8LinearConfig) -> None:
        layer = Float8Linear(K, N, device=device, config=config).double()
        with pytest.raises(
            TypeError, match=r"(?s)got input of dtype torch.float64, expected one of"
        ):
            layer(torch.randn(4, K, device=device, dtype=torch.float64))

    def test_float64_linear(self, device: str, config: Float8LinearConfig) -> None:
        linear = nn.Linear(K, N, device=device, dtype=torch.float64)
        message = "got weight of dtype torch.float64, expected one of torch.float32"
        with pytest.raises(TypeError, match=message):
            Float8Linear.from_float(linear, config)

    def test_no_linear(self, device: str, config: Float8LinearConfig) -> None:
        with pytest.raises(TypeError, match=r"got a Conv1d, expected an nn.Linear"):
            Float8Linear.from_float(nn.Conv1d(1, 1, 1).to(device), config)


@pytest.mark.gpu
@CONFIGS
def test_input_on_another_device(config: Float8LinearConfig) -> None:
    layer = Float8Linear(K, N, device="cuda", config=config)
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)cpu.*cuda|cuda.*cpu"):
        layer(torch.randn(4, K))


def test_float64_model_is_left_alone_with_the_reason() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(K, N, dtype=torch.float64)))
    (skipped,) = conversion_report(model).skipped
    assert "torch.float64" in skipped.skip_reason
    assert "expected one of" in skipped.skip_reason
