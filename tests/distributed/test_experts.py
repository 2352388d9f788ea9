"""Experts under FSDP2, which gathers their weights in float8 or not, and under expert parallel."""

import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from float8 import conversion_report, convert_to_high_precision
from float8.experts import Float8Experts
from float8.experts.gather import GatheredExperts, GatherExperts
from sqnr import same_bits, sqnr
from support.models import seeded
from support.ranks import Ranks, on
from support.sharded import (
    DIM,
    Run,
    Traffic,
    batch,
    convert,
    here,
    mesh_of,
    part,
    shard,
    train,
    train_alone,
    whole,
)

BF16 = torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
K, N = 32, 48


class Experts(nn.Module):
    """They multiply as torchtitan's do: cast, turned, by a method of that name."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, N, K) / 6)
        self.down = nn.Parameter(torch.randn(experts, K, N) / 7)

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
    return nn.Sequential(*(Block(experts) for _ in range(2))).to(here())


def two_runs(recipe: str, experts: int, steps: int, **more: Any) -> list[Run]:
    """What comes of a gather in 16 bits, and in float8."""
    runs = []
    for all_gather in (False, True):
        model = shard(convert(blocks(experts), recipe, all_gather), param_dtype=BF16, **more)
        runs.append(train(model, steps))
        weights = [model[0].experts.up, model[0].experts.down]
        assert all(isinstance(w.to_local(), GatherExperts) == all_gather for w in weights)
    return runs


@pytest.mark.parametrize("experts", [4, 3, 1], ids=str)  # uneven, and an empty rank
def test_training(either: Ranks, experts: int) -> None:
    either.run(training, experts)


def training(experts: int) -> None:
    """One scale for each expert: the same bits. Rows: those of the output, in the first step."""
    for more in ({}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy(False)}):
        if "offload_policy" not in more or here().type == "cpu":
            one, other = two_runs("tensorwise", experts, 3, **more)
            other.assert_equal(one)
    one, other = two_runs("rowwise", experts, 1)
    assert same_bits(one.losses[0], other.losses[0])
    for name, grad in one.grads[0].items():
        # Columns are cast again from rows.
        if grad.any():  # a rank may have none; one expert needs no router
            assert sqnr(grad, other.grads[0][name]) > 30, name


@on("four")
def test_more_ranks_than_experts_and_replicas() -> None:
    for more in ({}, {"mesh": mesh_of(2, 2)}):
        one, other = two_runs("tensorwise", 3, 2, **more)
        other.assert_equal(one)


def sharded(recipe: str, experts: int, dim: int = 0) -> tuple[Any, Traffic, list[str]]:
    """Forward and backward of experts alone, what was sent, and what was said."""
    torch.manual_seed(0)
    model = convert(Experts(experts).to(here()), recipe)
    fully_shard(model, mesh=mesh_of(), mp_policy=POLICY, shard_placement_fn=lambda _: Shard(dim))
    x, sizes = tokens(experts)
    with Traffic() as seen, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y = model(x, sizes)
    y.square().sum().backward()
    return (model, y), seen, [str(w.message) for w in said if "gathered" in str(w.message)]


def tokens(experts: int) -> tuple[Tensor, Tensor]:
    sizes = torch.arange(experts, device=here()) * 5
    return seeded(1, int(sizes.sum()), K, device=here()), sizes


def alone(recipe: str, experts: int) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = convert(Experts(experts).to(here(), BF16), recipe, all_gather=False)
    x, sizes = tokens(experts)
    y = model(x, sizes)
    y.square().sum().backward()
    return model, y


def what_is_sent(recipe: str) -> None:
    """A byte for each element and a scale for each row; or, of uneven shards, apart from it."""
    (_, _), seen, said = sharded(recipe, 4)
    assert seen.sizes == [2 * (2 * N * K + 4 * (N + K))]
    assert (seen.seen, seen.all_reduces, said) == ([], 0, [])
    (_, y), seen, said = sharded(recipe, 3)
    assert seen.sizes == [2 * 2 * N * K]
    assert seen.bytes_of("all_gather") == {torch.float32: 2 * 4 * (N + K)}
    assert (seen.all_reduces, said) == (0, [])
    assert same_bits(y, alone(recipe, 3)[1])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_is_sent(either: Ranks, recipe: str) -> None:
    either.run(what_is_sent, recipe)


def other_dims(dim: int) -> None:
    """Where experts are fewer than ranks their rows may be shared, where each has a scale."""
    for recipe in ("tensorwise", "rowwise"):
        (model, y), seen, said = sharded(recipe, 3, dim)
        in_float8 = recipe == "rowwise" and dim == 1
        assert seen.sizes == [3 * N * K // 2 * 2 * (1 if in_float8 else 2)]
        assert len(said) == (0 if in_float8 else 2)
        assert all(f"along dim {dim}" in each for each in said)
        single, wanted = alone(recipe, 3)
        assert same_bits(y, wanted)
        for name, weight in model.named_parameters():
            grad = whole(weight.grad)
            wanted = single.get_parameter(name).grad
            assert same_bits(wanted.float(), grad) or (in_float8 and sqnr(wanted, grad) > 30)


@pytest.mark.parametrize("dim", [1, 2])
def test_other_dims(either: Ranks, dim: int) -> None:
    either.run(other_dims, dim)


# ---------------------------------------------------------------- what else is done with them


def used(recipe: str, all_gather: bool, compiled: bool = False) -> Run:
    """Evaluate, then accumulate gradients of three microbatches with weights that stay gathered."""
    model = convert(blocks(4), recipe, all_gather)
    if compiled:
        for block in model:
            block.experts.compile(backend="aot_eager", fullgraph=True)
    shard(model, param_dtype=BF16, reshard_after_forward=False)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            model(batch(7, 0, torch.float32))

    def prepare(last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return train(model, 2, microbatches=3, before_backward=prepare)


def test_uses(either: Ranks) -> None:
    either.run(uses)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on("two")
def test_nothing_of_gathered_weights_is_kept(recipe: str) -> None:
    """What forward saves of them for backward is memory that FSDP2 frees."""
    model = convert(Experts(4), recipe)
    fully_shard(model, mesh=mesh_of(), mp_policy=POLICY)
    kept: list[Tensor] = []
    x, sizes = tokens(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x.requires_grad_(), sizes)
    of_weights = [t for t in kept if t.dim() == 3]
    assert [t.shape[1:] for t in of_weights] == [(N, K), (N, 1), (K, N), (K, 1)]
    assert all(t.untyped_storage().size() > 0 for t in of_weights)
    model.reshard()
    assert all(t.untyped_storage().size() == 0 for t in of_weights)


def uses() -> None:
    used("tensorwise", True).assert_equal(used("tensorwise", False))
    used("rowwise", True, compiled=True).assert_equal(used("rowwise", True))


@on("two")
def test_float32_without_a_policy() -> None:
    """The module casts its weights to bfloat16; they stay the bytes that were gathered."""
    model = fully_shard(convert(Experts(2).to(here()), "rowwise"), mesh=mesh_of())
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
    train(plain, 1).assert_equal(train(model, 1))
    for assign in (False, True):
        other = shard(convert(blocks(3), "tensorwise"))
        other.load_state_dict(state, assign=assign)
        assert isinstance(other[0].experts.up.to_local(), GatherExperts)
        for name, weight in other.named_parameters():
            assert same_bits(whole(weight), whole(plain.get_parameter(name)))


@on("two")
def test_changes() -> None:
    """Before fully_shard it is undone, or done otherwise; afterwards that is refused."""
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
    for change in (convert_to_high_precision, lambda model: convert(model, "tensorwise")):
        with pytest.raises(ValueError, match=r"experts'(.)*FSDP2 gathers in float8"):
            change(model)
    plain = shard(blocks(2))
    with pytest.raises(ValueError, match=r"experts'(.)*DTensor(.)*then call fully_shard"):
        convert(plain, "rowwise")


@on("two")
def test_experts_of_transformers() -> None:
    """Mixtral's weights are read as they are; gpt-oss's lie transposed, and stay as they are."""
    pytest.importorskip("transformers")
    hf = importlib.import_module("support.hugging_face")
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for name, more in (("Mixtral", {}), ("GptOss", {"head_dim": 16})):
        made = []
        for all_gather in (False, True):
            model = hf.llama(0, name, num_local_experts=4, num_experts_per_tok=2, **more)
            model = convert(model, "tensorwise", all_gather).to(here())
            experts = [x for x in model.modules() if isinstance(x, Float8Experts)]
            for block in model.model.layers:
                fully_shard(block, mesh=mesh_of())
            fully_shard(model, mesh=mesh_of())
            loss = model(input_ids=ids.to(here()), labels=ids.to(here())).loss
            loss.backward()
            made.append([loss, *(part(x.grad) for x in experts[0].parameters())])
        assert all(map(same_bits, *made)), name
        gathered = isinstance(experts[0].down_proj.to_local(), GatherExperts)
        assert gathered == (name == "Mixtral")
        assert ("gathered in high precision" in repr(experts[0])) != gathered
        assert all(x.skip_reason is None for x in conversion_report(model).experts)


@on("two")
def test_a_gather_in_16_bits() -> None:
    """Two ranks compute what one does."""
    model = convert(blocks(3), "rowwise", all_gather=False)
    run = train(shard(model), 1, full=True)
    run.assert_equal(train_alone(convert(blocks(3), "rowwise", all_gather=False), 1))


# ---------------------------------------------------------------- expert parallel


def exchanged(x: Tensor, given: Tensor, taken: Tensor) -> Tensor:
    """Send parts of so many rows to the ranks."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    group = dist.group.WORLD
    return all_to_all_single_autograd(x, taken.tolist(), given.tolist(), group)


def expert_parallel(recipe: str) -> None:
    """Each rank has two of four experts as DTensors, and tokens of its own, sent to and fro."""
    rank, mesh = dist.get_rank(), mesh_of()
    model = convert(Experts(4).to(here()), recipe, all_gather=False)
    # One rank has the tokens of both: those of an expert one after the other.
    sizes = torch.tensor([[5, 0, 17, 3], [2, 0, 1, 40]], device=here())
    x = [seeded(n, int(sizes[n].sum()), K, device=here()).requires_grad_() for n in (0, 1)]
    labels = torch.arange(4, device=here()).repeat(2).repeat_interleave(sizes.flatten())
    order = labels.argsort(stable=True)
    wanted = model(torch.cat(x)[order], sizes.sum(0))[order.argsort()]
    mine = wanted.split(sizes.sum(1).tolist())[rank]
    grads = torch.autograd.grad(wanted.square().sum(), (x[rank], *model.parameters()))

    for name, parameter in list(model.named_parameters()):
        local = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(model, name, nn.Parameter(local))
    sizes_here = sizes.view(2, 2, 2)[:, rank]  # [ranks, experts here]
    given, taken = sizes[rank].view(2, 2).sum(1), sizes_here.sum(1)
    received = exchanged(x[rank], given, taken)
    labels = torch.arange(2, device=here()).repeat(2).repeat_interleave(sizes_here.flatten())
    order = labels.argsort(stable=True)
    y = model(received[order], sizes_here.sum(0))
    y = exchanged(y[order.argsort()], taken, given)
    assert same_bits(y, mine)
    dx, *dws = torch.autograd.grad(y.square().sum(), (x[rank], *model.parameters()))
    assert same_bits(dx, grads[0])
    for dw, of_all in zip(dws, grads[1:], strict=True):
        assert same_bits(dw.to_local(), of_all.chunk(2)[rank])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_expert_parallel(either: Ranks, recipe: str) -> None:
    either.run(expert_parallel, recipe)


@on("four")
def test_expert_parallel_with_a_gather() -> None:
    """Two of four experts on each pair of ranks, which share them."""
    mesh, made = mesh_of(2, 2), []
    for all_gather in (False, True):
        torch.manual_seed(0)
        model = convert(Experts(4), "tensorwise", all_gather)
        for name, parameter in list(model.named_parameters()):
            local = distribute_tensor(parameter.detach(), mesh["shard"], [Shard(0)])
            setattr(model, name, nn.Parameter(local))
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
    alone = convert(model.model.layers[0].mlp.experts, "rowwise", all_gather=False)
    shared, mesh = (
        convert(model.model.layers[1].mlp.experts, "rowwise", all_gather=False),
        mesh_of(),
    )
    for seed, (name, parameter) in enumerate(list(shared.named_parameters())):
        values = seeded(seed, *parameter.shape)
        setattr(alone, name, nn.Parameter(values.chunk(2)[dist.get_rank()].clone()))
        setattr(shared, name, nn.Parameter(distribute_tensor(values, mesh, [Shard(0)])))
    alone.num_experts = shared.num_experts = 2
    index = torch.arange(3).repeat(4).view(6, 2)  # 2 is of another rank
    for experts in (alone, shared):
        y = experts(seeded(9, 6, 64), index, seeded(10, 6, 2).sigmoid())
        y.square().sum().backward()
    for mine, theirs in zip(alone.parameters(), shared.parameters(), strict=True):
        assert same_bits(theirs.grad.to_local(), mine.grad)
