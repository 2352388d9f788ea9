"""fairscale's model-parallel layers in float8, on two ranks, against one device."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    convert_to_high_precision,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed, of_recipe, tensorwise
from support.lazily import Lazily
from support.models import seeded
from support.outcome import compiles
from support.parallel import part
from support.ranks import Ranks, on
from support.spies import Traffic

initialize = Lazily("fairscale.nn.model_parallel.initialize")
theirs, ours = Lazily("fairscale.nn.model_parallel.layers"), Lazily("float8.integrations.fairscale")
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.exhaustive]

DIM, HIDDEN, TOKENS, BATCH = 32, 48, 8, 2


def swap(model: nn.Module, **how: Any) -> nn.Module:
    return ours.swap_tp_linear_with_float8_linear(model, **how)


class FeedForward(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.silu(self.first(x)))


def built(bias: bool, gather: bool = False) -> tuple[nn.Module, nn.Module]:
    """The same weights on one device, and in fairscale's layers."""
    if not initialize.model_parallel_is_initialized():
        initialize.initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(0)
    whole = FeedForward(nn.Linear(DIM, HIDDEN, bias), nn.Linear(HIDDEN, DIM, bias))
    whole.first.weight.data[-1, -1] = 3.0  # the amax is in the last part along both dims
    parallel = FeedForward(
        theirs.ColumnParallelLinear(DIM, HIDDEN, bias, gather_output=gather),
        theirs.RowParallelLinear(HIDDEN, DIM, bias, input_is_parallel=not gather),
    )
    parts = {n: part(p, dim(n)) for n, p in whole.state_dict().items()}
    parallel.load_state_dict(parts)
    return whole, parallel


def dim(name: str) -> int | None:
    return {"first.weight": 0, "first.bias": 0, "last.weight": 1}.get(name)


def compared(config: Any, sequence: bool, bias: bool, gather: bool, compiled: bool) -> None:
    whole, parallel = built(bias, gather)
    convert_to_float8_training(whole, config=config, module_filter_fn=lambda *_: True)
    parameters = list(parallel.parameters())
    assert swap(parallel, config=config, sequence_parallel=sequence) is parallel
    assert all(p is q for p, q in zip(parallel.parameters(), parameters, strict=True))
    call = parallel
    if compiled and compiles():
        call = torch.compile(parallel, backend="aot_eager", fullgraph=True)
    for step in range(3):
        x, g = (seeded(2 * step + n, TOKENS, BATCH, DIM) for n in (1, 2))
        own, own_g = (part(t, 0 if sequence else None) for t in (x, g))
        x.requires_grad_()
        own.requires_grad_()
        y = whole(x)
        y.backward(g)
        seen = Traffic()
        with nullcontext() if compiled else seen:
            got = call(own)
            got.backward(own_g)
        if sequence and not compiled:
            assert seen.bytes_of("all_gather") == {torch.uint8: 2 * own.numel()}
        if not compiled and config.delayed_sites:  # ranks ask each other until scales are known
            asked = sum(size == 4 for *_, size in seen.seen)
            assert asked == (4 + 2 * sequence if step < 2 else 0)
        pairs = [(got, y, 0), (own.grad, x.grad, 0)]
        pairs = [(a, part(b, along if sequence else None)) for a, b, along in pairs]
        for (name, p), q in zip(parallel.named_parameters(), whole.parameters(), strict=True):
            pairs.append((p.grad, part(q.grad, dim(name))))
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for model in (whole, parallel):
            sync_float8_amax_and_scale_history(model)
            model.zero_grad()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["tensorwise", "delayed"])
def test_they_compute_what_one_device_does(two: Ranks, config: Any, sequence: bool) -> None:
    two.run(compared, config, sequence, True, False, False)
    if sequence == bool(config.delayed_sites):
        two.run(compared, config, sequence, False, False, True)
    if not sequence:
        two.run(compared, config, sequence, True, True, False)


@on("two")
def test_there_and_back() -> None:
    _, parallel = built(True)
    plain = copy.deepcopy(parallel)
    swap(parallel, config=of_recipe("rowwise"), module_filter_fn=lambda mod, fqn: fqn == "first")
    assert type(parallel.first) is ours.Float8ColumnParallelLinear
    assert type(parallel.last) is type(plain.last)
    swap(parallel, sequence_parallel=True)
    assert type(parallel.last) is ours.Float8RowParallelLinear
    assert "grad_output gathered in float8" in repr(parallel.last)
    attach_to_optimizer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1))
    convert_to_high_precision(parallel)
    for a, b in zip(parallel.children(), plain.children(), strict=True):
        assert type(a) is type(b)
        assert vars(a).keys() == vars(b).keys()
    x = seeded(1, TOKENS, BATCH, DIM)
    assert torch.equal(parallel(x), plain(x))


REFUSED = [
    (tensorwise(enable_fsdp_float8_all_gather=True), "gather=True, expected False: FSDP does not"),
    (tensorwise(float8_weights=Float8Weights.ONLY), "a weight that ranks share with float8_w"),
]


@on("two")
def test_what_needs_the_whole_weight_is_refused() -> None:
    """Before anything changes: the hooks, the layer beside them, those converted already."""
    _, parallel = built(True)
    parallel.requires_grad_(False)
    model = nn.Sequential(nn.Linear(DIM, DIM).requires_grad_(False), parallel)
    parallel.last.register_forward_hook(lambda *_: None)
    for config, expected in REFUSED:
        before = [*map(type, model.modules())]
        with pytest.raises(ValueError, match=f"layer '1.first': got (.)*{expected}"):
            swap(model, config=config)
        assert [*map(type, model.modules())] == before
    assert len(parallel.last._forward_hooks) == 1
    swap(model)
    for config, expected in REFUSED:
        before, old = [*map(type, model.modules())], parallel.first.config
        with pytest.raises(ValueError, match=f"'1.first'(.)*already converted(.)*{expected}"):
            convert_to_float8_training(model, config=config, module_filter_fn=all_linears)
        assert [*map(type, model.modules())] == before
        assert parallel.first.config is parallel.last.config is old


@on("two")
def test_held_weights_are_cast_on_the_fly() -> None:
    _, parallel = built(True)
    wanted = swap(copy.deepcopy(parallel))
    swap(parallel, config=tensorwise(float8_weights=Float8Weights.HELD))
    with pytest.warns(UserWarning, match=r"2 layer\(s\) cast weights on the fly(.)*first"):
        attach_to_optimizer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1))
    assert parallel.first._float8_held == parallel.last._float8_held == ()
    assert "held" not in repr(parallel)
    x = seeded(1, TOKENS, BATCH, DIM)
    assert torch.equal(parallel(x), wanted(x))


@on("two")
def test_a_group_has_all_ranks_that_hold_parts() -> None:
    _, parallel = built(True)
    swap(parallel, config=delayed())
    assert parallel.first._float8_stateful
    parallel(seeded(1, TOKENS, BATCH, DIM)).sum().backward()
    rank = dist.get_rank()
    alone = dist.new_group([rank], use_local_synchronization=True)
    state = {name: x.clone() for name, x in parallel.named_buffers()}
    expected = rf"group: got ranks \[{rank}\], but parts of a weight are on ranks \[0, 1\]"
    with pytest.raises(ValueError, match=expected):
        sync_float8_amax_and_scale_history(parallel, group=alone)
    # The weights of other layers tell a mesh, here of this rank alone.
    beside = convert_to_float8_training(nn.Linear(DIM, DIM), config="delayed")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "own"))["own"]
    model = nn.Sequential(fully_shard(nn.Sequential(beside), mesh=mesh), parallel)
    expected = rf"got None and weights on a mesh of ranks \[{rank}\], but parts(.)*\[0, 1\]"
    with pytest.raises(ValueError, match=expected):
        sync_float8_amax_and_scale_history(model)
    assert all(torch.equal(x, state[name]) for name, x in parallel.named_buffers())
    for how in ({}, {"group": dist.group.WORLD}):
        sync_float8_amax_and_scale_history(parallel, **how)
    sync_float8_amax_and_scale_history(model, group=dist.group.WORLD)
    for layer in (parallel.first, parallel.last):
        peak = layer.fp8_amax_history_weight[:1].clone()
        both = [torch.empty_like(peak) for _ in range(2)]
        dist.all_gather(both, peak)
        assert both[0] == both[1] > 0


@on("two")
def test_ddp_leaves_amaxes_alone() -> None:
    """Which copies rank 0's buffers to all; that there are no replicas here makes no difference."""
    _, parallel = built(False)
    ddp = DistributedDataParallel(swap(parallel, config=delayed()))
    parallel.last.fp8_amax_weight.fill_(7.0 + dist.get_rank())
    ddp(seeded(1, TOKENS, BATCH, DIM))
    assert parallel.last.fp8_amax_weight == 7.0 + dist.get_rank()
