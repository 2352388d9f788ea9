"""From settings to a model, its optimizer and its learning rates."""

import dataclasses
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel

from float8 import Float8Weights, conversion_report, convert_to_float8_training
from float8.config import CastSite
from float8.formats import lacks_float8_gemm
from float8.parallel import tensor as float8_styles
from float8_lab.errors import ConfigError
from float8_lab.models.llama import Llama
from float8_lab.models.parallel import share_layers
from float8_lab.models.presets import preset
from float8_lab.ranks import ALONE, Ranks
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig, float8_config


def build_model(
    config: TrainConfig, device: torch.device, ranks: Ranks = ALONE
) -> tuple[Llama, str]:
    """Build the run's model: converted, spread, compiled and initialised as the settings say.

    Collective if it is spread. Returns what was converted as text, too, empty for high precision;
    a `ConfigError` if the recipe does not work with this model or device.
    """
    # No rank has room for a whole model: it gets memory when each rank has its shards.
    again = config.activation_checkpointing
    with torch.device("meta"):
        shape = preset(config.model).model
        model = Llama(shape, config.seq_len, activation_checkpointing=again)
    model.tie_head()
    conversion = ranks.together(lambda: _convert(model, config, device))
    mesh: Any = _make_mesh(config, device, ranks) if config.spread else None
    if config.tp > 1:
        ranks.together(lambda: _parallelize(model, config, mesh["tensor"]))
    if config.compile:
        # Blocks are alike, so one compilation serves all; the names of parameters stay.
        for block in (*model.layers, model.norm):
            # FSDP2's hooks break a graph from torch 2.14 on.
            mode = "reduce-overhead" if config.cuda_graphs else None
            block.compile(fullgraph=not config.fsdp, dynamic=False, mode=mode)
    if config.fsdp:
        data = mesh["shard"] if config.hsdp == 1 else mesh["replicate", "shard"]
        # No mixed precision policy: weights are gathered as they are, or in float8 if the config
        # says so, and autocast does the rest, so that the numbers are those of one device.
        for module in (*model.layers, model):
            fully_shard(module, mesh=data)
    model.to_empty(device=device)
    model.init_weights(config.seed)
    return model, conversion


def _convert(model: Llama, config: TrainConfig, device: torch.device) -> str:
    recipe = config.recipe
    settings = float8_config(recipe)
    if settings is None:
        return ""
    if reason := lacks_float8_gemm(device):  # the model itself may still be on the meta device
        raise ConfigError(f"recipe {recipe!r}: {reason}; or use --recipe {HIGH_PRECISION}")
    try:
        gather = config.fsdp_float8_all_gather
        settings = dataclasses.replace(settings, enable_fsdp_float8_all_gather=gather)
        one_cast = CastSite.WEIGHT_FOR_GRAD_INPUT not in settings.own_casts
        # As CUDA graphs, casts are made each time: nothing held is read.
        can_hold = one_cast and not config.cuda_graphs and (gather or not config.fsdp)
        if config.accumulate > 1 and can_hold:
            settings = dataclasses.replace(settings, float8_weights=Float8Weights.HELD)
        convert_to_float8_training(
            model,
            config=settings,
            module_filter_fn=lambda _, name: name != "output",
        )
    except ValueError as error:
        raise ConfigError(f"recipe {recipe!r}: {error}") from error
    report = conversion_report(model)
    if not report.converted:
        reasons = {str(layer.skip_reason) for layer in report.skipped if layer.fqn != "output"}
        raise ConfigError(f"recipe {recipe!r} converted no layer: {'; '.join(sorted(reasons))}")
    return str(report)


def _make_mesh(config: TrainConfig, device: torch.device, ranks: Ranks) -> DeviceMesh:
    """All ranks, in a dim for each way in which they share work; neighbours share layers."""
    shards = ranks.size // (config.hsdp * config.tp)
    sizes = {"replicate": config.hsdp, "shard": shards, "tensor": config.tp}
    dims = {name: n for name, n in sizes.items() if n > 1 or (name == "shard" and config.fsdp)}
    mesh = init_device_mesh(device.type, (*dims.values(),), mesh_dim_names=(*dims,))
    if config.fsdp and config.tp > 1:
        mesh["shard", "tensor"]._flatten()  # norms then take one collective, not one per dim
    return mesh


def _parallelize(model: Llama, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Give each rank its part of the layers of blocks. Embedding, norms and head are on all.

    They, too, become DTensors, so that the norm of all gradients is that of tensors on one mesh.
    """
    tokens = Shard(1) if config.sequence_parallel else Replicate()
    styles = None if config.recipe == HIGH_PRECISION else float8_styles
    try:
        share_layers(model.layers, mesh, tokens, styles)
    except ValueError as error:
        raise ConfigError(f"recipe {config.recipe!r} with --tp {config.tp}: {error}") from error
    local: Any = parallel.SequenceParallel(use_local_output=True)
    local.sequence_sharding = (tokens,)
    # Each rank is given all tokens.
    share = parallel.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=tokens)
    parallel.parallelize_module(model.embedding, mesh, share)
    head = local
    if config.sequence_parallel:  # torch 2.11 flattens tokens only where the first dim is sharded
        head = parallel.SequenceParallel(sequence_dim=0, use_local_output=True)
        model.output.register_forward_pre_hook(lambda _, args: (args[0].transpose(0, 1),))
        model.output.register_forward_hook(lambda _, args, logits: logits.transpose(0, 1))
    parallel.parallelize_module(model, mesh, {"embedding": local, "norm": local, "output": head})
    view = torch.ops.aten._unsafe_view.default  # not noted as one: FSDP2 warns of modules that do
    model.output.register_forward_hook(lambda _, args, logits: view(logits, logits.shape))
    model.tie_head()  # they have new Parameters


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, one fused kernel per group."""
    matrices, others = (
        [p for p in model.parameters() if (p.dim() > 1) is x] for x in (True, False)
    )
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the rate of step `step`, counted from 1: a linear rise, then half a cosine."""
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    decay_steps = config.steps - config.warmup_steps
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
