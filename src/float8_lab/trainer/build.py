"""From settings to a model: converted to float8, compiled, sharded, initialised."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from float8 import conversion_report, convert_to_float8_training
from float8.formats import lacks_float8_gemm
from float8_lab.errors import ConfigError
from float8_lab.models.llama import Llama
from float8_lab.trainer.config import DTYPES, TrainConfig, float8_config
from float8_lab.trainer.ranks import ALONE, Ranks


def build_model(
    config: TrainConfig, device: torch.device, ranks: Ranks = ALONE
) -> tuple[Llama, str]:
    """Build the run's model: converted, compiled, sharded and initialised as the settings say.

    Collective if it is sharded.

    Returns:
        The model, and what was converted as text (empty for high precision).

    Raises:
        ConfigError: (a `ValueError`) if the recipe does not work with this model or device.
    """
    # No rank has room for a whole model: it gets memory when each rank has its shards.
    again = config.activation_checkpointing
    with torch.device("meta"):
        model = Llama(config.model_config(), config.seq_len, activation_checkpointing=again)
    model.tie_head()
    conversion = ranks.together(
        lambda: _convert(model, config.recipe, config.fsdp_float8_all_gather, device)
    )
    if config.compile:
        # Blocks are alike, so one compilation serves all; the names of parameters stay.
        for block in (*model.layers, model.norm):
            block.compile(fullgraph=True, dynamic=False)
    if ranks.sharded:
        shards = ranks.size // config.hsdp
        if config.hsdp == 1:
            mesh = init_device_mesh(device.type, (shards,))
        else:
            names = ("replicate", "shard")
            mesh = init_device_mesh(device.type, (config.hsdp, shards), mesh_dim_names=names)
        # No mixed precision policy: weights are gathered as they are, or in float8 if the config
        # says so, and autocast does the rest, so that the numbers are those of one device.
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
    model.to_empty(device=device)
    model.init_weights(config.seed)
    return model, conversion


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """The context of the forward pass: autocast to the run's dtype, nothing for float32."""
    low = config.dtype != "float32"
    return torch.autocast(device.type, dtype=DTYPES[config.dtype] if low else None, enabled=low)


def _convert(model: Llama, recipe: str, float8_all_gather: bool, device: torch.device) -> str:
    settings = float8_config(recipe)
    if settings is None:
        return ""
    if reason := lacks_float8_gemm(device):  # the model itself may still be on the meta device
        raise ConfigError(f"recipe {recipe!r}: {reason}")
    try:
        settings = dataclasses.replace(settings, enable_fsdp_float8_all_gather=float8_all_gather)
        convert_to_float8_training(
            model, config=settings, module_filter_fn=lambda _, name: name != "output"
        )
    except ValueError as error:
        raise ConfigError(f"recipe {recipe!r}: {error}") from error
    report = conversion_report(model)
    if not report.converted:
        reasons = {str(layer.skip_reason) for layer in report.skipped if layer.fqn != "output"}
        raise ConfigError(f"recipe {recipe!r} converted no layer: {'; '.join(sorted(reasons))}")
    return str(report)
