"""Tensor parallel by float8's styles and by torch's own, against the same layers on one device."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from float8 import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    attach_to_optimizer,
    sync_float8_amax_and_scale_history,
)
from support.configs import FINER, RECIPES
from support.models import Attention, FeedForward, seeded
from support.parallel import (
    DIM,
    HIDDEN,
    NO_GRADIENT,
    STYLES,
    TOKENS,
    alone,
    block_of,
    close,
    off,
    part,
    plan_of,
)
from support.ranks import Ranks, on
from support.sharded import Traffic, convert, here, mesh_of, whole
from support.spies import GemmSpy


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
    with GemmSpy() as expected:
        y = whole(x)
        y.backward(g)
    with GemmSpy() as got:
        own_y = layer(own_x)
        own_y.backward(own_g)
    assert not isinstance(own_y, DTensor)
    assert len(got.gemms) == len(expected.gemms) == 3
    for mine, theirs in zip(got.gemms, expected.gemms, strict=True):
        assert torch.equal(mine[1], theirs[1])  # the scales of both operands
        assert torch.equal(mine[3], theirs[3])
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
            either.run(one_layer, kind, by_columns, sequence, True)
        either.run(one_layer, kind, by_columns, True, False, 0)


def trained(kind: str, sequence: bool, microbatches: int, checkpointed: bool, recipe: str) -> None:
    """Five steps on both; where sums differ in their last bits, few casts round otherwise."""
    whole, block = block_of(recipe, bias=True), block_of(recipe, bias=True)
    parallelize_module(block, mesh_of(), plan_of(kind, sequence, norms=True))
    losses = []
    for model, sharded in ((whole, False), (block, sequence)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        if "delayed" in recipe:
            attach_to_optimizer(model, optimizer, group=None if model is block else alone())
        for step in range(5):
            optimizer.zero_grad()
            for microbatch in range(microbatches):
                x = seeded(10 * step + microbatch, 2, TOKENS, DIM, device=here())
                x, to = (part(t, 1) if sharded else t for t in (x, x.roll(1, -1)))
                y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
                loss = (y - to).square().sum() / (2 * TOKENS * DIM)
                loss.backward()
            optimizer.step()
        if sharded:
            dist.all_reduce(loss)
        losses.append(loss.detach())
    assert off(losses[1], losses[0]) < 1e-3
    buffers = dict(block.named_buffers())
    for name, expected in whole.named_buffers():  # of delayed scaling
        assert expected.amax() > 0 or "history" not in name
        torch.testing.assert_close(buffers[name], expected, rtol=1e-2, atol=0.0, msg=name)
    offs = {}
    for (name, mine), theirs in zip(block.named_parameters(), whole.parameters(), strict=True):
        for what, a, b in (("value", mine, theirs), ("grad", mine.grad, theirs.grad)):
            offs[name, what] = off(a.full_tensor() if isinstance(a, DTensor) else a, b)
    offs.pop((NO_GRADIENT, "grad"), None)
    assert max(offs.values()) < 1e-2, offs


@pytest.mark.parametrize("kind", STYLES)
def test_five_steps_equal_those_of_a_single_device(two: Ranks, kind: str) -> None:
    two.run(trained, kind, True, 1, False, "tensorwise")
    two.run(trained, kind, True, 2, True, "delayed")
    two.run(trained, kind, False, 2, True, "delayed recipe")


@pytest.mark.parametrize("kind", STYLES)
@on("either")
def test_half_the_bytes_of_16_bits_are_gathered(kind: str) -> None:
    block = block_of("tensorwise").to(torch.bfloat16)
    parallelize_module(block, mesh_of(), plan_of(kind, sequence=True))
    for name, gathered in (("attention.wo", "grad_output"), ("attention.wq", "input")):
        said = repr(block.get_submodule(name)).endswith(f", {gathered} gathered in float8)")
        assert said == (kind == "float8")
    x = seeded(1, 2, TOKENS // 2, DIM, dtype=torch.bfloat16, device=here()).requires_grad_()
    with Traffic() as seen:
        block(x).sum().backward()
    gathered = {torch.uint8: 4 * x.numel()} if kind == "float8" else {x.dtype: 8 * x.numel()}
    assert seen.bytes_of("all_gather") == gathered
    assert seen.bytes_of("reduce_scatter") == {x.dtype: 4 * 2 * 2 * x.numel()}  # of all tokens
    assert seen.bytes_of("all_to_all") == {}
    # The 4 tensors that are gathered, and those that lie on all ranks: inputs of 2 layers,
    # gradients of 5. Each of the 7 weights.
    amaxes = [size // 4 for name, _, size in seen.seen if name == "all_reduce"]
    assert amaxes == [1] * (2 + 5 + (4 if kind == "float8" else 0) + 7)


@on("two")
def test_a_module_whose_inputs_are_prepared_compiles() -> None:
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        block = block_of("delayed recipe")
        parallelize_module(block, mesh_of(), plan_of("float8", sequence=True, local=True))
        if compiled:
            block.attention.compile(backend="aot_eager", fullgraph=True)
        x = seeded(1, 2, TOKENS // 2, DIM, device=here()).requires_grad_()
        y = block.attention(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad.to_local() for p in block.attention.parameters())])
    for got, expected in zip(*results, strict=True):
        close(got, expected)


@on("two")
def test_a_block_compiles_with_its_checkpoints() -> None:
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


class OutFirst(Attention):
    """The layers that read the input come last."""

    def __init__(self) -> None:
        super().__init__(DIM)
        for name in ("wq", "wk", "wv"):
            layer = getattr(self, name)
            delattr(self, name)
            setattr(self, name, layer)


@on("two")
def test_prepared_inputs_are_cast_as_their_readers_say() -> None:
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
        with GemmSpy() as seen:
            each["attention"](x)
        assert [float(scale) for _, scale, *_ in seen.gemms[:3]] == [expected] * 3
        assert "input gathered" not in repr(each["attention"].wo)


@pytest.mark.parametrize(("recipe", "of_weights"), [("delayed", 0), ("delayed recipe", 7)])
@on("either")
def test_delayed_scaling_asks_no_other_rank_once_scales_are_known(
    recipe: str, of_weights: int
) -> None:
    block = block_of(recipe)
    parallelize_module(block, mesh_of(), plan_of("float8", sequence=True))
    x = seeded(1, 2, TOKENS // 2, DIM, device=here())
    counts = []
    for _ in range(4):
        with Traffic() as seen:
            block(x).square().sum().backward()
        counts.append(sum(size <= 16 for *_, size in seen.seen))
        sync_float8_amax_and_scale_history(block)
        if len(counts) == 3:
            block.load_state_dict(block.state_dict())
    assert counts == [18, 18, of_weights, 18]


GATHERING = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}


def refused_styles() -> None:
    """What cannot be parallelized so."""
    mesh = mesh_of()
    wide = init_device_mesh(here().type, (1, 2), mesh_dim_names=("data", "tensor"))
    plain = nn.Sequential(nn.Linear(DIM, 48))
    odd, two, sharded = (convert(copy.deepcopy(plain), "tensorwise", False) for _ in range(3))
    odd[0] = convert(nn.Linear(49, 1), "tensorwise", False)
    two.append(convert(copy.deepcopy(plain), "rowwise", False))
    fully_shard(sharded.to(here()), mesh=mesh)
    colwise, rowwise = Float8ColwiseParallel(), Float8RowwiseParallel()
    prepare = PrepareFloat8ModuleInput(**GATHERING)
    wrong = PrepareFloat8ModuleInput(**GATHERING, float8_dtype=torch.float8_e5m2)
    mesh_dims = r"got a mesh of 2 dims(.)*'tensor'(.)*expected one"
    cases: list[tuple[nn.Module, Any, type[Exception], str]] = [
        (plain[0], colwise, TypeError, "got a Linear, expected a Float8Linear; convert"),
        (plain[0], rowwise, TypeError, "got a Linear, expected a Float8Linear; convert"),
        (plain[0], prepare, TypeError, "got a Linear, expected a Float8Linear or a module"),
        (odd[0], colwise, ValueError, r"weight of shape \(1, 49\)(.)*dim 0 over 2(.)*rows on"),
        (odd[0], rowwise, ValueError, r"weight of shape \(1, 49\)(.)*dim 1 over 2(.)*divisible"),
        (two, prepare, ValueError, r"got layers that cast their input in 2 ways"),
        (two[0], wrong, ValueError, r"got float8_dtype=(.)*e5m2, expected (.)*e4m3fn"),
        (sharded[0], rowwise, ValueError, r"weight is a DTensor already(.)*fully_shard"),
        (two[0], colwise, ValueError, mesh_dims),
        (two[0], rowwise, ValueError, mesh_dims),
        (two[0], prepare, ValueError, mesh_dims),
    ]
    for module, style, error, expected in cases:
        with pytest.raises(error, match=expected):
            style._apply(module, wide if expected is mesh_dims else mesh)
    parallelize_module(
        two, mesh, PrepareFloat8ModuleInput(**GATHERING, fwd_config_submodule_fqn="0")
    )
    once = parallelize_module(two[0], mesh, colwise)
    with pytest.raises(ValueError, match=r"weight is a DTensor already(.)*fully_shard"):
        parallelize_module(once, mesh, rowwise)


def refused_groups() -> None:
    block = block_of("delayed")
    parallelize_module(block, mesh_of(), plan_of("float8", sequence=True))
    with pytest.raises(ValueError, match=r"group: got ranks \[.\], but parts of a weight are on"):
        sync_float8_amax_and_scale_history(block, group=alone())
    sync_float8_amax_and_scale_history(block, group=dist.group.WORLD)


def refused_inputs() -> None:
    mesh, x = mesh_of(), torch.ones(2, TOKENS // 2, DIM, device=here())
    other = init_device_mesh(here().type, (2,), mesh_dim_names=("other",))

    def model(plan: Any) -> nn.Module:
        layer = convert(nn.Sequential(nn.Linear(DIM, 48)), "tensorwise", False)
        return parallelize_module(layer.to(here()), mesh, plan)

    elsewhere = DTensor.from_local(x, other, [Shard(1)], run_check=False)
    everything = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    gathering = model({"0": Float8ColwiseParallel(input_layouts=Shard(1))})
    prepared = model({"": PrepareFloat8ModuleInput(**GATHERING), "0": Float8ColwiseParallel()})
    summing = model({"0": Float8RowwiseParallel(output_layouts=Shard(1))})
    far = model({"0": Float8RowwiseParallel(output_layouts=Shard(3))})
    half, of_dtype = x[..., : DIM // 2], r"input of dtype torch.bfloat16 and weight of"
    cases: list[tuple[Any, Tensor, type[Exception], str]] = [
        (gathering, elsewhere, ValueError, r"input on (.)*other=2(.)* weight on (.)*one mesh"),
        (gathering, x.bfloat16(), TypeError, of_dtype),
        (prepared, x.bfloat16(), TypeError, of_dtype),
        (gathering, x[..., :31], ValueError, rf"input of shape(.)*, 31\), expected (.)*{DIM}"),
        (far, half, ValueError, r"input of 3 dims and an output to be sharded along"),
        (summing[0].forward, half, TypeError, "input of type Tensor for a weight that is"),
        (summing[0].forward, everything, ValueError, r"placed(.)*Replicate(.)*expected(.)*redist"),
    ]
    for call, given, error, expected in cases:
        with pytest.raises(error, match=expected):
            call(given)


@on("two")
def test_errors_come_before_collectives() -> None:
    with Traffic() as seen:
        refused_styles()
        refused_inputs()
    assert seen.seen == []
    refused_groups()


def odd_layers(features: int, rows: int, recipe: str = "tensorwise") -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(features, rows)), recipe, all_gather=False).to(here())


def parts_of_rows(recipe: str) -> None:
    """What has one scale for each row is gathered in high precision where ranks have parts."""
    single, layer = odd_layers(DIM, 48, recipe), odd_layers(DIM, 48, recipe)
    parallelize_module(layer, mesh_of(), {"0": Float8ColwiseParallel(input_layouts=Shard(-1))})
    x = seeded(1, 2, TOKENS, DIM, device=here())
    close(layer(part(x, 2)), part(single(x), 2))


def uneven_rows() -> None:
    """As a head whose vocabulary ranks cannot share evenly."""
    x, g = seeded(1, 2, TOKENS, DIM, device=here()), seeded(2, 2, TOKENS, 49, device=here())
    single, whole_x = odd_layers(DIM, 49), x.clone().requires_grad_()
    y = single(whole_x)
    y.backward(g)
    for layout, expected in ((Replicate(), y), (Shard(2), part(y, 2))):
        layer = odd_layers(DIM, 49)
        style = Float8ColwiseParallel(input_layouts=Shard(1), output_layouts=layout)
        parallelize_module(layer, mesh_of(), {"0": style})
        own = part(x, 1).requires_grad_()
        got = layer(own)
        close(got, expected)
        got.backward(g if layout.is_replicate() else part(g, 2))
        close(own.grad, part(whole_x.grad, 1))
        for mine, theirs in zip(layer.parameters(), single.parameters(), strict=True):
            close(mine.grad.full_tensor(), theirs.grad)


def odd_inputs() -> None:
    """A dim that nobody shards is odd; the input is a sum still to be made, or has a NaN."""
    single, layer = odd_layers(33, 48), odd_layers(33, 48)
    parallelize_module(layer, mesh_of(), {"0": Float8ColwiseParallel(input_layouts=Shard(0))})
    x = seeded(1, 4, 33, device=here())
    summands = DTensor.from_local(x / 2, mesh_of(), [Partial()], run_check=False)
    for own in (part(x, 0), summands):
        close(layer(own), part(single(x), 1))
    x[0, 0] = torch.nan  # on one rank
    assert layer(part(x, 0)).isnan().all()


def chunk_of(x: Tensor, dim: int) -> DTensor:
    """What torch leaves this rank of `x`: maybe less than others have, or nothing."""
    return distribute_tensor(x, mesh_of(), [Shard(dim)], src_data_rank=None)


def all_of(x: Tensor, dim: int) -> Tensor:
    return x.clone()


@pytest.mark.parametrize("recipe", [*RECIPES, *FINER])
@on("four")
def test_tokens_that_ranks_share_unevenly(recipe: str) -> None:
    """Five over four ranks, one of which has none: gradients are as far off as on one device."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
    for shape, dim in (((5, 64), 0), ((2, 5, 64), 1), ((2, 3, 5, 64), 2), ((2, 1, 3, 64), 1)):
        x, g = (seeded(seed, *shape) for seed in (1, 2))
        exact, expected = copy.deepcopy(plain), convert(copy.deepcopy(plain), recipe, False)
        model, shared = convert(copy.deepcopy(plain), recipe, False), Shard(dim)
        plan = {
            "0": Float8ColwiseParallel(input_layouts=shared),
            "2": Float8RowwiseParallel(output_layouts=shared, use_local_output=False),
        }
        parallelize_module(model, mesh_of(), plan)
        found = []
        for each, place in ((exact, all_of), (expected, all_of), (model, chunk_of)):
            own = place(x, dim).requires_grad_()
            y = each(own)
            y.backward(place(g, dim))
            found.append([whole(t) for t in (y, own.grad, *(p.grad for p in each.parameters()))])
        for a, b, c in zip(*found, strict=True):
            assert a.shape == b.shape == c.shape
            assert off(c, a) < 1.2 * off(b, a) + 1e-6


def test_odd_shapes_and_placements(two: Ranks) -> None:
    two.run(parts_of_rows, "tensorwise")
    two.run(parts_of_rows, "rowwise")
    two.run(uneven_rows)
    two.run(odd_inputs)


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


@pytest.mark.parametrize("kind", ["float8", pytest.param("torch", marks=pytest.mark.exhaustive)])
def test_a_block_is_one_graph(two: Ranks, kind: str) -> None:
    two.run(one_block, kind, True, False, "aot_eager", "tensorwise")


def stack(kind: str, recipe: str, dp: int) -> None:
    """Blocks that were made alike, each compiled by itself as trainers do."""
    shape = dp, dist.get_world_size() // dp
    mesh = init_device_mesh(here().type, shape, mesh_dim_names=("data", "tensor"))
    tensor = mesh["tensor"]  # one object, which compilers ask for
    torch._dynamo.reset()
    blocks = [block_of(recipe) for _ in range(3)]
    for block in blocks:
        parallelize_module(block, tensor, plan_of(kind, sequence=False))
        block.compile(fullgraph=True, backend="eager")  # guards are Dynamo's
        if dp > 1:
            fully_shard(block, mesh=mesh["data"])
    x = seeded(1, 2, TOKENS, DIM, device=here()).requires_grad_()
    for _ in range(2):
        y = x
        # One of each code object: the next would fail.
        with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
            for block in blocks:
                y = block(y)
        y.sum().backward()


def test_all_blocks_of_a_model_share_one_compilation(two: Ranks) -> None:
    two.run(stack, "float8", "tensorwise", 1)


@pytest.mark.exhaustive
def test_all_blocks_share_one_compilation_under_fsdp(four: Ranks) -> None:
    four.run(stack, "float8", "delayed", 2)
    four.run(stack, "torch", "delayed", 2)


@pytest.mark.parametrize("recipe", FINER)
@on("two")
def test_finer_scales_are_those_of_what_a_rank_holds(recipe: str) -> None:
    """Scales of rows travel with them, if that is all; else communication in high precision."""
    torch.manual_seed(0)
    plain = nn.Sequential(FeedForward(256, 512)).to(here())
    whole = convert(copy.deepcopy(plain), recipe, all_gather=False)
    model = convert(copy.deepcopy(plain), recipe, all_gather=False)
    plan = {f"0{name.removeprefix('ffn')}": s for name, s in plan_of("float8", True).items()}
    parallelize_module(model, mesh_of(), {n: s for n, s in plan.items() if "attention" not in n})
    x, g = (seeded(seed, 1, 16, 256, device=here()) for seed in (1, 2))
    how = "float8" if recipe == "rowwise" else "high precision"
    assert repr(model[0].w2).endswith(f"grad_output gathered in {how})")
    assert repr(model[0].w1).endswith(f"input gathered in {how})")
    own_x = part(x, 1).requires_grad_()
    x.requires_grad_()
    with Traffic() as seen:
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


@pytest.mark.parametrize(("local", "autocast"), [(False, False), (True, True)])
@on("two")
def test_arguments_of_styles(local: bool, autocast: bool) -> None:
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


@on("two")
def test_a_bias_keeps_the_dtype_that_autocast_chose() -> None:
    for style in (Float8ColwiseParallel(), Float8RowwiseParallel(output_layouts=Shard(1))):
        layer = layer_of("tensorwise", bias=True)
        parallelize_module(layer, mesh_of(), {"0": style})
        features = DIM if isinstance(style, Float8ColwiseParallel) else DIM // 2
        x = seeded(0, 2, TOKENS, features, device=here())
        with torch.autocast(here().type, torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
