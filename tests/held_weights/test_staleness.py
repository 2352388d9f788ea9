"""A weight that changed is never used as it was, by whatever it was changed."""

import copy
import pickle
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    update_float8_weights,
)
from sqnr import assert_same_bits, same_bits
from support.configs import of_recipe
from support.devices import on_devices
from support.microbatches import (
    HELD,
    ON_THE_FLY,
    SHAPE,
    accumulate,
    by_hand,
    layers_of,
    model_of,
    training_forward_casts,
    with_weights,
)
from support.models import copied, gradients, seeded
from support.modes import running
from support.rings import short

Act = Callable[[nn.Module], None]


def held_model(config=None) -> nn.Module:
    model = model_of(with_weights(config))
    update_float8_weights(model)
    assert training_forward_casts(model) == 0
    return model


class Step:
    """Steps of an optimizer of its own; version counters do not tell of those of fused ones."""

    def __init__(self, attach: bool, **how: bool) -> None:
        self._attach, self._how = attach, how

    def prepare(self, model: nn.Module) -> None:
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **self._how)
        if self._attach:
            attach_to_optimizer(model, self._optimizer)

    def __call__(self, model: nn.Module) -> None:
        self._optimizer.step()


def one_layer(config: Float8LinearConfig, device: str = "cpu") -> nn.Module:
    """What compiles sooner."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.SiLU(), nn.Linear(32, 48, bias=False)).to(device)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def assert_used_as_it_is(acts: list[Act], mode: str = "eager", at: int = 2, device="cpu") -> None:
    """Steps of three microbatches, one for each act, before the microbatch `at`.

    Optimizers step before all but the first. Held weights give the bits of casts on the fly.
    """
    made = model_of if mode == "eager" else one_layer
    results = []
    # Weights that change between microbatches look like a step without a sync.
    config = of_recipe("delayed", enable_pre_and_post_forward=False)
    for weights in (ON_THE_FLY, HELD):
        model = made(with_weights(config, weights), device)
        call = running(model, mode if weights is HELD else "eager")
        found: dict[str, Tensor] = {}

        def between(microbatch: int, act: Act, model: nn.Module = model) -> None:
            if microbatch == 0 and isinstance(act, Step):
                act.prepare(model)
            if microbatch in ((1, 2) if isinstance(act, Step) else (at,)):
                act(model)

        for step, act in enumerate(acts):
            update_float8_weights(model)
            results_of = accumulate(model, call, step, SHAPE, between=partial(between, act=act))
            results_of |= copied(model)
            results_of |= {name: p.detach().clone() for name, p in model.named_parameters()}
            found |= {f"step {step}: {name}": value for name, value in results_of.items()}
        results.append(found)
    assert_same_bits(*results)


# ---------------------------------------------------------------- optimizers


@on_devices
def test_optimizer_steps(device: str) -> None:
    steps = [Step(False, foreach=True), Step(True, foreach=True), Step(True, fused=True)]
    assert_used_as_it_is(steps, device=device)


def test_each_of_several_optimizers_and_none_after_the_removal() -> None:
    model, plain = model_of(with_weights(None)), model_of()
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in model.parameters()]
    attached = [attach_to_optimizer(model, optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        accumulate(model, model, 0, SHAPE)
        optimizer.step()
        assert training_forward_casts(model) == 0
        plain.load_state_dict(model.state_dict())
        assert same_bits(model(seeded(0, *SHAPE)), plain(seeded(0, *SHAPE)))
    for each in attached:
        each.remove()
    assert training_forward_casts(model) == 3


# ---------------------------------------------------------------- other writes


def load(model: nn.Module, assign: bool = False) -> None:
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


def new_data(model: nn.Module) -> None:
    """A new tensor as `.data`, which lies where the old one did, if the allocator plays along."""
    for layer in layers_of(model):
        address, values, others = layer.weight.data_ptr(), 3 * layer.weight.detach(), []
        layer.weight.data = values
        while len(others) < 100 and (not others or others[-1].data_ptr() != address):
            others.append(values.clone())
        layer.weight.data = others[-1]


def new_strides(model: nn.Module) -> None:
    """The memory that is there, read in another order."""
    for layer in layers_of(model):
        layer.weight.data = layer.weight.data.view(layer.weight.shape[::-1]).t()


def swap(model: nn.Module) -> None:
    """Nothing may refer to what is swapped: before the first microbatch."""
    for layer in layers_of(model):
        torch.utils.swap_tensors(layer.weight, nn.Parameter(3 * layer.weight.detach()))


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        by_hand(model)


IN_PLACE: list[Act] = [by_hand, load, new_data, new_strides, in_inference_mode]
OTHERS: list[Act] = [lambda model: load(model, assign=True), replace, reset]


def test_changes_between_microbatches() -> None:
    for act in (*IN_PLACE, *OTHERS):
        assert_used_as_it_is([act])
    assert_used_as_it_is([swap], at=0)


@pytest.mark.xdist_group("compilers")
def test_changes_under_compiled_code() -> None:
    steps = [Step(True, fused=True), Step(False, foreach=True)]
    assert_used_as_it_is([by_hand, new_data, new_strides, *steps], "aot_eager")


def test_another_dtype() -> None:
    model, plain, x = held_model(), model_of(), seeded(0, *SHAPE)
    model(x).sum().backward()
    model.bfloat16().zero_grad()
    got = [model(x.bfloat16()), update_float8_weights(model), model(x.bfloat16())]
    wanted = plain.bfloat16()(x.bfloat16())
    assert same_bits(got[0], wanted)
    assert same_bits(got[2], wanted)


def test_averages_written_into_data_are_evaluated() -> None:
    """As libraries do, for the time of an evaluation; no version counter tells of it."""
    model, x = held_model(), seeded(0, *SHAPE)
    before = model(x)
    own = [layer.weight.detach().clone() for layer in layers_of(model)]
    for layer in layers_of(model):
        layer.weight.data.mul_(3)
    average = model_of()
    by_hand(average)
    assert same_bits(model.eval()(x), average(x))
    for layer, values in zip(layers_of(model), own, strict=True):
        layer.weight.data.copy_(values)
    assert same_bits(model.train()(x), before)


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


@pytest.mark.filterwarnings("ignore")  # that torch.jit is old
def test_a_recorded_graph_casts_for_itself() -> None:
    model, x = one_layer(with_weights(None)), seeded(0, *SHAPE)
    update_float8_weights(model)
    with torch.no_grad():  # with gradients torch.jit records a Python function
        recorded = [make_fx(lambda x: model(x))(x), torch.jit.trace(model, (x,))]
    # Dynamo of torch 2.11 cannot tell export from compilation.
    ways = (True, False) if TorchVersion(torch.__version__) >= "2.13" else (False,)
    programs = [torch.export.export(model, (x,), strict=strict) for strict in ways]
    for program in programs:
        assert not program.constants
        assert same_bits(program.module()(x), model(x))
    by_hand(model)
    for graph in recorded:
        assert same_bits(graph(x), model(x))


def test_copies_and_checkpoints_carry_nothing() -> None:
    config = of_recipe("delayed")
    model, size = held_model(config), len(pickle.dumps(model_of(with_weights(config))))
    names = list(model.state_dict())
    assert [n for n, _ in model.named_buffers()] == [n for n in names if "fp8_" in n]
    pickled = pickle.dumps(model)
    assert abs(len(pickled) - size) < 200
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for other in (copy.deepcopy(model), pickle.loads(pickled), averaged):
        assert training_forward_casts(other) == 3
    Float8Linear.from_float(model.w1, with_weights(config))
    assert training_forward_casts(model) == 0


class Sharded(torch.Tensor):
    """Stands for a DTensor."""


def test_weights_that_are_no_plain_tensors_are_named() -> None:
    model = model_of(with_weights(None))
    model.w1.weight = nn.Parameter(model.w1.weight.detach().as_subclass(Sharded))
    with pytest.warns(UserWarning, match=r"1 layer\(s\) cast .*: w1 \(a Sharded\)"):
        update_float8_weights(model)
    assert training_forward_casts(model) == 1
    with pytest.raises(TypeError, match=r"model: got int, expected an nn\.Module"):
        update_float8_weights(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- a write while a graph is alive


@pytest.mark.parametrize("mode", short({"eager"}, ["eager", "aot_eager"]))
def test_what_changed_is_cast_again_and_an_older_graph_is_told(mode: str) -> None:
    model, plain = held_model(), model_of()
    call = running(model, mode)
    older = call(seeded(0, *SHAPE).requires_grad_())
    by_hand(model)
    by_hand(plain)
    for _ in range(2):
        assert same_bits(call(seeded(1, *SHAPE)), plain(seeded(1, *SHAPE)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.sum().backward()


def test_a_graph_keeps_column_data_alone() -> None:
    """So row data end with the next update, and backward reads what forward did."""
    model, plain, x = held_model(), model_of(), seeded(0, *SHAPE)
    y, expected = model(x), plain(x)
    row = weakref.ref(model.w1._float8_held[0].row_data)
    update_float8_weights(model)
    assert row() is None
    y.sum().backward()
    expected.sum().backward()
    assert_same_bits(gradients(model), gradients(plain))


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
    assert_same_bits(gradients(model), gradients(plain))
