"""`Watch` on one device: exact numbers, and that nothing else of a training changes."""

import copy
import io
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel

from float8 import (
    CastConfig,
    ScalingType,
    Watch,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    convert_to_high_precision,
    numerics,
)
from float8.delayed.cast import DelayedScale
from float8.formats import E4M3, E5M2
from float8.names import unwrapped
from float8.numerics import measure
from float8.quantize import Cast
from float8.scales import amax_to_scale
from sqnr import same_bits
from support.devices import on_devices
from support.errors import require_errors
from support.experts import Experts
from support.models import seeded
from support.reference import reference_values
from support.rings import short
from support.training import Wrapped

pytestmark = pytest.mark.xdist_group("compilers")  # one worker makes them ready

M, K, N = 37, 50, 23


def layers_of(recipe: str | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 9, bias=False))
    if recipe is not None:
        convert_to_float8_training(model, config=recipe, module_filter_fn=all_linears)
    return model


def wide(*shape: int, seed: int = 1) -> Tensor:
    """Of many sizes, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.logspace(0, -7, shape[-1])
    return x * (torch.rand(shape, generator=generator) > 0.1)


def seen_in_a_step(model: nn.Module, x: Tensor, g: Tensor) -> dict[str, float]:
    with Watch(model, 1) as watch:
        model(x).backward(g)
        return watch.step()


BLOCKS: dict[str, tuple[dict[str, Any], ...]] = {
    "tensorwise": ({}, {}, {"dtype": E5M2}),
    "rowwise": ({"block": (1, 0), "power_of_2": True},) * 3,
    "blockwise": ({"block": (1, 128)}, {"block": (128, 128)}, {"block": (1, 128)}),
}
"""How input, weight and grad_output are cast."""


@on_devices
@pytest.mark.parametrize("recipe", BLOCKS)
def test_shares_are_those_of_a_recount_in_float64(recipe: str, device: str) -> None:
    model, x, g = layers_of(recipe), wide(3, M, K).to(device), wide(3, M, 9, seed=2).to(device)
    model[1].weight.data = wide(9, N, seed=3)
    model[1].weight.data[2] = 0
    model.to(device)
    seen = seen_in_a_step(model, x, g)
    assert len(seen) == 2 * 3 * 4
    for key, read, how in (
        ("0/input", x, BLOCKS[recipe][0]),
        ("1/weight", model[1].weight.detach(), BLOCKS[recipe][1]),
        ("1/grad_output", g, BLOCKS[recipe][2]),
    ):
        read = read.flatten(0, -2).cpu()
        cast = reference_values(read, **{"dtype": E4M3, **how})
        lost = (cast == 0) & (read != 0)
        assert lost.any() or key != "0/input"
        assert seen[f"{key}/amax"] == read.abs().max().item()
        assert seen[f"{key}/underflow"] == lost.sum().item() / (read != 0).sum().item()
        assert seen[f"{key}/saturation"] == seen[f"{key}/nonfinite"] == 0


def test_delayed_scales_cut() -> None:
    model, x, g = layers_of("delayed"), wide(M, K), wide(M, 9, seed=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    attach_to_optimizer(model, optimizer)
    for _ in range(2):
        model(x).backward(g)
        optimizer.step()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    seen = seen_in_a_step(model, 8 * x, 4 * g)
    cut = (8 * x.abs() > x.abs().max()).sum().item() / (x != 0).sum().item()
    assert seen["0/input/saturation"] == cut > 0.05
    assert seen["1/grad_output/saturation"] == (
        (4 * g.abs() > g.abs().max()).sum().item() / (g != 0).sum().item()
    )
    assert seen["0/weight/saturation"] == 0  # dynamic
    for name, buffer in model.named_buffers():  # recorded by the layer alone, once
        assert same_bits(buffer, before[name]) == ("amax_" not in name or "history" in name)
    assert model[0].fp8_amax_input == 8 * x.abs().max()
    seen = seen_in_a_step(model.requires_grad_(False), (80 * x).requires_grad_(), 40 * g)
    assert seen["0/input/saturation"] == seen["1/grad_output/saturation"] == 0  # of the data


def test_what_is_cut_to_the_bit() -> None:
    how, amax = CastConfig(ScalingType.DELAYED, target_dtype=E4M3), torch.zeros(())
    for seed in range(50):  # scales are rounded up and down: the amax itself is not cut
        x = wide(2, 16, seed=seed)
        scale = amax_to_scale(x.abs().max(), E4M3, False)
        assert measure(x, Cast(how, DelayedScale(scale, amax)))[4] == 0
    scale = torch.tensor(257.4 / 448)  # which bfloat16 has not: 258 is the next
    x = torch.tensor([[258.0, 256.0, -258.0, math.inf, math.nan]], dtype=torch.bfloat16)
    numbers = measure(x, Cast(how, DelayedScale(scale, amax)))
    assert numbers.tolist()[1:] == [5, 5, 0, 2, 2]
    x = wide(M, K)
    x[0, 0] = math.nan  # and so is its scale
    seen = seen_in_a_step(layers_of("delayed"), x, wide(M, 9))
    assert seen["0/input/saturation"] == 0
    assert seen["0/input/nonfinite"] == 1 / (M * K)


def test_weights_are_cast_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, casts = layers_of("tensorwise"), []
    monkeypatch.setattr(
        numerics, "measure", lambda x, *rest, **more: casts.append(x) or measure(x, *rest, **more)
    )
    with Watch(model, 1) as watch:
        for _ in range(3):
            model(wide(M, K)).sum().backward()
        watch.step()
    assert sum(x is model[0].weight for x in casts) == 1
    assert len(casts) == 2 * (1 + 3 + 3)


def test_zeros_and_what_is_not_finite() -> None:
    model, x, g = layers_of("tensorwise"), wide(M, K), torch.zeros(M, 9)
    for bad, amax in ((math.inf, math.inf), (math.nan, math.nan), (-math.inf, math.inf)):
        x[3, 7] = bad
        seen = seen_in_a_step(model, x, g)
        assert seen["0/input/amax"] == pytest.approx(amax, nan_ok=True)
        assert seen["0/input/nonfinite"] == 1 / (M * K)
        assert seen["0/weight/nonfinite"] == 0
        assert seen["1/input/nonfinite"] == 1  # one scale, and so all of the output
        assert [seen[f"1/grad_output/{x}"] for x in ("amax", "underflow", "nonfinite")] == [0, 0, 0]
    x[3] = 0
    model[1].weight.data[2, 2:4] = math.inf
    seen = seen_in_a_step(model, x, g)
    assert seen["0/input/nonfinite"] == seen["1/input/nonfinite"] == 0
    assert seen["1/weight/nonfinite"] == 2 / (9 * N)


# ---------------------------------------------------------------- nothing else changes


def train(model: nn.Module, every: int | None) -> list[Tensor]:
    """Six steps of two microbatches, and evaluations between; losses, gradients, all state."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    attach_to_optimizer(model, optimizer)
    watch = None if every is None else Watch(model, every)
    first = "inner.0" if isinstance(model, Wrapped) else "0"
    found, told = [], []
    for step in range(6):
        for seed in (2 * step, 2 * step + 1):
            loss = (model(wide(M, K, seed=seed)) - 1).square().mean()
            loss.backward()
            found.append(loss.detach())
        with torch.no_grad():
            model(torch.full((M, K), 1e6))  # an evaluation, of which nothing is counted
        told.append({} if watch is None else watch.step())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if every is not None:
        assert [bool(seen) for seen in told] == [(n + 1) % every == 0 for n in range(6)]
        assert all(seen[f"{first}/input/amax"] < 100 for seen in told if seen)
    return [*found, *model.state_dict().values()]


@pytest.mark.parametrize(
    ("recipe", "how"),
    short(
        range(5),
        [
            ("delayed", "checkpoint"),
            *((recipe, "plain") for recipe in ("tensorwise", "delayed", "rowwise", "blockwise")),
            *((recipe, "checkpoint") for recipe in ("tensorwise", "rowwise", "blockwise")),
        ],
    ),
)
def test_a_watched_training_has_the_same_bits(recipe: str, how: str) -> None:
    model, other = (Wrapped(layers_of(recipe), how) for _ in range(2))
    assert all(map(same_bits, train(model, 2), train(other, None)))
    assert all("_float8_observers" not in vars(layer) for layer in model.modules())


class Block(nn.Sequential):
    """Whose forward is code of its own, and so one graph."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x))  # type: ignore[no-any-return]


def test_compiled_blocks_stay_one_graph() -> None:
    torch._dynamo.reset()
    model, eager, counter = Block(*layers_of("delayed")), layers_of("delayed"), CompileCounter()
    model.compile(backend=counter, fullgraph=True)
    assert all(map(same_bits, train(model, 3), train(eager, None)))
    assert counter.frame_count == 2  # a training and an evaluation
    x, g = wide(M, K), wide(M, 9, seed=2)
    assert seen_in_a_step(model, x, g) == seen_in_a_step(eager, x, g)
    torch._dynamo.reset()


class Blocks(nn.Module):
    """Blocks, and a head that is registered first."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            Block(nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(count)
        )
        convert_to_float8_training(self, module_filter_fn=all_linears)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def compile_whole(model: Any, **how: Any) -> tuple[Any, nn.Module]:
    model.compile(**how)
    return model, model


def compile_around(model: Any, **how: Any) -> tuple[Any, nn.Module]:
    optimized: Any = torch.compile(model, **how)
    return optimized, optimized


def compile_blocks(model: Any, **how: Any) -> tuple[Any, nn.Module]:
    for block in model.blocks:
        block.compile(**how)
    return model, model


def compile_around_blocks(model: Any, **how: Any) -> tuple[Any, nn.Module]:
    for n, block in enumerate(model.blocks):
        model.blocks[n] = torch.compile(block, **how)
    return model, model


def compile_function(model: Any, **how: Any) -> tuple[Any, nn.Module]:
    return torch.compile(lambda x: model(x), **how), model


def compile_out_of_sight(model: Any, **how: Any) -> tuple[Any, nn.Module]:
    return torch.compile(model, **how), model


EAGER = compile_whole, compile_around, compile_blocks, compile_around_blocks
STAY_COMPILED = compile_function, compile_out_of_sight


@pytest.fixture
def calls() -> Any:
    """Run with a backend that counts calls of compiled code; Dynamo begins, and ends, anew."""
    torch._dynamo.reset()
    yield Calls()
    torch._dynamo.reset()


class Calls:
    def __init__(self) -> None:
        self.graphs, self.calls = 0, 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


@pytest.mark.parametrize(
    "compiled", short({0}, [compile_whole, compile_around_blocks, compile_function])
)
def test_two_models_and_their_watches(compiled: Any, calls: Calls) -> None:
    """Steps that nobody watches run compiled code, all the time, and compile nothing."""
    # Dynamo compiles one code at most eight times.
    each = 10 if compiled in (compile_blocks, compile_around_blocks) else 1
    models = [compiled(Blocks(each), backend=calls, fullgraph=True) for _ in range(2)]
    eager = Blocks(each)
    watches = [Watch(model, every) for (_, model), every in zip(models, (3, 4), strict=True)]
    found, graphs, x = [], [], seeded(1, 8, 16)
    for _ in range(9):
        calls.calls = 0
        for call, _ in models:
            call(x).sum().backward()
        found.append((calls.calls, [watch.step() for watch in watches]))
        graphs.append(calls.graphs)
    stays = compiled in STAY_COMPILED
    for step, (count, seen) in enumerate(found, 1):
        watched = [step % 3 == 0, step % 4 == 0]
        assert count == each * (2 if stays else 2 - sum(watched))
        assert [bool(numbers) for numbers in seen] == watched
    assert len(graphs) == 9
    assert len({*graphs[:2], *([] if stays else graphs)}) == 1
    assert graphs[-1] == graphs[3]
    with Watch(eager, 1) as watch:
        eager(x).sum().backward()
        wanted = watch.step()
    assert list(found[2][1][0]) == list(wanted)
    assert found[2][1][0] == found[3][1][1] == pytest.approx(wanted, rel=1e-5)
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("compiled", short({0}, [compile_around, compile_blocks, compile_function]))
def test_watches_of_one_model_end_in_any_order(compiled: Any, calls: Calls) -> None:
    (call, model), x = compiled(Blocks(), backend=calls), seeded(1, 8, 16)

    def step() -> int:
        before = calls.calls
        call(x).sum().backward()
        return calls.calls - before

    each = step()
    stays = compiled in STAY_COMPILED
    one, other = Watch(model, 1), Watch(model, 1)
    one.close()  # under the other one
    assert step() == (each if stays else 0)
    assert other.step()["head/input/nonfinite"] == 0
    other.close()
    assert step() == each
    Watch(model, 1)  # nobody has it
    assert step() == each
    watch = Watch(model, 2)
    assert watch.step() == {}
    with pytest.raises(ZeroDivisionError), Watch(model, 1):
        call(x).sum().backward(torch.tensor(1 / 0))
    assert step() == (each if stays else 0)  # that of the first watch
    del watch
    graphs = calls.graphs
    assert step() == each
    assert calls.graphs == graphs
    assert all("_float8_observers" not in vars(layer) for layer in model.modules())


def test_stances_are_their_users(calls: Calls) -> None:
    (call, model), x = compile_around(Blocks(), backend=calls), seeded(1, 8, 16)
    call(x).sum().backward()
    stance: Any = torch.compiler.set_stance
    with Watch(model, 2) as watch:
        for mine in ("force_eager", "fail_on_recompile", "default"):
            with stance(mine):
                watch.step()
                call(x).sum().backward()
                assert watch.step()
                assert torch._dynamo.eval_frame._stance.stance == mine
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert calls.graphs == 1


@pytest.mark.parametrize("compiled", short({0, 1}, [None, *EAGER]))
def test_copies_are_not_watched(compiled: Any, calls: Calls) -> None:
    model: Any = Blocks()
    call, model = (model, model) if compiled is None else compiled(model, backend=calls)
    x = seeded(1, 8, 16)
    with Watch(model, 1) as watch:
        call(x).sum().backward()
        inner = unwrapped(model)
        copies = [copy.deepcopy(inner), AveragedModel(inner).module]
        if compiled is not compile_around_blocks:  # torch cannot pickle an OptimizedModule
            torch.save(inner, file := io.BytesIO())
            file.seek(0)
            copies += [torch.load(file, weights_only=False), pickle.loads(pickle.dumps(inner))]
        for each in copies:
            assert all("_float8_observers" not in vars(layer) for layer in each.modules())
            each(1e3 * x).sum().backward()
        assert watch.step()["blocks.0.0/input/amax"] < 100
    with Watch(copies[0], 1) as watch:
        copies[0](1e3 * x).sum().backward()
        assert watch.step()["blocks.0.0/input/amax"] > 100


def test_backwards_after_a_step_count_nothing() -> None:
    model, x = layers_of("tensorwise"), wide(M, K)
    with Watch(model, 1) as watch:
        late = model(x).sum()
        assert {key.split("/")[1] for key in watch.step()} == {"input", "weight"}
        late.backward()
        assert watch.step() == {}


# ---------------------------------------------------------------- the order


class Branches(nn.Module):
    """Layers that are registered in another order than they run; `w2` runs last, and `a` twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.root = False
        for name in ("head", "w2", "a", "w1", "w3"):
            self.add_module(name, nn.Linear(16, 16))
        convert_to_float8_training(self, module_filter_fn=all_linears)

    def forward(self, x: Tensor) -> Tensor:
        m: Any = self
        x = m.a(x)
        if m.root:  # whose derivative at 0 is infinite
            x = x + (0 * x).abs().sqrt()
        x = m.w1(x).sigmoid() * m.w3(x)
        return m.head(m.w2(m.a(x)))  # type: ignore[no-any-return]


def orders(seen: dict[str, float], what: str = "amax") -> tuple[list[str], list[str]]:
    """Names of layers in the order of their inputs, and of their grad_outputs, where not 0."""
    inputs, grads = (
        [key.split("/")[0] for key, x in seen.items() if key.endswith(f"{role}/{what}") and x != 0]
        for role in ("input", "grad_output")
    )
    return inputs, grads


@pytest.mark.parametrize(
    "how",
    short({"plain", "checkpoint", "reentrant"}, ["plain", "checkpoint", "reentrant", "compiled"]),
)
def test_the_order_is_that_of_execution(how: str, calls: Calls) -> None:
    model: Any = Branches()
    inner = Wrapped(model, "plain" if how == "compiled" else how)
    run: Any = torch.compile(lambda x: inner(x), backend=calls) if how == "compiled" else inner
    x = seeded(1, 8, 16).requires_grad_()  # as reentrant checkpoints ask for
    with Watch(model, 1) as watch:
        for _ in range(2):
            run(x).sum().backward()
        seen = watch.step()
        assert orders(seen) == (["a", "w1", "w3", "w2", "head"], ["head", "w2", "a", "w3", "w1"])
        assert list(seen)[::4][:2] == ["a/input/amax", "a/weight/amax"]
        # w3 makes the first NaN: `a`, which ran before it, has it in its second call.
        model.w3.bias.data[0] = math.nan
        run(x).sum().backward()
        assert orders(watch.step(), "nonfinite")[0] == ["a", "w2", "head"]
        model.w3.bias.data[0] = 0
        model.root = True
        run(x).sum().backward()
        seen = watch.step()
        assert orders(seen, "nonfinite") == ([], ["a"])
        assert orders(seen)[1] == ["head", "w2", "w3", "w1", "a"]


def test_names_are_those_without_wrappers_and_layers_in_high_precision_have_none() -> None:
    model = layers_of(None)
    convert_to_float8_training(model, module_filter_fn=lambda mod, fqn: fqn == "1")
    seen = seen_in_a_step(torch.compile(model, backend="eager"), wide(M, K), wide(M, 9))  # type: ignore[arg-type]
    assert {key.split("/")[0] for key in seen} == {"1"}
    assert seen_in_a_step(layers_of(None), wide(M, K), wide(M, 9)) == {}
    frozen = layers_of("tensorwise").requires_grad_(False)
    with Watch(frozen, 1) as watch:
        frozen(wide(M, K))
        assert {key.split("/")[1] for key in watch.step()} == {"input", "weight"}
        assert watch.step() == {}  # nothing ran


def test_conversions_between_steps() -> None:
    model = nn.ModuleDict({"layer": layers_of("tensorwise"), "experts": Experts(wide)})
    convert_to_float8_training(model, config="rowwise", module_filter_fn=all_linears)
    x, offs = wide(20, 32), torch.tensor([8, 8, 20], dtype=torch.int32)

    def step() -> set[str]:
        (model["layer"](wide(M, K)).sum() + model["experts"](x, offs).sum()).backward()
        return {key.split("/")[0] for key in watch.step()}

    with Watch(model, 1) as watch:
        every = {"layer.0", "layer.1", "experts", "experts.w1"}
        assert step() == every
        convert_to_high_precision(model["layer"])
        assert step() == {"experts", "experts.w1"}
        convert_to_float8_training(model, config="tensorwise", module_filter_fn=all_linears)
        step()
        assert step() == every
        convert_to_high_precision(model)
        model["layer"](wide(M, K)).sum().backward()
        assert watch.step() == {}
    root = convert_to_float8_training(nn.Linear(K, N), module_filter_fn=all_linears)
    assert "(root)/input/amax" in seen_in_a_step(root, wide(M, K), wide(M, N))


def test_what_cannot_be_watched() -> None:
    model, every = layers_of("tensorwise"), "expected a number of steps >= 1"
    require_errors(
        ("TypeError: model: got function, expected an nn.Module", Watch, [lambda x: x]),
        (f"TypeError: every: got 0, {every}", partial(Watch, every=0), [model]),
        (f"TypeError: every: got 1.5, {every}", partial(Watch, every=1.5), [model]),
    )
    assert "_float8_observers" not in vars(model[0])
    without = "ValueError: model: got a ReLU without Parameters, expected some"
    require_errors((without, Watch(nn.ReLU(), 1).step, []))


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_experts_by_the_names_of_their_weights(recipe: str) -> None:
    whole = nn.ModuleDict({"experts": Experts(wide)})
    convert_to_float8_training(whole, config=recipe, module_filter_fn=all_linears)
    x, offs = wide(24, 32), torch.tensor([8, 8, 20], dtype=torch.int32)
    x[20:] = math.nan  # rows of nobody
    with Watch(whole, 1) as watch:
        y = whole["experts"](x, offs)
        y[:20].sum().backward()
        seen = watch.step()
    of_a_copy = "experts"
    assert {key.rsplit("/", 2)[0] for key in seen} == {"experts.w1", of_a_copy}
    groups, (how, of_weights, _) = (x[:8], x[8:20]), BLOCKS[recipe]
    lost = sum(((reference_values(g, **how) == 0) & (g != 0)).sum().item() for g in groups)
    assert seen["experts.w1/input/underflow"] == lost / (x[:20] != 0).sum().item() > 0
    assert seen["experts.w1/input/amax"] == x[:20].abs().max().item()
    assert seen["experts.w1/input/nonfinite"] == 0
    weights = whole["experts"].w1.detach()
    lost = sum(((reference_values(w, **of_weights) == 0) & (w != 0)).sum().item() for w in weights)
    assert seen["experts.w1/weight/underflow"] == lost / (weights != 0).sum().item()
    assert "_float8_observers" not in vars(whole["experts"])
