"""Convert the linear layers of a model to `Float8Linear`, and back."""

import warnings
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from float8.arguments import require_module
from float8.checkpoints.modules import (
    as_linear,
    config_for,
    leave_quantizers,
    strategy_of,
    values_dtype,
    why_not_taken,
)
from float8.config import ConfigOrRecipe, Float8LinearConfig, as_config
from float8.convert.encoder import leave_fast_path
from float8.convert.experts import experts_left_by, is_router, why_not_experts
from float8.convert.filters import (
    CHOSEN_FOR,
    DEFAULT_TOKENS,
    LEFT_ALONE,
    ModuleFilter,
    choose_filter,
    chosen_for,
    keep_reasons,
    left_by,
    short_name,
)
from float8.convert.report import conversion_report
from float8.experts import (
    Float8Experts,
    convert_experts,
    kind_of,
    names_to_gather,
    unsupported_experts,
)
from float8.linear import Float8Layer, Float8Linear, unsupported
from float8.linear.source import become, replaced_forward
from float8.parallel.ddp import tell_ddp_what_to_ignore
from float8.parallel.fsdp import disable_float8_all_gather, enable_float8_all_gather
from float8.tensor import (
    Float8GatherWeight,
    Float8Tensor,
    is_dtensor,
    is_fsdp_module,
    local_tensor,
)


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: ConfigOrRecipe | None = None,
    tokens_per_step: int = DEFAULT_TOKENS,
    gpu: str | None = None,
    auto_filter: bool = False,
    cuda_graphs: bool = False,
    linear_classes: Collection[type[nn.Linear]] = (),
) -> nn.Module:
    """Turn the linear layers of `module` into `Float8Linear`, in place.

    Layers stay the same objects and get another class; Parameters do, too (but those that become
    `Float8Weights.ONLY`). So tied weights, optimizers that exist already, hooks, wrappers and
    `requires_grad=False` keep working. With `enable_fsdp_float8_all_gather`, weights become
    Parameters of a subclass: convert, then `fully_shard`, then make the optimizer.
    `conversion_report(module)` says what was converted and what was not, and a warning if nothing
    was. `convert_to_high_precision(module)` is the way back.

    Subclasses of `nn.Linear` without a forward of their own are converted, too: the layer is an
    instance of both then. The `Conv1D` of transformers (GPT2) is none, and stays.

    Experts of transformers 5 and of torchtitan become `Float8Experts`, in place, too; a
    `module_filter_fn` is called with the module that holds their weights. Their three GEMMs for all
    experts run as `grouped_linear` does. Without a filter they stay where, on paper, casts cost
    more than GEMMs gain; linear layers with as many outputs as there are experts, called a router
    or a gate, stay, too.

    Layers whose weights others have loaded in float8 (transformers' `FP8Linear`; compressed-tensors
    by channel or tensor) keep their bytes with `Float8Weights.ONLY`, which is what they get without
    a `config`. With another one they get Parameters in high precision, which train.

    `nn.TransformerEncoder` is kept off its fast path, which would evaluate in high precision.

    Layers already converted take the new `config`, with state made anew: without a
    `module_filter_fn` all of them, else those for which it returns True.

    Without a `module_filter_fn`, the head (`lm_head`, or `output` of the model itself), low-rank
    adapters and layers with fewer than 16 features out, such as routers, stay in high precision,
    and so do layers that float8 would make slower: on an H100 or H200 those that are too small for
    the GPU, or for the CPU that starts their kernels; on another GPU, of which nothing is known,
    those with fewer than 256 features in or out; without a GPU none. Weights on the CPU or the meta
    device are taken to be on their way to the current GPU, if there is one, or to the one that
    `gpu` names. The report says which GPU was meant.

    Args:
        module: the model, or a single linear layer.
        module_filter_fn: called as `module_filter_fn(mod, fqn)` for each `nn.Linear` and
            module of experts that can be converted; only those for which it returns True are,
            `all_linears` takes them all. Experts have no `in_features`: a filter that asks for it
            leaves them, as the report says. None: those described above.
        config: a `Float8LinearConfig`, or the name of a recipe, for example `"delayed"`. None
            means dynamic tensorwise scaling.
        tokens_per_step: rows of a layer's input: tokens per forward on one device. Read only
            without a `module_filter_fn`.
        gpu: `"H100"` or `"H200"`, or the name of one as torch gives it: convert what gains on that
            GPU, wherever the weights are now. None: what gains on the GPU here.
        auto_filter: measure the GPU time of each shape instead of judging by its size. A layer of
            less than 0.25 ms in bf16 stays, unless `cuda_graphs` is True.
        cuda_graphs: the model will run as CUDA graphs, which start all kernels at once
            (`torch.compile(model, mode="reduce-overhead")`): then GPU time alone decides, as it
            does for experts anyway.
        linear_classes: subclasses of `nn.Linear` with a forward of their own that computes the
            same, `input @ weight.T + bias`. It is replaced.

    Returns:
        `module`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a layer is to be gathered in float8, although its weight is a DTensor (convert,
            then `fully_shard`) or has gradient hooks; or a layer already converted cannot take the
            new config. Or `tokens_per_step` is less than 1, `gpu` is not known, or `auto_filter`
            comes without a GPU; or two of `gpu`, `auto_filter` and `module_filter_fn` come
            together, or the last with `cuda_graphs`. Nothing is changed then.
    """
    require_module(module, "module")
    given, config = None if config is None else as_config(config), as_config(config)
    gpu = short_name(gpu)
    skip_reason = choose_filter(
        module_filter_fn, config, tokens_per_step, auto_filter, linear_classes, gpu, cuda_graphs
    )
    known = {part for part in module.modules() if kind_of(part) is not None}
    changes = _Changes({}, {}, [], [], {})
    reasons = changes.reasons
    for fqn, part in module.named_modules():
        if isinstance(part, Float8Layer | Float8Experts):
            if part._float8_config != config and _takes(module_filter_fn, part, fqn):
                _require_changeable(part, fqn, config)
                changes.again.append(part)
        elif part in known:
            reason = why_not_experts(
                part, fqn, module, config, module_filter_fn, tokens_per_step, gpu
            )
            reasons[part] = reason
            if reason is None:
                _require_changeable(part, fqn, config)
                changes.experts.append(part)
        elif strategy_of(part) is not None:
            own = config_for(part, given)
            reasons[part] = why_not_taken(part, own)
            if module_filter_fn is not None and (left := left_by(module_filter_fn, part, fqn)):
                reasons[part] = left
            if reasons[part] is None:
                changes.loaded[part] = own
        elif isinstance(part, nn.Linear):
            reasons[part] = skip_reason(part, fqn)
            if module_filter_fn is None and is_router(part, fqn, known):
                reasons[part] = "a router: converted only if a module_filter_fn takes it"
            if reasons[part] is None:
                _require_changeable(part, fqn, config)
                changes.linears[part] = Float8Linear._float8_made_of(part, config, True)
    keep_reasons(reasons)
    # From here on the model changes, and nothing raises but for want of memory.
    changes.make(config, values_dtype(module))
    leave_quantizers(module)
    enable_float8_all_gather(module)
    tell_ddp_what_to_ignore(module)
    for part, reason in reasons.items():
        part.__dict__.pop(LEFT_ALONE, None)
        if reason is not None:
            part.__dict__[LEFT_ALONE] = reason
    if reasons:
        _forget_chosen_for(module)
        if module_filter_fn is None:
            device = next(next(iter(reasons)).parameters()).device
            chosen = chosen_for(device, config, tokens_per_step, auto_filter, gpu, cuda_graphs)
            module.__dict__[CHOSEN_FOR] = chosen
    leave_fast_path(module)
    _warn_if_nothing_is_converted(module)
    return module


swap_linear_with_float8_linear = convert_to_float8_training
"""The name that float8_experimental gave it."""


class _Changes(NamedTuple):
    """The changes that a conversion is going to make, found before it makes any."""

    linears: dict[nn.Module, Float8Layer]
    """Linear layers, and what each becomes, with the weight that it has now."""

    loaded: dict[nn.Module, Float8LinearConfig]
    """Layers whose weights others loaded in float8."""

    experts: list[nn.Module]

    again: list[Float8Layer | Float8Experts]
    """Those that were converted before, with another config."""

    reasons: dict[nn.Module, str | None]
    """Of all others that were looked at: why each stays; None: it does not."""

    def make(self, config: Float8LinearConfig, dtype: torch.dtype) -> None:
        """Give each its class and its config; `dtype`: of values that were loaded in float8."""
        # One by one: the weight that was there is freed before another one is made.
        for linear, new in self.linears.items():
            if new._float8_keeps_no_master:
                new._float8_drop_master()
            become(linear, new)
        for part, own in self.loaded.items():
            become(part, Float8Linear._float8_made_of(as_linear(part, own, dtype), own))
        disable_float8_all_gather(self.again)
        for layer in self.again:
            layer._float8_set_up(config)
        for part in self.experts:
            convert_experts(part, config)


def _takes(module_filter_fn: ModuleFilter | None, part: nn.Module, fqn: str) -> bool:
    """Whether a filter takes a module that was converted before."""
    if module_filter_fn is None:
        return True
    if isinstance(part, Float8Experts):
        return experts_left_by(module_filter_fn, part, fqn) is None
    return left_by(module_filter_fn, part, fqn) is None


def _forget_chosen_for(module: nn.Module) -> None:
    for part in module.modules():
        part.__dict__.pop(CHOSEN_FOR, None)


def _warn_if_nothing_is_converted(module: nn.Module) -> None:
    if any(isinstance(part, Float8Layer | Float8Experts) for part in module.modules()):
        return
    report = conversion_report(module)
    every = *report.skipped, *report.experts
    reasons = [layer.skip_reason for layer in every] or ["it has no nn.Linear"]
    why = "; ".join([*dict.fromkeys(map(str, reasons))][:3])
    warnings.warn(
        f"float8: no layer of {type(module).__name__} was converted: {why}. "
        f"print(conversion_report(model)) shows each",
        stacklevel=3,
    )


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Turn each `Float8Linear` of `module` back into what it was made of, in place.

    An `nn.Linear` or a subclass of it; experts become what they were, too. Layers stay
    the same objects, as do their Parameters, hooks, training mode and attributes, so optimizers and
    wrappers of the model keep working. A weight that was in float8 only becomes a new Parameter,
    which stays frozen. The state of delayed scaling is dropped. Does nothing for a model in high
    precision.

    Args:
        module: the model, or a single `Float8Linear`.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is no `nn.Module`.
        ValueError: a layer has a weight that FSDP2 gathers in float8, or is itself sharded, or
            parametrized; or one has a `forward` of its own as attribute. Nothing is changed then.
    """
    require_module(module, "module")
    layers = []
    for fqn, part in module.named_modules():
        if isinstance(part, Float8Layer | Float8Experts):
            layers.append(part)
            _require_changeable(part, fqn)
    disable_float8_all_gather(layers)
    _forget_chosen_for(module)
    for part in module.modules():
        part.__dict__.pop(LEFT_ALONE, None)
        if isinstance(part, Float8Layer | Float8Experts):
            part._float8_become_high_precision()
    leave_fast_path(module)
    tell_ddp_what_to_ignore(module)
    return module


def _require_changeable(
    part: nn.Module, fqn: str, config: Float8LinearConfig | None = None
) -> None:
    """Raise a `ValueError` if somebody relies on what `part` is, or it cannot take `config`."""
    gathers = config is not None and config.enable_fsdp_float8_all_gather
    to_gather = _weights_to_gather(part) if gathers else []
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if replaced_forward(part):
        got = "a layer with a `forward` of its own as attribute, which holds that of float8"
        do = "remove it first: accelerate's, by accelerate.hooks.remove_hook_from_submodules(model)"
        do += ", or transformers' own, by forwards_taken_off(model) of this library"
    elif is_fsdp_module(part):
        got = "a layer that fully_shard was applied to"
        do = "apply it to the block around it"
    elif is_parametrized(part):
        got, do = "a layer that is parametrized", "remove the parametrization first"
    elif isinstance(part, Float8Layer | Float8Experts) and _fsdp_has_weights(part):
        got = "a weight that FSDP2 gathers in float8"
        do = "make the change before fully_shard, or load a state dict of it into a new model"
    elif config and (problem := _why_not_again(part, config)):
        got = f"a layer already converted, which cannot take the new config: {problem}"
        do = "leave it out with module_filter_fn"
    elif any(map(is_dtensor, to_gather)):
        got = "a DTensor as weight, which enable_fsdp_float8_all_gather cannot prepare"
        do = "convert the model first, then call fully_shard"
    elif any(getattr(weight, name, None) for weight in to_gather for name in hooks):
        got = "a weight with gradient hooks, which enable_fsdp_float8_all_gather would lose"
        do = "register them on the weight after the conversion"
    else:
        return
    raise ValueError(f"layer {fqn or '(root)'!r}: got {got}, expected one to change; {do}")


def _why_not_again(part: nn.Module, config: Float8LinearConfig) -> Any:
    """Say why what was converted already cannot take this configuration, or return None."""
    if isinstance(part, Float8Experts):
        return unsupported_experts(part, config)
    return unsupported(part, config) if isinstance(part, Float8Layer) else None


def _weights_to_gather(part: nn.Module) -> list[Any]:
    """Return the Parameters that FSDP2 may gather in float8, if a configuration says so."""
    if kind_of(part) is not None:
        return [part._parameters[name] for name in names_to_gather(part)]
    return [part._parameters.get("weight")] if isinstance(part, nn.Linear) else []


def _fsdp_has_weights(part: Float8Layer | Float8Experts) -> bool:
    """Whether FSDP2 gathers a weight in float8: it has shards, or they are gathered now."""
    for weight in _weights_to_gather(part):
        local = local_tensor(weight)
        if isinstance(local, Float8GatherWeight) and local is not weight:
            return True
        if isinstance(local, Float8Tensor) and not getattr(part, "_float8_keeps_no_master", False):
            return True
    return False
