"""Swap the `nn.Linear` layers of a model for `Float8Linear`."""

from torch import nn

from float8.arguments import require_module
from float8.config import Float8LinearConfig
from float8.convert.filters import DEFAULT_TOKENS, ModuleFilter, choose_filter
from float8.convert.report import set_skip_reason
from float8.linear import Float8Linear, move_hooks
from float8.parallel.ddp import keep_amaxes_under_ddp
from float8.parallel.fsdp import check_gatherable, enable_float8_all_gather


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Float8LinearConfig | None = None,
    tokens_per_step: int = DEFAULT_TOKENS,
    auto_filter: bool = False,
) -> nn.Module:
    """Turn the linear layers of `module` into `Float8Linear`, in place.

    Parameters stay the same objects, so tied weights, optimizers that exist already and
    `requires_grad=False` keep working; forward hooks and the training mode stay too. Layers
    reached by several names stay shared. Subclasses of `nn.Linear` are left alone, as are layers
    already converted with this `config`. With `enable_fsdp_float8_all_gather`, weights become
    Parameters of a subclass: convert, then `fully_shard`, then make the optimizer.
    `conversion_report(module)` says what was converted and what was not.

    Without a `module_filter_fn`, layers that float8 would make slower stay in high precision: on an
    H100 or H200 those that are too small, elsewhere (as on a CPU) none. Weights on the CPU or the
    meta device are taken to be on their way to the current GPU, if there is one.

    Args:
        module: the model, or a single `nn.Linear`.
        module_filter_fn: called as `module_filter_fn(mod, fqn)` for each `nn.Linear`; only those
            for which it returns True are converted, `all_linears` takes them all. None: those
            that gain, or at least lose nothing, at `tokens_per_step`.
        config: None means `Float8LinearConfig()`, dynamic tensorwise scaling.
        tokens_per_step: rows of a layer's input: tokens per forward on one device. Read only
            without a `module_filter_fn`.
        auto_filter: measure each shape on the GPU instead of judging by its size.

    Returns:
        `module`; or, if it is itself an `nn.Linear` and passes the filter, its replacement.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a layer that the filter lets through was converted before, with another
            `config`, or is to be gathered in float8, although it is sharded already or its weight
            has gradient hooks; nothing is changed then. Or `tokens_per_step` is less than 1, or
            `auto_filter` comes with a `module_filter_fn` or without a GPU.
    """
    require_module(module, "module")
    config = Float8LinearConfig() if config is None else config
    if not isinstance(config, Float8LinearConfig):
        raise TypeError(
            f"config: got {type(config).__name__}, expected a Float8LinearConfig, for example "
            f"Float8LinearConfig.from_recipe_name('tensorwise')"
        )
    skip_reason = choose_filter(module_filter_fn, config, tokens_per_step, auto_filter)
    reasons: dict[nn.Linear, str | None] = {}
    for fqn, linear in module.named_modules():
        if isinstance(linear, Float8Linear):
            if linear.config == config:
                continue
            if module_filter_fn is None or module_filter_fn(linear, fqn):
                raise ValueError(
                    f"layer {fqn or '(root)'!r}: got a layer already converted with another config "
                    f"({linear.config.differences(config)}), expected one not converted or with "
                    f"the same config; leave it out with module_filter_fn, or convert the model "
                    f"afresh"
                )
        elif isinstance(linear, nn.Linear):
            reasons[linear] = skip_reason(linear, fqn)
            if reasons[linear] is None and config.enable_fsdp_float8_all_gather:
                check_gatherable(linear, fqn)

    replacements: dict[nn.Module, nn.Module] = {}
    for linear, reason in reasons.items():  # from here on nothing raises
        set_skip_reason(linear, reason)
        if reason is None:
            replacements[linear] = Float8Linear.from_float(linear, config)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    for linear, replacement in replacements.items():
        move_hooks(linear, replacement)
    module = replacements.get(module, module)
    enable_float8_all_gather(module)
    keep_amaxes_under_ddp(module)
    return module


swap_linear_with_float8_linear = convert_to_float8_training
"""The name that float8_experimental gave it."""
