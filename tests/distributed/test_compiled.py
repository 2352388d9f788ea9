"""What is compiled under FSDP2, DDP and FSDP1 has one graph per block and the bits of eager mode.

On GPUs Inductor compiles: eager mode is near then, and test_nccl.py compares gathers.
FSDP2's hooks switch the compiler off for themselves, in this torch: compiling "with hooks" compiles
a block between them, and a whole model breaks where the first runs, as it does without float8.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    activations_in_float8,
    attach_to_optimizer,
    precompute_float8_dynamic_scale_for_fsdp,
)
from sqnr import sqnr
from support.devices import E4M3
from support.graphs import op_by_op
from support.outcome import IN_ONE_GRAPH, assert_same, compiled, compiles, train
from support.ranks import on
from support.rings import short
from support.sharded import DIM, convert, fsdp1, here, shard, small
from support.spies import Traffic, saved_tensors
from tolerances import COMPILED

CELLS = [  # any two of what they vary meet
    ("delayed", True, "blocks"),
    ("delayed", False, "blocks with hooks"),
    ("tensorwise", True, "blocks with hooks"),
    ("tensorwise", True, "whole model"),
    ("delayed", False, "whole model"),
    ("tensorwise", False, "blocks"),
]


def backend() -> str:
    return "inductor" if here().type == "cuda" else "aot_eager"


@pytest.mark.parametrize(("recipe", "all_gather", "what"), short({0}, CELLS))
@on("either")
def test_fsdp2(recipe: str, all_gather: bool, what: str) -> None:
    eager = train(shard(small(recipe, all_gather)), 2)
    # A whole model breaks at FSDP2's own hook, float8 or not.
    breaking = what == "whole model" or not IN_ONE_GRAPH
    how = what, shard, 2, backend()
    plain_breaks = compiled(small(None, False), *how)[1] if breaking else []
    run, breaks, graphs = compiled(small(recipe, all_gather), *how)
    if backend() == "aot_eager":
        assert_same(run, eager)
    else:  # in the first step: AdamW's makes signs of gradients, however small they are
        assert run.keys() == eager.keys()
        for name in (name for name in eager if name.startswith(("loss 0", "grad 0"))):
            assert sqnr(eager[name], run[name]) > COMPILED, name
    assert breaks == plain_breaks
    assert graphs == 2 * compiles()  # none compiled again


@pytest.mark.parametrize(
    ("wrap", "what"),
    [
        pytest.param(DistributedDataParallel, "whole model", marks=pytest.mark.exhaustive),
        pytest.param(fsdp1, "blocks", marks=pytest.mark.exhaustive),
        pytest.param(fsdp1, "whole model", marks=pytest.mark.exhaustive),
    ],
)
@on("either")
def test_ddp_and_fsdp1(wrap: Callable[[nn.Module], nn.Module], what: str) -> None:
    eager = train(wrap(small("delayed", False)), 3)
    run, breaks, graphs = compiled(small("delayed", False), what, wrap, 3)
    assert_same(run, eager)
    if wrap is fsdp1 and what == "blocks":
        assert (breaks, graphs) == ([], 2 * compiles())  # none compiled again
    elif wrap is fsdp1:  # breaks where FSDP1 gathers, float8 or not
        assert set(breaks) <= set(compiled(small(None, False), what, wrap, 1)[1])
        assert graphs or not compiles()


@on("either")
def test_compiled_forwards_keep_the_gathered_bytes_and_no_copy() -> None:
    """Else every whole weight stays transposed until backward, however it was sharded."""
    torch._dynamo.reset()
    layers = (nn.Linear(*shape, bias=False) for shape in ((32, 64), (64, 32)))
    model = shard(convert(nn.Sequential(*map(nn.Sequential, layers)).to(here()), "tensorwise"))
    for block in model if compiles() else ():
        block.compile(backend=backend())
    with saved_tensors() as saved:
        model(torch.ones(4, 32, device=here()))
    kept = [x for x in saved if x.dtype == E4M3 and x.numel() >= 32 * 64]
    # The gathered bytes, of the layer whose input has a gradient; no view of their transposed copy.
    found = [(tuple(x.shape), x.stride()) for x in kept]
    assert found == [((32, 64), (64, 1))] or not compiles()


@on("either")
def test_activations_in_float8_leave_weights_of_tensor_parallel() -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    model = nn.Sequential(
        nn.Linear(128, 256, bias=False), nn.SiLU(), nn.Linear(256, 96, bias=False)
    )
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(model.to(here(), torch.bfloat16), mesh, plan)
    x = torch.randn(64, 128, device=here(), dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved:
        options = op_by_op(activations_in_float8(min_mib=0))
        (torch.compile(model, **options) if compiles() else model)(x)
    packed = {tuple(x.shape) for x in saved if x.dtype == E4M3}
    assert packed == {(64, 128), (64, 256 // dist.get_world_size())} or not compiles()


def stepped(compile_step: bool, attached: bool, kind: Any = torch.optim.SGD, **more: Any) -> Tensor:
    """The losses of three steps."""
    torch._dynamo.reset()
    model, losses = shard(small("delayed recipe", True, blocks=1)), []
    optimizer = kind(model.parameters(), **more)
    if attached:
        attach_to_optimizer(model, optimizer)

    def step() -> None:
        optimizer.step()

    for _ in range(3):
        with Traffic() as seen:
            loss = model(torch.ones(4, DIM)).square().mean()
        assert (seen.all_reduces == 0) == (attached and len(losses) > 0)
        loss.backward()
        losses.append(loss.detach())
        if not attached:  # what the step makes of it is not known then
            precompute_float8_dynamic_scale_for_fsdp(model)
        (torch.compile(step, backend=backend()) if compile_step and compiles() else step)()
        optimizer.zero_grad()
    return torch.stack(losses)


@pytest.mark.exhaustive
@on("two")
def test_compiled_optimizer_steps() -> None:
    attached = partial(stepped, attached=True, lr=1.0)
    assert torch.equal(attached(False), attached(True))
    # Of this torch compiles another rounding.
    stepped(True, False, torch.optim.AdamW, lr=0.1, fused=True)
