"""From settings to a model, its optimizer and its learning rates."""

import dataclasses

import torch
from torch import nn

from float8 import (
    Float8Weights,
    activations_in_float8,
    conversion_report,
    convert_to_float8_training,
)
from float8.config import CastSite
from float8.formats import lacks_float8_gemm
from float8_lab.errors import ConfigError
from float8_lab.models.llama import Llama
from float8_lab.models.presets import preset
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig, float8_config


def build_model(config: TrainConfig, device: torch.device) -> tuple[Llama, str]:
    """Build the run's model as the settings say, and what was converted as text, which may be "".

    Raises a `ConfigError` if the recipe does not work with this model or device.
    """
    with torch.device("meta"):
        model = Llama(preset(config.model).model, config.seq_len)
    model.tie_head()
    conversion = _convert(model, config, device)
    if config.compile:
        # Blocks are alike, so one compilation serves all; the names of parameters stay.
        for block in (*model.layers, model.norm):
            options = activations_in_float8() if "+activations" in config.recipe else None
            block.compile(fullgraph=True, dynamic=False, options=options)
    model.to_empty(device=device)
    model.init_weights(config.seed)
    for parameter in model.parameters() if config.rounded_start else ():
        parameter.detach().copy_(parameter.to(torch.float8_e5m2))
    return model, conversion


def _convert(model: Llama, config: TrainConfig, device: torch.device) -> str:
    recipe = config.recipe
    settings = float8_config(recipe)
    if settings is None:
        return ""
    # The model itself may still be on the meta device.
    reason = lacks_float8_gemm(device, only=settings.only_on)
    if reason and not settings.emulate:
        raise ConfigError(f"recipe {recipe!r}: {reason}; or use --recipe {HIGH_PRECISION}")
    try:
        # One process gathers nothing, whatever a configuration of the user's says.
        settings = dataclasses.replace(settings, enable_fsdp_float8_all_gather=False)
        one_cast = CastSite.WEIGHT_FOR_GRAD_INPUT not in settings.own_casts
        if config.accumulate > 1 and one_cast:
            settings = dataclasses.replace(settings, float8_weights=Float8Weights.HELD)
        chosen = lambda _, name: name != "output" or "+head" in recipe  # noqa: E731
        convert_to_float8_training(model, config=settings, module_filter_fn=chosen)
    except ValueError as error:
        raise ConfigError(f"recipe {recipe!r}: {error}") from error
    report = conversion_report(model)
    if not report.converted:
        reasons = {str(layer.skip_reason) for layer in report.skipped if layer.fqn != "output"}
        raise ConfigError(f"recipe {recipe!r} converted no layer: {'; '.join(sorted(reasons))}")
    return str(report)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, one fused kernel per group."""
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) is matrix], "weight_decay": x}
        for matrix, x in ((True, config.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the rate of step `step`, counted from 1: a linear rise, then a linear fall.

    The step after the last one would have the lowest rate, which may be 0.
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps + 1 - config.warmup_steps)
    return peak + (floor - peak) * progress
