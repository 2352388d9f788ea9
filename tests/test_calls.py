"""How many calls of Python within the library each path of data takes, at most."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import float8
from support.microbatches import with_weights
from support.models import seeded
from support.parallel import STYLES
from support.sharded import convert, mesh_of

# Of a forward, its backward and, where something follows it, an optimizer step. GPUs have one call
# less for each GEMM under one scale per tensor: the op `scaled_mm`.
MOST = {
    "tensorwise": [21, 17],
    "delayed": [26, 18, 18],
    "rowwise": [23, 23],
    "blockwise": [27, 27],
    "held": [20, 13, 20],
    "gather": [32, 16, 49],
    "tensor parallel": [79, 55],  # two layers
}


def calls(forward: Any, *step: Any) -> list[int]:
    """Count those of the third round: what is made once has been made then."""
    outputs: list[Tensor] = []
    files: list[list[str]] = []  # of each call, by run
    rounds = [lambda: outputs.append(forward()), lambda: outputs.pop().sum().backward(), *step]
    with torch.autograd.set_multithreading_enabled(False):  # one thread has the profile
        for run in 3 * rounds:
            files.append([])
            sys.setprofile(lambda f, event, _: files[-1].append(event + f.f_code.co_filename))
            try:
                run()
            finally:
                sys.setprofile(None)
    ours = f"call{float8.__path__[0]}"
    return [sum(file.startswith(ours) for file in each) for each in files[-len(rounds) :]]


def on_one_device(path: str) -> list[int]:
    x = seeded(0, 32, 64).requires_grad_()
    config = with_weights(None) if path == "held" else path
    layer, steps = float8.Float8Linear(64, 128, bias=False, config=config), {}
    steps["held"] = [lambda: float8.update_float8_weights(layer)]
    steps["delayed"] = [lambda: float8.sync_float8_amax_and_scale_history(layer)]
    return calls(lambda: layer(x), *steps.get(path, []))


def on_ranks(path: str) -> list[int]:
    x = seeded(0, 16, 64).requires_grad_()
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((64, 128), (128, 64))))
    if path == "gather":
        model = fully_shard(convert(model[:1], "tensorwise"), mesh=mesh_of())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        float8.attach_to_optimizer(model, optimizer)
        return calls(lambda: model(x), optimizer.step)
    colwise, rowwise, _ = STYLES["float8"]
    plan = {"0": colwise(input_layouts=Shard(0)), "1": rowwise(output_layouts=Shard(0))}
    parallelize_module(convert(model, "tensorwise", all_gather=False), mesh_of(), plan)
    return calls(lambda: model(x))


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("path", "most"), MOST.items())
def test_no_path_takes_more_calls(path: str, most: list[int], request: Any) -> None:
    many = path in ("gather", "tensor parallel")
    found = request.getfixturevalue("two").run(on_ranks, path)[0] if many else on_one_device(path)
    assert all(got <= bound for got, bound in zip(found, most, strict=True)), found
