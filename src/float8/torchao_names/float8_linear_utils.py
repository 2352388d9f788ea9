"""See `float8.convert_to_float8_training` and `float8.sync_float8_amax_and_scale_history`."""

from collections.abc import Callable

from torch import nn

from float8.config import linear_requires_sync
from float8.convert import (
    ModuleFilter,
    convert_to_float8_training,
    swap_linear_with_float8_linear,
)
from float8.convert.filters import (
    _auto_filter_for_recipe,
    _auto_filter_for_rowwise,
    _auto_filter_for_tensorwise,
)
from float8.convert.replace import replace_modules
from float8.linear import Float8Layer
from float8.sync import sync_float8_amax_and_scale_history

__all__ = [
    "_auto_filter_for_recipe",
    "_auto_filter_for_rowwise",
    "_auto_filter_for_tensorwise",
    "convert_to_float8_training",
    "get_float8_layers",
    "linear_requires_sync",
    "swap_linear_layers",
    "swap_linear_with_float8_linear",
    "sync_float8_amax_and_scale_history",
]


def get_float8_layers(model: nn.Module) -> list[Float8Layer]:
    """All converted layers, each once."""
    return [layer for layer in model.modules() if isinstance(layer, Float8Layer)]


def swap_linear_layers(
    module: nn.Module,
    from_float_func: Callable[[nn.Linear], nn.Module],
    *,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Replace each `nn.Linear` for which `module_filter_fn` returns True, in place.

    Returns:
        `module`; or, if it is itself such a layer, its replacement.
    """
    new: dict[nn.Module, nn.Module] = {
        mod: from_float_func(mod)
        for fqn, mod in module.named_modules()
        if isinstance(mod, nn.Linear) and (module_filter_fn is None or module_filter_fn(mod, fqn))
    }
    return replace_modules(module, new)
