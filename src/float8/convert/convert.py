"""Swap the `nn.Linear` layers of a model for `Float8Linear`."""

from collections.abc import Callable

from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.report import set_skip_reason
from float8.linear import Float8Linear, unsupported

ModuleFilter = Callable[[nn.Module, str], bool]


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Turn the linear layers of `module` into `Float8Linear`, in place.

    Parameters stay the same objects, so tied weights, optimizers that exist already and
    `requires_grad=False` keep working; forward hooks and the training mode stay too. Layers
    reached by several names stay shared. Subclasses of `nn.Linear` are left alone, as are layers
    already converted. `conversion_report(module)` says what was converted and what was not.

    Args:
        module: the model, or a single `nn.Linear`.
        module_filter_fn: called as `module_filter_fn(mod, fqn)` for each `nn.Linear`; only those
            for which it returns True are converted. None: all.
        config: None means `Float8LinearConfig()`, dynamic tensorwise scaling.

    Returns:
        `module`; or, if it is itself an `nn.Linear` and passes the filter, its replacement.

    Raises:
        TypeError: an argument has the wrong type.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {type(module).__name__}, expected an nn.Module")
    config = Float8LinearConfig() if config is None else config
    if not isinstance(config, Float8LinearConfig):
        raise TypeError(
            f"config: got {type(config).__name__}, expected a Float8LinearConfig, for example "
            f"Float8LinearConfig.from_recipe_name('tensorwise')"
        )

    replacements: dict[nn.Module, nn.Module] = {}
    for fqn, linear in module.named_modules():
        if not isinstance(linear, nn.Linear) or isinstance(linear, Float8Linear):
            continue
        reason = _reason_to_skip(linear, fqn, config, module_filter_fn)
        set_skip_reason(linear, reason)
        if reason is None:
            replacements[linear] = Float8Linear.from_float(linear, config)

    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(module, module)


def swap_linear_with_float8_linear(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """`convert_to_float8_training` by the name that float8_experimental gave it."""
    return convert_to_float8_training(module, module_filter_fn=module_filter_fn, config=config)


def _reason_to_skip(
    linear: nn.Linear,
    fqn: str,
    config: Float8LinearConfig,
    module_filter_fn: ModuleFilter | None,
) -> str | None:
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, which may not compute what nn.Linear does"
    if module_filter_fn is not None and not module_filter_fn(linear, fqn):
        return "module_filter_fn returned False"
    return unsupported(linear, config)
