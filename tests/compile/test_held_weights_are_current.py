"""Compiled held weights: one graph, and never read as they were, in whatever order ops run."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import tolerances
from float8 import (
    Float8LinearConfig,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
    update_float8_weights,
)
from float8.products import Dense
from sqnr import assert_close
from support.configs import of_recipe, tensorwise
from support.devices import GPU, on_devices
from support.microbatches import HELD, ON_THE_FLY, layers_of, with_weights
from support.models import Block, FeedForward, forward_backward, gradients, seeded
from support.rings import short
from support.spies import saved_tensors
from support.training import Wrapped, one_layer, two_layers


class Parallel(nn.Module):
    """Linear layers that read one input."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "feed-forward": lambda: FeedForward(64, 192),
    "parallel": lambda: Parallel(2),
    "block": lambda: Block(64, 192),
    "checkpointed": lambda: Wrapped(Parallel(2), "checkpoint"),
}
CONFIGS = {
    "tensorwise": of_recipe("tensorwise"),
    # Weights that change between microbatches look like a step without a sync.
    "delayed": of_recipe("delayed", enable_pre_and_post_forward=False),
    "rowwise": of_recipe("rowwise"),
    "blockwise": of_recipe("blockwise"),
    # Whose GEMMs compilers see into.
    "emulated": of_recipe("tensorwise", emulate=True),
}


def load(model: nn.Module) -> None:
    model.load_state_dict({name: 1.5 * x for name, x in model.state_dict().items()})


def initialise(model: nn.Module) -> None:
    torch.manual_seed(1)
    for layer in layers_of(model):
        nn.init.normal_(layer.weight, std=0.2)


@torch.no_grad()
def copy(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.weight.copy_(-layer.weight)


def new_data(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.weight.data = 0.5 * layer.weight.detach()


def step(model: nn.Module) -> None:
    """Of optimizers that nobody attached."""
    for foreach in (False, True):
        torch.optim.SGD(model.parameters(), lr=0.002, foreach=foreach).step()


WRITES = [load, step, initialise, copy, new_data, sync_float8_amax_and_scale_history]


def made(
    model: Callable[[], nn.Module], config: Float8LinearConfig, device: str = "cpu", **how: Any
) -> nn.Module:
    """A float8 model, compiled as `how` says."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = model().to(device)
    convert_to_float8_training(module, config=config, module_filter_fn=all_linears)
    update_float8_weights(module)
    if how:
        module.compile(fullgraph=True, **how)
    return module


def results(model: str, config: Float8LinearConfig, device: str, **how) -> list[dict[str, Tensor]]:
    """Outputs and gradients of microbatches, with a write of the weights before each third."""
    module = made(MODELS[model], config, device, **how)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.002)
    attach_to_optimizer(module, optimizer)
    found: list[dict[str, Tensor]] = []
    for write in WRITES:
        write(module)
        for microbatch in range(3):
            seed = 10 * len(found)
            x, g = (seeded(seed + n, 32, 64, device=device) for n in (1, 2))
            found.append(forward_backward(module, x, g))
            # The same for all: weights that went different ways could not be compared.
            for n, p in enumerate(module.parameters()):
                p.grad = 50 * seeded(seed + n, *p.shape, device=device)
            if microbatch == 0:
                optimizer.step()
    return found


def ours_last(module: torch.fx.GraphModule, _) -> Callable:
    """Run a graph in an order in which each op of ours waits for all that can run without it."""
    before, placed, writes = list(module.graph.nodes), set(), torch.ops.aten.copy_.default
    graph, new = torch.fx.Graph(), {}
    while before:
        ready = [n for n in before if placed.issuperset(n.all_input_nodes)]

        def rank(node: torch.fx.Node) -> int:
            ours = getattr(node.target, "namespace", None) in ("float8", "higher_order")
            return 3 if node.op == "output" else 2 if node.target is writes else int(ours)

        node = min(ready, key=rank)
        new[node] = graph.node_copy(node, new.__getitem__)
        before.remove(node)
        placed.add(node)
    return make_boxed_func(torch.fx.GraphModule(module, graph))


CASES = [
    ("emulated", "parallel"),
    ("tensorwise", "parallel"),
    ("blockwise", "block"),
    ("rowwise", "checkpointed"),
    ("delayed", "feed-forward"),
]


@on_devices
@pytest.mark.parametrize(("config", "model"), short({3}, CASES))
def test_in_whatever_order_ops_run(device: str, config: str, model: str) -> None:
    wanted = results(model, with_weights(CONFIGS[config], ON_THE_FLY), device)
    backend = aot_autograd(
        fw_compiler=ours_last,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    got = results(model, with_weights(CONFIGS[config]), device, backend=backend)
    for n, (one, other) in enumerate(zip(wanted, got, strict=True)):
        assert_close(one, other, what=n)


# A CPU has few: C++ of one layer takes as long as a second to compile, and GPUs have all.
INDUCTOR = [("cpu", config, "parallel") for config in ("tensorwise", "rowwise", "emulated")]
INDUCTOR = [pytest.param(*each, marks=pytest.mark.exhaustive) for each in INDUCTOR]
INDUCTOR += [
    pytest.param("cuda", *each, marks=GPU)
    for each in (("rowwise", "parallel"), ("rowwise", "feed-forward"), *CASES)
]


@pytest.mark.parametrize(("device", "config", "model"), INDUCTOR)
def test_inductor(device: str, config: str, model: str) -> None:
    # Where nothing lies between two layers, eager mode rounds as Inductor does.
    how = {} if (model, device) == ("parallel", "cpu") else {"backend": "inductor"}
    wanted = results(model, with_weights(CONFIGS[config], ON_THE_FLY), device, **how)
    got = results(model, with_weights(CONFIGS[config]), device, backend="inductor")
    for n, (one, other) in enumerate(zip(wanted, got, strict=True)):
        assert_close(one, other, tolerances.COMPILED, n)


class Clips(Parallel):
    """Writes its weight in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.1, 0.1).mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_a_write_in_the_compiled_code_itself(backend: str) -> None:
    found, x = [], seeded(0, 32, 64).requires_grad_()
    for weights in (ON_THE_FLY, HELD):
        model = made(lambda: Clips(1), with_weights(None, weights), backend=backend)
        found.append({f"call {n}": model(x).detach() for n in range(3)})
    assert_close(*found, bound=tolerances.COMPILED)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        pytest.param("cpu", "parallel", marks=pytest.mark.exhaustive),
        *(pytest.param("cuda", kind, marks=GPU) for kind in ("parallel", "feed-forward")),
    ],
)
def test_what_is_held_is_handed_on_itself(device: str, kind: str) -> None:
    """Saved where it lies; Inductor makes no copy of it, which would be cast again at each use.

    Of rows' scales it makes copies.
    """
    cast_again = AssertionError("cast again")
    grads, kept = [], []
    for weights in (ON_THE_FLY, HELD):
        no_cast = nullcontext()
        if weights is HELD and device == "cpu":
            no_cast = mock.patch.object(Dense, "quantize_weight", side_effect=cast_again)
        config = with_weights(CONFIGS["rowwise"], weights)
        model = made(MODELS[kind], config, device, backend="inductor")
        inputs = [seeded(n, 32, 64, device=device).requires_grad_() for n in range(2)]
        with saved_tensors() as saved, no_cast:
            outputs = [model(x) for x in inputs]
        theirs = {p.data_ptr() for p in model.parameters()}
        theirs |= {each.col_data.data_ptr() for x in layers_of(model) for each in x._float8_held}
        ours = {x.data_ptr(): x.nbytes for x in saved if x.data_ptr() not in theirs}
        kept.append(sum(size for size in ours.values() if size > 1024))  # but for scales
        update_float8_weights(model)  # casts anew, elsewhere
        with no_cast:
            torch.stack(outputs).sum().backward()
        of_inputs = {f"input {n}": x.grad for n, x in enumerate(inputs)}
        grads.append(of_inputs | gradients(model))
    assert kept[0] == kept[1]
    assert_close(*grads, bound=tolerances.COMPILED)


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
@pytest.mark.parametrize(
    ("config", "how"), short({1}, [(tensorwise(), "checkpoint"), (of_recipe("delayed"), "plain")])
)
def test_one_graph_for_all_layers_and_steps(config, how: str) -> None:
    block = two_layers if how == "checkpoint" else one_layer
    model = nn.ModuleList(block(with_weights(config), how=how) for _ in range(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach_to_optimizer(model, optimizer)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)

    def run(x: Tensor) -> Tensor:
        return sum(block(x.requires_grad_()).sum() for block in model)

    kept = []
    for seed in range(4):
        # What stays allocated makes sure that the next operands lie elsewhere.
        kept.append(torch.empty(32 * 64 * 2 * 12, dtype=torch.uint8))
        for microbatch in range(2):
            run(seeded(2 * seed + microbatch, 8, 32)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert counter.frame_count == 1
    if how == "plain":
        for tokens in (16, 24, 7):
            run(seeded(0, tokens, 32)).backward()
        assert counter.frame_count == 2
