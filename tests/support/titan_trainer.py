"""torchtitan's own training program on the CPU: a debug model, by a config as users write it.

`main` takes its arguments, and a folder that has a tokenizer, and documents in `data`.

What torchtitan lacks on a CPU it is given here: the name and the memory of the device, an attention
whose backward runs there (its own, without masks), and sums that Gloo has. `set_timeout` is missing
in torch 2.13.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

CPU = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=2**33),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
CPU.current_device = lambda: 0  # as of others, an index
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda device: CPU
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda *_: None

import titan_datasets

titan_datasets.take_its_place()

# ruff: isort: split
# ruff: noqa: E402
from torchtitan import train
from torchtitan.models.common import attention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from float8.integrations.torchtitan import Float8Converter, attach_to_optimizers


def delayed() -> Trainer.Config:
    """Two blocks of its debug Llama 3 with our converter."""
    config = llama3_debugmodel()
    converter = Float8Converter.Config(recipe_name="delayed", enable_fsdp_float8_all_gather=True)
    spec = config.model_spec = model_registry("debugmodel", converters=[converter])
    spec.model.layers = spec.model.layers[:2]
    for _, _, parent, name in list(spec.model.traverse(attention.FlexAttention.Config)):
        setattr(parent, name, attention.ScaledDotProductAttention.Config())
    parallelize = spec.parallelize_fn

    def with_sums_of_gloo(model: nn.Module, **more: Any) -> nn.Module:
        model = parallelize(model, **more)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(float(more["parallel_dims"].dp_shard))
        return model

    spec.parallelize_fn = with_sums_of_gloo
    spec.post_optimizer_build_fn = attach_to_optimizers
    config.optimizer.implementation = "foreach"
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.validator.enable = False
    config.debug.seed = 0
    return config


def main(folder: Path, *arguments: str) -> None:
    own = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= own | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    sys.argv += ["--module", __name__, "--config", delayed.__name__, *arguments]
    sys.argv += ["--hf_assets_path", str(folder), "--dataloader.dataset_path", str(folder / "data")]
    train.main()
