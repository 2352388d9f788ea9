"""torch.distributed.checkpoint: saved on N ranks, loaded on M, on one without FSDP, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from float8 import precompute_float8_dynamic_scale_for_fsdp, sync_float8_amax_and_scale_history
from support.configs import RECIPES
from support.models import seeded
from support.ranks import Ranks
from support.sharded import DIM, convert, model_of, shard, train, whole


def flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of nested dicts, in full."""
    if isinstance(tree, Tensor):
        return {prefix: whole(tree)}
    items = tree.items() if isinstance(tree, dict) else ()
    return {k: v for key, value in items for k, v in flat(value, f"{prefix}/{key}").items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def save(path: str, recipe: str) -> dict[str, Tensor]:
    model = shard(convert(model_of(42), recipe))
    train(model, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(seeded(0, 16, DIM)).square().mean().backward()
    sync_float8_amax_and_scale_history(model)
    optimizer.step()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=path)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(value) is Tensor for value in full.values())
    return flat(state)


def load(path: str, recipe: str, expected: dict[str, Tensor], sharded: bool = True) -> None:
    model = convert(model_of(42), recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model = shard(model) if sharded else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(seeded(0, 16, DIM))
    precompute_float8_dynamic_scale_for_fsdp(model)  # of other weights
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert_same(flat({"model": model_state, "optimizer": optimizer_state}), expected)
    # A scale that was computed ahead for the old weights is not used for these.
    reference = convert(model_of(42), recipe)
    reference.load_state_dict({n: whole(v) for n, v in model.state_dict().items()})
    x = seeded(5, 16, DIM)
    assert torch.equal(model(x), reference(x))


def load_plain(path: str, expected: dict[str, Tensor]) -> None:
    """Into the model as it was before the conversion."""
    model = shard(model_of(42))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), expected[f"/model/{name}"]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_from_two_ranks_to_four_and_to_one_and_back(
    two: Ranks, four: Ranks, recipe: str, tmp_path: Path
) -> None:
    path, again = str(tmp_path / "two"), str(tmp_path / "one")
    saved = two.run(save, path, recipe)[0]
    assert ("/model/0.ffn.w1.fp8_scale_weight" in saved) == (recipe == "delayed")
    four.run(load, path, recipe, saved)
    four.run(load_plain, path, saved)
    load(path, recipe, saved, sharded=False)
    two.run(load, save_alone(again, path, recipe, saved), recipe, saved)


def save_alone(again: str, path: str, recipe: str, expected: dict[str, Tensor]) -> str:
    """Load without FSDP and save that."""
    model = convert(model_of(42), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    assert_same(flat(state), expected)
    dcp.save(state, checkpoint_id=again)
    return again


def load_in_place(path: str) -> None:
    """Into the tensors of a state dict, and nothing more; hidden width 3: one rank has no row."""
    model, other = (shard(convert(model_of(3), "tensorwise")) for _ in range(2))
    train(model, 1)
    other(seeded(0, 16, DIM))
    state = other.state_dict()
    dcp.save(model.state_dict(), checkpoint_id=path)
    x = seeded(5, 16, DIM)
    for precompute in (False, True):
        if precompute:
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(0.5)
            precompute_float8_dynamic_scale_for_fsdp(other)
            state = other.state_dict()
        dcp.load(state, checkpoint_id=path)
        assert torch.equal(other(x), model(x))


def test_loading_in_place_drops_precomputed_scales(four: Ranks, tmp_path: Path) -> None:
    four.run(load_in_place, str(tmp_path))
