"""What people do with FSDP2 besides plain steps, with float8 all-gather as without."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from support.configs import RECIPES
from support.ranks import Ranks
from support.sharded import (
    DIM,
    Run,
    batch,
    convert,
    model_of,
    part,
    shard,
    traffic,
    train,
    whole,
)

from float8 import precompute_float8_dynamic_scale_for_fsdp, swiglu_feed_forward
from float8.tensor import Float8GatherWeight

Trainer = Callable[[str, bool], Run]


def accumulating(recipe: str, all_gather: bool) -> Run:
    """Three microbatches per step; weights stay gathered between them, gradients unreduced."""
    model = shard(convert(model_of(), recipe, all_gather), reshard_after_forward=False)

    def prepare(last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

    with traffic() as seen:
        run = train(model, 3, microbatches=3, before_backward=prepare)
    assert len(seen.sizes) == 3 * 2  # each block once per step
    return run


def frozen(recipe: str, all_gather: bool) -> Run:
    model = convert(model_of(42), recipe, all_gather)
    for layer in (model[0].ffn.w1, model[1].ffn.w2):
        layer.weight.requires_grad_(False)
    return train(shard(model), 3)


def checkpointed(recipe: str, all_gather: bool) -> Run:
    model = shard(convert(model_of(), recipe, all_gather))

    def forward(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    for block in model:
        block.unshard  # noqa: B018  each block is sharded by itself
    return train(model, 3, forward=forward)


def evaluated(recipe: str, all_gather: bool) -> Run:
    """Evaluation between steps, in which the last block's weights stay gathered."""
    model = shard(convert(model_of(), recipe, all_gather), reshard_after_forward=False)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            model(batch(7, 0, torch.float32))
    return train(model, 2)


def from_meta(recipe: str, all_gather: bool) -> Run:
    with torch.device("meta"):
        model = model_of(42)
    model = shard(convert(model, recipe, all_gather))
    model.to_empty(device="cpu")
    for seed, parameter in enumerate(model.parameters()):
        torch.manual_seed(seed)
        nn.init.constant_(parameter, 0.01 * (seed + 1))
    run = train(model, 3)
    for parameter in model.parameters():
        assert not parameter.is_meta
    return run


def tied(recipe: str, all_gather: bool) -> Run:
    model = model_of()
    model[1].ffn.w1.weight = model[0].ffn.w1.weight
    model = convert(model, recipe, all_gather)
    assert model[1].ffn.w1.weight is model[0].ffn.w1.weight
    from torch.distributed.fsdp import fully_shard

    from support.sharded import cpu_mesh

    model = fully_shard(model, mesh=cpu_mesh())
    assert model[1].ffn.w1.weight is model[0].ffn.w1.weight
    return train(model, 3)


def offloaded(recipe: str, all_gather: bool) -> Run:
    model = convert(model_of(42), recipe, all_gather)
    return train(shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)), 3)


def fused_optimizer(recipe: str, all_gather: bool) -> Run:
    return train(shard(convert(model_of(42), recipe, all_gather)), 3, fused=True)


def for_loop_optimizer(recipe: str, all_gather: bool) -> Run:
    return train(shard(convert(model_of(42), recipe, all_gather)), 3, foreach=False)


def fused_functions(recipe: str, all_gather: bool) -> Run:
    model = shard(convert(model_of(), recipe, all_gather))

    def fuse(ffn: nn.Module, args: Any, output: Any = None) -> Any:
        return swiglu_feed_forward(args[0], ffn.w1, ffn.w3, ffn.w2)

    for block in model:
        block.ffn.forward = functools.partial(
            lambda ffn, x: swiglu_feed_forward(x, ffn.w1, ffn.w3, ffn.w2), block.ffn
        )
    return train(model, 3)


def clipped(recipe: str, all_gather: bool) -> Run:
    model, run = shard(convert(model_of(42), recipe, all_gather)), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loss = model(batch(step, torch.distributed.get_rank(), torch.float32)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        run.losses.append(loss.detach())
        run.grads.append({n: part(p.grad) for n, p in model.named_parameters()})
        with contextlib.suppress(StopIteration):
            optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
    return run


USES: dict[str, Trainer] = {
    f.__name__: f
    for f in (
        accumulating,
        frozen,
        checkpointed,
        evaluated,
        from_meta,
        tied,
        offloaded,
        fused_optimizer,
        for_loop_optimizer,
        fused_functions,
        clipped,
    )
}


def same(use: str, recipe: str) -> None:
    USES[use](recipe, True).assert_equal(USES[use](recipe, False))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_use_is_as_with_a_cast_after_the_gather(two: Ranks, recipe: str, use: str) -> None:
    two.run(same, use, recipe)


def smaller_mesh() -> None:
    """`reshard_after_forward=int`, neither 1 nor all ranks: torch has no way to do it."""
    model = shard(convert(model_of(), "tensorwise"), reshard_after_forward=2)
    with pytest.raises(Exception):
        train(model, 1)


def test_resharding_to_a_smaller_mesh_raises(four: Ranks) -> None:
    four.run(smaller_mesh)


def states() -> None:
    for recipe in RECIPES:
        model = shard(convert(model_of(42), recipe))
        train(model, 2)
        sharded = {n: v for n, v in model.state_dict().items() if "fp8_" not in n}
        assert all(type(v.to_local()) is Tensor for v in sharded.values())
        plain = model_of(42)
        plain.load_state_dict({n: whole(v) for n, v in sharded.items()})
        again = shard(convert(model_of(42), recipe))
        again.load_state_dict(sharded, strict=recipe == "tensorwise")
        for a, b, c in zip(
            model.parameters(), plain.parameters(), again.parameters(), strict=True
        ):
            assert torch.equal(whole(a), b)
            assert torch.equal(whole(c), b)
        local = again[0].ffn.w1.weight.to_local()
        assert isinstance(local, Float8GatherWeight)
        assert DIM == local.shape[1]


def test_state_dicts_hold_plain_weights(two: Ranks) -> None:
    two.run(states)


def after_sharding() -> None:
    with pytest.raises(ValueError, match=r"'0.ffn.w1': got a DTensor(.)*convert the model first"):
        convert(shard(model_of()), "tensorwise")


def test_converting_after_sharding_raises(two: Ranks) -> None:
    two.run(after_sharding)
