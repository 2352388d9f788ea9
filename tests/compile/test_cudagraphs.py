"""`mode="reduce-overhead"`: whole training steps replayed as CUDA graphs."""

import pytest
import torch

import tolerances
from float8 import update_float8_weights
from sqnr import same_bits, sqnr
from support.configs import delayed, tensorwise
from support.microbatches import with_weights
from support.training import SideBySide, two_layers

pytestmark = pytest.mark.gpu


def assert_step_is_close(both: SideBySide, seed: int) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    for name, (wanted, got) in both.step(seed).items():
        if bool((wanted == 0).all()):
            assert same_bits(got, wanted), (seed, name)
        else:
            assert sqnr(wanted, got) > tolerances.COMPILED, (seed, name)


@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
@pytest.mark.parametrize("how", ["plain", "checkpoint"])
def test_reduce_overhead_replays_graphs_with_the_results_of_eager_mode(config, how: str) -> None:
    torch._dynamo.utils.counters.clear()
    both = SideBySide(
        two_layers(config, "cuda", how),
        lambda m: torch.compile(m, mode="reduce-overhead", fullgraph=True),
    )
    for seed in range(5):
        assert_step_is_close(both, seed)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._inductor.cudagraph_trees.get_container(0).tree_manager is not None  # did run


@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
@pytest.mark.parametrize("updated", [True, False])
def test_held_weights_are_read_as_they_are_in_each_step(config, updated: bool) -> None:
    """A graph records the cast: it sees what was written, whether anybody tells of it or not."""
    torch._dynamo.utils.counters.clear()
    both = SideBySide(
        two_layers(with_weights(config), "cuda"),
        lambda m: torch.compile(m, mode="reduce-overhead", fullgraph=True),
    )
    kept = []
    for seed in range(6):
        kept.append(torch.empty(2 * 32 * 64, dtype=torch.uint8, device="cuda"))  # moves the next
        if updated or seed == 0:
            update_float8_weights(both.copy)
        assert_step_is_close(both, seed)
        for model in (both.model, both.copy):
            with torch.no_grad():
                for index, parameter in enumerate(model.parameters()):
                    parameter.mul_(1.5 if (seed + index) % 2 else -0.8)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
