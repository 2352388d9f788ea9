"""Convert linear layers and experts of a model to float8, and back."""

import functools
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from float8.checkpoints import schemes
from float8.config import ConfigOrRecipe, Float8LinearConfig, require_module
from float8.convert.choice import CHOICE, CONVERTED, DEFAULT_TOKENS, Choice, Chooser
from float8.convert.keep import Keep, ModuleFilter
from float8.experts import Float8Experts, convert_experts, names_to_gather, unsupported_experts
from float8.fsdp.gather import Float8GatherWeight
from float8.fsdp.weights import disable_float8_all_gather, enable_float8_all_gather
from float8.kernels.runtime.private import warn
from float8.linear import Float8Linear, unsupported
from float8.linear.source import become, replaced_forward
from float8.parallel.ddp import tell_ddp_what_to_ignore
from float8.tensor import Float8Tensor, is_dtensor, is_fsdp_module, local_tensor


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | Keep | None = None,
    config: ConfigOrRecipe | None = None,
    tokens_per_step: int = DEFAULT_TOKENS,
    gpu: str | None = None,
    cuda_graphs: bool = False,
    linear_classes: Collection[type[nn.Linear]] = (),
    head: bool = False,
) -> nn.Module:
    """Convert the linear layers of `module` to `Float8Linear`, in place, and return `module`.

    Layers and their Parameters stay the same objects, except weights that `Float8Weights.ONLY`
    replaces; layers get another class. So ties, optimizers, hooks, wrappers and
    `requires_grad=False` keep working. With `enable_fsdp_float8_all_gather`, weights become
    Parameters of a subclass: convert, then `fully_shard`, then make the optimizer.
    `conversion_report(module)` lists which layers were converted, and why others were not; a
    warning says if none was. `convert_to_high_precision(module)` is the way back.

    Subclasses of `nn.Linear` that inherit its forward are converted, too, to instances of both
    classes. GPT2's `Conv1D` is no `nn.Linear` and stays. Experts of transformers 5 and of
    torchtitan become `Float8Experts`: the three GEMMs of all experts run as in `grouped_linear`.

    Layers that another library loaded in float8 (transformers' `FP8Linear`; compressed-tensors by
    channel, tensor or as MXFP8) keep their bytes under `Float8Weights.ONLY`, the default for them.
    Any other config dequantizes them to Parameters that train. A layer already converted gets the
    new `config`, and new state of delayed scaling. `nn.TransformerEncoder` is kept off its fast
    path, which would evaluate in high precision.

    Without a `module_filter_fn`, the head (`lm_head`, or `output` of the model itself), low-rank
    adapters, routers, and layers with fewer than 16 features out stay in high precision. So do
    layers and experts that float8 would make slower on the GPU of the weights, or on the current
    GPU if they are on CPU or meta. Without a GPU, speed does not count. The report names the GPU.

    Args:
        module: the model, or a single linear layer.
        module_filter_fn: called as `module_filter_fn(mod, fqn)` for each `nn.Linear` and module of
            experts that can be converted, or was. Return True to convert it; `all_linears` takes
            all. Experts have no `in_features`: a filter that reads it leaves them out, as the
            report says. None: the rules above. `keep_high_precision(...)`: except some blocks.
        config: a `Float8LinearConfig`, or the name of a recipe, for example `"delayed"`. None
            means dynamic tensorwise scaling.
        tokens_per_step: rows of a layer's input: tokens per forward on one device. Used only
            without a `module_filter_fn`.
        gpu: `"H100"` or `"H200"`, or the name of one as torch gives it: convert layers that gain on
            that GPU, wherever the weights are now. None: those that gain on the GPU here.
        cuda_graphs: set True if you run CUDA graphs (`mode="reduce-overhead"`): launch cost is then
            ignored when layers are chosen, as it always is for experts.
        linear_classes: subclasses of `nn.Linear` with a forward of their own that computes the
            same, `input @ weight.T + bias`. Their forward is replaced.
        head: convert the head, too, if it gains. The loss depends on its logits directly.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a recipe or `gpu` is unknown; `tokens_per_step` is less than 1; `gpu`,
            `cuda_graphs` or `head` comes with a `module_filter_fn`; the GPU has no GEMM for
            `mxfp8`; a weight to be gathered in float8 is a DTensor (convert, then `fully_shard`) or
            has gradient hooks; or a converted layer cannot take `config`. Nothing is changed then.
    """
    require_module(module, "module")
    arguments = config, module_filter_fn, tokens_per_step, gpu, cuda_graphs, linear_classes, head
    return convert_chosen(Chooser(module, *arguments))


def convert_chosen(chooser: Chooser) -> nn.Module:
    """Convert the layers of `chooser.model` that `chooser` chooses, and return the model."""
    module = chooser.model
    choices: dict[nn.Module, Choice] = {}
    changes: dict[nn.Module, Callable[[], None]] = {}
    for fqn, mod in module.named_modules():
        if (choice := chooser.choose(mod, fqn)) is not None:
            choices[mod] = choice
            if choice.reason is None:
                changes[mod] = _prepare(mod, fqn, chooser)
    # From here on the model changes, and nothing raises unless memory runs out.
    if converted := [mod for mod in changes if isinstance(mod, CONVERTED)]:
        disable_float8_all_gather(converted)
    for change in changes.values():
        change()
    if chooser.config.enable_fsdp_float8_all_gather:
        enable_float8_all_gather(module)
    schemes.leave_quantizers(module)
    tell_ddp_what_to_ignore(module)
    _switch_fast_path(module)
    for mod, choice in choices.items():
        before = Choice(*mod.__dict__.get(CHOICE, ()))
        if choice.by_filter and before.reason and not before.by_filter:
            choice = choice._replace(reason=before.reason)  # it says more
        mod.__dict__[CHOICE] = tuple(choice)
    if not any(isinstance(mod, CONVERTED) for mod in choices):
        reasons = [*dict.fromkeys(str(choice.reason) for choice in choices.values())][:3]
        why = f"was converted: {'; '.join(reasons) or 'it has no nn.Linear'}"
        do = "print(conversion_report(model)) shows each"
        warn(f"float8: no layer of {type(module).__name__} {why}. {do}")
    return module


swap_linear_with_float8_linear = convert_to_float8_training
"""The name of `convert_to_float8_training` in float8_experimental."""


def _prepare(mod: Any, fqn: str, chooser: Chooser) -> Callable[[], None]:
    """Return a function that converts `mod`, or raise a `ValueError` if a check fails."""
    config, is_converted = chooser.config, isinstance(mod, CONVERTED)
    if is_converted:
        _require_changeable(mod, fqn, config)
    if config.enable_fsdp_float8_all_gather:
        _require_gatherable(mod, fqn)
    if is_converted:
        return functools.partial(mod._float8_set_up, config)
    if mod in chooser.experts:
        return functools.partial(convert_experts, mod, config)
    if schemes.strategy_of(mod) is not None:  # loaded in float8 by another library
        config = schemes.config_for(mod, chooser.config_or_none)
        dtype, as_linear = schemes.values_dtype(chooser.model), schemes.as_linear
        make = Float8Linear._float8_made_of
        return lambda: become(mod, make(as_linear(mod, config, dtype), config))
    new = Float8Linear._float8_made_of(mod, config, True)

    def convert() -> None:
        if new._float8_keeps_no_master:  # one layer at a time: each frees its master here
            new._float8_drop_master()
        become(mod, new)

    return convert


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Give converted layers and experts of `module` their former classes, and return `module`.

    Layers stay the same objects, as do their Parameters, hooks, training mode and attributes, so
    optimizers and wrappers of the model keep working. A weight that was in float8 only becomes a
    new Parameter, which stays frozen. The state of delayed scaling is dropped. A no-op for a model
    in high precision. `module` is the model, or a single `Float8Linear`.

    Raises:
        TypeError: `module` is no `nn.Module`.
        ValueError: a layer has a weight that FSDP2 gathers in float8, is itself sharded or
            parametrized, or has a `forward` as attribute of the instance. Nothing is changed then.
    """
    require_module(module, "module")
    layers = []
    for fqn, mod in module.named_modules():
        if isinstance(mod, CONVERTED):
            layers.append(mod)
            _require_changeable(mod, fqn)
    disable_float8_all_gather(layers)
    for mod in module.modules():
        mod.__dict__.pop(CHOICE, None)
        if isinstance(mod, CONVERTED):
            mod._float8_become_high_precision()
    _switch_fast_path(module)
    tell_ddp_what_to_ignore(module)
    return module


def _require_changeable(
    mod: Float8Linear | Float8Experts, fqn: str, config: Float8LinearConfig | None = None
) -> None:
    """Raise a `ValueError` if the class of `mod` cannot be changed, or not to take `config`."""
    problem_with: Any = unsupported if isinstance(mod, Float8Linear) else unsupported_experts
    if replaced_forward(mod):
        got = "a layer with a `forward` of its own as attribute, which calls that of float8"
        do = "remove it first: accelerate's, by accelerate.hooks.remove_hook_from_submodules(model)"
        do += ", or transformers' own, by forwards_taken_off(model) of this library"
    elif is_fsdp_module(mod):
        got = "a layer that fully_shard was applied to"
        do = "apply it to the block around it"
    elif is_parametrized(mod):
        got, do = "a layer that is parametrized", "remove the parametrization first"
    elif _is_gathered_in_float8(mod):
        got = "a weight that FSDP2 gathers in float8"
        do = "make the change before fully_shard, or load a state dict of it into a new model"
    elif config is not None and (problem := problem_with(mod, config)):
        got = f"a layer already converted, which cannot take the new config: {problem}"
        do = "leave it out with module_filter_fn"
    else:
        return
    raise _refusal(fqn, got, do)


def _require_gatherable(mod: nn.Module, fqn: str) -> None:
    """Raise a `ValueError` if FSDP2 could not gather the weights of `mod` in float8."""
    hooks = "_backward_hooks", "_post_accumulate_grad_hooks"
    for weight in map(mod._parameters.get, names_to_gather(mod)):
        if is_dtensor(weight):
            got = "a DTensor as weight, which enable_fsdp_float8_all_gather cannot prepare"
            raise _refusal(fqn, got, "convert the model first, then call fully_shard")
        if any(getattr(weight, name, None) for name in hooks):
            got = "a weight with gradient hooks, which enable_fsdp_float8_all_gather would lose"
            raise _refusal(fqn, got, "register them on the weight after the conversion")


def _refusal(fqn: str, got: str, do: str) -> ValueError:
    """Return an error about the layer called `fqn`: what was got, and what to do."""
    return ValueError(f"layer {fqn or '(root)'!r}: got {got}, expected one that can change; {do}")


def _is_gathered_in_float8(mod: Float8Linear | Float8Experts) -> bool:
    """Return True if FSDP2 has sharded a weight of `mod` for a float8 gather, or gathered it."""
    for name in names_to_gather(mod):
        weight: Any = mod._parameters.get(name)
        local = local_tensor(weight)
        if isinstance(local, Float8GatherWeight) and local is not weight:
            return True
        if isinstance(local, Float8Tensor) and not mod._float8_keeps_no_master:
            return True
    return False


# ---------------------------------------------------------------- nn.TransformerEncoder

_BEFORE = "_float8_before"
"""The attribute of an encoder with the former value of its switch."""

_SWITCHES: tuple[tuple[type[nn.Module], str, Any], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
"""Attributes, and their values, with which an encoder does not take its fast path. In evaluation
that path reads the weights of linear layers and computes in high precision, unlike training."""


def _switch_fast_path(module: nn.Module) -> None:
    """Turn the fast path of encoders off if they have converted layers, else on again."""
    for mod in module.modules():
        for cls, name, off in _SWITCHES:
            if not isinstance(mod, cls):
                continue
            if any(isinstance(layer, Float8Linear) for layer in mod.modules()):
                mod.__dict__.setdefault(_BEFORE, getattr(mod, name))
                setattr(mod, name, off)
            elif _BEFORE in mod.__dict__:
                setattr(mod, name, mod.__dict__.pop(_BEFORE))
