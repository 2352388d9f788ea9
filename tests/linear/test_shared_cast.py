"""Layers that read the same tensor cast it once, in eager mode, and never a stale one."""

import gc
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from float8 import Float8Linear, kernels
from float8.linear import shared
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.models import seeded
from support.spies import GemmSpy

M, K, N = 32, 64, 48


def layers(device: str, count: int = 3, **more) -> list[Float8Linear]:
    torch.manual_seed(0)
    return [
        Float8Linear(K, N, bias=False, device=device, config=tensorwise(), **more)
        for _ in range(count)
    ]


def casts_of(run) -> int:
    # Not by a dispatch mode: under one, nothing is shared.
    with mock.patch.object(kernels, "cast_dynamic", wraps=kernels.cast_dynamic) as cast:
        run()
    return cast.call_count


def activation(*args, **more) -> torch.Tensor:
    """The result of an operation, as layers read it in training: leaves are not shared."""
    return seeded(*args, **more).requires_grad_() * 1


@on_devices
def test_one_cast_for_three_layers(device: str) -> None:
    q, k, v = layers(device)
    x = activation(0, M, K, device=device)
    assert casts_of(lambda: (q(x), k(x), v(x))) == 1 + 3  # the weights have one each
    assert casts_of(lambda: q(x.clone())) == 2
    assert casts_of(lambda: (q(x.detach()), k(x.detach()))) == 4


@on_devices
def test_leaves_and_traced_tensors_are_cast_each_time(device: str) -> None:
    """They are filled from outside: by a collective, through NumPy, by the next batch."""
    q, k = layers(device, 2)
    leaf = seeded(0, M, K, device=device).requires_grad_()
    assert casts_of(lambda: (q(leaf), k(leaf))) == 4
    x = activation(0, M, K, device=device)
    q(x)
    traced = make_fx(lambda x: k(x))(x)
    y = activation(1, M, K, device=device)
    assert torch.equal(traced(y), k(y))


@on_devices
def test_inference_mode_and_then_training(device: str) -> None:
    (layer,) = layers(device, 1)
    layer.weight.requires_grad_(False)
    x = activation(0, M, K, device=device)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()


@on_devices
def test_results_are_those_of_separate_casts(device: str) -> None:
    shared_layers, x = layers(device), seeded(0, M, K, device=device)
    leaf = x.clone().requires_grad_()
    together = leaf * 1
    sum(layer(together) for layer in shared_layers).square().sum().backward()
    apart = [x.clone().requires_grad_() for _ in shared_layers]
    others = layers(device)
    sum(layer(x) for layer, x in zip(others, apart, strict=True)).square().sum().backward()
    assert torch.equal(leaf.grad, sum(x.grad for x in reversed(apart)))
    for mine, other in zip(shared_layers, others, strict=True):
        assert torch.equal(mine.weight.grad, other.weight.grad)


@on_devices
def test_a_tensor_changed_in_place_is_cast_again(device: str) -> None:
    (layer,) = layers(device, 1)
    x = activation(0, M, K, device=device)
    with torch.no_grad():
        layer(x)
        x.mul_(3)
        assert torch.equal(layer(x), layer(x.clone()))
        x.data = x.data * 5  # changes no version
        assert torch.equal(layer(x), layer(x.clone()))
        x.data = x.data.view(K, M).t()  # nor this, nor the address
        assert torch.equal(layer(x), layer(x.clone()))


@on_devices
def test_other_options_are_cast_again(device: str) -> None:
    first, second = layers(device, 2)
    second = Float8Linear.from_float(second, tensorwise(round_scales_to_power_of_2=True))
    x = activation(0, M, K, device=device)
    with GemmSpy() as spy:
        first(x)
        second(x)
        with torch.autocast(device, torch.bfloat16):
            second(x)
    scales = [scale.item() for _, scale, _, _ in spy.gemms]
    assert scales[0] < scales[1]
    assert len({a.shape for a, _, _, _ in spy.gemms}) == 1


@on_devices
def test_a_cast_without_column_data_is_not_taken_for_one_with(device: str) -> None:
    frozen, layer = layers(device, 2)
    frozen.weight.requires_grad_(False)
    x = activation(0, M, K, device=device)
    frozen(x)
    layer(x).sum().backward()
    shared_grad, layer.weight.grad = layer.weight.grad, None
    layer(x.detach().clone()).sum().backward()
    assert torch.equal(shared_grad, layer.weight.grad)


@on_devices
def test_without_gradients_and_then_with(device: str) -> None:
    (layer,) = layers(device, 1)
    x = activation(0, M, K, device=device)
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    wanted = layers(device, 1)[0]
    wanted(x.detach().clone()).sum().backward()
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
    x = activation(0, M, K)
    layer(x)
    assert shared._last.operand is not None
    del x
    gc.collect()
    assert shared._last.operand is None


@pytest.mark.gpu
def test_each_cuda_graph_casts_for_itself() -> None:
    q, k = layers("cuda", 2)
    static = seeded(0, M, K, device="cuda").requires_grad_()

    def run(layer: Float8Linear) -> torch.Tensor:
        return layer(x)

    x = static * 1
    run(q), run(k)
    torch.cuda.synchronize()
    graphs, outputs = [], []
    for layer in (q, k):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(run(layer))
        graphs.append(graph)
    with torch.no_grad():
        x.copy_(seeded(5, M, K, device="cuda"))
    for graph, output, layer in zip(graphs, outputs, (q, k), strict=True):
        graph.replay()
        assert torch.equal(output, layer(x.clone()))


@pytest.mark.gpu
def test_another_stream_casts_again() -> None:
    q, k = layers("cuda", 2)
    x = activation(0, M, K, device="cuda")
    stream = torch.cuda.Stream()

    def both() -> None:
        q(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            k(x)

    assert casts_of(both) == 4


def test_layers_in_a_model_share() -> None:
    model = nn.ModuleList(layers("cpu"))
    x = activation(0, 2, M, K)
    assert casts_of(lambda: [layer(x) for layer in model]) == 4
