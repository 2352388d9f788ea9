"""Layers that others loaded in float8: which they are, and what this library makes of them.

transformers has `fine-grained-fp8` in its `FP8Linear`, and compressed-tensors in an `nn.Linear`
with more Parameters. They are told by a weight of float8 with a scale beside it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from float8.checkpoints.layouts import COMPRESSED, FINE_GRAINED, LAYOUTS, values_of
from float8.config import Float8LinearConfig, Float8Weights, as_config
from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.linear.source import class_with_forward, replaced_forward, shallow_copy
from float8.tensor import is_dtensor

_SCHEME = "quantization_scheme"  # which compressed-tensors leaves on modules, beside a forward


def strategy_of(mod: Any) -> tuple[str, str] | None:
    """Return format and strategy, maybe unknown ones, of a layer in float8; None: it is none."""
    weight = mod._parameters.get("weight") if isinstance(mod, nn.Linear) else None
    if weight is None or weight.dtype not in FLOAT8_MAX:
        return None
    # Their forward computes `input @ weight.T + bias`; that of a grouped one does not.
    if class_with_forward(type(mod)).__name__ not in ("Linear", "FP8Linear", "CompressedLinear"):
        return None
    if "weight_scale_inv" in mod._parameters:
        block: Any = getattr(mod, "block_size", None)
        named = {None: "tensor", (128, 128): "block"}
        return FINE_GRAINED, named.get(block and (*block,), f"{block} blocks")
    if (scale := mod._parameters.get("weight_scale")) is None:
        return None
    return COMPRESSED, "tensor" if scale.numel() == 1 else "channel"


def config_for(mod: Any, config: Float8LinearConfig | None) -> Float8LinearConfig:
    """Return the configuration of a layer that is in float8; None: that which keeps its bytes."""
    if config is not None:
        return config
    layout = LAYOUTS.get(strategy_of(mod) or ("", ""))
    recipe = as_config(layout.recipe if layout else "tensorwise")
    return replace(recipe, float8_weights=Float8Weights.ONLY)


def why_not_taken(mod: Any, config: Float8LinearConfig) -> str | None:
    """Say why a layer that is in float8 cannot become a `Float8Linear` of `config`, or None."""
    format, strategy = strategy_of(mod) or ("", "")
    layout = LAYOUTS.get((format, strategy))
    if layout is None:
        return (
            f"got a weight in float8 with scales of {strategy} ({format}), expected 128x128 blocks "
            f"or compressed-tensors by channel or tensor; load it dequantised"
        )
    if replaced_forward(mod) and (hasattr(mod, "_hf_hook") or _SCHEME not in vars(mod)):
        return (
            "got a layer with a `forward` of its own as attribute, expected one without; load the "
            "model onto one device"
        )
    if is_dtensor(mod.weight):
        return "got a weight in float8 that ranks share, expected a whole one; load it dequantised"
    pair = mod.weight, mod._parameters["weight" + layout.scale_suffix]
    try:
        layout.require_pair("weight", *((x.dtype, tuple(x.shape)) for x in pair))
    except ValueError as error:
        return f"{error}; load it dequantised"
    of = config.cast_config_weight.scaling_granularity
    if config.float8_weights is not Float8Weights.ONLY or of is layout.granularity:
        return None
    return (
        f"got float8_weights=ONLY with scales of {of} for a weight in float8 that has those of "
        f"{layout.granularity}, expected the recipe {layout.recipe!r}"
    )


@torch.inference_mode(False)  # else it could not be saved for a backward
def as_linear(mod: Any, config: Float8LinearConfig, dtype: torch.dtype) -> nn.Linear:
    """Return a copy of a layer that is in float8 as an `nn.Linear`; bias and hooks are its own.

    Its weight is a `Float8Tensor` of the same bytes under `Float8Weights.ONLY`, else the values.
    """
    layout = LAYOUTS[strategy_of(mod) or ("", "")]
    scale = mod._parameters["weight" + layout.scale_suffix]
    weight: Any = layout.weight(mod.weight, scale, dtype)
    only = config.float8_weights is Float8Weights.ONLY
    weight = weight if only else values_of(weight).to(dtype)
    new: nn.Linear = shallow_copy(mod, nn.Linear)
    new._parameters["weight"] = nn.Parameter(weight, requires_grad=not only)
    for name in ("weight_scale", "weight_scale_inv", "activation_scale", "input_scale"):
        new._parameters.pop(name, None)
    for name in (_SCHEME, "quantization_status"):
        new.__dict__.pop(name, None)
    return new


def leave_quantizers(model: nn.Module) -> None:
    """Take a model, none of whose layers is in float8 of others any more, from who loaded it.

    The hook of compressed-tensors would give all modules dicts of Parameters of another kind.
    transformers would refuse to train masters, and save them under its `quantization_config`.
    """
    left = any(_SCHEME in vars(part) for part in model.modules())
    if left or any(p.dtype in FLOAT8_MAX for p in model.parameters()):
        return
    for part in model.modules():
        if hook := part.__dict__.pop("ct_decompress_hook", None):
            hook.remove()
        quantizer = vars(part).get("hf_quantizer")
        how = getattr(quantizer, "quantization_config", None)
        if quantizer and getattr(how, "quant_method", None) in ("fp8", COMPRESSED):
            quantizer.remove_quantization_config(part)


def values_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model whose weights are in float8: that of its other Parameters."""
    others = (
        p.dtype
        for name, p in model.named_parameters()
        if p.dtype in HIGH_PRECISION_DTYPES and not name.endswith(("_scale", "_scale_inv"))
    )
    return next(others, torch.bfloat16)
