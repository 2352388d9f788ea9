"""FSDP1 gathers weights in high precision: ranks scale as one process does, compiled or not."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from support.configs import RECIPES
from support.models import Block, fp8_state
from support.ranks import on
from support.sharded import compiled, convert, here, model_of, small, train, train_alone


def wrap(model: nn.Module) -> nn.Module:
    """Each block, then the whole."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block, nn.Sequential}),
        use_orig_params=True,
        device_id=here(),
    )


@pytest.mark.parametrize("recipe", RECIPES)
@on("either")
def test_two_ranks_equal_one(recipe: str) -> None:
    model = convert(model_of(), recipe, all_gather=False)
    alone = convert(model_of(), recipe, all_gather=False)
    losses = train(wrap(model), 4).losses, train_alone(alone, 4).losses
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
    state = {n.replace("_fsdp_wrapped_module.", ""): v for n, v in fp8_state(model).items()}
    assert state.keys() == fp8_state(alone).keys()
    for name, value in fp8_state(alone).items():
        assert torch.equal(state[name], value), name


@on("two")
def test_it_cannot_gather_in_float8_and_says_so() -> None:
    model = convert(model_of(blocks=1), "tensorwise")
    with pytest.raises(ValueError, match=r"FSDP1(.)*enable_fsdp_float8_all_gather=False"):
        train(wrap(model), 1)


@on("either")
def test_compiled_is_as_eager() -> None:
    eager, *_ = compiled(small("delayed", False), "nothing", wrap, 4)
    _, plain_breaks, _ = compiled(small(None, False), "whole model", wrap, 1)
    for what in ("blocks", "whole model"):
        run, breaks, graphs = compiled(small("delayed", False), what, wrap, 4)
        run.assert_equal(eager)
        if what == "blocks":
            assert breaks == []
            assert graphs == 2  # none compiled again
        else:  # breaks where FSDP1 gathers, float8 or not
            assert set(breaks) <= set(plain_breaks)
            assert graphs >= 2
