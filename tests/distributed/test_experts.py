"""Experts under FSDP2, which gathers their weights in float8 or not, and under expert parallel."""

import importlib
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from float8 import conversion_report, convert_to_high_precision, update_float8_weights
from float8.config import Float8Weights
from float8.experts import Float8Experts
from float8.experts.gather import GatheredExperts, GatherExperts
from sqnr import same_bits, sqnr
from support.errors import require_errors
from support.models import seeded
from support.outcome import (
    Results,
    accumulate,
    after_a_write,
    assert_same,
    casts_saved,
    compiles,
    evaluate,
    outcome,
    train,
)
from support.ranks import on
from support.rings import short
from support.sharded import (
    DIM,
    batch,
    convert,
    here,
    keep,
    mesh_of,
    model_of,
    offload,
    part,
    shard,
    whole,
)
from support.spies import Traffic, saved_tensors

BF16 = torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
K, N = 32, 48


class Experts(nn.Module):
    """They multiply as torchtitan's do: cast, turned, by a method of that name."""

    def __init__(self, experts: int, K: int = K, N: int = N) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, N, K) * K**-0.5)
        self.down = nn.Parameter(torch.randn(experts, K, N) * N**-0.5)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        offs = sizes.cumsum(0, dtype=torch.int32)
        h = self._grouped_mm(A=x.bfloat16(), B_t=up.bfloat16().transpose(-2, -1), offs=offs)
        y = self._grouped_mm(A=F.silu(h), B_t=down.bfloat16().transpose(-2, -1), offs=offs)
        return y.type_as(x)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return F.grouped_mm(A, B_t, offs=offs)


class Block(nn.Module):
    """Each token goes to two experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, DIM))
        self.experts = Experts(experts)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = (x @ self.router.t().to(x)).softmax(-1).topk(min(2, len(self.router)))
        order = chosen.flatten().argsort(stable=True)
        sizes = chosen.flatten().bincount(minlength=len(self.router))
        tokens = order // chosen.shape[1]
        y = self.experts(F.pad(x, (0, K - DIM))[tokens], sizes)[:, :DIM]
        # Not by index_add, which adds in any order on GPUs.
        each = y[order.argsort()].view(*chosen.shape, DIM)
        return x + (each * scores[..., None]).sum(1)


def blocks(experts: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(experts)).to(here())


def gathered(recipe: str, experts: int, steps: int, gather: bool, wrap: Any = shard) -> Results:
    """What comes of a gather in float8, or in 16 bits."""

    def check(model: Any) -> None:
        for weight in (model[0].experts.up, model[0].experts.down):
            assert isinstance(weight.to_local(), GatherExperts) == gather

    made = partial(blocks, experts), partial(wrap, param_dtype=BF16)
    return outcome(recipe, gather, made[1], make=made[0], begin=check, steps=steps)


@pytest.mark.parametrize(
    "experts",
    short({1}, [4, 3, 1]),  # even; uneven; a rank has none
)
@on("either")
def test_training(experts: int) -> None:
    """One scale for each expert, or square: the same bits. Rows: those of the first output."""
    others = [keep, *([offload] if here().type == "cpu" else [])]
    for wrap in (shard, *(others if experts == 4 else ())):
        assert_same(*(gathered("tensorwise", experts, 2, how, wrap) for how in (True, False)))
    assert_same(*(gathered("blockwise", experts, 2, how) for how in (True, False)))
    one, other = (gathered("rowwise", experts, 1, how) for how in (False, True))
    assert same_bits(one["loss 0"], other["loss 0"])
    for name, grad in one.items():
        # Columns are cast again from rows.
        if name.startswith("grad") and grad.any():  # a rank may have none; one needs no router
            assert sqnr(grad, other[name]) > 30, name


@pytest.mark.parametrize(
    ("recipe", "experts"),
    [
        ("rowwise", 3),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("tensorwise", 3), ("blockwise", 3), ("rowwise", 4))
        ),
    ],
)
@on("either")
def test_shards_are_cast_once_per_step(recipe: str, experts: int) -> None:
    """Each of two weights is gathered four times in the second step; both steps cast it."""
    made = {"make": partial(blocks, experts), "wrap": partial(shard, param_dtype=BF16)}
    most = own = 1
    if recipe == "blockwise":  # casts each expert; gathers also those that pad a shard
        most = -(-experts // dist.get_world_size())
        own = min(most, experts - most * dist.get_rank())
    assert casts_saved(recipe, **made) == 2 * (4 * most - 2 * own)


def multiply_unnoticed(model: nn.Module) -> None:
    for x in model.state_dict().values():
        x.to_local().data.mul_(3)  # counts no version
    update_float8_weights(model)


@on("two")
def test_what_is_held_is_no_older_than_the_last_update() -> None:
    for make in (partial(blocks, 3), partial(model_of, blocks=1)):  # experts, and dense layers
        assert same_bits(*after_a_write(multiply_unnoticed, "rowwise", make))


@on("two")
def test_held_weights_of_other_modules_and_in_inference_mode() -> None:
    """Another module may have a weight, too, and come first; nothing counts writes in that mode."""
    model: Any = convert(blocks(4), "rowwise", float8_weights=Float8Weights.HELD)
    first = nn.Module()
    first.up = model[0].experts.up
    model[0]._modules = {"first": first, **model[0]._modules}
    train(shard(model), 1)
    with torch.inference_mode():
        found = [
            shard(convert(blocks(4), "rowwise", float8_weights=weights))(batch(0, 0))
            for weights in (Float8Weights.ON_THE_FLY, Float8Weights.HELD)
        ]
    assert same_bits(*found)


@on("two")
def test_held_weights_that_nothing_gathers_are_named() -> None:
    model: Any = convert(blocks(4), "rowwise", float8_weights=Float8Weights.HELD)
    ignored = {model[0].experts.up}
    fully_shard(model, mesh=mesh_of(), ignored_params=ignored)
    with pytest.warns(
        UserWarning, match=r"float8: 1 layer\(s\) .* 0.experts.up \(gathered by FSDP"
    ):
        update_float8_weights(model)


@pytest.mark.exhaustive
@on("four")
def test_more_ranks_than_experts_and_replicas() -> None:
    for wrap in (shard, partial(shard, mesh=mesh_of(2, 2))):
        assert_same(*(gathered("tensorwise", 3, 2, how, wrap) for how in (True, False)))


@on("two")
def test_a_gather_in_16_bits() -> None:
    more: dict[str, Any] = {"make": partial(blocks, 3), "steps": 1, "take": whole}
    assert_same(*(outcome("rowwise", False, wrap, **more) for wrap in (shard, None)))


# ---------------------------------------------------------------- what is sent


def tokens(experts: int, K: int = K) -> tuple[Tensor, Tensor]:
    sizes = torch.arange(experts, device=here()) * 5
    return seeded(1, int(sizes.sum()), K, device=here()), sizes


def passed(
    recipe: str, experts: int, dim: int | None, K: int = K, N: int = N
) -> tuple[Any, Tensor, Traffic, list[str]]:
    """Forward and backward of experts that ranks share along a dim, or of all; what was sent, said.

    Only of weights that ranks share FSDP2 makes 16 bits.
    """
    torch.manual_seed(0)
    model = Experts(experts, K, N).to(here(), torch.float32 if dim is not None else BF16)
    convert(model, recipe, dim is not None)
    if dim is not None:
        how = {"mesh": mesh_of(), "mp_policy": POLICY}
        fully_shard(model, **how, shard_placement_fn=lambda _: Shard(dim))
    with Traffic() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = model(*tokens(experts, K))
    y.square().sum().backward()
    said = [str(w.message) for w in caught if "gathered" in str(w.message)]
    return model, y, seen, said


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on("either")
def test_what_is_sent(recipe: str) -> None:
    """A byte for each element and a scale for each row; or, of uneven shards, apart from it."""
    _, _, seen, said = passed(recipe, 4, 0)
    assert seen.sizes == [2 * (2 * N * K + 4 * (N + K))]
    assert (seen.seen, seen.all_reduces, said) == ([], 0, [])
    _, y, seen, said = passed(recipe, 3, 0)
    assert seen.sizes == [2 * 2 * N * K]
    assert seen.bytes_of("all_gather") == {torch.float32: 2 * 4 * (N + K)}
    assert (seen.all_reduces, said) == (0, [])
    assert same_bits(y, passed(recipe, 3, None)[1])


@pytest.mark.parametrize("dim", [1, 2])
@on("either")
def test_other_dims(dim: int) -> None:
    """Where experts are fewer than ranks their rows may be shared, where each has a scale."""
    for recipe in ("tensorwise", "rowwise"):
        model, y, seen, said = passed(recipe, 3, dim)
        in_float8 = recipe == "rowwise" and dim == 1
        assert seen.sizes == [3 * N * K // 2 * 2 * (1 if in_float8 else 2)]
        assert len(said) == (0 if in_float8 else 2)
        assert all(f"along dim {dim}" in each for each in said)
        single, wanted, *_ = passed(recipe, 3, None)
        assert same_bits(y, wanted)
        for name, weight in model.named_parameters():
            grad, wanted = whole(weight.grad), single.get_parameter(name).grad
            assert same_bits(wanted.float(), grad) or (in_float8 and sqnr(wanted, grad) > 30)


@pytest.mark.parametrize("dim", [0, 1, 2])
@on("either")
def test_squares_of_weights(dim: int) -> None:
    """Their scales are sent with even shards of experts, and apart from shards of whole squares."""
    experts, (K, N) = (4, (160, 272)) if dim == 0 else (3, (256, 512))
    model, y, seen, said = passed("blockwise", experts, dim, K, N)
    elements = experts // 2 * 2 * N * K if dim == 0 else 3 * N * K
    if dim == 0:
        assert seen.sizes == [elements + 2 * 4 * (3 * 4 + 2 * 4)]
    else:
        assert seen.sizes == [elements * dim]
    if dim == 1:
        assert seen.bytes_of("all_gather") == {torch.float32: 3 * 4 * (2 * 4 + 1 * 4)}
    assert (seen.all_reduces, len(said)) == (0, 2 * (dim == 2))
    single, wanted, *_ = passed("blockwise", experts, None, K, N)
    assert same_bits(y, wanted)
    for name, weight in model.named_parameters():
        assert same_bits(single.get_parameter(name).grad.float(), whole(weight.grad))


@on("two")
def test_shards_that_cut_squares_are_gathered_in_16_bits() -> None:
    _, y, seen, said = passed("blockwise", 3, 1, 128, 256)
    assert seen.sizes == [3 * 128 * 128 + 2 * 3 * 64 * 256]
    assert len(said) == 1
    assert "shards of 64 rows would cut squares" in said[0]
    assert same_bits(y, passed("blockwise", 3, None, 128, 256)[1])


# ---------------------------------------------------------------- what else is done with them


@on("either")
def test_uses() -> None:
    def evaluate_then_compile(model: Any) -> None:
        evaluate(model)
        if compiles():
            model[0].experts.compile(backend="aot_eager", fullgraph=True)

    def prepare(model: Any, last: bool) -> None:
        accumulate(model, last)
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    row: dict[str, Any] = {"make": partial(blocks, 4), "wrap": partial(keep, param_dtype=BF16)}
    row |= {"begin": evaluate, "before_backward": prepare, "microbatches": 2, "steps": 2}
    assert_same(outcome("tensorwise", True, **row), outcome("tensorwise", False, **row))
    row |= {"microbatches": 1, "steps": 1}
    eager = outcome("rowwise", True, **row)
    assert_same(outcome("rowwise", True, **row | {"begin": evaluate_then_compile}), eager)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@on("two")
def test_nothing_of_gathered_weights_is_kept(recipe: str) -> None:
    """What forward saves of them for backward is memory that FSDP2 frees."""
    model = fully_shard(convert(Experts(4), recipe), mesh=mesh_of(), mp_policy=POLICY)
    x, sizes = tokens(4)
    with saved_tensors() as kept:
        model(x.requires_grad_(), sizes)
    of_weights = [t for t in kept if t.dim() == 3]
    up, down = ((1, 4), (1, 4)) if recipe == "blockwise" else ((N, 1), (K, 1))
    assert [t.shape[1:] for t in of_weights] == [(N, K), up, (K, N), down]
    assert all(t.untyped_storage().size() > 0 for t in of_weights)
    model.reshard()
    assert all(t.untyped_storage().size() == 0 for t in of_weights)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@on("two")
def test_float32_without_a_policy(recipe: str) -> None:
    """The module casts its weights to bfloat16; they stay the bytes that were gathered."""
    model = fully_shard(convert(Experts(2), recipe), mesh=mesh_of())
    x, sizes = tokens(2)
    y = model(x, sizes)
    gathered = model.up
    assert isinstance(gathered, GatheredExperts)
    turned = gathered.bfloat16().transpose(-2, -1)
    assert (turned.dtype, turned.shape) == (BF16, (2, K, N))
    assert turned._data.data_ptr() == gathered._data.data_ptr()
    values = gathered.to_original_precision()
    assert same_bits(turned.to_original_precision().float(), values.mT.to(BF16).float())
    y.sum().backward()
    assert model.up.grad.dtype == torch.float32
    with torch.inference_mode():  # where nobody has taken `bfloat16()` apart
        assert same_bits(model(x, sizes), y)
        model.unshard()
        assert isinstance(model.up.bfloat16(), GatheredExperts)
        assert type(model.up.double()) is Tensor


@on("two")
def test_state_dicts_are_plain_and_load() -> None:
    model, plain = (
        shard(convert(blocks(3), "tensorwise", gather), param_dtype=BF16)
        for gather in (True, False)
    )
    train(model, 1)
    state = model.state_dict()
    assert all(type(x.to_local()) is Tensor for x in state.values())
    plain.load_state_dict(state)
    assert_same(train(plain, 1), train(model, 1))
    wanted = {name: whole(x) for name, x in plain.named_parameters()}
    for assign in (False, True):
        other = shard(convert(blocks(3), "tensorwise"))
        other.load_state_dict(state, assign=assign)
        assert isinstance(other[0].experts.up.to_local(), GatherExperts)
        assert_same({name: whole(x) for name, x in other.named_parameters()}, wanted)


@on("two")
def test_changes() -> None:
    model = convert(blocks(2), "rowwise")
    experts, weight, before = model[0].experts, model[0].experts.up, model[0].experts.up.clone()
    assert isinstance(weight, GatherExperts)
    convert(model, "tensorwise")
    assert (model[0].experts.up, weight.how.power_of_2) == (weight, False)
    convert_to_high_precision(model)
    assert type(experts) is Experts
    assert (type(experts.up), experts.up) == (nn.Parameter, weight)
    assert same_bits(weight, before)
    shard(convert(model, "rowwise"))
    convert(model, "rowwise")  # what it is already
    refused = r"ValueError: experts'(.)*FSDP2 gathers in float8"
    require_errors(
        (refused, convert_to_high_precision, [model]),
        (refused, convert, [model, "tensorwise"]),
        (
            "ValueError: experts'(.)*DTensor(.)*then call fully_",
            convert,
            [shard(blocks(2)), "rowwise"],
        ),
    )


@pytest.mark.parametrize("name", ["Mixtral", pytest.param("GptOss", marks=pytest.mark.exhaustive)])
@on("two")
def test_experts_of_transformers(name: str) -> None:
    """Mixtral's weights are read as they are; gpt-oss's lie transposed, and stay as they are."""
    pytest.importorskip("transformers")
    hf = importlib.import_module("support.hugging_face")
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    sizes = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"head_dim": 16} if name == "GptOss" else {}
    made = []
    for all_gather in (False, True):
        model = convert(hf.llama(0, name, **sizes), "tensorwise", all_gather)
        (experts,) = (x for x in model.modules() if isinstance(x, Float8Experts))
        for part_of in (*model.model.layers, model):
            fully_shard(part_of, mesh=mesh_of())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        made.append([loss, *(part(x.grad) for x in experts.parameters())])
    assert all(map(same_bits, *made))
    gathered = isinstance(experts.down_proj.to_local(), GatherExperts)
    assert gathered == (name == "Mixtral")
    assert ("gathered in high precision" in repr(experts)) != gathered
    assert all(x.skip_reason is None for x in conversion_report(model).experts)


# ---------------------------------------------------------------- expert parallel


def spread(experts: nn.Module, mesh: Any) -> nn.Module:
    """Each rank of a mesh has some of them, as DTensors."""
    for name, parameter in list(experts.named_parameters()):
        local = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(experts, name, nn.Parameter(local))
    return experts


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on("either")
def test_expert_parallel(recipe: str) -> None:
    """Each rank has two of four experts as DTensors, and tokens of its own, sent to and fro."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = convert(Experts(4).to(here()), recipe, all_gather=False)
    # One rank has the tokens of both: those of an expert one after the other.
    sizes = torch.tensor([[5, 0, 17, 3], [2, 0, 1, 40]], device=here())
    x = [seeded(n, int(sizes[n].sum()), K, device=here()).requires_grad_() for n in (0, 1)]
    labels = torch.arange(4, device=here()).repeat(2).repeat_interleave(sizes.flatten())
    order = labels.argsort(stable=True)
    wanted = model(torch.cat(x)[order], sizes.sum(0))[order.argsort()]
    mine = wanted.split(sizes.sum(1).tolist())[rank]
    grads = torch.autograd.grad(wanted.square().sum(), (x[rank], *model.parameters()))

    spread(model, mesh_of())
    sizes_here = sizes.view(2, 2, 2)[:, rank]  # [ranks, experts here]
    given, taken = (n.sum(1).tolist() for n in (sizes[rank].view(2, 2), sizes_here))
    received = all_to_all_single_autograd(x[rank], taken, given, group)
    labels = torch.arange(2, device=here()).repeat(2).repeat_interleave(sizes_here.flatten())
    order = labels.argsort(stable=True)
    y = model(received[order], sizes_here.sum(0))[order.argsort()]
    y = all_to_all_single_autograd(y, given, taken, group)
    assert same_bits(y, mine)
    dx, *dws = torch.autograd.grad(y.square().sum(), (x[rank], *model.parameters()))
    assert same_bits(dx, grads[0])
    for dw, of_all in zip(dws, grads[1:], strict=True):
        assert same_bits(dw.to_local(), of_all.chunk(2)[rank])


@pytest.mark.exhaustive
@on("four")
def test_expert_parallel_with_a_gather() -> None:
    mesh, made = mesh_of(2, 2), []
    for all_gather in (False, True):
        torch.manual_seed(0)
        model = spread(convert(Experts(4), "tensorwise", all_gather), mesh["shard"])
        fully_shard(model, mesh=mesh["replicate"], mp_policy=POLICY)
        x, sizes = tokens(4)
        with Traffic() as seen:
            y = model(x[: sizes[:2].sum()], sizes[:2])
        y.square().sum().backward()
        made.append([y, *(part(w.grad) for w in model.parameters())])
        assert seen.sizes == [2 * N * K + 4 * (N + K) if all_gather else 2 * N * K * 2]
    assert all(map(same_bits, *made))


@on("two")
def test_dtensors_of_transformers_get_gradients() -> None:
    """Weights and biases: those of the experts of this rank, as a module of these alone."""
    pytest.importorskip("transformers")
    hf = importlib.import_module("support.hugging_face")
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    model = hf.llama(0, "GptOss", **sizes, layer_types=["full_attention"] * 2)
    alone, shared = (
        convert(layer.mlp.experts, "rowwise", all_gather=False) for layer in model.model.layers
    )
    for seed, (name, parameter) in enumerate(list(shared.named_parameters())):
        parameter.data.copy_(seeded(seed, *parameter.shape))
        setattr(alone, name, nn.Parameter(parameter.detach().chunk(2)[dist.get_rank()].clone()))
    spread(shared, mesh_of())
    alone.num_experts = shared.num_experts = 2
    index = torch.arange(3).repeat(4).view(6, 2)  # 2 is of another rank
    for experts in (alone, shared):
        y = experts(seeded(9, 6, 64), index, seeded(10, 6, 2).sigmoid())
        y.square().sum().backward()
    for mine, theirs in zip(alone.parameters(), shared.parameters(), strict=True):
        assert same_bits(theirs.grad.to_local(), mine.grad)
