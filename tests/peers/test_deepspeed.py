"""DeepSpeed's ZeRO trains a converted model on two ranks; not installed by any extra."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from float8 import all_linears, attach_to_optimizer, convert_to_float8_training
from sqnr import same_bits
from support.models import seeded
from support.ranks import Ranks

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.xdist_group("ranks")

CONFIG = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
CONFIG |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def converted(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    return convert_to_float8_training(model, config=recipe, module_filter_fn=all_linears)


def trained(model: nn.Module, config: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """The losses and the state of delayed scaling, of a run that is saved and loaded on its way."""
    deepspeed = importlib.import_module("deepspeed")
    rank = torch.distributed.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    attachment = attach_to_optimizer(engine.module, optimizer)
    found = {}
    for microbatch in range(8):
        if microbatch == 4:
            engine.save_checkpoint(folder)
            for buffer in engine.module.buffers():
                buffer.zero_()
            engine.load_checkpoint(folder)
        x = seeded(10 * microbatch + rank, 8, 64)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        found[f"loss {microbatch}"] = loss.detach()
    attachment.remove()
    assert found["loss 7"] < found["loss 0"]
    return found | {name: x.clone() for name, x in engine.module.named_buffers()}


def two_ranks_train(recipe: str, folder: Path) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(torch.distributed.get_rank())}
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    runs = []
    for stage in range(4):
        config = CONFIG | {"zero_optimization": {"stage": stage}}
        runs.append(trained(converted(recipe), config, folder / str(stage)))
    with deepspeed.zero.Init(config_dict_or_path=config):
        torch.manual_seed(0)
        apart = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    for layer in (apart[0], apart[2]):
        with deepspeed.zero.GatheredParameters([layer.weight]):
            convert_to_float8_training(layer, config=recipe, module_filter_fn=all_linears)
    runs.append(trained(apart, config, folder / "apart"))
    for run in runs[1:]:
        assert all(same_bits(x, run[name]) for name, x in runs[0].items())
    histories = [x for name, x in runs[0].items() if "history" in name]
    assert all((x > 0).sum() == 4 for x in histories)  # one of each step, not microbatch
    assert len(histories) == (4 if recipe == "delayed" else 0)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_zero_0_to_3(two: Ranks, recipe: str, tmp_path: Path) -> None:
    try:
        two.run(two_ranks_train, recipe, tmp_path)
    finally:
        two.stop()  # DeepSpeed changes what a process is
