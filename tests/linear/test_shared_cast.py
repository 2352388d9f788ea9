"""Layers that read the same tensor cast it once, in eager mode, and never a stale one."""

import gc

import pytest
import torch
from torch import nn

from float8 import Float8Linear
from float8.linear import shared
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.models import forward_backward, seeded
from support.spies import GemmSpy, OpCounter

M, K, N = 32, 64, 48


def layers(device: str, count: int = 3, **more) -> list[Float8Linear]:
    torch.manual_seed(0)
    return [
        Float8Linear(K, N, bias=False, device=device, config=tensorwise(), **more)
        for _ in range(count)
    ]


def casts_of(run) -> int:
    with OpCounter() as counter:
        run()
    return sum(n for op, n in counter.ops.items() if op.startswith("float8.cast"))


@on_devices
def test_one_cast_for_three_layers(device: str) -> None:
    q, k, v = layers(device)
    x = seeded(0, M, K, device=device).requires_grad_()
    assert casts_of(lambda: (q(x), k(x), v(x))) == 1 + 3  # the weights have one each
    assert casts_of(lambda: q(x.clone())) == 2


@on_devices
def test_results_are_those_of_separate_casts(device: str) -> None:
    shared_layers, x = layers(device), seeded(0, M, K, device=device)
    together = x.clone().requires_grad_()
    sum(layer(together) for layer in shared_layers).square().sum().backward()
    apart = [x.clone().requires_grad_() for _ in shared_layers]
    others = layers(device)
    sum(layer(x) for layer, x in zip(others, apart, strict=True)).square().sum().backward()
    assert torch.equal(together.grad, sum(x.grad for x in reversed(apart)))
    for mine, other in zip(shared_layers, others, strict=True):
        assert torch.equal(mine.weight.grad, other.weight.grad)


@on_devices
def test_a_tensor_changed_in_place_is_cast_again(device: str) -> None:
    (layer,) = layers(device, 1)
    x = seeded(0, M, K, device=device)
    with torch.no_grad():
        layer(x)
        x.mul_(3)
        assert torch.equal(layer(x), layer(x.clone()))
        x.data = x.data * 5  # changes no version
        assert torch.equal(layer(x), layer(x.clone()))


@on_devices
def test_other_options_are_cast_again(device: str) -> None:
    first, second = layers(device, 2)
    second.config  # noqa: B018
    second = Float8Linear.from_float(second, tensorwise(round_scales_to_power_of_2=True))
    x = seeded(0, M, K, device=device)
    with GemmSpy() as spy:
        first(x)
        second(x)
        with torch.autocast(device, torch.bfloat16):
            second(x)
    scales = [scale.item() for _, scale, _, _ in spy.gemms]
    assert scales[0] < scales[1]
    assert len({a.shape for a, _, _, _ in spy.gemms}) == 1
    frozen = first(x)  # needs no column data ...
    first.weight.requires_grad_(True)
    results = forward_backward(first, x, torch.ones_like(frozen))  # ... and this does
    assert results["weight"].isfinite().all()


@on_devices
def test_without_gradients_and_then_with(device: str) -> None:
    (layer,) = layers(device, 1)
    x = seeded(0, M, K, device=device)
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    wanted = layers(device, 1)[0]
    wanted(x.clone()).sum().backward()
    assert torch.equal(layer.weight.grad, wanted.weight.grad)


@on_devices
def test_delayed_layers_cast_on_their_own(device: str) -> None:
    """Each has a history of its own to keep."""
    pair = [Float8Linear(K, N, bias=False, device=device, config=delayed()) for _ in range(2)]
    x = seeded(0, M, K, device=device)
    for layer in pair:
        layer(x)
        assert layer.fp8_amax_input.item() == x.abs().max().item()


@on_devices
def test_inference_tensors(device: str) -> None:
    (layer,) = layers(device, 1)
    with torch.inference_mode():
        x = seeded(0, M, K, device=device)
        first = layer(x)
        x.mul_(2)
        assert not torch.equal(layer(x), first)


def test_the_operand_goes_with_the_tensor() -> None:
    (layer,) = layers("cpu", 1)
    x = seeded(0, M, K)
    with torch.no_grad():
        layer(x)
    assert shared._last.operand is not None
    del x
    gc.collect()
    assert shared._last.operand is None


@pytest.mark.gpu
def test_another_stream_casts_again() -> None:
    q, k = layers("cuda", 2)
    x = seeded(0, M, K, device="cuda")
    stream = torch.cuda.Stream()

    def both() -> None:
        q(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            k(x)

    assert casts_of(both) == 4


def test_layers_in_a_model_share() -> None:
    model = nn.ModuleList(layers("cpu"))
    x = seeded(0, 2, M, K).requires_grad_()
    assert casts_of(lambda: [layer(x) for layer in model]) == 4
