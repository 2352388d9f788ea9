"""Communication that nothing hides, and bytes by kind of collective."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.profiler import DeviceType

from float8_lab.bench.traffic import CountedTraffic, Traffic, exposed, exposed_ms


@pytest.mark.parametrize(
    ("communication", "work", "expected"),
    [
        ([], [(0, 5)], 0),
        ([(0, 5)], [], 5),
        ([(2, 4)], [(0, 9)], 0),
        ([(0, 9)], [(2, 4)], 7),
        ([(0, 4)], [(4, 9)], 4),  # they only touch
        ([(0, 4)], [(3, 9)], 3),
        ([(0, 4), (2, 6)], [(1, 3)], 4),  # overlapping communication counts once
        ([(0, 9)], [(1, 3), (2, 5), (7, 8)], 4),  # and so does overlapping work
        ([(5, 6), (0, 2)], [(5.5, 7), (1, 1.5)], 2),  # in any order
        ([(0, 2), (3, 5)], [(1, 4)], 2),  # one kernel hides parts of two
        ([(3, 3)], [], 0),
    ],
)
def test_exposed_is_what_no_work_covers(communication, work, expected) -> None:
    assert exposed(communication, work) == expected


def test_spans_around_kernels_are_neither() -> None:
    def event(name: str, start: float, end: float, device=DeviceType.CUDA, span=False):
        return SimpleNamespace(
            name=name,
            device_type=device,
            is_user_annotation=span,
            time_range=SimpleNamespace(start=start, end=end),
        )

    events = [
        event("ncclDevKernel_AllGather_RING_LL", 0, 3000),
        event("nvjet_gemm", 1000, 2000),
        event("nccl:_all_gather_base", 0, 9000),
        event("FSDP::all_gather", 0, 9000, span=True),
        event("aten::mm", 0, 9000, device=DeviceType.CPU),
    ]
    assert exposed_ms(SimpleNamespace(events=lambda: events)) == 2.0


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
    assert counted.traffic == Traffic(96, 32, 64, 8, all_reduces=2)
    with CountedTraffic() as nothing:
        x.exp_()
    assert nothing.traffic == Traffic()
