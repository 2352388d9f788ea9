"""What all libraries promise that train a converted model: see the table in support.libraries."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from float8 import Float8Linear
from sqnr import same_bits
from support import libraries
from support.libraries import ROWS
from support.models import fp8_state
from support.rings import short

FIRST = ["accelerate", "lightning", "transformers", "transformers, sgd, callbacks anew", "trl"]
FIRST += ["peft", "torch, EMA", "torchao, AdamW8bit"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    @functools.cache
    def train(name: str) -> tuple:
        for library in ROWS[name].needs:
            pytest.importorskip(library)
        folder = tmp_path_factory.mktemp("whole")
        torch.manual_seed(0)
        return folder, *libraries.run(name, folder)

    return train


@pytest.mark.parametrize("name", [name for name in FIRST if ROWS[name].plain])
def test_losses_are_those_of_a_plain_loop(name: str, trained: Callable) -> None:
    _, _, calls = trained(name)
    wanted = libraries.plain_losses(name, calls)
    assert len(calls) == 8
    assert [x.loss for x in calls] == wanted


@pytest.mark.parametrize("name", short(FIRST, ROWS))
def test_each_step_is_synced_once_and_nothing_stays_attached(name: str, trained: Callable) -> None:
    _, model, calls = trained(name)
    model = model["model"] if isinstance(model, nn.ModuleDict) else model  # beside averages
    steps = [int((x > 0).sum()) for key, x in fp8_state(model).items() if "history" in key]
    assert len(steps) == ROWS[name].histories
    frozen = name == "peft"  # nobody needs the gradient of the first layers' outputs
    assert all(each == 4 or (frozen and each == 0) for each in steps)  # not 8, one per microbatch
    layers = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    assert layers
    assert not any(x._float8_attached or x._float8_has_unsynced_amax() for x in layers)
    if ROWS[name].made is libraries.feed_forwards:
        assert calls[-1].loss < calls[0].loss


IN_A_FRESH_PROCESS = ["accelerate", "transformers", "torch, EMA"]
RESUMED = [*((name, "here") for name in ROWS)]
RESUMED += [(name, "a fresh process") for name in IN_A_FRESH_PROCESS]


@pytest.mark.parametrize(
    ("name", "where"), short({n for n, name in enumerate(ROWS) if name in FIRST}, RESUMED)
)
def test_a_run_is_resumed_bit_by_bit(name: str, where: str, trained: Callable) -> None:
    folder, model, _ = trained(name)
    resume = libraries.resumed if where == "here" else libraries.resumed_in_a_fresh_process
    rest = resume(name, folder)
    whole = model.state_dict()
    assert rest.keys() == whole.keys()
    assert [key for key, x in whole.items() if not same_bits(x, rest[key])] == []
