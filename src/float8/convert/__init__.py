"""Converting a model, and the report of what was converted."""

from float8.convert.choice import all_linears
from float8.convert.convert import (
    convert_to_float8_training,
    convert_to_high_precision,
    swap_linear_with_float8_linear,
)
from float8.convert.keep import ModuleFilter, keep_high_precision
from float8.convert.report import ConversionReport, conversion_report
from float8.convert.state_dict import float8_state_dict, high_precision_state_dict

__all__ = [
    "ConversionReport",
    "ModuleFilter",
    "all_linears",
    "conversion_report",
    "convert_to_float8_training",
    "convert_to_high_precision",
    "float8_state_dict",
    "high_precision_state_dict",
    "keep_high_precision",
    "swap_linear_with_float8_linear",
]
