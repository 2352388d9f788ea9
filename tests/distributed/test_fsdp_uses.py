"""What people do with FSDP2 besides plain steps, with float8 all-gather as without."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from float8 import (
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from float8.tensor import Float8GatherWeight
from support.configs import RECIPES
from support.models import fp8_state
from support.ranks import on
from support.sharded import (
    Run,
    Traffic,
    batch,
    convert,
    here,
    mesh_of,
    model_of,
    part,
    shard,
    train,
    whole,
)


def accumulating(recipe: str, all_gather: bool) -> Run:
    """Three microbatches per step; weights stay gathered between them, gradients unreduced."""
    model = shard(convert(model_of(), recipe, all_gather), reshard_after_forward=False)

    def prepare(last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

    with Traffic() as seen:
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

    return train(model, 3, forward=forward)


def evaluated(recipe: str, all_gather: bool) -> Run:
    """Evaluation before training, after which all weights stay gathered."""
    model = shard(convert(model_of(), recipe, all_gather), reshard_after_forward=False)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            model(batch(7, 0, torch.float32))
    return train(model, 2)


def evaluated_between(recipe: str, all_gather: bool) -> Run:
    """Each step is followed by an evaluation of other weights, of which no history may learn."""
    model = shard(convert(model_of(42), recipe, all_gather), reshard_after_forward=False)

    def evaluate(last: bool) -> None:
        before = {name: value.clone() for name, value in fp8_state(model).items()}
        for mode, factor in ((torch.no_grad(), 64.0), (torch.inference_mode(), 1 / 64)):
            with mode:
                model(batch(7, 0, torch.float32))
            for module in (*model, model):
                module.reshard()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
        for name, value in fp8_state(model).items():
            assert torch.equal(value, before[name]), name

    with torch.no_grad():
        model(batch(7, 0, torch.float32))  # FSDP2's first forward is not one in inference mode
    return train(model, 3, before_backward=evaluate)


def from_meta(recipe: str, all_gather: bool) -> Run:
    model = shard(convert(model_of(42, device="meta"), recipe, all_gather))
    model.to_empty(device=here())
    values = model_of(42).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = values[name].chunk(2)[dist.get_rank()]
            parameter.to_local().copy_(rows)
    return train(model, 3)


def tied(recipe: str, all_gather: bool) -> Run:
    model = model_of()
    model[1].ffn.w1.weight = model[0].ffn.w1.weight
    model = fully_shard(convert(model, recipe, all_gather), mesh=mesh_of())
    assert model[1].ffn.w1.weight is model[0].ffn.w1.weight
    return train(model, 3)


def offloaded(recipe: str, all_gather: bool) -> Run:
    model = convert(model_of(42), recipe, all_gather)
    return train(shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)), 3)


def fused_optimizer(recipe: str, all_gather: bool) -> Run:
    return train(shard(convert(model_of(42), recipe, all_gather)), 3, fused=True)


def clipped(recipe: str, all_gather: bool) -> Run:
    """Everything by hand: another optimizer, clipping, sync and precomputing."""
    model, run = shard(convert(model_of(42), recipe, all_gather)), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loss = model(batch(step, dist.get_rank(), torch.float32)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        run.losses.append(loss.detach())
        run.grads.append({n: part(p.grad) for n, p in model.named_parameters()})
        sync_float8_amax_and_scale_history(model)
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
    return run


def autocast(recipe: str, all_gather: bool) -> Run:
    model = shard(convert(model_of(42), recipe, all_gather))

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(here().type, torch.bfloat16):
            return model(x)

    return train(model, 3, forward=forward)


def without_rows(recipe: str, all_gather: bool) -> Run:
    """One rank's batch is empty."""
    model = shard(convert(model_of(42), recipe, all_gather))

    def forward(x: Tensor) -> Tensor:
        y = model(x[: 0 if dist.get_rank() else None])
        return nn.functional.pad(y, (0, 0, 0, x.shape[0] - y.shape[0]))

    return train(model, 3, forward=forward)


def sharded_by_columns(recipe: str, all_gather: bool) -> Run:
    def along(parameter: nn.Parameter) -> torch.distributed.tensor.Shard:
        return torch.distributed.tensor.Shard(parameter.dim() - 1)

    return train(shard(convert(model_of(), recipe, all_gather), shard_placement_fn=along), 3)


def replicated(recipe: str, all_gather: bool) -> Run:
    """The mesh has two ranks, and each holds everything."""
    model = convert(model_of(), recipe, all_gather)
    for module in (*model, model):
        replicate(module, mesh=mesh_of())
    return train(model, 2)


USES: dict[str, Callable[[str, bool], Run]] = {
    use.__name__: use
    for use in (
        accumulating,
        frozen,
        checkpointed,
        evaluated,
        evaluated_between,
        from_meta,
        tied,
        offloaded,
        fused_optimizer,
        clipped,
        sharded_by_columns,
        autocast,
        without_rows,
        replicated,
    )
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("recipe", RECIPES)
@on("either")
def test_use_is_as_with_a_cast_after_the_gather(use: str, recipe: str) -> None:
    USES[use](recipe, True).assert_equal(USES[use](recipe, False))


@on("two")
def test_state_dicts_hold_plain_weights() -> None:
    for recipe in RECIPES:
        model = shard(convert(model_of(42), recipe))
        train(model, 2)
        sharded = {n: v for n, v in model.state_dict().items() if "fp8_" not in n}
        assert all(type(v.to_local()) is Tensor for v in sharded.values())
        plain = model_of(42)
        plain.load_state_dict({n: whole(v) for n, v in sharded.items()})
        again = shard(convert(model_of(42), recipe))
        again.load_state_dict(sharded)
        for a, b, c in zip(model.parameters(), plain.parameters(), again.parameters(), strict=True):
            assert torch.equal(whole(a), b)
            assert torch.equal(whole(c), b)
        assert isinstance(again[0].ffn.w1.weight.to_local(), Float8GatherWeight)


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@on("two")
def test_a_first_forward_in_inference_mode_does_what_torch_alone_does(recipe: str | None) -> None:
    """Torch's own buffers of the gather are inference tensors then: it evaluates, and only that."""
    models = [model_of(42) for _ in range(2)]
    models = [shard(m if recipe is None else convert(m, recipe)) for m in models]
    x, outputs = batch(0, dist.get_rank(), torch.float32), []
    for model, mode in zip(models, (torch.inference_mode(), torch.no_grad()), strict=True):
        with mode:
            outputs += [model(x), model(x)]
        assert not any(parameter.is_inference() for parameter in model.parameters())
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
        models[0](x).sum().backward()


@on("two")
def test_a_shard_of_a_rank_that_does_not_run_the_layer_counts() -> None:
    runs = []
    for all_gather in (False, True):
        model = shard(convert(model_of(), "delayed", all_gather))
        with torch.no_grad():
            weight = model[1].ffn.w1.weight.to_local()
            weight.mul_(100 if dist.get_rank() else 1)
        for _ in range(2):
            for block in model:
                block.unshard()
            x = batch(0, dist.get_rank(), torch.float32)
            for block in list(model)[: 1 if dist.get_rank() else None]:
                x = block.ffn(x)
            for block in model:
                block.reshard()
            sync_float8_amax_and_scale_history(model)
        runs.append(fp8_state(model))
        with Traffic() as seen:
            sync_float8_amax_and_scale_history(model)  # of nothing
        assert seen.all_reduces == 1
        assert all(torch.equal(value, runs[-1][name]) for name, value in fp8_state(model).items())
    assert runs[0]["1.ffn.w1.fp8_scale_weight"] > 10 * runs[0]["1.ffn.w3.fp8_scale_weight"]
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name


@on("four")
def test_a_state_dict_taken_before_the_first_forward_stays_one_of_the_model() -> None:
    for recipe in RECIPES:
        model = shard(convert(model_of(40), recipe))  # even: others torch moves, see the class
        early = model.state_dict()
        train(model, 1)
        weights = {n: v for n, v in model.state_dict().items() if "ffn" in n and "fp8_" not in n}
        for name, value in weights.items():
            assert torch.equal(early[name], value), name
        with torch.no_grad():
            early["0.ffn.w1.weight"].zero_()
            early["1.ffn.w2.weight"].to_local().zero_()
        for name in ("0.ffn.w1.weight", "1.ffn.w2.weight"):
            assert (whole(weights[name]) == 0).all(), name


@on("two")
def test_converting_after_sharding_works_but_for_a_gather_in_float8() -> None:
    with pytest.raises(ValueError, match=r"'0.ffn.w1': got a DTensor(.)*convert the model first"):
        convert(shard(model_of()), "tensorwise")
    for recipe in ("tensorwise", "delayed"):
        before = shard(convert(model_of(42), recipe, all_gather=False))
        after = convert(shard(model_of(42)), recipe, all_gather=False)
        train(before, 3).assert_equal(train(after, 3))


@on("two")
def test_converting_once_more_after_sharding_changes_nothing() -> None:
    once, twice = (shard(convert(model_of(42), "tensorwise")) for _ in range(2))
    convert(twice, "tensorwise")
    train(once, 2).assert_equal(train(twice, 2))
