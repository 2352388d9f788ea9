"""Speculative scaling: delayed scaling that never saturates."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import float8
import sqnr
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    all_linears,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits
from support.configs import DELAYED, DYNAMIC, SPECULATIVE, delayed, mixed, speculative, tensorwise
from support.devices import on_devices
from support.models import FeedForward, forward_backward, fp8_state, seeded

CONFIGS = {"tensorwise": tensorwise(), "delayed": delayed(), "speculative": speculative()}
M, K, N = 32, 32, 48


def layer_of(config: Float8LinearConfig, device: str = "cpu", **more) -> Float8Linear:
    torch.manual_seed(0)
    return Float8Linear(K, N, device=device, config=config, **more)


def model_of(config: Float8LinearConfig, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = FeedForward(K, N).to(device)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        assert same_bits(got[name], want[name]), name


def step(model: nn.Module, factor: float, device: str = "cpu") -> dict[str, Tensor]:
    """Results and state after one step on inputs and gradients times `factor`."""
    x, g = seeded(0, M, K, device=device), seeded(1, M, model(seeded(0, M, K)).shape[1])
    results = forward_backward(model, x * factor, g.to(device) * factor)
    sync_float8_amax_and_scale_history(model)
    return results | {name: buffer.clone() for name, buffer in fp8_state(model).items()}


@on_devices
@pytest.mark.parametrize("speculating", range(3))
def test_where_nothing_saturates_it_is_delayed_scaling(device: str, speculating: int) -> None:
    """In each role; a factor below 1 leaves a history that is larger than the data."""
    mix = [DELAYED, DELAYED, DELAYED]
    mix[speculating] = SPECULATIVE
    ours, theirs = layer_of(mixed(*mix), device), layer_of(delayed(), device)
    for factor in (1.0, 1.0, 0.5, 0.01):
        x, g = seeded(0, M, K, device=device), seeded(1, M, N, device=device)
        got, want = (forward_backward(layer, x * factor, g * factor) for layer in (ours, theirs))
        assert_same(got | fp8_state(ours), want | fp8_state(theirs))
        for layer in (ours, theirs):
            sync_float8_amax_and_scale_history(layer)


@on_devices
def test_where_all_saturates_it_is_dynamic_scaling(device: str) -> None:
    ours, theirs = layer_of(speculative(), device), layer_of(tensorwise(), device)
    for factor in (1.0, 10.0, 300.0):  # always above the history
        x, g = seeded(0, M, K, device=device), seeded(1, M, N, device=device)
        got, want = (forward_backward(layer, x * factor, g * factor) for layer in (ours, theirs))
        assert_same(got, want)
        sync_float8_amax_and_scale_history(ours)


@on_devices
def test_a_sudden_jump_of_the_inputs(device: str) -> None:
    """Training goes on as with dynamic scaling, where delayed scaling loses the step."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(device)
    decibels: dict[str, float] = {}
    for name, config in CONFIGS.items():
        exact, model = copy.deepcopy(plain), copy.deepcopy(plain)
        convert_to_float8_training(model, config=config, module_filter_fn=all_linears)
        optimizer = torch.optim.SGD(exact.parameters(), lr=1e-4)
        for seed in range(6):
            factor = 100.0 if seed == 5 else 1.0
            x = seeded(seed, 128, 64, device=device) * factor
            g = seeded(seed + 100, 128, 64, device=device) * factor
            model.load_state_dict(exact.state_dict() | fp8_state(model))  # the same weights in all
            got, want = forward_backward(model, x, g), forward_backward(exact, x, g)
            sync_float8_amax_and_scale_history(model)
            optimizer.step()
        decibels[name] = min(sqnr.sqnr(want[key], got[key]) for key in want if "bias" not in key)
    assert decibels["speculative"] > decibels["tensorwise"] - 1.0
    assert decibels["delayed"] < decibels["speculative"] - 10.0


@on_devices
def test_evaluation_neither_records_nor_saturates(device: str) -> None:
    ours, theirs = layer_of(speculative(), device), layer_of(tensorwise(), device)
    x = seeded(0, M, K, device=device)
    forward_backward(ours, x, seeded(1, M, N, device=device))
    sync_float8_amax_and_scale_history(ours)
    before = {name: buffer.clone() for name, buffer in fp8_state(ours).items()}
    with torch.no_grad():
        assert same_bits(ours(x * 100), theirs(x * 100))
    assert_same(fp8_state(ours), before)


@on_devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_microbatch_is_cast_by_itself(device: str, bad: float) -> None:
    """What another one recorded since the last sync, NaN included, changes nothing."""
    layer, alone = (layer_of(speculative(), device) for _ in range(2))
    x, g = seeded(0, M, K, device=device), seeded(1, M, N, device=device)
    for each in (layer, alone):
        forward_backward(each, x, g)
        sync_float8_amax_and_scale_history(each)
    wrong = x.clone()
    wrong[2, 3] = bad
    for other in (x * 50, wrong, x):
        assert_same(
            forward_backward(layer, other, g), forward_backward(copy.deepcopy(alone), other, g)
        )
    sync_float8_amax_and_scale_history(layer)
    assert forward_backward(layer, x, g)["output"].isfinite().all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    """What is computed again is cast again with the same scales."""

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            # Twice, so that the layers have recorded more when the first is computed again.
            once = checkpoint(self.inner, x, use_reentrant=use_reentrant)
            return checkpoint(self.inner, once * 20, use_reentrant=use_reentrant)

    class Twice(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x) * 20)

    ours, theirs = Checkpointed(model_of(speculative())), Twice(model_of(speculative()))
    for factor in (1.0, 100.0, 1.0):
        assert_same(step(ours, factor), step(theirs, factor))


def test_cached_weights() -> None:
    """A weight that jumped since the last sync is cast by its own amax, cached or not."""
    cached, apart = (layer_of(speculative()) for _ in range(2))
    for factor in (1.0, 30.0, 1.0):
        with torch.no_grad():
            for layer in (cached, apart):
                layer.weight.mul_(factor)
        with float8.cached_weights(cached):
            for seed in range(2):
                x, g = seeded(seed, M, K), seeded(seed + 9, M, N)
                assert_same(forward_backward(cached, x, g), forward_backward(apart, x, g))
        assert_same(fp8_state(cached), fp8_state(apart))
        for layer in (cached, apart):
            sync_float8_amax_and_scale_history(layer)


def test_compiled_with_the_bits_of_eager_mode() -> None:
    """One graph serves predictions that hold and those that do not."""
    eager, model = model_of(speculative()), model_of(speculative())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for factor in (1.0, 1.0, 100.0, 1.0):
            x, g = seeded(0, M, K) * factor, seeded(1, M, K) * factor
            want = forward_backward(eager, x, g)
            y = compiled(x_in := x.detach().requires_grad_())
            model.zero_grad(set_to_none=True)
            y.backward(g)
            got = {"output": y.detach(), "input": x_in.grad}
            got |= {name: p.grad for name, p in model.named_parameters()}
            assert_same(got, want)
            for each in (eager, model):
                sync_float8_amax_and_scale_history(each)
            assert_same(fp8_state(model), fp8_state(eager))


def test_a_scale_that_starts_from_one() -> None:
    """`enable_amax_init=False` does not let the first step saturate either."""
    ours = layer_of(speculative(enable_amax_init=False))
    theirs = layer_of(tensorwise())
    x = seeded(0, M, K) * 1e5
    assert same_bits(ours.get_buffer("fp8_scale_input"), torch.ones(()))
    with torch.no_grad():
        ours.weight.mul_(1e5)
        theirs.weight.mul_(1e5)
        assert same_bits(ours(x), theirs(x))


def test_the_layer_says_so() -> None:
    layer = layer_of(mixed(SPECULATIVE, DYNAMIC, DELAYED))
    assert "input=speculative/e4m3, weight=dynamic/e4m3, grad_output=delayed/e5m2" in repr(layer)
