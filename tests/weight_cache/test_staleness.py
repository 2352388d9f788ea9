"""Inside `cached_weights`, a weight that changed is never served as it was."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import optimizer

import float8
from float8 import (
    Float8Linear,
    Float8Tensor,
    all_linears,
    attach_to_optimizer,
    cached_weights,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.microbatches import accumulate
from support.models import FeedForward, fp8_state, seeded

SHAPE = (8, 32)
BOTH = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])


def model_of(config=None, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = FeedForward(32, 48).to(device)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def layers_of(model: nn.Module) -> list[Float8Linear]:
    return [layer for layer in model.modules() if isinstance(layer, Float8Linear)]


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


@torch.no_grad()
def by_hand(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.weight.mul_(3)


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


def test_another_error_is_not_hidden() -> None:
    model = model_of()

    def use() -> None:
        with cached_weights(model):
            by_hand(model)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    assert_closed(model)


def test_a_write_by_hand_after_the_last_eager_use_is_fine() -> None:
    model = model_of()
    with cached_weights(model):
        accumulate(model, model, 0, SHAPE)
        by_hand(model)
    assert_closed(model)


# ---------------------------------------------------------------- opening and closing


def assert_closed(model: nn.Module) -> None:
    for layer in layers_of(model):
        assert layer.cached_weight is None
        assert layer.weight_cache is None


def test_an_error_on_entry_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    calls = []

    def fails_at_last(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("full")
        return cast(*args, **kwargs)

    cast = float8.weight_cache.cast_weight
    monkeypatch.setattr(float8.weight_cache, "cast_weight", fails_at_last)
    with pytest.raises(MemoryError, match="full"), cached_weights(model):
        pass
    assert_closed(model)


def test_nothing_is_cached_outside() -> None:
    model = model_of()
    assert_closed(model)
    with cached_weights(model):
        assert all(layer.cached_weight is not None for layer in layers_of(model))
    assert_closed(model)


def test_contexts_within_contexts() -> None:
    model = model_of()
    whole, part = cached_weights(model), cached_weights(model.w1)
    with whole:
        outer = [layer.cached_weight for layer in layers_of(model)]
        with part, whole, cached_weights(model):
            inner = [layer.cached_weight for layer in layers_of(model)]
            assert all(a is b for a, b in zip(inner, outer, strict=True))
        assert all(layer.cached_weight is not None for layer in layers_of(model))
    assert_closed(model)
    with part:
        assert model.w1.cached_weight is not None
        assert model.w2.cached_weight is None
        with whole:
            assert model.w2.cached_weight is not None
        assert model.w1.cached_weight is not None
        assert model.w2.cached_weight is None
    assert_closed(model)


@BOTH
def test_entered_again_it_takes_the_same_memory_and_new_values(config) -> None:
    model = model_of(config)
    caching = cached_weights(model)
    seen = []
    for _ in range(2):
        with caching:
            operands = [layer.cached_weight for layer in layers_of(model)]
            seen.append([[t.data_ptr() for t in operand if t is not None] for operand in operands])
            rows = [operand.row.float() * operand.scale for operand in operands]
        for layer, row in zip(layers_of(model), rows, strict=True):
            torch.testing.assert_close(row, layer.weight.detach(), rtol=0.07, atol=1e-3)
        with torch.no_grad():  # outside, any write will do
            for layer in layers_of(model):
                layer.weight.data.mul_(-2)
    assert seen[0] == seen[1]


def test_a_backward_may_come_after() -> None:
    model, plain = model_of(), model_of()
    for module, around in ((model, cached_weights(model)), (plain, torch.enable_grad())):
        with around:
            y = module(seeded(0, *SHAPE))
        y.sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(a.grad, b.grad)


def test_inference_mode_inside_and_around() -> None:
    model, x = model_of(), seeded(0, *SHAPE)
    wanted = model(x)
    with cached_weights(model):
        with torch.inference_mode():
            assert same_bits(model(x), wanted)
        by_hand(model)
        with torch.inference_mode():
            model(x)  # casts again
        model(x.requires_grad_()).sum().backward()
    with torch.inference_mode():
        caching = cached_weights(model)
        caching.__enter__()
    model(x).sum().backward()
    caching.__exit__(None, None, None)


@BOTH
def test_copies_and_checkpoints_carry_nothing(config) -> None:
    model = model_of(config)
    names = list(model.state_dict())
    size = len(pickle.dumps(model))
    with cached_weights(model):
        assert list(model.state_dict()) == names
        assert [n for n, _ in model.named_buffers()] == [n for n in names if "fp8_" in n]
        copied = copy.deepcopy(model)
        pickled = pickle.dumps(model)
        converted = Float8Linear.from_float(model.w1, config)
        assert all(layer.cached_weight is not None for layer in layers_of(model))
    assert abs(len(pickled) - size) < 200
    for other in (copied, pickle.loads(pickled), converted):
        assert_closed(other)


def test_models_without_layers_to_cache() -> None:
    with cached_weights(nn.Linear(4, 4)):
        pass
    with pytest.raises(TypeError, match=r"model: got int, expected an nn\.Module"):
        cached_weights(3)  # type: ignore[arg-type]


class Sharded(torch.Tensor):
    """Stands for a DTensor."""


def test_weights_that_are_no_plain_tensors_are_named() -> None:
    model = model_of()
    model.w1.weight = nn.Parameter(model.w1.weight.detach().as_subclass(Sharded))
    caching = cached_weights(model)
    with pytest.warns(UserWarning, match=r"1 layer\(s\) cast .*: w1 \(Sharded\)"):
        caching.__enter__()
    assert model.w1.cached_weight is None
    assert model.w2.cached_weight is not None
    caching.__exit__(None, None, None)


def test_float8_weights_are_served_as_they_are(recwarn: pytest.WarningsRecorder) -> None:
    model = model_of()
    weight = Float8Tensor.from_high_precision(model.w1.weight.detach())
    model.w1.weight = nn.Parameter(weight, requires_grad=False)
    wanted = model(seeded(0, *SHAPE))
    with cached_weights(model):
        assert model.w1.cached_weight is None
        assert same_bits(model(seeded(0, *SHAPE)), wanted)
    assert not [w for w in recwarn if "cached_weights" in str(w.message)]
