"""torch.distributed.checkpoint: saved on N ranks, loaded on M, on one alone, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor.parallel import parallelize_module

from float8 import precompute_float8_dynamic_scale_for_fsdp, sync_float8_amax_and_scale_history
from support.models import seeded
from support.outcome import assert_same, train
from support.parallel import DIM as LLAMA_DIM
from support.parallel import block_of, plan_of
from support.ranks import Ranks
from support.rings import short
from support.sharded import DIM, convert, data_and_tensor, model_of, shard, whole


def flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of nested dicts, in full."""
    if isinstance(tree, Tensor):
        return {prefix: whole(tree)}
    items = tree.items() if isinstance(tree, dict) else ()
    return {k: v for key, value in items for k, v in flat(value, f"{prefix}/{key}").items()}


def built(recipe: str, how: str) -> tuple[nn.Module, Any, Tensor]:
    """A model, its optimizer, and an input: `alone`, or as ranks share it.

    By FSDP2 with uneven shards, or a `llama` by tensor parallel, or FSDP2 over another dim, too.
    """
    if "llama" not in how:
        model, x = convert(model_of(42, blocks=1), recipe), seeded(0, 16, DIM)
        model = shard(model) if how == "fsdp" else model
    else:
        model, x = nn.Sequential(block_of(recipe, all_gather=True)), seeded(0, 2, 4, LLAMA_DIM)
        if "alone" not in how:
            size = dist.get_world_size()
            mesh = data_and_tensor(2, size // 2) if "two dims" in how else data_and_tensor(size)
            parallelize_module(model[0], mesh["tensor"], plan_of("float8", True, norms=True))
            model = shard(model, mesh["data"]) if "two dims" in how else model
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), x


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def save(path: str, recipe: str, how: str) -> dict[str, Tensor]:
    model, optimizer, x = built(recipe, how)
    for _ in range(2):
        model(x).square().mean().backward()
        sync_float8_amax_and_scale_history(model)
        optimizer.step()
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=path)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(value) is Tensor for value in full.values())
    return flat(state)


def load(path: str, recipe: str, how: str, expected: dict[str, Tensor], again: str = "") -> None:
    model, optimizer, x = built(recipe, how)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model(x)
    precompute_float8_dynamic_scale_for_fsdp(model)  # of other weights
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert_same(flat(state_of(model, optimizer)), expected)
    if again:
        dcp.save(state_of(model, optimizer), checkpoint_id=again)
    if "llama" in how:
        model(x).square().mean().backward()
        sync_float8_amax_and_scale_history(model)
    else:  # a scale that was computed ahead for the old weights is not used for these
        reference = convert(model_of(42, blocks=1), recipe)
        reference.load_state_dict({n: whole(v) for n, v in model.state_dict().items()})
        assert torch.equal(model(x), reference(x))


def load_plain(path: str, expected: dict[str, Tensor]) -> None:
    """Into the model as it was before the conversion."""
    model = shard(model_of(42, blocks=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), expected[f"/model/{name}"]), name


CASES = [("two", "delayed"), ("two", "tensorwise"), ("four", "delayed")]


@pytest.mark.parametrize(("ranks", "recipe"), short({0}, CASES))
def test_from_ranks_to_one_and_to_two(
    request: pytest.FixtureRequest, two: Ranks, ranks: str, recipe: str, tmp_path: Path
) -> None:
    path, again = str(tmp_path / "ranks"), str(tmp_path / "one")
    saved = request.getfixturevalue(ranks).run(save, path, recipe, "fsdp")[0]
    assert ("/model/0.ffn.w1.fp8_scale_weight" in saved) == (recipe == "delayed")
    load(path, recipe, "alone", saved, again)
    two.run(load, again, recipe, "fsdp", saved)
    two.run(load_plain, path, saved)


def test_of_tensor_parallel(two: Ranks, tmp_path: Path) -> None:
    saved = two.run(save, str(tmp_path), "delayed", "llama, tensor parallel")[0]
    load(str(tmp_path), "delayed", "llama, alone", saved)


@pytest.mark.exhaustive
def test_from_a_mesh_of_two_dims_to_others(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path)
    saved = four.run(save, path, "delayed", "llama, two dims")[0]
    four.run(load, path, "delayed", "llama, two dims", saved)
    two.run(load, path, "delayed", "llama, tensor parallel", saved)
    load(path, "delayed", "llama, alone", saved)


def load_in_place(path: str) -> None:
    """Into the tensors of a state dict, and nothing more; hidden width 3: one rank has no row."""
    model, other = (shard(convert(model_of(3), "tensorwise")) for _ in range(2))
    train(model, 1)
    x = seeded(5, 16, DIM)
    other(x)
    state = other.state_dict()
    dcp.save(model.state_dict(), checkpoint_id=path)
    for precompute in (False, True):
        if precompute:
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(0.5)
            precompute_float8_dynamic_scale_for_fsdp(other)
            state = other.state_dict()
        dcp.load(state, checkpoint_id=path)
        assert torch.equal(other(x), model(x))


@pytest.mark.exhaustive
def test_loading_in_place_drops_precomputed_scales(four: Ranks, tmp_path: Path) -> None:
    four.run(load_in_place, str(tmp_path))
