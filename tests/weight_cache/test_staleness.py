"""Inside `cached_weights`, a weight that changed is never served as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import optimizer

from float8 import (
    attach_to_optimizer,
    cached_weights,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.microbatches import (
    SHAPE,
    accumulate,
    assert_closed,
    by_hand,
    layers_of,
    model_of,
)
from support.models import fp8_state, seeded

BOTH = pytest.mark.parametrize(
    # Weights that change between microbatches look like a step without a sync.
    "config",
    [tensorwise(), delayed(enable_pre_and_post_forward=False)],
    ids=["dynamic", "delayed"],
)


class Hidden(torch.optim.Optimizer):
    """Writes past the version counters, as some optimizers of others do."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.1 * p.grad)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD, for loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "AdamW, for loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "through .data": Hidden,
}

COMPILE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}


def both_ways(config, how: str, act: Callable[[nn.Module, int], None], device: str = "cpu"):
    """Microbatches with `act` before each, without and with the cache: all results."""
    torch._dynamo.reset()
    models, results = [model_of(config, device) for _ in range(2)], []
    for model in models:
        call = COMPILE[how](model)
        accumulate(model, call, 0, SHAPE)  # a history for delayed scaling
        sync_float8_amax_and_scale_history(model)
        by_hand(model)  # from here on another sync changes the weights' scales
    for model, around in zip(models, (lambda m: torch.enable_grad(), cached_weights), strict=True):
        call = COMPILE[how](model)
        with around(model):
            results.append(accumulate(model, call, 0, SHAPE, between=lambda n: act(model, n)))  # noqa: B023
        results[-1] |= {name: b.clone() for name, b in fp8_state(model).items()}
        results[-1] |= {name: p.detach().clone() for name, p in model.named_parameters()}
    return results


def assert_equal(results: list[dict[str, Tensor]]) -> None:
    without, with_cache = results
    for name, wanted in without.items():
        assert same_bits(with_cache[name], wanted), name


# ---------------------------------------------------------------- optimizer steps


class Stepper:
    """Steps an optimizer of its own for each model, before all microbatches but the first."""

    def __init__(self, optimizer: str) -> None:
        self._make = OPTIMIZERS[optimizer]
        self._optimizers: dict[nn.Module, torch.optim.Optimizer] = {}

    def __call__(self, model: nn.Module, microbatch: int) -> None:
        if model not in self._optimizers:
            self._optimizers[model] = self._make(list(model.parameters()))
            attach_to_optimizer(model, self._optimizers[model])
        if microbatch:
            self._optimizers[model].step()
            for layer in layers_of(model):  # cached again at once, where it was
                assert (layer.weight_cache is None) == (layer.cached_weight is None)


@on_devices
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@BOTH
def test_an_optimizer_step_inside(device: str, config, optimizer: str) -> None:
    assert_equal(both_ways(config, "eager", Stepper(optimizer), device))


@pytest.mark.parametrize("optimizer", ["AdamW, fused", "through .data"])
@BOTH
def test_an_optimizer_step_inside_compiled(config, optimizer: str) -> None:
    assert_equal(both_ways(config, "compiled", Stepper(optimizer)))


def test_a_compiled_optimizer_step_inside() -> None:
    torch._dynamo.reset()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model, backend="aot_eager")
    step = torch.compile(optimizer.step, backend="aot_eager")
    with cached_weights(model):
        run(seeded(0, *SHAPE)).sum().backward()
        before = [layer.weight.detach().clone() for layer in layers_of(model)]
        step()
        for layer, old in zip(layers_of(model), before, strict=True):
            assert not torch.equal(layer.weight, old)
            assert layer.weight_cache is not None
            assert layer.weight_cache.holds(layer.weight)


def test_other_models_steps_cast_nothing() -> None:
    model, other = model_of(), model_of()
    accumulate(other, other, 0, SHAPE)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with cached_weights(model):
        before = [layer.cached_weight for layer in layers_of(model)]
        optimizer.step()
        after = [layer.cached_weight for layer in layers_of(model)]
        assert all(a is b for a, b in zip(before, after, strict=True))


def test_hooks_of_optimizers_are_there_only_while_a_context_is_open() -> None:
    hooks = (
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    )
    before = [len(h) for h in hooks]
    with cached_weights(model_of()):
        assert [len(h) for h in hooks] == [n + 1 for n in before]
    assert [len(h) for h in hooks] == before


# ---------------------------------------------------------------- loading, moving, replacing


def load(model: nn.Module, assign: bool) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in state.items():
        state[name] = value if "fp8_" in name else 3 * value
    model.load_state_dict(state, assign=assign)


def replace(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.weight = nn.Parameter(3 * layer.weight.detach())


def reset(model: nn.Module) -> None:
    for index, layer in enumerate(layers_of(model)):
        torch.manual_seed(100 + index)
        layer.reset_parameters()


def by_data(model: nn.Module) -> None:
    """A new tensor as `.data`: another address."""
    for layer in layers_of(model):
        layer.weight.data = 3 * layer.weight.data


def sync_only(model: nn.Module) -> None:
    sync_float8_amax_and_scale_history(model)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "load": lambda model: load(model, assign=False),
    "load, assign": lambda model: load(model, assign=True),
    "replace": replace,
    "reset": reset,
    "sync": sync_only,
}
NOTICED_IN_EAGER_MODE = {"by hand": by_hand, "new data": by_data}


@BOTH
@pytest.mark.parametrize(
    ("how", "change"),
    [("eager", name) for name in (*CHANGES, *NOTICED_IN_EAGER_MODE)]
    + [("compiled", name) for name in CHANGES],
)
def test_a_change_between_microbatches(config, how: str, change: str) -> None:
    act = (CHANGES | NOTICED_IN_EAGER_MODE)[change]
    results = both_ways(config, how, lambda model, n: act(model) if n == 2 else None)
    assert_equal(results)
    if change != "sync":
        assert not same_bits(
            results[0]["output 2"], both_ways(config, how, unchanged)[0]["output 2"]
        )


def unchanged(model: nn.Module, microbatch: int) -> None:
    """The control: nothing happens between microbatches."""


@pytest.mark.parametrize("how", COMPILE)
@BOTH
def test_another_dtype(config, how: str) -> None:
    model, plain = model_of(config), model_of(config)
    call = COMPILE[how](model)
    with cached_weights(model):
        call(seeded(0, *SHAPE)).sum().backward()
        model.bfloat16().zero_grad()
        got = call(seeded(0, *SHAPE, dtype=torch.bfloat16))
    plain(seeded(0, *SHAPE)).sum().backward()
    wanted = plain.bfloat16()(seeded(0, *SHAPE, dtype=torch.bfloat16))
    assert same_bits(got, wanted)


def test_functional_call_takes_the_weights_it_is_given() -> None:
    model = model_of()
    x = seeded(0, *SHAPE)
    others = {name: 3 * p.detach() for name, p in model.named_parameters()}
    wanted = [model(x), torch.func.functional_call(model, others, (x,)), model(x)]
    with cached_weights(model):
        got = [model(x), torch.func.functional_call(model, others, (x,)), model(x)]
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a, b)


def test_a_recorded_graph_casts_for_itself() -> None:
    model = model_of()
    x = seeded(0, *SHAPE)
    with cached_weights(model), torch.no_grad():
        graph = make_fx(lambda x: model(x))(x)
    by_hand(model)
    assert same_bits(graph(x), model(x))


# ---------------------------------------------------------------- writes by hand, compiled


@pytest.mark.parametrize("then", ["exit", "optimizer step"])
def test_a_write_by_hand_under_compiled_code_raises(then: str) -> None:
    torch._dynamo.reset()
    model = model_of()
    call = COMPILE["compiled"](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def use() -> None:
        with cached_weights(model):
            accumulate(model, call, 0, SHAPE)
            by_hand(model)
            if then == "optimizer step":
                optimizer.step()
                pytest.fail("stepped with gradients of other weights")

    with pytest.raises(RuntimeError, match="the weight of layer 'w1' was written by hand inside"):
        use()
    assert_closed(model)
