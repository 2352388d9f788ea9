"""Convert the linear layers of a model to `Float8Linear`, and back."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from float8.arguments import require_module
from float8.config import ConfigOrRecipe, Float8LinearConfig, as_config
from float8.convert.encoder import leave_fast_path
from float8.convert.filters import (
    CHOSEN_FOR,
    DEFAULT_TOKENS,
    LEFT_ALONE,
    ModuleFilter,
    choose_filter,
    chosen_for,
)
from float8.convert.fuse import Fused, as_named, fuse_modules, unfuse
from float8.convert.recognise import SwiGLU
from float8.convert.report import conversion_report
from float8.linear import Float8Layer, Float8Linear, is_conv1d, unsupported
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
    linear_classes: Collection[type[nn.Linear]] = (),
    fuse: bool | Mapping[type[nn.Module], SwiGLU] = False,
) -> nn.Module:
    """Turn the linear layers of `module` into `Float8Linear`, in place.

    Layers stay the same objects and get another class; Parameters do, too (but those that become
    `Float8Weights.ONLY`). So tied weights, optimizers that exist already, hooks, wrappers and
    `requires_grad=False` keep working. With `enable_fsdp_float8_all_gather`, weights become
    Parameters of a subclass: convert, then `fully_shard`, then make the optimizer.
    `conversion_report(module)` says what was converted and what was not, and a warning if nothing
    was. `convert_to_high_precision(module)` is the way back.

    Subclasses of `nn.Linear` without a forward of their own are converted, too: the layer is an
    instance of both then. So is the `Conv1D` of transformers (GPT2), whose weight stays [K, N].

    `nn.TransformerEncoder` is kept off its fast path, which would evaluate in high precision.

    Layers already converted take the new `config`, with state made anew: without a
    `module_filter_fn` all of them, else those for which it returns True.

    Without a `module_filter_fn`, the head (`lm_head`, or `output` of the model itself), low-rank
    adapters and layers with fewer than 16 features out, such as routers, stay in high precision,
    and so do layers that float8 would make slower: on an H100 or H200 those that are too small; on
    another GPU, of which nothing is known, those with fewer than 256 features in or out; without a
    GPU none. Weights on the CPU or the meta device are taken to be on their way to the current GPU,
    if there is one, or to the one that `gpu` names. The report says which GPU was meant.

    Args:
        module: the model, or a single linear layer.
        module_filter_fn: called as `module_filter_fn(mod, fqn)` for each `nn.Linear` and `Conv1D`
            that can be converted; only those for which it returns True are, `all_linears` takes
            them all. None: those described above.
        config: a `Float8LinearConfig`, or the name of a recipe, for example `"delayed"`. None
            means dynamic tensorwise scaling.
        tokens_per_step: rows of a layer's input: tokens per forward on one device. Read only
            without a `module_filter_fn`.
        gpu: `"H100"` or `"H200"`: convert what gains on that GPU, wherever the weights are now.
            None: what gains on the GPU here.
        auto_filter: measure each shape on the GPU instead of judging by its size.
        linear_classes: subclasses of `nn.Linear` with a forward of their own that computes the
            same, `input @ weight.T + bias`. It is replaced.
        fuse: let SwiGLU feed-forwards whose layers were converted compute as `swiglu_feed_forward`
            does, and RMSNorms of many operations in one kernel. They are told by what their forward
            computes, and become instances of a subclass of their class; all else stays. A dict
            such as `{LlamaMLP: SwiGLU("gate_proj", "up_proj", "down_proj")}` does the same and adds
            classes whose forward computes that of one tensor, by what you say: nothing checks it.
            The report lists them, and those left alone with the reason. False changes and undoes
            nothing.

    Returns:
        `module`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a layer is to be gathered in float8, although its weight is a DTensor (convert,
            then `fully_shard`) or has gradient hooks; or a layer already converted cannot take the
            new config; or a class in `fuse` has no such submodule. Or `tokens_per_step` is less
            than 1, `gpu` is not known, or `auto_filter` comes without a GPU; or two of `gpu`,
            `auto_filter` and `module_filter_fn` come together. Nothing is changed then.
    """
    require_module(module, "module")
    config = as_config(config)
    gpu = gpu.upper() if isinstance(gpu, str) else gpu
    named = None if fuse is False else as_named(fuse, module)
    skip_reason = choose_filter(
        module_filter_fn, config, tokens_per_step, auto_filter, linear_classes, gpu
    )
    reasons: dict[nn.Module, str | None] = {}
    again: list[Float8Layer] = []
    for fqn, linear in module.named_modules():
        if isinstance(linear, Float8Layer):
            if linear.config == config:
                continue
            if not (module_filter_fn is None or module_filter_fn(linear, fqn)):
                continue
            again.append(linear)
        elif isinstance(linear, nn.Linear) or is_conv1d(linear):
            reasons[linear] = skip_reason(linear, fqn)
            if reasons[linear] is not None:
                continue
        else:
            continue
        _require_changeable(linear, fqn, config)
    made = {mod: Float8Linear.made_of(mod, config) for mod, why in reasons.items() if why is None}
    # From here on the model changes, and nothing raises.
    for linear, new in made.items():
        become(linear, new)
    disable_float8_all_gather(again)
    for layer in again:
        layer.set_up(config)
    enable_float8_all_gather(module)
    tell_ddp_what_to_ignore(module)
    if named is not None:
        fuse_modules(module, named)
    for linear, reason in reasons.items():  # after `fuse_modules`, which forgets such notes
        linear.__dict__.pop(LEFT_ALONE, None)
        if reason is not None:
            linear.__dict__[LEFT_ALONE] = reason
    if reasons:
        _forget_chosen_for(module)
        if module_filter_fn is None:
            first: Any = next(iter(reasons))
            chosen = chosen_for(first.weight.device, config, tokens_per_step, auto_filter, gpu)
            module.__dict__[CHOSEN_FOR] = chosen
    leave_fast_path(module)
    if named is not None or not any(isinstance(x, Float8Layer) for x in module.modules()):
        _warn_if_nothing_is(module)
    return module


swap_linear_with_float8_linear = convert_to_float8_training
"""The name that float8_experimental gave it."""


def _forget_chosen_for(module: nn.Module) -> None:
    for part in module.modules():
        part.__dict__.pop(CHOSEN_FOR, None)


def _warn_if_nothing_is(module: nn.Module) -> None:
    """Warn if nothing was converted, else if nothing was fused."""
    report, name = conversion_report(module), type(module).__name__
    if not any(isinstance(layer, Float8Layer) for layer in module.modules()):
        what = f"no layer of {name} was converted"
        reasons = [layer.skip_reason for layer in report.skipped] or ["it has no linear layers"]
    else:
        what = f"nothing of {name} was fused"
        reasons = [each.reason for each in report.fused] or ["it has no such modules"]
        if None in reasons:
            return
    why = "; ".join([*dict.fromkeys(map(str, reasons))][:3])
    warnings.warn(
        f"float8: {what}: {why}. print(conversion_report(model)) shows each", stacklevel=3
    )


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Turn each `Float8Linear` of `module` back into what it was made of, in place.

    An `nn.Linear`, a subclass of it, or a `Conv1D`. Layers stay the same objects, as do their
    Parameters, hooks, training mode and attributes, so optimizers and wrappers of the model keep
    working. A weight that was in float8 only becomes a new Parameter, which stays frozen. Fused
    modules get their own forward back. The state of delayed scaling is dropped. Does nothing for a
    model in high precision.

    Args:
        module: the model, or a single `Float8Linear`.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is no `nn.Module`.
        ValueError: a layer has a weight that FSDP2 gathers in float8, or is itself sharded, or
            parametrized; or one, or a fused module, has a `forward` of its own as attribute.
            Nothing is changed then.
    """
    require_module(module, "module")
    layers = []
    for fqn, part in module.named_modules():
        if isinstance(part, Float8Layer):
            layers.append(part)
        if isinstance(part, Float8Layer | Fused):
            _require_changeable(part, fqn)
    disable_float8_all_gather(layers)
    _forget_chosen_for(module)
    for part in module.modules():
        unfuse(part)
    for layer in layers:
        layer.become_high_precision()
    leave_fast_path(module)
    tell_ddp_what_to_ignore(module)
    return module


def _require_changeable(
    part: nn.Module, fqn: str, config: Float8LinearConfig | None = None
) -> None:
    """Raise a `ValueError` if somebody relies on what `part` is, or it cannot take `config`."""
    gathers = config is not None and config.enable_fsdp_float8_all_gather
    weight: Any = part.weight if gathers and isinstance(part, nn.Linear) else None
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if replaced_forward(part):
        got = "a layer with a `forward` of its own as attribute, which holds that of float8"
        do = "remove it first: accelerate's, by accelerate.hooks.remove_hook_from_submodules(model)"
        do += ", or transformers' tensor parallel's, by forwards_taken_off(model) of this library"
    elif isinstance(part, Fused):
        return
    elif is_fsdp_module(part):
        got = "a layer that fully_shard was applied to"
        do = "apply it to the block around it"
    elif is_parametrized(part):
        got, do = "a layer that is parametrized", "remove the parametrization first"
    elif isinstance(part, Float8Layer) and _fsdp_has_weight(part):
        got = "a weight that FSDP2 gathers in float8"
        do = "make the change before fully_shard, or load a state dict of it into a new model"
    elif isinstance(part, Float8Layer) and config and (problem := unsupported(part, config)):
        got = f"a layer already converted, which cannot take the new config: {problem}"
        do = "leave it out with module_filter_fn"
    elif is_dtensor(weight):
        got = "a DTensor as weight, which enable_fsdp_float8_all_gather cannot prepare"
        do = "convert the model first, then call fully_shard"
    elif any(getattr(weight, name, None) for name in hooks):
        got = "a weight with gradient hooks, which enable_fsdp_float8_all_gather would lose"
        do = "register them on the weight after the conversion"
    else:
        return
    raise ValueError(f"layer {fqn or '(root)'!r}: got {got}, expected one to change; {do}")


def _fsdp_has_weight(layer: Float8Layer) -> bool:
    """Whether the weight is one that FSDP2 gathers in float8: a shard, or gathered now."""
    weight: Any = layer.weight
    local = local_tensor(weight)
    shard = isinstance(local, Float8GatherWeight) and local is not weight
    return shard or (isinstance(local, Float8Tensor) and not layer.keeps_no_master)
