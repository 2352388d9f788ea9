"""Converting a model, and the report of what was converted."""

from float8.convert.convert import (
    convert_to_float8_training,
    swap_linear_with_float8_linear,
)
from float8.convert.filters import (
    SMALLEST,
    Judge,
    ModuleFilter,
    all_linears,
    by_measuring,
    by_size,
    known_gpu,
)
from float8.convert.plan import LayerPlan, plan_conversion
from float8.convert.report import ConversionReport, LayerReport, conversion_report
from float8.convert.state_dict import high_precision_state_dict

__all__ = [
    "SMALLEST",
    "ConversionReport",
    "Judge",
    "LayerPlan",
    "LayerReport",
    "ModuleFilter",
    "all_linears",
    "by_measuring",
    "by_size",
    "conversion_report",
    "convert_to_float8_training",
    "high_precision_state_dict",
    "known_gpu",
    "plan_conversion",
    "swap_linear_with_float8_linear",
]
