"""`float8.linear.functional.linear`: what a `Float8Linear` computes, without a module."""

import pytest
import torch
from torch import Tensor

from float8 import Float8Linear, Float8LinearConfig
from float8.linear.functional import linear
from sqnr import same_bits
from support.configs import DELAYED, DISABLED, DYNAMIC, delayed, mixed, tensorwise
from support.devices import DTYPES, on_devices
from support.models import seeded

K, N = 33, 40
CONFIGS = pytest.mark.parametrize(
    "config",
    [
        None,
        tensorwise(round_scales_to_power_of_2=True),
        tensorwise(emulate=True),
        Float8LinearConfig(
            cast_config_input_for_grad_weight=DISABLED,
            cast_config_grad_output_for_grad_weight=DISABLED,
        ),
    ],
    ids=["default", "powers of two", "emulated", "grad_weight in high precision"],
)


def both_ways(
    layer: Float8Linear, x: Tensor, autocast: torch.dtype | None = None
) -> list[dict[str, Tensor | None]]:
    """Output and gradients: of the layer, and of the function."""
    config = layer.config

    def function(x: Tensor) -> Tensor:
        return linear(x, layer.weight, layer.bias, config=config)

    results = []
    for run in (layer, function):
        layer.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        with torch.autocast(x.device.type, autocast or torch.bfloat16, enabled=bool(autocast)):
            y = run(leaf)
        y.backward(seeded(1, *y.shape, device=x.device, dtype=y.dtype))
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"output": y.detach(), "input": leaf.grad, **gradients})
    return results


def assert_same(mine: dict, theirs: dict) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].shape == theirs[name].shape, name
        assert mine[name].stride() == theirs[name].stride(), name
        assert same_bits(mine[name], theirs[name]), name


@on_devices
@CONFIGS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_layer(
    device: str, dtype: torch.dtype, bias: bool, config: Float8LinearConfig | None
) -> None:
    layer = Float8Linear(K, N, bias, device=device, dtype=dtype, config=config)
    assert_same(*both_ways(layer, seeded(0, 24, K, device=device, dtype=dtype)))


@on_devices
@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (3, 1, 2), (0,), (2, 0)], ids=str)
def test_any_leading_dims(device: str, leading: tuple[int, ...]) -> None:
    layer = Float8Linear(K, N, device=device)
    results = both_ways(layer, seeded(0, *leading, K, device=device))
    assert_same(*results)
    assert results[1]["output"].shape == (*leading, N)


@on_devices
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast(device: str, autocast: torch.dtype) -> None:
    layer = Float8Linear(K, N, device=device)
    results = both_ways(layer, seeded(0, 24, K, device=device), autocast)
    assert_same(*results)
    assert results[1]["output"].dtype == autocast
    assert results[1]["weight"].dtype == torch.float32


@on_devices
@pytest.mark.parametrize("config", [None, tensorwise(round_scales_to_power_of_2=True)])
def test_compiled(
    device: str, config: Float8LinearConfig | None, recwarn: pytest.WarningsRecorder
) -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, config=config)

    torch._dynamo.reset()
    weight = seeded(1, 48, 32, device=device).requires_grad_()
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        x, weight.grad = seeded(0, 16, 32, device=device).requires_grad_(), None
        function(x, weight).square().sum().backward()
        results.append((x.grad, weight.grad))
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))
    assert not [w for w in recwarn if "cache" in str(w.message)]


def test_wrong_dtypes() -> None:
    x, weight = seeded(0, 16, K), seeded(1, N, K)
    with pytest.raises(TypeError, match=r"input of dtype torch\.bfloat16 and weight of dtype tor"):
        linear(x.bfloat16(), weight)
    with pytest.raises(TypeError, match=r"input of dtype torch\.float64, expected one of"):
        linear(x.double(), weight.double())
    layer = Float8Linear(K, N)
    for call in (lambda x: linear(x, weight), layer):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(TypeError, match=r"input of dtype torch\.float64, expected one of"),
        ):
            call(x.double())


def test_wrong_shapes() -> None:
    weight = seeded(1, N, K)
    with pytest.raises(ValueError, match=r"got input of shape \(4, 32\), expected \[\.\.\., 33\]"):
        linear(seeded(0, 4, 32), weight)
    strict = tensorwise(pad_inner_dim=False)
    with pytest.raises(ValueError, match=r"weight of shape \(40, 33\).*pad_inner_dim=True"):
        linear(seeded(0, 16, K), weight, config=strict)
    with pytest.raises(ValueError, match=r"15 tokens.*pad_inner_dim=True"):
        linear(seeded(0, 15, 32), seeded(1, 16, 32).requires_grad_(), config=strict)


@pytest.mark.parametrize(
    "config", [delayed(), mixed(DYNAMIC, DYNAMIC, DELAYED)], ids=["all", "grad_output"]
)
def test_delayed_scaling_needs_a_layer(config: Float8LinearConfig) -> None:
    with pytest.raises(ValueError, match=r"delayed scaling.*use Float8Linear"):
        linear(seeded(0, 16, K), seeded(1, N, K), config=config)
