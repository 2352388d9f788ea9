"""Tensor parallel by the styles of float8, and by torch's own, against a single device."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from float8 import (
    Float8ColwiseParallel,
    Float8LinearConfig,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.config import CAST_SITES, GEMM_OPERANDS, CastConfig, ScalingType
from support.devices import GPU
from support.errors import require_errors
from support.graphs import without_code
from support.models import Attention, FeedForward, forward_backward, seeded
from support.outcome import compiles
from support.parallel import (
    DIM,
    HIDDEN,
    NO_GRADIENT,
    STYLES,
    TOKENS,
    all_close,
    alone,
    block_of,
    both_sides,
    close,
    off,
    part,
    plan_of,
)
from support.ranks import on
from support.sharded import convert, data_and_tensor, here, mesh_of, shard, whole
from support.spies import GemmSpy, Traffic

EXHAUSTIVE = pytest.mark.exhaustive


def layer_of(features: int, rows: int, recipe: str = "tensorwise", bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = convert(nn.Sequential(nn.Linear(features, rows, bias=bias)), recipe, all_gather=False)
    layer[0].weight.data[-1, -1] = 3.0  # the amax is in the last part along both dims
    return layer.to(here())


@pytest.mark.parametrize("kind", STYLES)
@on("either")
def test_one_layer_equals_that_of_a_single_device(kind: str) -> None:
    """Each of its three GEMMs has the scales of the whole tensors, bit by bit."""
    colwise, rowwise, _ = STYLES[kind]
    x, g = (seeded(seed, 2, TOKENS, n, device=here()) for seed, n in ((1, DIM), (2, HIDDEN)))
    x[-1, -1, -1], g[-1, -1, -1] = 9.0, 7.0
    for dim, bias in ((1, True), (None, True), (0, False)):
        tokens = Replicate() if dim is None else Shard(dim)
        for style, in_dim, out_dim in (
            (colwise(input_layouts=tokens), dim, 2),
            (rowwise(output_layouts=tokens), 2, dim),
        ):
            single, layer = (layer_of(DIM, HIDDEN, bias=bias) for _ in "ab")
            parallelize_module(layer, mesh_of(), {"0": style})
            pairs, seen = both_sides(layer, single, x, g, in_dim, out_dim, watch=GemmSpy)
            all_close(pairs)
            scales = [[(scale_a, scale_b) for _, scale_a, _, scale_b in s.gemms] for s in seen]
            assert len(scales[0]) == 3
            assert scales[0] == scales[1]
            with torch.inference_mode():
                y = layer(part(x, in_dim))
            assert not isinstance(y, DTensor)
            assert torch.equal(y, pairs["output"][0])


ODD: list[tuple[Any, ...]] = [
    (DIM, 48, "tensorwise", Shard(-1), Shard(-1), 2, 2),  # parts of rows
    # What has one scale for each row is gathered in high precision where ranks have parts.
    (DIM, 48, "rowwise", Shard(-1), Shard(-1), 2, 2),
    (DIM, 49, "tensorwise", Shard(1), Replicate(), 1, None),  # a vocabulary shared unevenly
    (DIM, 49, "tensorwise", Shard(1), Shard(2), 1, 2),
    (33, 48, "tensorwise", Shard(0), Shard(-1), 0, 2),  # an odd dim that nobody shards
]
"""Features, rows, recipe, layouts of input and output, and along which dims these are compared."""


@on("two")
def test_odd_shapes_and_placements() -> None:
    for features, rows, recipe, enter, leave, in_dim, out_dim in ODD:
        single, layer = (layer_of(features, rows, recipe) for _ in "ab")
        style = Float8ColwiseParallel(input_layouts=enter, output_layouts=leave)
        parallelize_module(layer, mesh_of(), {"0": style})
        x, g = seeded(1, 2, TOKENS, features), seeded(2, 2, TOKENS, rows)
        pairs, _ = both_sides(layer, single, x, g, in_dim, out_dim)
        all_close(pairs if recipe == "tensorwise" else {"output": pairs["output"]})
    # The last: its input may be a sum still to be made, or have a NaN on one rank.
    summands = DTensor.from_local(x / 2, mesh_of(), [Partial()], run_check=False)
    close(layer(summands), part(single(x), 2))
    x[0, 0] = torch.nan
    assert layer(part(x, 0)).isnan().all()


def shared(x: Tensor, dim: int) -> DTensor:
    """What torch leaves this rank of `x`: maybe less than others have, or nothing."""
    return distribute_tensor(x, mesh_of(), [Shard(dim)], src_data_rank=None)


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", pytest.param("blockwise", marks=EXHAUSTIVE)]
)
@on("two_or_four")
def test_tokens_that_ranks_share_unevenly(recipe: str) -> None:
    """One rank has none of five over four, or of one: gradients are as far off as on one device."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
    for shape, dim in (((5, 64), 0), ((2, 3, 5, 64), 2), ((2, 1, 3, 64), 1)):
        x, g = (seeded(seed, *shape) for seed in (1, 2))
        single, model = (convert(copy.deepcopy(plain), recipe, False) for _ in "ab")
        plan = {
            "0": Float8ColwiseParallel(input_layouts=Shard(dim)),
            "2": Float8RowwiseParallel(output_layouts=Shard(dim), use_local_output=False),
        }
        parallelize_module(model, mesh_of(), plan)
        pairs, _ = both_sides(model, single, x, g, dim, dim, place=shared)
        for name, exact in forward_backward(plain, x, g).items():
            got, expected = pairs[name]
            assert exact.shape == expected.shape == got.shape
            assert off(got, exact) < 1.2 * off(expected, exact) + 1e-6, name


def of_gemms(names: tuple[str, ...]) -> Float8LinearConfig:
    """Return a configuration with these GEMMs in float8, the others in high precision."""
    in_float8 = {site for name in names for site in GEMM_OPERANDS[name]}
    high = CastConfig(scaling_type=ScalingType.DISABLED)
    casts = {x.value: CastConfig() if x in in_float8 else high for x in CAST_SITES}
    return Float8LinearConfig(**{f"cast_config_{name}": cast for name, cast in casts.items()})


@on("two")
def test_any_gemms_in_float8_and_two_casts_of_a_gradient() -> None:
    """Tokens are gathered and sums scattered around GEMMs in high precision, too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
    subsets = (itertools.combinations(GEMM_OPERANDS, n) for n in (1, 2, 3))
    again = CastConfig(target_dtype=torch.float8_e4m3fn)
    two_casts = Float8LinearConfig(cast_config_grad_output_for_grad_weight=again)
    configs = [*map(of_gemms, itertools.chain(*subsets)), two_casts]
    for n, config in enumerate(configs):
        shape = (2, 64) if n % 2 else (2, 8, 64)
        dim = len(shape) - 2
        x, g = (seeded(seed, *shape) for seed in (1, 2))
        single, model = (
            convert_to_float8_training(
                copy.deepcopy(plain), config=config, module_filter_fn=all_linears
            )
            for _ in "ab"
        )
        plan = {
            "0": Float8ColwiseParallel(input_layouts=Shard(dim)),
            "2": Float8RowwiseParallel(output_layouts=Shard(dim), use_local_output=False),
        }
        parallelize_module(model, mesh_of(), plan)
        pairs, _ = both_sides(model, single, x, g, dim, dim, place=shared)
        for name, (got, expected) in pairs.items():
            assert got.shape == expected.shape
            assert off(got, expected) < 0.02, (config.float8_gemms, shape, name)


@pytest.mark.parametrize(
    "recipe",
    ["rowwise", "blockwise", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.exhaustive)],
)
@on("two")
def test_finer_scales_are_those_of_what_a_rank_holds(recipe: str) -> None:
    """Scales of rows travel with them, if that is all; else communication in high precision."""
    torch.manual_seed(0)
    plain = FeedForward(256, 512)
    single, model = (convert(copy.deepcopy(plain), recipe, all_gather=False) for _ in "ab")
    plan = {n.partition(".")[2]: s for n, s in plan_of("float8", True).items() if "ffn" in n}
    parallelize_module(model, mesh_of(), plan)
    x, g = (seeded(seed, 1, 16, 256) for seed in (1, 2))
    how = "float8" if recipe == "rowwise" else "high precision"
    assert repr(model.w2).endswith(f"grad_output gathered in {how})")
    assert repr(model.w1).endswith(f"input gathered in {how})")
    pairs, (seen, _) = both_sides(model, single, x, g, 1, 1, watch=Traffic)
    own = x.numel() // 2
    gathered = {torch.uint8: 2 * own, torch.float32: 2 * own // 256 * 4}
    assert seen.bytes_of("all_gather") == (
        gathered if recipe == "rowwise" else {torch.float32: 2 * own * 4}
    )
    for name, exact in forward_backward(plain, x, g).items():
        got, expected = pairs[name]
        if name in ("output", "input"):
            continue
        if recipe == "blockwise":  # ranks hold whole blocks
            assert off(got, expected) < 1e-5, name
        assert off(got, exact) < 1.05 * off(expected, exact), name


# ---------------------------------------------------------------- a block


def compiled(kind: str, recipe: str, backend: str, part_of: str = "") -> None:
    """Blocks that were made alike, each compiled by itself as trainers do, share one graph.

    `part_of` a block may be all that is compiled. `no code`: by Inductor, op by op.
    """
    options: dict[str, Any] = {"backend": backend}
    if backend == "no code":
        options["backend"] = partial(compile_fx, inner_compile=without_code)
    mesh = data_and_tensor(dist.get_world_size() // 2, 2)
    tensor, two_dims = mesh["tensor"], mesh.shape[0] > 1  # one object, which compilers ask for
    torch._dynamo.reset()  # other tests of these ranks count, too
    single, *blocks = [block_of(recipe) for _ in range(3)]
    for block in blocks:
        parallelize_module(block, tensor, plan_of(kind, not two_dims, local=("ffn",)))
        if compiles() or backend == "inductor":  # which orders collectives otherwise
            block.get_submodule(part_of).compile(fullgraph=True, **options)
        if two_dims:
            fully_shard(block, mesh=mesh["data"])
    x, g = (seeded(seed, 2, TOKENS, DIM, device=here()) for seed in (1, 2))
    dim = None if two_dims else 1
    # One of each code object: the next would fail.
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        all_close(both_sides(blocks[0], single, x, g, dim, dim)[0])
        for _ in range(2):
            y = part(x, dim).requires_grad_()
            for block in blocks:
                y = block(y)
            y.sum().backward()


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        ("two", ("float8", "delayed recipe", "aot_eager", "ffn.w2")),
        pytest.param("two", ("float8", "delayed recipe", "aot_eager"), marks=EXHAUSTIVE),
        pytest.param("two", ("torch", "tensorwise", "aot_eager"), marks=EXHAUSTIVE),
        pytest.param("two", ("float8", "tensorwise", "no code"), marks=EXHAUSTIVE),
        pytest.param("four", ("float8", "delayed", "eager"), marks=EXHAUSTIVE),
        pytest.param("two_gpus", ("float8", "tensorwise", "inductor"), marks=GPU),
        pytest.param("two_gpus", ("float8", "delayed", "inductor"), marks=GPU),
    ],
)
def test_blocks_compile_once(request: Any, ranks: str, how: tuple[str, ...]) -> None:
    request.getfixturevalue(ranks).run(compiled, *how)


def trained(
    recipe: str,
    *shape: int,
    kind: str = "float8",
    sequence: bool = True,
    gather: bool = False,
    attach: bool = True,
    microbatches: int = 1,
    checkpointed: bool = False,
) -> list[Tensor]:
    """Steps of a block that ranks share over `tensor`, maybe also `data`, and of one alone.

    Where sums differ in their last bits, few casts round otherwise. The gradients of all steps. The
    third step of delayed scaling is the first one with known scales.
    """
    mesh = data_and_tensor(*shape)
    alike = (nn.Sequential(block_of(recipe, True, all_gather)) for all_gather in (False, gather))
    single, model = alike
    parallelize_module(model[0], mesh["tensor"], plan_of(kind, sequence, norms=True))
    replicas, replica = 1, 0
    if mesh.ndim == 2:
        shard(model, mesh["data"])
        replicas, replica = shape[0], mesh.get_local_rank("data")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (single, model)]
    if attach:
        attach_to_optimizer(single, optimizers[0], group=alone())
        attach_to_optimizer(model, optimizers[1])

    def loss_of(model: Any, x: Tensor, to: Tensor) -> Tensor:
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        return (y - to).square().sum() / (2 * TOKENS * DIM)

    def mine(x: Tensor) -> Tensor:
        return x.chunk(shape[-1], 1)[mesh.get_local_rank("tensor")] if sequence else x

    results: list[Tensor] = []
    first = 0
    for step in range(3 if "delayed" in recipe else 2):
        for microbatch in range(microbatches):
            batches = [
                seeded(100 * step + 10 * microbatch + n, 2, TOKENS, DIM) for n in range(replicas)
            ]
            watch = nullcontext if step else GemmSpy
            with watch() as expected:
                found = [loss_of(single, x, x.roll(1, -1)) for x in batches]
            sum(found).backward()
            x = batches[replica]
            with Traffic() as seen, watch() as gemms:
                loss = loss_of(model, mine(x), mine(x.roll(1, -1)))
            all_reduces = seen.all_reduces
            with seen:
                loss.backward()
        torch._foreach_div_([p.grad for p in single.parameters()], replicas)
        if step == 0:  # the scales of weights are those of the whole, bit by bit
            wanted = [scale for *_, scale in expected.gemms[:7]]
            assert [scale for *_, scale in gemms.gemms] == wanted
        first = first if step else all_reduces  # inputs' amaxes are among them
        if gather and recipe == "tensorwise":  # seven weights, over each dim that has ranks
            dims = sum(size > 1 for size in shape)
            assert first - all_reduces == (7 * dims if attach and step else 0)
        if sequence and recipe == "tensorwise" and kind == "float8":
            assert seen.bytes_of("all_gather") == {torch.uint8: 4 * mine(x).numel()}
        for name, parameter in model.named_parameters():
            got = whole(parameter.grad)
            if name.removeprefix("0.") != NO_GRADIENT:
                wanted = single.get_parameter(name).grad
                assert off(got, wanted) < 1e-2, (step, name, off(got, wanted))
            results.append(got)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert off(whole(parameter), single.get_parameter(name)) < 1e-2, name
    if sequence:
        dist.all_reduce(loss, group=mesh.get_group("tensor"))
    assert off(loss, found[replica]) < 1e-3
    buffers = dict(model.named_buffers())
    for name, wanted in single.named_buffers():  # of delayed scaling
        assert wanted.amax() > 0 or "history" not in name
        torch.testing.assert_close(buffers[name], wanted, rtol=1e-2, atol=0.0, msg=name)
    return results


TWICE: dict[str, Any] = {"microbatches": 2, "checkpointed": True}


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("delayed", {"checkpointed": True}),
        pytest.param("tensorwise", {"kind": "torch", "sequence": False}, marks=EXHAUSTIVE),
        pytest.param("delayed", {"kind": "torch", **TWICE}, marks=EXHAUSTIVE),
        pytest.param("delayed recipe", {"sequence": False, **TWICE}, marks=EXHAUSTIVE),
        pytest.param("tensorwise", {"attach": False}, marks=EXHAUSTIVE),
    ],
)
@on("two")
def test_steps_equal_those_of_a_single_device(recipe: str, how: dict[str, Any]) -> None:
    trained(recipe, 2, **how)


def however_gathered(recipe: str, *shape: int) -> None:
    """As on a single device; on four ranks with the same bits where float8 is not gathered."""
    found = trained(recipe, *shape, gather=True)
    if dist.get_world_size() == 4:
        others = trained(recipe, *shape, gather=False)
        assert all(torch.equal(*pair) for pair in zip(found, others, strict=True))


@pytest.mark.parametrize(
    ("ranks", "recipe", "shape"),
    [
        ("two", "tensorwise", (1, 2)),
        pytest.param("four", "tensorwise", (2, 2), marks=EXHAUSTIVE),
        pytest.param("four", "delayed", (2, 2), marks=EXHAUSTIVE),
    ],
)
def test_fsdp_with_tensor_parallel_equals_a_single_device(
    request: Any, ranks: str, recipe: str, shape: tuple[int, int]
) -> None:
    request.getfixturevalue(ranks).run(however_gathered, recipe, *shape)


# ---------------------------------------------------------------- what is sent


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


@pytest.mark.parametrize(
    ("recipe", "of_weights"), [("delayed", 0), pytest.param("delayed recipe", 7, marks=EXHAUSTIVE)]
)
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
            with torch.no_grad():  # which no sync may follow
                assert torch.equal(block(30 * x), block.eval()(30 * x))
            block.train().load_state_dict(block.state_dict())
    assert counts == [18, 18, of_weights, 18]


# ---------------------------------------------------------------- styles and compilers


@pytest.mark.exhaustive
@on("two")
def test_what_is_checkpointed_compiles() -> None:
    """Dynamo lets nothing that is checkpointed write to a module."""
    torch._dynamo.reset()
    plan = {"": PrepareFloat8ModuleInput(**GATHERING), "0": Float8ColwiseParallel()}
    model = parallelize_module(layer_of(DIM, HIDDEN), mesh_of(), plan)
    # AOTAutograd of torch 2.13 takes no mesh that is used where something is checkpointed.
    backend = "eager" if torch.__version__.startswith("2.13") else "aot_eager"
    # On all ranks: in eager mode what runs again in backward stops early, and so asks less.
    in_one_graph = torch.compile(checkpoint, backend=backend, fullgraph=True)
    x, found = seeded(1, 2, TOKENS // 2, DIM).requires_grad_(), []
    for call in (checkpoint, in_one_graph):
        model.zero_grad()
        call(model, x, use_reentrant=False).square().sum().backward()
        found.append([whole(p.grad) for p in model.parameters()])
    for got, expected in zip(*found, strict=True):
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
    parallelize_module(model, mesh_of(), plan)
    twin = copy.deepcopy(model)
    for name, layer in model["attention"].named_children():
        layer.fp8_scale_input.fill_(1.0 if name == "wo" else 0.5)
        layer.fp8_scale_weight.fill_(1.0)
    for layer in twin["attention"].children():
        layer.fp8_scale_input.fill_(0.25)
    x = seeded(1, 2, TOKENS // 2, DIM)
    for each, expected in ((model, 0.5), (twin, 0.25)):
        with GemmSpy() as seen:
            each["attention"](x)
        assert [float(scale) for _, scale, *_ in seen.gemms[:3]] == [expected] * 3
        assert "input gathered" not in repr(each["attention"].wo)


class Model(nn.Module):
    """Two nested feed-forward blocks and a head, as wildcards and loss parallel need them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"ffn": FeedForward(DIM, HIDDEN)}) for _ in "ab")
        self.head = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["ffn"](x)
        return self.head(x)


@pytest.mark.parametrize(
    ("local", "autocast"), [pytest.param(False, False, marks=EXHAUSTIVE), (True, True)]
)
@on("two")
def test_arguments_of_styles(local: bool, autocast: bool) -> None:
    plain, single, model = Model(), *(convert(Model(), "tensorwise", False) for _ in "ab")
    plan = {
        "layers.*.ffn": PrepareFloat8ModuleInput(**GATHERING, use_local_output=local),
        "layers.*.ffn.w[13]": Float8ColwiseParallel(use_local_output=local),
        "layers.*.ffn.w2": Float8RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
        "head": Float8ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh_of(), plan)
    x, target = seeded(1, 2, TOKENS, DIM), torch.arange(2 * TOKENS) % DIM
    own = part(x, 1) if local else distribute_tensor(x, mesh_of(), [Shard(1)])

    def loss_of(model: Any, x: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), target)
        loss.backward()
        return loss.detach()

    loss_of(plain, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = loss_of(single, x)
        with loss_parallel():
            loss = loss_of(model, own)
    assert off(loss.full_tensor(), expected) < (1e-2 if autocast else 1e-6)
    for name, parameter in model.named_parameters():
        got, one, exact = (m.get_parameter(name).grad for m in (model, single, plain))
        assert got.placements == parameter.placements
        got = got.full_tensor()
        # Sums over ranks are rounded to bfloat16, and casts of them may go the other way.
        assert off(got, exact) < 1.1 * off(one, exact), (name, off(got, exact), off(one, exact))
        assert autocast or off(got, one) < 1e-4, name
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert off(model.eval()(own).full_tensor(), single.eval()(x)) < 1e-4


@on("two")
def test_a_bias_keeps_the_dtype_that_autocast_chose() -> None:
    for style, features in (
        (Float8ColwiseParallel(), DIM),
        (Float8RowwiseParallel(output_layouts=Shard(1)), DIM // 2),
    ):
        layer = parallelize_module(layer_of(DIM, HIDDEN), mesh_of(), {"0": style})
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(seeded(0, 2, TOKENS, features)).dtype == torch.bfloat16


# ---------------------------------------------------------------- errors

GATHERING = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}


@on("two")
def test_errors_come_before_collectives() -> None:
    mesh, x = mesh_of(), torch.ones(2, TOKENS // 2, DIM)
    wide = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    colwise, rowwise = Float8ColwiseParallel(), Float8RowwiseParallel()
    prepare = PrepareFloat8ModuleInput(**GATHERING)
    wrong = PrepareFloat8ModuleInput(**GATHERING, float8_dtype=torch.float8_e5m2)

    def layer(recipe: str = "tensorwise", shape: Any = (DIM, 48)) -> nn.Module:
        return convert(nn.Sequential(nn.Linear(*shape)), recipe, False)

    def made(plan: Any) -> nn.Module:
        return parallelize_module(layer(), mesh, plan)

    odd, two = layer(shape=(49, 1))[0], layer()
    two.append(layer("rowwise")[0])
    elsewhere = DTensor.from_local(x, other, [Shard(1)], run_check=False)
    everything = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    gathering = made({"0": Float8ColwiseParallel(input_layouts=Shard(1))})
    prepared = made({"": prepare, "0": colwise})
    summing = made({"0": Float8RowwiseParallel(output_layouts=Shard(1))})
    far = made({"0": Float8RowwiseParallel(output_layouts=Shard(3))})
    half = x[..., : DIM // 2]
    plain, sharded = nn.Linear(DIM, 48), fully_shard(layer(), mesh=mesh)
    no_layer = "TypeError: got a Linear, expected a Float8Linear"
    is_dtensor = r"ValueError: a DTensor already(.)*fully_shard"
    mesh_dims = r"ValueError: a mesh of 2 dims(.)*'tensor'(.)*expected one"
    of_dtype = "TypeError: input of dtype torch.bfloat16 and weight of"
    in_2_ways = "ValueError: got layers that cast their input in 2 ways"
    with Traffic() as seen:
        require_errors(
            (f"{no_layer}; convert", colwise._apply, [plain, mesh]),
            (f"{no_layer}; convert", rowwise._apply, [plain, mesh]),
            (f"{no_layer} or a module", prepare._apply, [plain, mesh]),
            (r"ValueError: \(1, 49\)(.)*dim 0 over 2(.)*rows on", colwise._apply, [odd, mesh]),
            (r"ValueError: \(1, 49\)(.)*dim 1 over 2(.)*divisible", rowwise._apply, [odd, mesh]),
            (in_2_ways, prepare._apply, [two, mesh]),
            (r"ValueError: float8_dtype=(.)*e5m2, (.)*e4m3fn", wrong._apply, [two[0], mesh]),
            (is_dtensor, rowwise._apply, [sharded[0], mesh]),
            (is_dtensor, rowwise._apply, [gathering[0], mesh]),
            (mesh_dims, colwise._apply, [two[0], wide]),
            (mesh_dims, rowwise._apply, [two[0], wide]),
            (mesh_dims, prepare._apply, [two[0], wide]),
            (r"ValueError: input on (.)*other=2(.)*one mesh", gathering, [elsewhere]),
            (of_dtype, gathering, [x.bfloat16()]),
            (of_dtype, prepared, [x.bfloat16()]),
            (rf"ValueError: shape(.)*, 31\), expected (.)*{DIM}", gathering, [x[..., :31]]),
            ("ValueError: input of 3 dims and an output to be sharded along", far, [half]),
            ("TypeError: type Tensor for a weight that is", summing[0].forward, [half]),
            (r"ValueError: Replicate(.)*expected(.)*redist", summing[0].forward, [everything]),
        )
    assert seen.seen == []
    first = PrepareFloat8ModuleInput(**GATHERING, fwd_config_submodule_fqn="0")
    parallelize_module(two, mesh, first)
    block = parallelize_module(block_of("delayed"), mesh, plan_of("float8", sequence=True))
    of_parts = r"ValueError: group: got ranks \[.\], but parts of a weight are on"
    require_errors((of_parts, partial(sync_float8_amax_and_scale_history, group=alone()), [block]))
    sync_float8_amax_and_scale_history(block, group=dist.group.WORLD)
