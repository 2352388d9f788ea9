"""The compile table: scaling x gather x what is compiled, each cell with the bits of eager mode.

FSDP2's hooks switch the compiler off for themselves, in this torch: compiling "with hooks" compiles
a block between them, and a whole model breaks where they run, which is not ours to change.
"""

import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from support.configs import RECIPES
from support.ranks import Ranks
from support.sharded import convert, model_of, shard, train

BLOCKS = 2
WHAT = ["blocks", "blocks with hooks", "whole model"]


def cell(recipe: str, all_gather: bool, what: str, backend: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    model = convert(model_of(32, blocks=BLOCKS), recipe, all_gather)
    forward: nn.Module = model
    if what == "blocks":
        for block in model:
            block.compile(backend=counter, fullgraph=True)
    forward = model = shard(model)
    if what == "blocks with hooks":
        for block in model:
            block.compile(backend=counter)
    if what == "whole model":
        forward = torch.compile(model, backend=counter)
    compiled = train(model, 3, forward=forward)
    breaks = counters["graph_break"]
    if what == "whole model":
        # One break, at the hook of the whole; then, block by block, none. As without float8.
        assert len(breaks) == 1
        assert "disable" in next(iter(breaks))
    else:
        assert not breaks
    assert counter.frame_count == BLOCKS  # one graph per block, never compiled again
    assert counters["frames"]["total"] == counters["frames"]["ok"] or what == "whole model"
    train(shard(convert(model_of(32), recipe, all_gather)), 3).assert_equal(compiled)


def cells(recipe: str) -> None:
    for all_gather, what in itertools.product((False, True), WHAT):
        try:
            cell(recipe, all_gather, what, "aot_eager")
        except AssertionError as error:
            raise AssertionError(f"{recipe}, {all_gather=}, {what}: {error}") from error


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_cell_has_one_graph_per_block_and_the_bits_of_eager_mode(
    two: Ranks, recipe: str
) -> None:
    two.run(cells, recipe)
