"""Tensor parallel by float8's styles and by torch's own, against the same layers on one device."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from float8 import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    Float8SequenceParallel,
    Float8Tensor,
    PrepareFloat8ModuleInput,
    sync_float8_amax_and_scale_history,
)
from float8.parallel.amax import sync_groups
from support.models import FeedForward, seeded
from support.parallel import (
    DIM,
    HIDDEN,
    NO_GRADIENT,
    STYLES,
    TOKENS,
    Attention,
    alone,
    block_of,
    close,
    mesh_of,
    off,
    part,
    plan_of,
    scales,
    train_both,
)
from support.ranks import Ranks
from support.sharded import FunctionalTraffic, convert, here, whole


def layer_of(recipe: str, bias: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = convert(nn.Sequential(nn.Linear(DIM, HIDDEN, bias=bias)), recipe, all_gather=False)
    layer[0].weight.data[-1, -1] = 3.0  # the amax is in the last part along both dims
    return layer.to(here())


def one_layer(kind: str, by_columns: bool, sequence: bool, bias: bool, dim: int = 1) -> None:
    colwise, rowwise, _ = STYLES[kind]
    tokens = Shard(dim) if sequence else Replicate()
    if by_columns:
        style = colwise(input_layouts=tokens)
        in_dim, out_dim = dim if sequence else None, 2
    else:
        style = rowwise(output_layouts=tokens)
        in_dim, out_dim = 2, dim if sequence else None
    whole, layer = layer_of("tensorwise", bias), layer_of("tensorwise", bias)
    parallelize_module(layer, mesh_of(), {"0": style})
    x = seeded(1, 2, TOKENS, DIM, device=here())
    g = seeded(2, 2, TOKENS, HIDDEN, device=here())
    x[-1, -1, -1], g[-1, -1, -1] = 9.0, 7.0
    own_x, own_g = (t if dim is None else part(t, dim) for t, dim in ((x, in_dim), (g, out_dim)))
    x.requires_grad_()
    own_x.requires_grad_()
    with scales() as expected:
        y = whole(x)
        y.backward(g)
    with scales() as got:
        own_y = layer(own_x)
        own_y.backward(own_g)
    assert not isinstance(own_y, DTensor)
    assert len(got) == len(expected) == 3
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    with torch.inference_mode():
        assert torch.equal(layer(own_x.detach()), own_y)
    close(own_y, y if out_dim is None else part(y, out_dim))
    close(own_x.grad, x.grad if in_dim is None else part(x.grad, in_dim))
    for mine, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
        assert mine.grad.placements == mine.placements
        close(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("kind", STYLES)
def test_one_layer_equals_that_of_a_single_device(either: Ranks, kind: str) -> None:
    for by_columns in (True, False):
        for sequence in (True, False):
            for bias in (True, False):
                either.run(one_layer, kind, by_columns, sequence, bias)
        either.run(one_layer, kind, by_columns, True, False, 0)


def trained(
    kind: str, sequence: bool, microbatches: int, checkpointed: bool, recipe: str = "tensorwise"
) -> None:
    whole, block = block_of(recipe, bias=True), block_of(recipe, bias=True)
    parallelize_module(block, mesh_of(), plan_of(kind, sequence, norms=True))
    train_both(whole, block, sequence, microbatches, checkpointed, "delayed" in recipe)


@pytest.mark.parametrize("kind", STYLES)
def test_five_steps_equal_those_of_a_single_device(two: Ranks, kind: str) -> None:
    two.run(trained, kind, True, 1, False)
    two.run(trained, kind, False, 2, True)
    two.run(trained, kind, True, 2, True)


def sent(kind: str) -> None:
    """In forward and backward of attention and feed-forward: each gathers its tokens once."""
    block = block_of("tensorwise").to(torch.bfloat16)
    parallelize_module(block, mesh_of(), plan_of(kind, sequence=True))
    x = seeded(1, 2, TOKENS // 2, DIM, dtype=torch.bfloat16, device=here()).requires_grad_()
    with FunctionalTraffic() as seen:
        block(x).sum().backward()
    gathered = {torch.uint8: 4 * x.numel()} if kind == "float8" else {x.dtype: 8 * x.numel()}
    assert seen.bytes_of("all_gather") == gathered
    assert seen.bytes_of("reduce_scatter") == {x.dtype: 4 * 2 * 2 * x.numel()}  # of all tokens
    assert seen.bytes_of("all_to_all") == {}
    # The 4 tensors that are gathered, and those that lie on all ranks: inputs of 2 layers,
    # gradients of 5. Weights: those of attention together, those of feed-forward.
    amaxes = [size // 4 for name, _, size in seen.seen if name == "all_reduce"]
    weights = [4, 3] if kind == "float8" else [1] * 7
    assert sorted(amaxes) == sorted([1] * (2 + 5 + (4 if kind == "float8" else 0)) + weights)


@pytest.mark.parametrize("kind", STYLES)
def test_five_steps_with_delayed_scaling(two: Ranks, kind: str) -> None:
    two.run(trained, kind, True, 1, False, "delayed")
    two.run(trained, kind, False, 2, True, "delayed")
    two.run(trained, kind, True, 1, False, "delayed recipe")


@pytest.mark.parametrize("kind", STYLES)
def test_half_the_bytes_of_16_bits_are_gathered(either: Ranks, kind: str) -> None:
    either.run(sent, kind)


class Transposes(TorchDispatchMode):
    """Copies of bytes in another layout, in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.float8.transpose.default:
            self.shapes.append(tuple(args[0].shape))
        if any(issubclass(kind, DTensor | Float8Tensor) for kind in types):
            return NotImplemented
        return func(*args, **kwargs or {})


def transposed() -> None:
    """The bytes of q/k/v and of w1/w3 are, and grad_output of wo and of w2: once each."""
    block = block_of("tensorwise")
    parallelize_module(block, mesh_of(), plan_of("float8", sequence=True))
    x = seeded(1, 2, TOKENS // 2, DIM, device=here()).requires_grad_()
    with Transposes() as seen:
        loss = block(x).square().sum()
        loss.backward(retain_graph=True)
    assert seen.shapes == [(2 * TOKENS, DIM)] * 4
    first = [x.grad, *(whole(p.grad) for p in block.parameters())]
    x.grad = None
    block.zero_grad()
    loss.backward()
    for a, b in zip(first, [x.grad, *(whole(p.grad) for p in block.parameters())], strict=True):
        assert torch.equal(a, b)


def transposed_by_a_compiler() -> None:
    block = block_of("tensorwise")
    parallelize_module(block, mesh_of(), plan_of("float8", sequence=True))
    graphs = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [n for n in graph.graph.nodes if n.target is torch.ops.float8.transpose.default]
        graphs.append([n.args[0] for n in calls])
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=kept, partition_fn=partition)
    x = seeded(1, 2, TOKENS // 2, DIM, device=here()).requires_grad_()
    torch.compile(block, backend=backend, fullgraph=True)(x).sum().backward()
    assert len(graphs) == 2
    # Those four, and the inputs of wo and w2, which are here alone.
    assert sum(map(len, graphs)) == sum(len(set(each)) for each in graphs) == 6


def test_what_several_layers_read_is_transposed_once(two: Ranks) -> None:
    two.run(transposed)
    two.run(transposed_by_a_compiler)


def hooked(backend: str, recipe: str) -> None:
    """What is compiled is the module itself whose inputs are prepared, or a layer by itself."""
    layer = {"ffn.w1": Float8ColwiseParallel(input_layouts=Shard(1))}
    for plan in (plan_of("float8", True, False), plan_of("float8", True, True), layer):
        results = []
        for compiled in (False, True):
            block = block_of(recipe)
            parallelize_module(block, mesh_of(), plan)
            module = block.ffn.w1 if plan is layer else block.attention
            if compiled:
                module.compile(backend=backend, fullgraph=True)
            x = seeded(1, 2, TOKENS // 2, DIM, device=here()).requires_grad_()
            y = module(x)
            y.square().sum().backward()
            grads = [p.grad.to_local() for p in module.parameters()]
            results.append([y, x.grad, *grads])
        for got, expected in zip(*results, strict=True):
            close(got, expected)


@pytest.mark.parametrize(
    "recipe", ["delayed recipe", pytest.param("tensorwise", marks=pytest.mark.exhaustive)]
)
def test_a_module_whose_inputs_are_prepared_compiles(two: Ranks, recipe: str) -> None:
    two.run(hooked, "aot_eager", recipe)


def checkpointed_in_a_graph() -> None:
    """Dynamo lets nothing that is checkpointed write to a module."""
    torch._dynamo.reset()
    block = block_of("tensorwise")
    parallelize_module(block, mesh_of(), plan_of("float8", sequence=True))
    x = seeded(1, 2, TOKENS // 2, DIM, device=here())
    # AOTAutograd of torch 2.13 takes no mesh that is used where something is checkpointed.
    backend = "eager" if torch.__version__.startswith("2.13") else "aot_eager"
    compiled = torch.compile(checkpoint, backend=backend, fullgraph=True)
    results = []
    for call in (checkpoint, compiled):
        block.zero_grad()
        call(block, x, use_reentrant=False).square().sum().backward()
        results.append([whole(p.grad) for p in block.parameters()])
    for got, expected in zip(*results, strict=True):
        close(got, expected)


def test_a_block_compiles_with_its_checkpoints(two: Ranks) -> None:
    two.run(checkpointed_in_a_graph)


class OutFirst(Attention):
    """The layers that read the input come last."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv"):
            layer = getattr(self, name)
            delattr(self, name)
            setattr(self, name, layer)


def copied() -> None:
    """Scales come from those layers of this very module that read the input."""
    torch.manual_seed(0)
    model = convert(nn.ModuleDict({"attention": OutFirst()}), "delayed", all_gather=False)
    assert next(iter(model["attention"].children())) is model["attention"].wo
    plan = {n: s for n, s in plan_of("float8", True).items() if n.startswith("attention")}
    parallelize_module(model.to(here()), mesh_of(), plan)
    twin = copy.deepcopy(model)
    for name, layer in model["attention"].named_children():
        layer.fp8_scale_input.fill_(1.0 if name == "wo" else 0.5)
        layer.fp8_scale_weight.fill_(1.0)
    for layer in twin["attention"].children():
        layer.fp8_scale_input.fill_(0.25)
    x = seeded(1, 2, TOKENS // 2, DIM, device=here())
    for each, expected in ((model, 0.5), (twin, 0.25)):
        with scales() as seen:
            each["attention"](x)
        assert [float(mine) for mine, _ in seen[:3]] == [expected] * 3
        assert "input gathered" not in repr(each["attention"].wo)


def test_prepared_inputs_are_cast_as_their_readers_say(two: Ranks) -> None:
    two.run(copied)


def few_reductions(recipe: str, all_asked: int, of_weights: int) -> None:
    """With delayed scaling ranks ask each other until a sync has found all scales."""
    block = block_of(recipe)
    parallelize_module(block, mesh_of(), plan_of("float8", sequence=True))
    x = seeded(1, 2, TOKENS // 2, DIM, device=here())
    counts = []
    for _ in range(4):
        with FunctionalTraffic() as seen:
            block(x).square().sum().backward()
        counts.append(sum(size <= 16 for *_, size in seen.seen))
        sync_float8_amax_and_scale_history(block)
        if len(counts) == 3:
            block.load_state_dict(block.state_dict())
    assert counts == [all_asked, all_asked, of_weights, all_asked]


def test_delayed_scaling_asks_no_other_rank_once_scales_are_known(either: Ranks) -> None:
    either.run(few_reductions, "delayed", 18, 0)


def test_the_recipe_asks_once_per_module_for_the_weights_alone(either: Ranks) -> None:
    either.run(few_reductions, "delayed recipe", 11 + 2, 2)


def wrong_uses() -> None:
    """Each raises before any collective; so do both ranks, and none waits."""
    mesh = mesh_of()
    plain = nn.Sequential(nn.Linear(DIM, 48))
    for style in (Float8ColwiseParallel(), Float8RowwiseParallel()):
        with pytest.raises(TypeError, match="got a Linear, expected a Float8Linear; convert"):
            parallelize_module(plain, mesh, {"0": style})
    layouts = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    with pytest.raises(TypeError, match="got a Linear, expected a Float8Linear or a module"):
        parallelize_module(plain, mesh, {"0": PrepareFloat8ModuleInput(**layouts)})
    odd = convert(nn.Sequential(nn.Linear(49, 1)), "tensorwise", all_gather=False)
    with pytest.raises(ValueError, match=r"weight of shape \(1, 49\)(.)*dim 0 over 2(.)*rows on"):
        parallelize_module(odd, mesh, {"0": Float8ColwiseParallel()})
    with pytest.raises(ValueError, match=r"weight of shape \(1, 49\)(.)*dim 1 over 2(.)*divisible"):
        parallelize_module(odd, mesh, {"0": Float8RowwiseParallel()})
    wide = init_device_mesh(here().type, (1, 2), mesh_dim_names=("data", "tensor"))
    block = block_of("tensorwise")
    for name, style in plan_of("float8", sequence=True).items():
        with pytest.raises(ValueError, match=r"got a mesh of 2 dims(.)*'tensor'(.)*expected one"):
            style._apply(block.get_submodule(name), wide)
    two = convert(nn.Sequential(nn.Linear(DIM, 48)), "tensorwise", all_gather=False)
    two.append(convert(nn.Sequential(nn.Linear(DIM, 48)), "rowwise", all_gather=False))
    with pytest.raises(ValueError, match=r"got layers that cast their input in 2 ways"):
        parallelize_module(two, mesh, PrepareFloat8ModuleInput(**layouts))
    parallelize_module(two, mesh, PrepareFloat8ModuleInput(**layouts, fwd_config_submodule_fqn="0"))
    wrong = PrepareFloat8ModuleInput(**layouts, float8_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"got float8_dtype=(.)*e5m2, expected (.)*e4m3fn"):
        parallelize_module(two[0], mesh, wrong)
    block = block_of("delayed")
    parallelize_module(block, mesh, plan_of("float8", sequence=True))
    with pytest.raises(ValueError, match=r"group: got ranks \[.\], but parts of a weight are on"):
        sync_float8_amax_and_scale_history(block, group=alone())
    with pytest.raises(ValueError, match=r"group: got ranks \[.\], but parts of a weight are on"):
        sync_groups([torch.ones(1)], alone(), parted=[dist.group.WORLD])  # no DTensor
    sync_float8_amax_and_scale_history(block, group=dist.group.WORLD)
    layer = layer_of("tensorwise", bias=False)
    style = Float8RowwiseParallel(input_layouts=Shard(2), output_layouts=Shard(1))
    parallelize_module(layer, mesh, {"0": style})
    with pytest.raises(ValueError, match=r"sharded along dim 1 over 2 ranks, expected(.)*pad it"):
        layer(torch.ones(1, 3, DIM // 2, device=here()))
    with pytest.raises(TypeError, match="input of type Tensor for a weight that is a DTensor"):
        layer[0].forward(torch.ones(1, 4, DIM // 2, device=here()))
    whole = DTensor.from_local(torch.ones(1, 4, DIM, device=here()), mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"input placed(.)*Replicate(.)*expected(.)*redistribute"):
        layer[0].forward(whole)


def refused(recipe: str) -> None:
    """What is wrong is said before ranks talk to each other."""
    mesh, x = mesh_of(), torch.ones(2, TOKENS // 2, DIM, device=here())
    layouts = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}

    def model(plan: Any, **more: Any) -> nn.Module:
        layer = convert(nn.Sequential(nn.Linear(DIM, 48)), recipe, all_gather=False, **more)
        return parallelize_module(layer.to(here()), mesh, plan)

    other = init_device_mesh(here().type, (2,), mesh_dim_names=("other",))
    elsewhere = DTensor.from_local(x, other, [Shard(1)], run_check=False)
    gathering = {"0": Float8ColwiseParallel(input_layouts=Shard(1))}
    with FunctionalTraffic() as seen:
        with pytest.raises(ValueError, match=r"input on (.)*other=2(.)* weight on (.)*one mesh"):
            model(gathering)(elsewhere)
        for plan in (gathering, PrepareFloat8ModuleInput(**layouts)):
            with pytest.raises(TypeError, match=r"input of dtype torch.bfloat16 and weight of"):
                model(plan if plan is gathering else {"": plan, "0": Float8ColwiseParallel()})(
                    x.bfloat16()
                )
        with pytest.raises(ValueError, match=rf"input of shape(.)*, 31\), expected (.)*{DIM}"):
            model(gathering)(x[..., :31])
        far = {"0": Float8RowwiseParallel(output_layouts=Shard(3))}
        with pytest.raises(ValueError, match=r"input of 3 dims and an output to be sharded along"):
            model(far)(x[..., : DIM // 2])
        shared = model(gathering)
        sharded = convert(nn.Sequential(nn.Linear(DIM, 48)), recipe, all_gather=False)
        fully_shard(sharded.to(here()), mesh=mesh)
        for each in (shared, sharded):
            with pytest.raises(ValueError, match=r"weight is a DTensor already(.)*fully_shard"):
                parallelize_module(each, mesh, {"0": Float8RowwiseParallel()})
        with pytest.raises(ValueError, match=r"dim 0 by 2 ranks, expected a multiple of (16|128)"):
            model({"0": Float8ColwiseParallel()}, pad_inner_dim=False)
        wide = init_device_mesh(here().type, (1, 2), mesh_dim_names=("data", "tensor"))
        with pytest.raises(ValueError, match=r"Float8SequenceParallel: got a mesh of 2 dims"):
            Float8SequenceParallel()._apply(nn.RMSNorm(DIM), wide)
    assert seen.seen == []


def test_errors_come_before_collectives(either: Ranks) -> None:
    either.run(refused, "tensorwise")


def parts_of_rows(recipe: str) -> None:
    """What has one scale for each row is gathered in high precision where ranks have parts."""
    single = convert(nn.Sequential(nn.Linear(DIM, 48)), recipe, all_gather=False).to(here())
    layer = copy.deepcopy(single)
    parallelize_module(layer, mesh_of(), {"0": Float8ColwiseParallel(input_layouts=Shard(-1))})
    x = seeded(1, 2, TOKENS, DIM, device=here())
    close(layer(part(x, 2)), part(single(x), 2))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_ranks_may_have_parts_of_the_features(two: Ranks, recipe: str) -> None:
    two.run(parts_of_rows, recipe)


def shown() -> None:
    for recipe, how in (
        ("tensorwise", "float8"),
        ("rowwise", "float8"),
        ("rowwise_with_gw_hp", "high precision"),
        ("blockwise", "high precision"),
    ):
        block = block_of(recipe)
        assert "gathered" not in repr(block)
        parallelize_module(block, mesh_of(), plan_of("float8", sequence=True))
        assert repr(block.attention.wo).endswith(f"grad_output gathered in {how})")
        assert repr(block.attention.wq).endswith(f"input gathered in {how})")
        parallelize_module(block_of(recipe), mesh_of(), plan_of("float8", sequence=False))


def test_a_layer_says_how_its_tensors_travel(two: Ranks) -> None:
    two.run(shown)


def uneven_rows() -> None:
    """As a head whose vocabulary ranks cannot share evenly."""
    torch.manual_seed(0)
    plain = convert(nn.Sequential(nn.Linear(DIM, 49)), "tensorwise", all_gather=False).to(here())
    x, g = seeded(1, 2, TOKENS, DIM, device=here()), seeded(2, 2, TOKENS, 49, device=here())
    whole_x = x.clone().requires_grad_()
    y = plain(whole_x)
    y.backward(g)
    for layout, expected in ((Replicate(), y), (Shard(2), part(y, 2))):
        layer = copy.deepcopy(plain)
        style = Float8ColwiseParallel(input_layouts=Shard(1), output_layouts=layout)
        parallelize_module(layer, mesh_of(), {"0": style})
        own = part(x, 1).requires_grad_()
        got = layer(own)
        close(got, expected)
        got.backward(g if layout.is_replicate() else part(g, 2))
        close(own.grad, part(whole_x.grad, 1))
        for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            close(mine.grad.full_tensor(), theirs.grad)


def test_rows_need_not_be_shared_evenly(two: Ranks) -> None:
    two.run(uneven_rows)


def odd_inputs() -> None:
    """A dim that nobody shards is odd; the input is a sum still to be made, or has a NaN."""
    torch.manual_seed(0)
    whole = convert(nn.Sequential(nn.Linear(33, 48)), "tensorwise", all_gather=False).to(here())
    layer = copy.deepcopy(whole)
    parallelize_module(layer, mesh_of(), {"0": Float8ColwiseParallel(input_layouts=Shard(0))})
    x = seeded(1, 4, 33, device=here())
    summands = DTensor.from_local(x / 2, mesh_of(), [Partial()], run_check=False)
    for own in (part(x, 0), summands):
        close(layer(own), part(whole(x), 1))
    x[0, 0] = torch.nan  # on one rank
    assert layer(part(x, 0)).isnan().all()


def test_odd_inputs(two: Ranks) -> None:
    two.run(odd_inputs)


def test_wrong_uses_raise(two: Ranks) -> None:
    two.run(wrong_uses)


def one_block(
    kind: str, sequence: bool, bias: bool, backend: str | None, recipe: str = "tensorwise"
) -> None:
    whole, block = block_of(recipe, bias), block_of(recipe, bias)
    parallelize_module(block, mesh_of(), plan_of(kind, sequence))
    torch._dynamo.reset()  # other tests of these ranks count, too
    call = torch.compile(block, fullgraph=True, backend=backend) if backend else block
    x, g = (seeded(seed, 2, TOKENS, DIM, device=here()) for seed in (1, 2))
    own_x, own_g = (part(t, 1) if sequence else t.clone() for t in (x, g))
    x.requires_grad_()
    own_x.requires_grad_()
    y = whole(x)
    y.backward(g)
    own_y = call(own_x)
    own_y.backward(own_g)
    close(own_y, part(y, 1) if sequence else y)
    close(own_x.grad, part(x.grad, 1) if sequence else x.grad)
    for (name, mine), theirs in zip(block.named_parameters(), whole.parameters(), strict=True):
        if isinstance(mine, DTensor):
            assert mine.grad.placements == mine.placements
            grad = mine.grad.full_tensor()
            if name == NO_GRADIENT and grad.is_cuda:
                assert grad.norm() < 1e-3 * whole.attention.wq.bias.grad.norm()
            else:
                close(grad, theirs.grad)
        else:  # a norm's, of the tokens of this rank
            grad = mine.grad.clone()
            if sequence:
                dist.all_reduce(grad)
            close(grad, theirs.grad)


@pytest.mark.parametrize("kind", STYLES)
def test_a_block_equals_that_of_a_single_device(either: Ranks, kind: str) -> None:
    for sequence in (True, False):
        either.run(one_block, kind, sequence, True, None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_inductor_compiles_a_block(either: Ranks, recipe: str) -> None:
    either.run(one_block, "float8", True, False, "inductor", recipe)


REST = [pytest.param(recipe, marks=pytest.mark.exhaustive) for recipe in ("delayed", "rowwise")]


@pytest.mark.parametrize("recipe", ["tensorwise", *REST])
@pytest.mark.parametrize("kind", STYLES)
def test_a_block_is_one_graph(two: Ranks, kind: str, recipe: str) -> None:
    two.run(one_block, kind, True, False, "aot_eager", recipe)


def finer(recipe: str) -> None:
    """Scales of rows travel with them, if that is all; else communication in high precision."""
    torch.manual_seed(0)
    plain = nn.Sequential(FeedForward(256, 512)).to(here())
    whole = convert(copy.deepcopy(plain), recipe, all_gather=False)
    model = convert(copy.deepcopy(plain), recipe, all_gather=False)
    plan = {f"0{name.removeprefix('ffn')}": s for name, s in plan_of("float8", True).items()}
    parallelize_module(model, mesh_of(), {n: s for n, s in plan.items() if "attention" not in n})
    x, g = (seeded(seed, 1, 16, 256, device=here()) for seed in (1, 2))
    own_x = part(x, 1).requires_grad_()
    x.requires_grad_()
    with FunctionalTraffic() as seen:
        model(own_x).backward(part(g, 1))
    rows = own_x.numel() // 256
    gathered = {torch.uint8: 2 * own_x.numel(), torch.float32: 2 * rows * 4}
    if recipe != "rowwise":
        gathered = {torch.float32: 2 * own_x.nbytes}
    assert seen.bytes_of("all_gather") == gathered
    for other in (whole, plain):
        other(x).backward(g)
    for name, parameter in model.named_parameters():
        got, expected, exact = (
            parameter.grad.full_tensor(),
            whole.get_parameter(name).grad,
            plain.get_parameter(name).grad,
        )
        if recipe == "blockwise":  # ranks hold whole blocks
            assert off(got, expected) < 1e-5, name
        assert off(got, exact) < 1.05 * off(expected, exact), name


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_finer_scales_are_those_of_what_a_rank_holds(two: Ranks, recipe: str) -> None:
    two.run(finer, recipe)


class Model(nn.Module):
    """Two nested feed-forward blocks and a head, as wildcards and loss parallel need them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"ffn": FeedForward(DIM, HIDDEN)}) for _ in "ab")
        self.head = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["ffn"](x)
        return self.head(x)


def arguments(local: bool, autocast: bool) -> None:
    """Outputs that stay DTensors, wildcards, loss parallel, autocast, evaluation."""
    models = []
    for parallel in (False, True):
        torch.manual_seed(0)
        models.append(convert(Model(), "tensorwise", all_gather=False).to(here()))
        if parallel:
            layouts = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
            plan = {
                "layers.*.ffn": PrepareFloat8ModuleInput(**layouts, use_local_output=local),
                "layers.*.ffn.w[13]": Float8ColwiseParallel(use_local_output=local),
                "layers.*.ffn.w2": Float8RowwiseParallel(
                    output_layouts=Shard(1), use_local_output=local
                ),
                "head": Float8ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(models[1], mesh_of(), plan)
    whole, model = models
    torch.manual_seed(0)
    plain = Model().to(here())
    x = seeded(1, 2, TOKENS, DIM, device=here())
    target = torch.arange(2 * TOKENS, device=here()) % DIM
    own = part(x, 1) if local else distribute_tensor(x, mesh_of(), [Shard(1)])
    with torch.autocast(here().type, torch.bfloat16, enabled=autocast):
        expected = nn.functional.cross_entropy(whole(x).flatten(0, 1), target)
        expected.backward()
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(own).flatten(0, 1), target)
            loss.backward()
    assert off(loss.full_tensor(), expected) < (1e-2 if autocast else 1e-6)
    nn.functional.cross_entropy(plain(x).flatten(0, 1), target).backward()
    for name, parameter in model.named_parameters():
        got, one, exact = (m.get_parameter(name).grad for m in (model, whole, plain))
        assert got.placements == parameter.placements
        got = got.full_tensor()
        # Sums over ranks are rounded to bfloat16, and casts of them may go the other way.
        assert off(got, exact) < 1.1 * off(one, exact), (name, off(got, exact), off(one, exact))
        assert autocast or off(got, one) < 1e-4, name
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert off(model.eval()(own).full_tensor(), whole.eval()(x)) < 1e-4


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_arguments_of_styles(two: Ranks, local: bool, autocast: bool) -> None:
    two.run(arguments, local, autocast)
