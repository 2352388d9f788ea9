"""Bytes by kind of collective."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from float8_lab.bench.traffic import CountedTraffic


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_every_way_to_call_a_collective_is_counted() -> None:
    x, out = torch.ones(8), torch.zeros(8)
    with CountedTraffic() as counted:
        dist.all_gather_into_tensor(out, x)
        dist.all_gather([out], x)
        dist.reduce_scatter_tensor(out, x)
        dist.all_reduce(x.view(torch.int32))
        funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))
        funcol.wait_tensor(funcol.all_gather_tensor(x, 0, dist.group.WORLD))
        dist.broadcast(x[:2], 0)
        dist.barrier()
        (x + out).sum()
    kinds = ("gathered", "reduce_scattered", "all_reduced", "other", "all_reduces")
    assert [counted.traffic[kind] for kind in kinds] == [96, 32, 64, 8, 2]
    with CountedTraffic() as nothing:
        x.exp_()
    assert not nothing.traffic
