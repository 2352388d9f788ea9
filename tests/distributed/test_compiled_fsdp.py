"""The compile table: scaling x gather x what is compiled, each cell with the bits of eager mode.

On GPUs Inductor compiles: the bits are those of the other gather then, and eager mode is near.
FSDP2's hooks switch the compiler off for themselves, in this torch: compiling "with hooks" compiles
a block between them, and a whole model breaks where the first runs, as it does without float8.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from float8 import attach_to_optimizer, precompute_float8_dynamic_scale_for_fsdp
from sqnr import sqnr
from support.configs import RECIPES
from support.devices import E4M3
from support.models import fp8_state
from support.ranks import Ranks
from support.sharded import DIM, Run, convert, here, model_of, shard, small, traffic, train
from support.spies import saved_tensors
from tolerances import COMPILED

WHAT = ["blocks", "blocks with hooks", "whole model"]
IN_ONE_GRAPH = TorchVersion(torch.__version__) < "2.15"
"""Whether `fullgraph=True` takes a block with FSDP2's hooks; else they break it, float8 or not."""


def backend() -> str:
    return "inductor" if here().type == "cuda" else "aot_eager"


def compiled(recipe: str | None, all_gather: bool, what: str) -> tuple[Run, list[str], int]:
    """What training brings forth, why graphs broke, and how many were compiled."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend())
    model = small(recipe, all_gather)
    if what == "blocks":
        for block in model:
            block.compile(backend=counter, fullgraph=IN_ONE_GRAPH)
    forward = model = shard(model)
    if what == "blocks with hooks":
        for block in model:
            block.compile(backend=counter)
    if what == "whole model":
        forward = torch.compile(model, backend=counter)
    run = train(model, 2, forward=forward)
    return run, sorted(counters["graph_break"]), counter.frame_count


def cells(recipe: str, gathers: list[bool], whats: list[str]) -> None:
    breaking = [what for what in whats if what == "whole model" or not IN_ONE_GRAPH]
    plain_breaks = {what: compiled(None, False, what)[1] for what in breaking}
    other_gather: dict[str, Run] = {}
    for all_gather in gathers:
        eager = train(shard(small(recipe, all_gather)), 2)
        for what in whats:
            run, breaks, graphs = compiled(recipe, all_gather, what)
            if backend() == "aot_eager":
                run.assert_equal(eager)
            else:
                other_gather.setdefault(what, run).assert_equal(run)
                assert_near(run, eager)
            # A whole model breaks at FSDP2's own hook, float8 or not.
            assert breaks == plain_breaks.get(what, []), (all_gather, what)
            assert graphs == 2, (all_gather, what)  # none compiled again


def assert_near(run: Run, eager: Run) -> None:
    """In the first step: AdamW's makes signs of gradients, however small they are."""
    assert sqnr(eager.losses[0], run.losses[0]) > COMPILED
    assert run.grads[0].keys() == eager.grads[0].keys()
    for name, gradient in eager.grads[0].items():
        assert sqnr(gradient, run.grads[0][name]) > COMPILED, name


@pytest.mark.parametrize(
    ("recipe", "what"), [*((recipe, "blocks") for recipe in RECIPES), ("delayed", "whole model")]
)
def test_what_is_compiled_has_one_graph_per_block_and_the_bits_of_eager_mode(
    either: Ranks, recipe: str, what: str
) -> None:
    either.run(cells, recipe, [True], [what])


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_cell_has_one_graph_per_block_and_the_bits_of_eager_mode(
    either: Ranks, recipe: str
) -> None:
    either.run(cells, recipe, [False, True], WHAT)


def fused(recipe: str) -> None:
    """Feed-forwards that `fuse=True` found, compiled and under activation checkpointing."""
    runs = {}
    for how in ("eager", "checkpointed", "compiled"):
        torch._dynamo.reset()
        model = convert(model_of(), recipe, fuse=True)
        for block in model if how == "compiled" else ():
            block.compile(backend=backend(), fullgraph=IN_ONE_GRAPH)
        forward = model = shard(model)
        if how == "checkpointed":
            forward = partial(checkpoint, model, use_reentrant=False)
        runs[how] = train(model, 2, forward=forward)
    runs["checkpointed"].assert_equal(runs["eager"])
    assert_near(runs["compiled"], runs["eager"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_feed_forwards(either: Ranks, recipe: str) -> None:
    either.run(fused, recipe)


def evaluating(all_gather: bool, compile: bool) -> Run:
    """Evaluations record nothing, and the trained steps between them what they must."""
    torch._dynamo.reset()
    model = small("delayed", all_gather)
    if compile:
        # One is enough, and half the time.
        model[0].compile(backend="aot_eager", fullgraph=IN_ONE_GRAPH)
    model = shard(model)

    def evaluate(last: bool) -> None:
        before = {name: value.clone() for name, value in fp8_state(model).items()}
        with torch.no_grad():
            model(64 * torch.ones(4, DIM))
        for name, value in fp8_state(model).items():
            assert torch.equal(value, before[name]), name

    return train(model, 3, before_backward=evaluate)


def evaluations() -> None:
    evaluating(True, True).assert_equal(evaluating(False, False))


def test_compiled_evaluations_record_nothing(two: Ranks) -> None:
    two.run(evaluations)


def saved_weights(recipe: str) -> None:
    """Else every whole weight stays transposed until backward, however it was sharded."""
    torch._dynamo.reset()
    layers = (nn.Linear(*shape, bias=False) for shape in ((32, 64), (64, 32)))
    model = shard(convert(nn.Sequential(*map(nn.Sequential, layers)).to(here()), recipe))
    for block in model:
        block.compile(backend=backend())
    with saved_tensors() as saved:
        model(torch.ones(4, 32, device=here()))
    kept = [x for x in saved if x.dtype == E4M3 and x.numel() >= 32 * 64]
    # The gathered bytes, of the layer whose input has a gradient; no view of their transposed copy.
    assert [(tuple(x.shape), x.stride()) for x in kept] == [((32, 64), (64, 1))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_forwards_keep_the_gathered_bytes_and_no_copy(either: Ranks, recipe: str) -> None:
    either.run(saved_weights, recipe)


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=1.0),
    "foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "for loop": partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
}


def stepped(recipe: str, compile_step: bool, tell: str, kind: str) -> list[Tensor]:
    torch._dynamo.reset()
    model, losses = shard(small(recipe, True)), []
    optimizer = OPTIMIZERS[kind](model.parameters())
    if tell == "attach":
        attach_to_optimizer(model, optimizer)

    def step() -> None:
        optimizer.step()

    for _ in range(4):
        with traffic() as seen:
            loss = model(torch.ones(4, DIM, device=here())).square().mean()
        assert (seen.all_reduces == 0) == (tell == "attach" and len(losses) > 0)
        loss.backward()
        losses.append(loss.detach())
        if tell == "before":  # what the step makes of it is not known then
            precompute_float8_dynamic_scale_for_fsdp(model)
        (torch.compile(step, backend=backend()) if compile_step else step)()
        optimizer.zero_grad()
    return losses


def compiled_steps(cases: list[tuple[str, str]], kinds: list[str]) -> None:
    for recipe, tell in cases:
        eager, compiled = (stepped(recipe, compiled, tell, "SGD") for compiled in (False, True))
        assert all(torch.equal(*pair) for pair in zip(eager, compiled, strict=True)), (recipe, tell)
    for kind in kinds:  # of others torch compiles another rounding
        stepped("tensorwise", True, "before", kind)


def test_compiled_optimizer_steps(two: Ranks) -> None:
    two.run(compiled_steps, [("delayed recipe", "attach")], ["fused"])


@pytest.mark.exhaustive
def test_compiled_steps_of_every_optimizer(two: Ranks) -> None:
    two.run(compiled_steps, [("tensorwise", "attach"), ("tensorwise", "before")], [*OPTIMIZERS])
