"""`mode="reduce-overhead"`: whole training steps replayed as CUDA graphs."""

import pytest
import torch

import tolerances
from sqnr import same_bits, sqnr
from support.configs import delayed, tensorwise
from support.training import SideBySide, two_layers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
@pytest.mark.parametrize("how", ["plain", "checkpoint"])
def test_reduce_overhead_replays_graphs_with_the_results_of_eager_mode(config, how: str) -> None:
    torch._dynamo.utils.counters.clear()
    both = SideBySide(
        two_layers(config, "cuda", how),
        lambda m: torch.compile(m, mode="reduce-overhead", fullgraph=True),
    )
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        for name, (wanted, got) in both.step(seed).items():
            if bool((wanted == 0).all()):
                assert same_bits(got, wanted), (seed, name)
            else:
                assert sqnr(wanted, got) > tolerances.COMPILED, (seed, name)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._inductor.cudagraph_trees.get_container(0).tree_manager is not None  # did run
