"""Train PyTorch models with 8-bit floating point matrix multiplies.

Most users need `convert_to_float8_training(model)` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from float8 import wings as wings
from float8.config import (
    CastConfig,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    Float8Weights,
    ScalingGranularity,
    ScalingType,
    linear_requires_sync,
)
from float8.convert.choice import all_linears
from float8.convert.convert import (
    convert_to_float8_training,
    convert_to_high_precision,
    swap_linear_with_float8_linear,
)
from float8.convert.keep import keep_high_precision
from float8.convert.report import ConversionReport, conversion_report
from float8.convert.state_dict import float8_state_dict, high_precision_state_dict
from float8.delayed.sync import forget_float8_amax, sync_float8_amax_and_scale_history
from float8.experts import grouped_linear
from float8.fsdp.weights import precompute_float8_dynamic_scale_for_fsdp
from float8.linear import Float8Linear, linear
from float8.memory.policy import activations_in_float8, save_gemm_outputs
from float8.numerics import Watch
from float8.step import attach_to_optimizer
from float8.tensor import Float8Tensor
from float8.weights.update import update_float8_weights

if TYPE_CHECKING:
    from float8.parallel.tensor import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

__version__ = "0.3.0.dev0"


def __getattr__(name: str) -> Any:
    """Return a class for tensor parallel or `_auto_filter_for_recipe`, imported at first use."""
    if name == "_auto_filter_for_recipe":
        return getattr(import_module("float8.float8_linear_utils"), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("float8.parallel.tensor"), name)


__all__ = [
    "CastConfig",
    "ConversionReport",
    "DelayedScalingConfig",
    "Float8ColwiseParallel",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8RowwiseParallel",
    "Float8Tensor",
    "Float8Weights",
    "PrepareFloat8ModuleInput",
    "ScalingGranularity",
    "ScalingType",
    "Watch",
    "activations_in_float8",
    "all_linears",
    "attach_to_optimizer",
    "conversion_report",
    "convert_to_float8_training",
    "convert_to_high_precision",
    "float8_state_dict",
    "forget_float8_amax",
    "grouped_linear",
    "high_precision_state_dict",
    "keep_high_precision",
    "linear",
    "linear_requires_sync",
    "precompute_float8_dynamic_scale_for_fsdp",
    "save_gemm_outputs",
    "swap_linear_with_float8_linear",
    "sync_float8_amax_and_scale_history",
    "update_float8_weights",
]
