"""Convert linear layers and experts of a model to float8, and back."""

import functools
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from float8.config import ConfigOrRecipe, Float8LinearConfig, require_module
from float8.convert.choice import CHOICE, DEFAULT_TOKENS, Choice, Chooser
from float8.convert.conversion import FEATURES
from float8.convert.keep import Keep, ModuleFilter
from float8.kernels.runtime.private import warn
from float8.linear import Float8Module
from float8.linear.source import replaced_forward

Changes = dict[nn.Module, Callable[[], None]]  # module: the function that converts it, or back


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
    """Convert linear layers and experts of `module` to float8, in place, and return `module`.

    Modules and Parameters stay the same objects, so that tied weights, optimizers, hooks, wrappers
    and `requires_grad=False` keep working. Exceptions: `Float8Weights.ONLY` (weights that exist in
    float8 only) makes new Parameters; `enable_fsdp_float8_all_gather` gives weights a subclass of
    Tensor: convert, then `fully_shard`, then make the optimizer. Warns if no layer is converted.
    `conversion_report(module)` lists which layers were converted, and why others were not.
    `convert_to_high_precision(module)` undoes the conversion.

    Linear layers change their class to `Float8Linear`; those of a subclass of `nn.Linear` that
    inherits its forward become instances of both. GPT2's `Conv1D` is no `nn.Linear` and stays.
    Experts of transformers 5 and torchtitan become `Float8Experts`, which run as grouped GEMMs.
    Layers that another library loaded in float8 (transformers' `FP8Linear`; compressed-tensors by
    channel, block, tensor or MXFP8) keep their bytes, frozen, if `config` is None or has
    `Float8Weights.ONLY`; any other `config` dequantizes them to trainable Parameters. Layers that
    were converted with another configuration get `config`, and new state of delayed scaling.

    Without a `module_filter_fn`, the output head (`lm_head`, or `output` of the model itself),
    adapters of PEFT, routers of experts, and layers with fewer than 16 output features stay in high
    precision. So do layers and experts that float8 would make slower on the GPU of their weights
    (the current GPU for weights on CPU or meta). Without a GPU, speed is ignored.

    Args:
        module: the model, or a single linear layer.
        module_filter_fn: called as `module_filter_fn(mod, fqn)` for each linear layer and module of
            experts that `config` supports; return True to convert `mod`, as `all_linears` always
            does. Experts for which it raises an `AttributeError` stay as they are. Or pass what
            `keep_high_precision` returns, to exclude blocks or names. None: the rules above.
        config: a `Float8LinearConfig`, or the name of a recipe. None means `"tensorwise"`.
        tokens_per_step: the number of rows M of a layer's input [M, K], which are the tokens per
            forward on one device. Used only without a `module_filter_fn`.
        gpu: `"H100"` or `"H200"`, or a device name of torch with one of these: convert layers that
            are faster in float8 on that GPU. None means the GPU of the weights, as above.
        cuda_graphs: set True if you run CUDA graphs (`mode="reduce-overhead"`): no layer is then
            skipped because its GPU would wait for launches by the CPU (experts never are).
        linear_classes: subclasses of `nn.Linear` that override forward, and still compute
            `input @ weight.T + bias`. Their layers are converted, and their forward is replaced.
        head: convert the head, too, if float8 is faster. The loss depends directly on its logits.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a recipe or `gpu` is unknown; `tokens_per_step` is less than 1; `gpu`,
            `cuda_graphs` or `head` comes with a `module_filter_fn`; the GPU has no GEMM for MXFP8;
            a weight to all-gather in float8 is a DTensor (convert, then `fully_shard`) or has
            gradient hooks; a converted layer cannot get `config`. The model is unchanged then.
    """
    require_module(module, "module")
    arguments = config, module_filter_fn, tokens_per_step, gpu, cuda_graphs, linear_classes, head
    return convert_chosen(Chooser(module, *arguments))


def convert_chosen(chooser: Chooser) -> nn.Module:
    """Convert the modules of `chooser.model` that `chooser.choose` selects; return the model."""
    module = chooser.model
    choices: dict[nn.Module, Choice] = {}
    changes: Changes = {}
    for fqn, mod in module.named_modules():
        if (choice := chooser.choose(mod, fqn)) is not None:
            choices[mod] = choice
            if choice.skip_reason is None:
                changes[mod] = _prepare(mod, fqn, chooser)
    # From here on the model changes, and nothing raises unless memory runs out.
    _change(module, chooser.config, changes)
    for mod, choice in choices.items():
        previous = Choice(*mod.__dict__.get(CHOICE, ()))  # of the last conversion, if any
        if choice.by_filter and previous.skip_reason and not previous.by_filter:
            choice = choice._replace(skip_reason=previous.skip_reason)  # says more
        mod.__dict__[CHOICE] = tuple(choice)
    if not any(isinstance(mod, Float8Module) for mod in choices):
        reasons = dict.fromkeys(str(choice.skip_reason) for choice in choices.values())
        why = f"was converted: {'; '.join([*reasons][:3]) or 'it has no nn.Linear'}"
        fix = "print(conversion_report(model)) shows each"
        warn(f"float8: no layer of {type(module).__name__} {why}. {fix}")
    return module


swap_linear_with_float8_linear = convert_to_float8_training
"""The name of `convert_to_float8_training` in float8_experimental."""


def _prepare(mod: Any, fqn: str, chooser: Chooser) -> Callable[[], None]:
    """Return a function that converts `mod` to `chooser.config`, or raise a `ValueError`."""
    conversion: Any = chooser.conversions[mod]
    is_converted = isinstance(mod, Float8Module)
    if is_converted:  # `Chooser.choose` has checked the others
        _require_changeable(mod, fqn)
        if problem := conversion.problem(mod, chooser):
            got = f"a layer already converted, which cannot take the new config: {problem}"
            raise _refusal(fqn, got, "leave it out with module_filter_fn")
    for feature in FEATURES:
        if refused := feature.why_not_taken(mod, chooser.config):
            raise _refusal(fqn, *refused)
    if is_converted:
        return functools.partial(mod._float8_set_up, chooser.config)
    return conversion.prepare(mod, chooser)  # type: ignore[no-any-return]


def _change(model: nn.Module, config: Float8LinearConfig | None, changes: Changes) -> None:
    """Run `changes`, {module: function that converts it}: to `config`, or back if that is None."""
    for feature in FEATURES:
        feature.before_conversion([mod for mod in changes if isinstance(mod, Float8Module)])
    for change in changes.values():
        change()
    for feature in FEATURES:
        feature.after_conversion(model, config)


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Turn float8 layers and experts of `module` back into their old classes; return `module`.

    Layers stay the same objects, as do their Parameters, hooks, training mode and attributes, so
    optimizers and wrappers of the model keep working. A weight that exists in float8 only is
    dequantized to a new, frozen Parameter. The state of delayed scaling is removed. `module` is the
    model, or a single `Float8Linear`.

    Raises:
        TypeError: `module` is no `nn.Module`.
        ValueError: `fully_shard` was applied to a layer itself; a layer is parametrized, has a
            weight that FSDP2 gathers in float8, or a `forward` as attribute. Nothing changes then.
    """
    require_module(module, "module")
    changes: Changes = {}
    for fqn, mod in module.named_modules():
        if isinstance(mod, Float8Module):
            _require_changeable(mod, fqn)
            changes[mod] = mod._float8_become_high_precision
    _change(module, None, changes)
    for mod in module.modules():
        mod.__dict__.pop(CHOICE, None)  # `conversion_report` would still show it
    return module


def _require_changeable(mod: Float8Module, fqn: str) -> None:
    """Raise a `ValueError` if `mod`, in float8, cannot change class or config, as under FSDP2."""
    if replaced_forward(mod):
        got = "a layer with a `forward` of its own as attribute, which calls that of float8"
        fix = "remove it first: accelerate's by accelerate.hooks.remove_hook_from_submodules(model)"
        raise _refusal(fqn, got, fix)
    if is_parametrized(mod):
        raise _refusal(fqn, "a layer that is parametrized", "remove the parametrization first")
    for feature in FEATURES:
        if refused := feature.why_not_changed(mod):
            raise _refusal(fqn, *refused)


def _refusal(fqn: str, got: str, fix: str) -> ValueError:
    return ValueError(f"layer {fqn or '(root)'!r}: got {got}, expected one that can change; {fix}")
