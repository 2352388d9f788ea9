"""Fused functions under tensor parallel: against one device, and against layer by layer."""

import copy
import itertools
import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from float8 import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    Float8SequenceParallel,
    conversion_report,
    kernels,
    rms_norm_linear,
    swiglu_feed_forward,
    why_not_fused,
)
from support.models import FeedForward, seeded
from support.parallel import (
    DIM,
    HIDDEN,
    TOKENS,
    FusedBlock,
    block_of,
    close,
    fused_plan,
    mesh_of,
    off,
    part,
    plan_of,
    scales,
    train_both,
)
from support.ranks import Ranks
from support.sharded import FunctionalTraffic, convert, here, whole

PRODUCERS = ("swiglu_cast", "swiglu_backward_cast", "rms_norm_cast")


def fused_block(recipe: str, apart: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return convert(FusedBlock(apart), recipe, all_gather=False).to(here())


def used() -> Any:
    """Watches the producers of fused casts."""
    return mock.patch.multiple(
        kernels, **{name: mock.Mock(wraps=getattr(kernels, name)) for name in PRODUCERS}
    )


def eighths(seed: int, *shape: int) -> Tensor:
    """Few bits, which float8 keeps and whose products sum up exactly; 7/8 is the amax."""
    x = seeded(seed, *shape, device=here()).mul(2).round().clamp(-7, 7)
    x[(0,) * x.dim()] = 7  # on the first rank only
    return x / 8


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def feed_forward(recipe: str, sequence: bool, prepared: bool) -> None:
    """All operands have the scales of one device, bit by bit."""
    torch.manual_seed(0)
    single = FeedForward(DIM, HIDDEN).to(here())
    for seed, weight in enumerate(single.parameters()):
        weight.data.copy_(eighths(10 + seed, *weight.shape))
    model = nn.ModuleDict({"ffn": convert(single, recipe, all_gather=False, fuse=True)})
    single = copy.deepcopy(model)
    plan = plan_of("float8", sequence) if prepared else fused_plan(sequence)
    parallelize_module(model, mesh_of(), {n: s for n, s in plan.items() if "ffn" in n})
    assert [each.reason for each in conversion_report(model).fused] == [None]
    x, g = (eighths(seed, 2, TOKENS, DIM) for seed in (1, 2))
    x[-1, -1, -1] = 4 / 8
    own_x, own_g = (part(t, 1) if sequence else t.clone() for t in (x, g))
    x.requires_grad_()
    own_x.requires_grad_()
    with scales() as expected:
        y = single["ffn"](x)
        y.backward(g)
    with scales() as got, used():
        own_y = model["ffn"](own_x)
        own_y.backward(own_g)
        assert kernels.swiglu_cast.called
        assert kernels.swiglu_backward_cast.called
    assert len(got) == len(expected) == 9
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    close(own_y, part(y, 1) if sequence else y)
    close(own_x.grad, part(x.grad, 1) if sequence else x.grad)
    for (name, mine), theirs in zip(grads_of(model).items(), single.parameters(), strict=True):
        assert off(mine, theirs.grad) < (2e-2 if mine.is_cuda else 1e-5), name
    buffers = dict(model.named_buffers())
    for name, expected_buffer in single.named_buffers():
        if "input" not in name or not sequence:
            continue
        amax = buffers[name].clone()
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        assert torch.equal(amax, expected_buffer), name


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_fused_feed_forward_has_the_scales_of_one_device(either: Ranks, recipe: str) -> None:
    for sequence in (True, False):
        for prepared in (True, False):
            either.run(feed_forward, recipe, sequence, prepared)


def test_four_ranks_with_parts_that_are_padded(four: Ranks) -> None:
    four.run(feed_forward, "tensorwise", True, True)
    four.run(feed_forward, "delayed", False, False)


def forward_backward(model: nn.Module, call: Any, sequence: bool) -> dict[str, Tensor]:
    """Output and gradients of one step, whole; of `sequence` this rank has some tokens."""
    x, g = (seeded(seed, 2, TOKENS, DIM, device=here()) for seed in (1, 2))
    x, g = (part(t, 1) if sequence else t for t in (x, g))
    x.requires_grad_()
    y = call(x)
    y.backward(g)
    made = {"output": y.detach(), "input": x.grad}
    if sequence:
        made = {name: DTensor.from_local(t, mesh_of(), [Shard(1)]) for name, t in made.items()}
    for name, p in model.named_parameters():
        made[name] = p.grad.clone()
        if sequence and not isinstance(p, DTensor):  # a norm's, of the tokens of this rank
            dist.all_reduce(made[name])
    return {name: whole(t) for name, t in made.items()}


def blocks(
    recipe: str, sequence: bool, backend: str | None, fuse: bool, norms: bool = True
) -> None:
    """One whose modules were found, or one that calls the functions, in each way to compute it."""
    ways: dict[str, dict[str, Tensor]] = {}
    for way in ("one device", "fused", "apart"):
        if fuse:
            block = block_of(recipe, fuse=way != "apart")
            plan = plan_of("float8", sequence)
        else:
            block, plan = fused_block(recipe, way == "apart"), fused_plan(sequence, norms)
        if way != "one device":
            parallelize_module(block, mesh_of(), plan)
        torch._dynamo.reset()
        compiled = backend and way == "fused"
        call = torch.compile(block, fullgraph=True, backend=backend) if compiled else block
        shared = sequence and way != "one device"
        if compiled:  # Dynamo does not follow a mock
            assert why_not_fused(block.ffn.w1, block.ffn.w3, block.ffn.w2) is None
            ways[way] = forward_backward(block, call, shared)
            continue
        with used():
            ways[way] = forward_backward(block, call, shared)
            assert kernels.swiglu_cast.called == (way != "apart")
            assert kernels.rms_norm_cast.called == (way != "apart" and not fuse)
    for name, got in ways["fused"].items():
        # Where sums differ in their last bits, few casts round otherwise.
        for other in ("one device", "apart"):
            assert off(got, ways[other][name]) < (2e-2 if got.is_cuda else 1e-2), (name, other)
    alike = ("output", "attention.wo.weight") if fuse else ("output",)
    for name in alike:
        close(ways["fused"][name], ways["one device"][name])


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_fused_block_equals_that_of_one_device_and_the_one_computed_apart(
    either: Ranks, recipe: str
) -> None:
    for sequence in (True, False):
        for fuse in (True, False):
            either.run(blocks, recipe, sequence, None, fuse)
    either.run(blocks, recipe, True, None, False, False)


MORE = [("tensorwise", False), ("delayed", True), ("delayed", False)]
REST = [pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE]


@pytest.mark.parametrize(("recipe", "sequence"), [("tensorwise", True), *REST])
def test_a_fused_block_is_one_graph(two: Ranks, recipe: str, sequence: bool) -> None:
    for fuse in (True, False):
        two.run(blocks, recipe, sequence, "aot_eager", fuse)


def stack(make: Any, plan: dict[str, Any], mesh: DeviceMesh, sharded: bool) -> None:
    """Blocks that were made alike, each compiled by itself as trainers do."""
    torch._dynamo.reset()
    layers, tensor = [make() for _ in range(3)], mesh["tensor"]
    for block in layers:
        parallelize_module(block, tensor, plan)
        block.compile(fullgraph=True, backend="eager")  # guards are Dynamo's
        if sharded:
            fully_shard(block, mesh=mesh["data"])
    x = eighths(1, 2, TOKENS, DIM).requires_grad_()
    for _ in range(2):
        y = x
        # One of each code object: the next would fail.
        with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
            for block in layers:
                y = block(y)
        y.sum().backward()


def stacks(recipe: str, dp: int, fused: bool) -> None:
    mesh = init_device_mesh(
        here().type, (dp, dist.get_world_size() // dp), mesh_dim_names=("data", "tensor")
    )
    if fused:
        stack(partial(fused_block, recipe), fused_plan(False), mesh, dp > 1)
    for kind, fuse in (("float8", True),) if fused else (("float8", False), ("torch", False)):
        stack(partial(block_of, recipe, fuse=fuse), plan_of(kind, False), mesh, dp > 1)


SHARED = [("two", "tensorwise", True), ("four", "delayed", True)]
OTHERS = [
    pytest.param(ranks, recipe, fused, marks=pytest.mark.exhaustive)
    for ranks, recipe, fused in itertools.product(
        ("two", "four"), ("tensorwise", "delayed"), (True, False)
    )
    if (ranks, recipe, fused) not in SHARED
]


@pytest.mark.parametrize(("ranks", "recipe", "fused"), SHARED + OTHERS)
def test_all_blocks_of_a_model_share_one_compilation(
    request: pytest.FixtureRequest, ranks: str, recipe: str, fused: bool
) -> None:
    there: Ranks = request.getfixturevalue(ranks)
    there.run(stacks, recipe, 2 if ranks == "four" else 1, fused)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_inductor_compiles_a_fused_block(either: Ranks, recipe: str) -> None:
    for sequence in (True, False):
        either.run(blocks, recipe, sequence, "inductor", False)
    either.run(blocks, recipe, True, "inductor", True)


def trained(recipe: str, sequence: bool, microbatches: int, checkpointed: bool, fuse: bool) -> None:
    for_both = []
    for _ in range(2):
        for_both.append(block_of(recipe, fuse=True) if fuse else fused_block(recipe))
    single, block = for_both
    plan = plan_of("float8", sequence, norms=True) if fuse else fused_plan(sequence, norms=True)
    parallelize_module(block, mesh_of(), plan)
    with used():
        train_both(single, block, sequence, microbatches, checkpointed, "delayed" in recipe)
        steps = 5 * microbatches * (2 if checkpointed else 1)
        # Twice where all ranks are asked: always under dynamic scaling, else in two steps.
        asked = steps if recipe == "tensorwise" else 2 * steps // 5
        assert kernels.swiglu_cast.call_count == 2 * steps + asked
        norms = 0 if fuse else 2 * (2 * steps + (asked if sequence else 0))
        assert kernels.rms_norm_cast.call_count == norms


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_five_fused_steps_equal_those_of_a_single_device(two: Ranks, recipe: str) -> None:
    if recipe == "delayed":
        two.run(trained, "delayed recipe", True, 1, False, False)
    two.run(trained, recipe, True, 1, False, True)
    two.run(trained, recipe, True, 2, True, False)
    two.run(trained, recipe, False, 2, True, True)
    two.run(trained, recipe, False, 1, False, False)


def sent() -> None:
    """In forward and backward each part of the block gathers its tokens once, in float8."""
    for fuse in (True, False):
        block = block_of("tensorwise", fuse=True) if fuse else fused_block("tensorwise")
        block = block.to(torch.bfloat16)
        plan = plan_of("float8", True) if fuse else fused_plan(True, norms=True)
        parallelize_module(block, mesh_of(), plan)
        x = seeded(1, 2, TOKENS // 2, DIM, dtype=torch.bfloat16, device=here()).requires_grad_()
        with FunctionalTraffic() as seen, used():
            block(x).sum().backward()
            assert kernels.swiglu_backward_cast.call_count == 2
        assert seen.bytes_of("all_gather") == {torch.uint8: 4 * x.numel()}
        assert seen.bytes_of("reduce_scatter") == {x.dtype: 4 * 2 * 2 * x.numel()}  # of all tokens
        assert seen.bytes_of("all_to_all") == {}
        # Of weights that one module reads together, and of gate's gradient and up's.
        reduced = [each[1:] for each in seen.seen if each[0] == "all_reduce"]
        amaxes = sorted(size // 4 for dtype, size in reduced if dtype is torch.int32)
        assert amaxes == ([1] * 9 + [2, 3, 4] if fuse else [1] * 10 + [2, 3, 3])
        norms = [] if fuse else [(x.dtype, 2 * DIM)] * 2  # gradients, of all tokens
        assert [each for each in reduced if each[0] is not torch.int32] == norms


def test_fused_functions_gather_bytes_once(either: Ranks) -> None:
    either.run(sent)


class Uses(nn.Module):
    """Both functions in a row, or what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in "ab")
        self.q, self.k = nn.Linear(DIM, 49, bias=False), nn.Linear(DIM, 17, bias=False)
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in "ab")
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.apart = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.apart:
            normed = self.norms[0](x)
            q, k, normed = self.q(normed), self.k(normed), self.norms[1](x)
            y = self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
            return q, k, x + y
        q, k, x = rms_norm_linear(x, self.norms[0], (self.q, self.k), residual=True)
        layers = self.gate, self.up, self.down
        return q, k, swiglu_feed_forward(x, *layers, norm=self.norms[1], residual=True)


def hooked(model: nn.Module) -> None:
    model.ffn.w3.register_forward_hook(lambda *_: None)


def exchanged(model: nn.Module) -> None:
    """As many hooks as the style put there, but not all of them its own."""
    model.ffn.w3._forward_pre_hooks.popitem()
    model.ffn.w3.register_full_backward_hook(lambda *_: None)


def undone(model: nn.Module) -> None:
    with torch.no_grad():
        model.ffn.w1.weight = nn.Parameter(model.ffn.w1.weight.full_tensor())


def falls_back(
    recipe: str, kind: str, change: str | None, styles: dict[str, Any], reason: str
) -> None:
    """The report says why, and the results are those of layer by layer."""
    results = []
    for fuse in (True, False):
        block = block_of(recipe, fuse=fuse)
        parallelize_module(block, mesh_of(), plan_of(kind, True) | styles)
        if change is not None:
            globals()[change](block)
        if fuse:
            (report,) = conversion_report(block).fused
            assert re.search(reason, report.reason), report.reason
            assert why_not_fused(block.ffn.w1, block.ffn.w3, block.ffn.w2) == report.reason
        if change == "undone":
            return
        with used():
            results.append(forward_backward(block, block, True))
            assert not kernels.swiglu_cast.called
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


def other_roles() -> None:
    """Layers that are not shared as gate, up and down or q/k/v are; they say what is wrong."""
    model = convert(Uses(), "tensorwise", all_gather=False).to(here())
    plan: dict[str, Any] = {n: Float8ColwiseParallel() for n in ("gate", "up", "down", "q")}
    parallelize_module(model, mesh_of(), plan)
    x = seeded(1, 2, TOKENS, DIM, device=here())
    with pytest.raises(
        ValueError, match=rf"input of shape(.)*{HIDDEN // 2}\), expected(.)*{HIDDEN}"
    ):
        swiglu_feed_forward(x, model.gate, model.up, model.down)
    parallelize_module(model, mesh_of(), {"k": Float8RowwiseParallel(input_layouts=Replicate())})
    (k,) = rms_norm_linear(x, model.norms[0], (model.k,))
    assert torch.equal(k, model.k(model.norms[0](x)))


def test_layers_in_other_roles_are_not_fused(two: Ranks) -> None:
    two.run(other_roles)


def test_what_is_not_fused_says_why(two: Ranks) -> None:
    two.run(falls_back, "tensorwise", "torch", None, {}, "has hooks, other than those of Float8C")
    two.run(falls_back, "tensorwise", "float8", "hooked", {}, "has hooks, other than")
    two.run(falls_back, "tensorwise", "float8", "exchanged", {}, "has hooks, other than")
    two.run(falls_back, "tensorwise", "float8", "undone", {}, "a DTensor, or was one, and another")
    two.run(falls_back, "rowwise", "float8", None, {}, "finer than one per tensor")
    whole = {
        "ffn.w1": Float8ColwiseParallel(output_layouts=Replicate()),
        "ffn.w3": Float8ColwiseParallel(output_layouts=Replicate()),
        "ffn.w2": Float8RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    }
    two.run(falls_back, "tensorwise", "float8", None, whole, r"another layout than Shard\(-1\)")
    other = {"ffn.w3": Float8ColwiseParallel(input_layouts=Shard(1))}
    two.run(falls_back, "tensorwise", "float8", None, other, "expect their input in different")


def other_norms() -> None:
    """A norm with torch's style, or a sum still to be made before it, is called by itself."""
    results = []
    for style in (SequenceParallel, Float8SequenceParallel):
        block = fused_block("tensorwise")
        plan = fused_plan(True, norms=True) | {"norms.*": style()}
        parallelize_module(block, mesh_of(), plan)
        ours = style is Float8SequenceParallel
        layers = block.attention.layers
        assert (why_not_fused(*layers, norm=block.norms[0]) is None) == ours
        assert why_not_fused(*layers) is None
        with used():
            results.append(forward_backward(block, block, True))
            assert kernels.rms_norm_cast.called == ours
            assert kernels.swiglu_cast.called
    for name in results[0]:
        assert off(results[0][name], results[1][name]) < 1e-2, name


def test_a_norm_with_a_style_of_torch_is_called_by_itself(two: Ranks) -> None:
    two.run(other_norms)


def hooked_norm() -> None:
    """Hooks of others on a norm are called once; frozen norms stay frozen."""
    calls: list[int] = []
    sequence = {"norms.*": Float8SequenceParallel()}
    plan = sequence | {n: Float8ColwiseParallel(input_layouts=Shard(1)) for n in ("gate", "up")}
    plan["down"] = Float8RowwiseParallel(output_layouts=Shard(1))

    def hook(norm: nn.Module, args: Any, kwargs: Any) -> Any:
        calls.append(1)
        return (-args[0], *args[1:]), kwargs

    x = part(seeded(1, 2, TOKENS, DIM, device=here()), 1)
    made = []
    for negated in (False, True):
        model = convert(Uses(), "tensorwise", all_gather=False).to(here())
        model.norms.requires_grad_(False)
        torch.manual_seed(0)
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.1)
        norm = model.norms[-1]
        parallelize_module(model, mesh_of(), plan)
        assert not norm.weight.requires_grad
        if negated:
            norm.register_forward_pre_hook(hook, with_kwargs=True)
        layers = model.gate, model.up, model.down
        made.append(swiglu_feed_forward(x if negated else -x, *layers, norm=norm).detach())
    assert calls == [1]
    assert off(*made) < 1e-2


def test_hooks_of_others_on_a_norm(two: Ranks) -> None:
    two.run(hooked_norm)


def two_norms() -> None:
    """A norm of what is float8 already is not left out: it raises, fused or not."""
    for call in (
        lambda x, norm, layers: norm(x),
        lambda x, norm, layers: swiglu_feed_forward(x, *layers, norm=norm),
    ):
        model = convert(Uses(), "tensorwise", all_gather=False).to(here())
        layers, norm = (model.gate, model.up, model.down), model.norms[-1]
        distribute_module(norm, mesh_of())
        plan = {"gate": Float8ColwiseParallel(), "up": Float8ColwiseParallel()}
        parallelize_module(model, mesh_of(), plan | {"down": Float8RowwiseParallel()})
        x = DTensor.from_local(seeded(1, 2, TOKENS, DIM, device=here()), mesh_of(), [Replicate()])
        x = model.gate.in_float8(x)
        with pytest.raises(NotImplementedError, match=r"got aten\.pow"):
            call(x, norm, layers)


def test_a_norm_of_float8_is_not_left_out(two: Ranks) -> None:
    two.run(two_norms)


def two_dims(all_gather: bool) -> list[Tensor]:
    """FSDP2 over one dim of the mesh, tensor parallel over the other, against one device."""
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = convert(nn.Sequential(FusedBlock()), "tensorwise", all_gather=all_gather).to(here())
    torch.manual_seed(0)
    alone = convert(nn.Sequential(FusedBlock()), "tensorwise", all_gather=False).to(here())
    parallelize_module(model[0], mesh["tensor"], fused_plan(True, norms=True))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh["data"])
    ffn = model[0].ffn
    assert "FSDP2" in why_not_fused(ffn.w1, ffn.w3, ffn.w2)
    batch = [seeded(rank, 2, TOKENS, DIM, device=here()) for rank in range(2)]
    for x in batch:
        (alone(x).square().sum() / 2).backward()
    x = batch[mesh.get_local_rank("data")].chunk(2, 1)[mesh.get_local_rank("tensor")]
    with FunctionalTraffic() as seen, used():
        y = model(x)
        assert y._base is None  # of views FSDP2 warns
        y.square().sum().backward()
        assert kernels.swiglu_backward_cast.called
        assert kernels.rms_norm_cast.called
    assert seen.bytes_of("all_gather") == {torch.uint8: 4 * x.numel()}
    grads = list(grads_of(model).values())
    for mine, (name, theirs) in zip(grads, alone.named_parameters(), strict=True):
        assert off(mine, theirs.grad) < 1e-2, name
    return grads


def test_fused_functions_under_fsdp_and_tensor_parallel(four: Ranks) -> None:
    runs = [four.run(two_dims, all_gather)[0] for all_gather in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def uses(sequence: bool, how: str, frozen: tuple[str, ...] = ()) -> None:
    """Uneven heads, DTensors between layers, frozen weights, autocast, evaluation."""
    on_mesh, autocast, training = how == "on a mesh", how == "autocast", how != "evaluation"
    results: list[list[Tensor]] = []
    tokens = Shard(1) if sequence else Replicate()
    for apart in (True, False):
        torch.manual_seed(0)
        model = convert(Uses(), "tensorwise", all_gather=False).to(here())
        model.apart = apart
        for name in frozen:
            getattr(model, name).weight.requires_grad_(False)
        heads = Replicate() if how == "whole heads" else Shard(-1)
        plan: dict[str, Any] = {
            name: Float8ColwiseParallel(input_layouts=tokens, output_layouts=heads) for name in "qk"
        }
        plan |= {n: Float8ColwiseParallel(input_layouts=tokens) for n in ("gate", "up")}
        plan["down"] = Float8RowwiseParallel(output_layouts=tokens, use_local_output=not on_mesh)
        if sequence:
            plan["norms.*"] = Float8SequenceParallel()
        parallelize_module(model, mesh_of(), plan)
        x = seeded(1, 2, TOKENS, DIM, device=here())
        own = (part(x, 1) if sequence else x).requires_grad_()
        given = DTensor.from_local(own, mesh_of(), [tokens]) if on_mesh else own
        with (
            used(),
            torch.autocast(here().type, torch.bfloat16, enabled=autocast),
            torch.set_grad_enabled(training),
        ):
            made = [
                y.to_local() if isinstance(y, DTensor) else y for y in model.train(training)(given)
            ]
            assert kernels.swiglu_cast.called != apart
            assert kernels.rms_norm_cast.called == (not apart and not autocast)
        if training:
            sum((y * y.detach().cos()).sum() for y in made).backward()
            grads = (p.grad for p in model.parameters())
            made += [own.grad, *(whole(grad) for grad in grads if grad is not None)]
        results.append(made)
    for mine, theirs in zip(*results, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        # Layer by layer, bfloat16 rounds what is cast.
        bound = 0.1 if autocast else 2e-2 if mine.is_cuda else 1e-4
        assert off(mine.float(), theirs.float()) < bound


def test_uses_of_fused_functions(either: Ranks) -> None:
    for sequence in (True, False):
        for how in ("", "whole heads", "autocast", "evaluation"):
            either.run(uses, sequence, how)
        either.run(uses, sequence, "", ("q", "gate", "down"))
        either.run(uses, sequence, "", ("q", "k", "gate", "up", "down"))
    either.run(uses, True, "on a mesh")
