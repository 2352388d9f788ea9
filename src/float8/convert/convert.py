"""Swap the linear layers of a model for `Float8Linear`."""

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from float8.arguments import require_module
from float8.config import ConfigOrRecipe, Float8LinearConfig, as_config
from float8.convert.encoder import leave_fast_path
from float8.convert.filters import DEFAULT_TOKENS, ModuleFilter, choose_filter
from float8.convert.fuse import fuse_modules
from float8.convert.replace import replace_modules
from float8.convert.report import conversion_report, set_skip_reason
from float8.convert.restore import require_changeable
from float8.linear import Float8Layer, Float8Linear, is_conv1d, move_hooks, unsupported
from float8.parallel.ddp import tell_ddp_what_to_ignore
from float8.parallel.fsdp import (
    check_gatherable,
    disable_float8_all_gather,
    enable_float8_all_gather,
)
from float8.tensor import is_dtensor, is_fsdp_module


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: ConfigOrRecipe | None = None,
    tokens_per_step: int = DEFAULT_TOKENS,
    auto_filter: bool = False,
    linear_classes: Collection[type[nn.Linear]] = (),
    fuse: bool = False,
) -> nn.Module:
    """Turn the linear layers of `module` into `Float8Linear`, in place.

    Parameters stay the same objects (but those that become `Float8Weights.ONLY`), so tied weights,
    optimizers that exist already and `requires_grad=False` keep working; forward hooks and the
    training mode stay too. Layers reached by several names stay shared. With
    `enable_fsdp_float8_all_gather`, weights become Parameters of a subclass: convert, then
    `fully_shard`, then make the optimizer. `conversion_report(module)` says what was converted and
    what was not, and a warning if nothing was. `convert_to_high_precision(module)` is the way back.

    Subclasses of `nn.Linear` without a forward of their own are converted, too: the new layer is an
    instance of both. So is the `Conv1D` of transformers (GPT2), whose weight stays [K, N].

    `nn.TransformerEncoder` is kept off its fast path, which would evaluate in high precision.

    Layers already converted take the new `config`, with state made anew: without a
    `module_filter_fn` all of them, else those for which it returns True.

    Without a `module_filter_fn`, the head (`lm_head`, or `output` of the model itself) and low-rank
    adapters stay in high precision, and so do layers that float8 would make slower: on an H100 or
    H200 those that are too small, elsewhere (as on a CPU) none. Weights on the CPU or the meta
    device are taken to be on their way to the current GPU, if there is one.

    Args:
        module: the model, or a single linear layer.
        module_filter_fn: called as `module_filter_fn(mod, fqn)` for each `nn.Linear` and `Conv1D`
            that can be converted; only those for which it returns True are, `all_linears` takes
            them all. None: those described above.
        config: a `Float8LinearConfig`, or the name of a recipe, for example `"delayed"`. None
            means dynamic tensorwise scaling.
        tokens_per_step: rows of a layer's input: tokens per forward on one device. Read only
            without a `module_filter_fn`.
        auto_filter: measure each shape on the GPU instead of judging by its size.
        linear_classes: subclasses of `nn.Linear` with a forward of their own that computes the
            same, `input @ weight.T + bias`. It is replaced.
        fuse: let SwiGLU feed-forwards whose layers were converted compute as `swiglu_feed_forward`
            does, and RMSNorms of many operations in one kernel. They are told by what their forward
            computes, and become instances of a subclass of their class; all else stays. The report
            lists them, and those left alone with the reason. False changes and undoes nothing.

    Returns:
        `module`; or, if it is itself a linear layer and passes the filter, its replacement.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a layer is sharded by `fully_shard` already; or it is to be gathered in float8,
            although its weight is a DTensor or has gradient hooks; or a layer already converted
            cannot take the new config; nothing is changed then. Or `tokens_per_step` is less than
            1, or `auto_filter` comes with a `module_filter_fn` or without a GPU.
    """
    require_module(module, "module")
    config = as_config(config)
    if not isinstance(fuse, bool):
        raise TypeError(f"fuse: got {fuse!r}, expected True or False")
    skip_reason = choose_filter(
        module_filter_fn, config, tokens_per_step, auto_filter, linear_classes
    )
    reasons: dict[Any, str | None] = {}
    again: list[Float8Layer] = []
    under_fsdp = [part for part in module.modules() if is_fsdp_module(part)]
    sharded = {layer for part in under_fsdp for layer in part.modules()}
    for fqn, linear in module.named_modules():
        if isinstance(linear, Float8Layer):
            if linear.config == config:
                continue
            if module_filter_fn is None or module_filter_fn(linear, fqn):
                _require_convertible_again(linear, fqn, config)
                again.append(linear)
        elif isinstance(linear, nn.Linear) or is_conv1d(linear):
            reasons[linear] = skip_reason(linear, fqn)
            if reasons[linear] is None:
                _require_not_sharded(linear, fqn, sharded)
                check_gatherable(linear, fqn, config)

    replacements = {
        linear: Float8Linear.from_float(linear, config, linear_classes=linear_classes)
        for linear, reason in reasons.items()
        if reason is None
    }
    # From here on the model changes, and nothing raises.
    for linear, reason in reasons.items():
        set_skip_reason(replacements.get(linear, linear), reason)
    module = replace_modules(module, replacements)
    for linear, replacement in replacements.items():
        move_hooks(linear, replacement)
    disable_float8_all_gather(again)
    for layer in again:
        layer.set_up(config)
    enable_float8_all_gather(module)
    tell_ddp_what_to_ignore(module)
    if fuse:
        fuse_modules(module)
    leave_fast_path(module)
    _warn_if_nothing_is(module, fuse)
    return module


swap_linear_with_float8_linear = convert_to_float8_training
"""The name that float8_experimental gave it."""


def _require_convertible_again(layer: Float8Layer, fqn: str, config: Float8LinearConfig) -> None:
    require_changeable(layer, fqn)
    problem = unsupported(layer, config)
    if problem is not None:
        raise ValueError(
            f"layer {fqn or '(root)'!r}: got a layer already converted, which cannot take the new "
            f"config: {problem}; leave it out with module_filter_fn"
        )
    check_gatherable(layer, fqn, config)


def _require_not_sharded(layer: nn.Module, fqn: str, sharded: set[nn.Module]) -> None:
    if layer in sharded and is_dtensor(layer.weight):
        raise ValueError(
            f"layer {fqn!r}: got a DTensor as weight, of which fully_shard has shards, expected a "
            f"plain tensor: it would gather into the layer that it knows, not its replacement; "
            f"convert the model first, then call fully_shard"
        )


def _warn_if_nothing_is(module: nn.Module, fuse: bool) -> None:
    report = conversion_report(module)
    what, reasons = "", []
    if not any(isinstance(layer, Float8Layer) for layer in module.modules()):
        what = f"no layer of {type(module).__name__} was converted"
        reasons = [layer.skip_reason for layer in report.skipped] or ["it has no linear layers"]
    elif fuse and all(each.reason is not None for each in report.fused):
        what = f"nothing of {type(module).__name__} was fused"
        reasons = [each.reason for each in report.fused] or ["it has no such modules"]
    if what:
        why = "; ".join([*dict.fromkeys(map(str, reasons))][:3])
        warnings.warn(
            f"float8: {what}: {why}. print(conversion_report(model)) shows each",
            stacklevel=3,
        )
