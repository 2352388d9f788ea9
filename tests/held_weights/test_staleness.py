"""A weight that changed is never used as it was, by whatever it was changed."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from float8 import (
    Float8Linear,
    attach_to_optimizer,
    float8_state_dict,
    sync_float8_amax_and_scale_history,
    update_float8_weights,
)
from sqnr import same_bits
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.microbatches import (
    HELD,
    ON_THE_FLY,
    SHAPE,
    accumulate,
    assert_held_is_cast,
    by_hand,
    counting_casts,
    layers_of,
    model_of,
    with_weights,
)
from support.models import fp8_state, seeded

BOTH = pytest.mark.parametrize(
    # Weights that change between microbatches look like a step without a sync.
    "config",
    [tensorwise(), delayed(enable_pre_and_post_forward=False)],
    ids=["dynamic", "delayed"],
)
COMPILE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}
HOW = pytest.mark.parametrize("how", COMPILE)


def held_model(config=None) -> nn.Module:
    model = model_of(with_weights(config))
    update_float8_weights(model)
    assert_held_is_cast(model)
    return model


def assert_used_as_it_is(config, how: str, act: Callable[[nn.Module, int], None], device="cpu"):
    """Microbatches with `act` before each: held weights give the bits of casts on the fly."""
    torch._dynamo.reset()
    results = []
    for weights in (ON_THE_FLY, HELD):
        model = model_of(with_weights(config, weights), device)
        # What `aot_eager` compiles has the bits of eager mode.
        call = COMPILE[how](model) if weights is HELD else model
        for _ in range(2):  # delayed scaling knows its scales then
            accumulate(model, call, 0, SHAPE)
            sync_float8_amax_and_scale_history(model)
        by_hand(model)  # from here on another sync changes the weights' scales
        update_float8_weights(model)
        found = accumulate(model, call, 0, SHAPE, between=lambda n: act(model, n))  # noqa: B023
        found |= {name: b.clone() for name, b in fp8_state(model).items()}
        results.append(found | {name: p.detach().clone() for name, p in model.named_parameters()})
    for name, wanted in results[0].items():
        assert same_bits(results[1][name], wanted), name


# ---------------------------------------------------------------- optimizers


class Hidden(torch.optim.Optimizer):
    """Writes past the version counters, as some optimizers of others do."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.1 * p.grad)


COUNTED: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "for loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
}
NOT_COUNTED: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "through .data": Hidden,
}


class Stepper:
    """Steps an optimizer of its own for each model, before all microbatches but the first."""

    def __init__(self, optimizer: str, attach: bool, compiled: bool = False) -> None:
        self._make, self._attach = (COUNTED | NOT_COUNTED)[optimizer], attach
        self._compiled = compiled
        self._steps: dict[nn.Module, Callable[[], None]] = {}

    def __call__(self, model: nn.Module, microbatch: int) -> None:
        if model not in self._steps:
            optimizer = self._make(list(model.parameters()))
            step = optimizer.step
            if self._attach:
                attach_to_optimizer(model, optimizer)
            self._steps[model] = (
                torch.compile(step, backend="aot_eager") if self._compiled else step
            )
        if microbatch:
            self._steps[model]()
            if self._attach and layers_of(model)[0].config.float8_weights is HELD:
                assert_held_is_cast(model)


@on_devices
@BOTH
def test_optimizer_steps(device: str, config) -> None:
    for optimizer in (*COUNTED, *NOT_COUNTED):
        assert_used_as_it_is(config, "eager", Stepper(optimizer, attach=True), device)
    for optimizer in COUNTED:
        assert_used_as_it_is(config, "eager", Stepper(optimizer, attach=False), device)


@pytest.mark.parametrize(("optimizer", "attach"), [("fused", True), ("foreach", False)])
def test_optimizer_steps_under_compiled_code(optimizer: str, attach: bool) -> None:
    assert_used_as_it_is(tensorwise(), "compiled", Stepper(optimizer, attach))


@pytest.mark.parametrize("optimizer", ["foreach", "fused"])
def test_a_compiled_step(optimizer: str) -> None:
    assert_used_as_it_is(tensorwise(), "eager", Stepper(optimizer, True, compiled=True))


def test_each_of_several_optimizers_and_none_after_the_removal() -> None:
    model = model_of(with_weights(None))
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in model.parameters()]
    attached = [attach_to_optimizer(model, optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        accumulate(model, model, 0, SHAPE)
        optimizer.step()
        assert_held_is_cast(model)
    for each in attached:
        each.remove()
    assert all(layer.held is None for layer in layers_of(model))


# ---------------------------------------------------------------- other writes


def load(model: nn.Module, assign: bool = False) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in state.items():
        state[name] = value if "fp8_" in name else 3 * value
    model.load_state_dict(state, assign=assign)


def load_scales(model: nn.Module) -> None:
    """Twice: the versions of new buffers are equal."""
    for factor in (2, 3):
        state = {name: factor * value for name, value in float8_state_dict(model).items()}
        model.load_state_dict(state, strict=False, assign=True)
        model(seeded(0, *SHAPE))


def replace(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.weight = nn.Parameter(3 * layer.weight.detach())


def reset(model: nn.Module) -> None:
    for index, layer in enumerate(layers_of(model)):
        torch.manual_seed(100 + index)
        layer.reset_parameters()


def new_data(model: nn.Module) -> None:
    """A new tensor as `.data`, which lies where the old one did, if the allocator plays along."""
    for layer in layers_of(model):
        address, values, others = layer.weight.data_ptr(), 3 * layer.weight.detach(), []
        layer.weight.data = values
        while len(others) < 100 and (not others or others[-1].data_ptr() != address):
            others.append(values.clone())
        layer.weight.data = others[-1]


def swap(model: nn.Module) -> None:
    for layer in layers_of(model):
        torch.utils.swap_tensors(layer.weight, nn.Parameter(3 * layer.weight.detach()))


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        by_hand(model)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "by hand": by_hand,
    "load": load,
    "load scales": load_scales,
    "new data": new_data,
    "load, assign": lambda model: load(model, assign=True),
    "replace": replace,
    "reset": reset,
    "inference mode": in_inference_mode,
    "sync": sync_float8_amax_and_scale_history,
}


@BOTH
def test_changes_between_microbatches(config) -> None:
    for act in CHANGES.values():
        assert_used_as_it_is(config, "eager", lambda model, n: act(model) if n == 2 else None)  # noqa: B023
    # Nothing may refer to what is swapped.
    assert_used_as_it_is(config, "eager", lambda model, n: None if n else swap(model))


@pytest.mark.parametrize("change", [*CHANGES][:4])
def test_changes_under_compiled_code(change: str) -> None:
    act = CHANGES[change]
    config = delayed(enable_pre_and_post_forward=False)
    assert_used_as_it_is(config, "compiled", lambda model, n: act(model) if n == 2 else None)


@HOW
@BOTH
def test_another_dtype(config, how: str) -> None:
    torch._dynamo.reset()
    model, plain = held_model(config), model_of(config)
    call, x = COMPILE[how](model), seeded(0, *SHAPE)
    call(x).sum().backward()
    model.bfloat16().zero_grad()
    got = [call(x.bfloat16()), update_float8_weights(model), call(x.bfloat16())]
    plain(x).sum().backward()
    wanted = plain.bfloat16()(x.bfloat16())
    assert same_bits(got[0], wanted)
    assert same_bits(got[2], wanted)


@HOW
def test_averages_written_into_data_are_evaluated(how: str) -> None:
    """As libraries do, for the time of an evaluation; no version counter tells of it."""
    torch._dynamo.reset()
    model, x = held_model(), seeded(0, *SHAPE)
    call = COMPILE[how](model)
    before = call(x)
    own = [layer.weight.detach().clone() for layer in layers_of(model)]
    for layer in layers_of(model):
        layer.weight.data.mul_(3)
    average = model_of()
    by_hand(average)
    assert same_bits(call.eval()(x), average(x))
    for layer, values in zip(layers_of(model), own, strict=True):
        layer.weight.data.copy_(values)
    assert same_bits(call.train()(x), before)


# ---------------------------------------------------------------- somebody else's weights


def test_functional_call_takes_the_weights_it_is_given() -> None:
    model, plain, x = held_model(), model_of(), seeded(0, *SHAPE)
    others = {name: 3 * p.detach() for name, p in model.named_parameters()}
    for _ in range(2):
        assert same_bits(
            torch.func.functional_call(model, others, (x,)),
            torch.func.functional_call(plain, others, (x,)),
        )
        assert same_bits(model(x), plain(x))


def test_a_recorded_graph_casts_for_itself() -> None:
    model, x = held_model(), seeded(0, *SHAPE)
    with torch.no_grad():
        graph = make_fx(lambda x: model(x))(x)
    # Dynamo of torch 2.11 cannot tell export from compilation.
    ways = (True, False) if TorchVersion(torch.__version__) >= "2.13" else (False,)
    programs = [torch.export.export(model, (x,), strict=strict) for strict in ways]
    for program in programs:
        assert not program.constants
        assert same_bits(program.module()(x), model(x))
    by_hand(model)
    assert same_bits(graph(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_records_casts() -> None:
    model, x = held_model(), seeded(0, *SHAPE)
    with torch.no_grad():  # with gradients a Python function is recorded
        traced = torch.jit.trace(model, (x,))
        by_hand(model)
        assert same_bits(traced(x), model(x))


def test_copies_and_checkpoints_carry_nothing() -> None:
    model = held_model(delayed())
    names, size = list(model.state_dict()), len(pickle.dumps(model_of(with_weights(delayed()))))
    assert [n for n, _ in model.named_buffers()] == [n for n in names if "fp8_" in n]
    pickled = pickle.dumps(model)
    assert abs(len(pickled) - size) < 200
    averaged = torch.optim.swa_utils.AveragedModel(model)
    made = Float8Linear.from_float(model.w1, with_weights(delayed()))
    for other in (copy.deepcopy(model), pickle.loads(pickled), averaged, made):
        assert all(layer.held is None for layer in layers_of(other))
    assert_held_is_cast(model)


class Sharded(torch.Tensor):
    """Stands for a DTensor."""


def test_weights_that_are_no_plain_tensors_are_named() -> None:
    model = model_of(with_weights(None))
    model.w1.weight = nn.Parameter(model.w1.weight.detach().as_subclass(Sharded))
    with pytest.warns(UserWarning, match=r"1 layer\(s\) cast .*: w1 \(a Sharded\)"):
        update_float8_weights(model)
    assert model.w1.held is None
    assert model.w2.held is not None
    with pytest.raises(TypeError, match=r"model: got int, expected an nn\.Module"):
        update_float8_weights(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- a write while a graph is alive


@BOTH
def test_eager_code_keeps_the_old_bytes_for_its_backward(config) -> None:
    model, plain = held_model(config), model_of(config)
    grads = []
    for each, writes in ((plain, False), (model, True)):
        x = seeded(0, *SHAPE).requires_grad_()
        y = each(x)
        if writes:
            by_hand(each)
            with torch.no_grad():
                each(x)  # casts again
            update_float8_weights(each)
        y.sum().backward()
        grads += [[x.grad, *(p.grad for p in each.parameters())]]
    for wanted, got in zip(*grads, strict=True):
        assert same_bits(got, wanted)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_casts_on_the_fly_and_an_older_graph_is_told(backend: str) -> None:
    torch._dynamo.reset()
    model, plain = held_model(), model_of()
    call = torch.compile(model, backend=backend, fullgraph=True)
    older = call(seeded(0, *SHAPE).requires_grad_())
    with counting_casts() as casts:
        by_hand(model)
        by_hand(plain)
        outputs = [call(seeded(1, *SHAPE)) for _ in range(2)]
        assert not casts
    for output in outputs:
        assert same_bits(output, plain(seeded(1, *SHAPE)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.sum().backward()


def test_inference_mode_inside_and_around() -> None:
    model, plain, x = model_of(with_weights(None)), model_of(), seeded(0, *SHAPE)
    with torch.inference_mode():
        update_float8_weights(model)
        assert same_bits(model(x), plain(x))
        by_hand(model)
        by_hand(plain)
        assert same_bits(model(x), plain(x))  # casts again
    for each in (model, plain):
        each(x.requires_grad_()).sum().backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(mine.grad, wanted.grad)
