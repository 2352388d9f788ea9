"""Other optimizers than AdamW step weights that FSDP2 gathers in float8 to the same bits."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from float8 import Float8Weights, all_linears, attach_to_optimizer, convert_to_float8_training
from support.configs import tensorwise
from support.models import FeedForward, seeded
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
MUON = "torch.optim", "Muon"


def losses(module: str, name: str, **settings: Any) -> list[float]:
    """Before and after two steps; torchao keeps the state of smaller weights in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(128, 256))
    config = tensorwise(**settings)
    convert_to_float8_training(model, config=config, module_filter_fn=all_linears)
    for block in (*model, model):
        fully_shard(block)
    parameters = [p for p in model.parameters() if p.ndim == 2]
    optimizer = getattr(importlib.import_module(module), name)(parameters, lr=1e-2)
    attach_to_optimizer(model, optimizer)
    found = []
    for seed in range(3):
        x = seeded(seed, 16, 128)
        loss = (model(x) - x).square().mean()
        found.append(loss.item())
        if seed == 2:
            return found
        loss.backward()
        with torch.compiler.set_stance("default" if module == MUON[0] else "force_eager"):
            optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "optimizer", [MUON, ("torchao.optim", "AdamW8bit"), ("torchao.optim", "AdamWFp8")], ids=str
)
def test_the_gather_and_held_weights_change_no_bit(two: Ranks, optimizer: Any) -> None:
    pytest.importorskip(optimizer[0])
    wanted = two.run(losses, *optimizer)
    assert wanted[0][2] < wanted[0][0]
    for weights in (Float8Weights.ON_THE_FLY, Float8Weights.HELD):
        how = {"enable_fsdp_float8_all_gather": True, "float8_weights": weights}
        assert two.run(losses, *optimizer, **how) == wanted
