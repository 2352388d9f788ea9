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
    Tensor, or with a warning new Parameters if a compiled graph refers to them: convert, then
    `fully_shard`, then make the optimizer. Warns if `module` has no float8 layer afterwards. Call
    `conversion_report(module)` to see which layers were converted, and why others were not, and
    `convert_to_high_precision(module)` to turn layers back.

    Linear layers change their class to `Float8Linear`; those of a subclass of `nn.Linear` that
    inherits its forward become instances of both. GPT2's `Conv1D` is no `nn.Linear` and stays.
    Experts of transformers 5 and torchtitan become `Float8Experts`, which run as grouped GEMMs.
    Layers that another library loaded in float8 (transformers' `FP8Linear`; compressed-tensors by
    channel, block, tensor or MXFP8) get a new weight: dequantized and trainable or, if `config` is
    None or has `ONLY` with the same granularity, a frozen one of the same bytes. Layers converted
    with another configuration get `config`, and new state of delayed scaling.

    Without a `module_filter_fn`, other layers stay in high precision if they are the output head
    (`lm_head`, or `output` of the model itself), in PEFT's LoRA or `modules_to_save`, or routers of
    experts, if they have fewer than 16 outputs, or if the GPU would wait for the CPU. So do layers
    and experts with a modelled speed-up below 1.01 on the GPU of their weights (the current GPU for
    CPU or meta). GPUs other than H100 and H200 are not modelled: there experts are judged as on an
    H100, and layers stay if they have fewer than 256 features in or out. Without a GPU, or with
    `emulate`, speed counts only if `gpu` is given.

    Args:
        module: the model, or a single linear layer.
        module_filter_fn: called as `module_filter_fn(mod, fqn)` for each linear layer and module of
            experts that can change to `config`; return True to convert `mod`, as `all_linears`
            always does. Experts for which it raises an `AttributeError` stay as they are. Or pass
            what `keep_high_precision` returns, to exclude blocks or names. None: the rules above.
        config: a `Float8LinearConfig`, or the name of a recipe. None means `"tensorwise"`.
        tokens_per_step: tokens per forward on a device, the rows of a layer's input; default 8192.
        gpu: `"H100"`, `"H200"`, or a device name with one of these: the GPU whose speed decides.
        cuda_graphs: True if you run CUDA graphs, so that no layer stays as waiting for the CPU.
        linear_classes: subclasses of `nn.Linear` whose forward computes the same, and is replaced.
        head: convert the head, too, if float8 is faster. The loss depends directly on its logits.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a recipe or `gpu` is unknown; `tokens_per_step` is less than 1; `gpu`,
            `cuda_graphs` or `head` comes with a `module_filter_fn`; the GPU has no GEMM for MXFP8;
            a weight to all-gather in float8 is a DTensor or has gradient hooks; a float8 layer
            cannot get `config`; `keep_high_precision` names no module. Nothing changes then.
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
    _change(module, chooser.config, changes)  # the model is unchanged until here
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
    """Return a function that converts `mod` in place; raise a `ValueError` if it cannot change."""
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
    """Convert `model` to `config` (None: back) by the functions in `changes`, one per module."""
    for feature in FEATURES:
        feature.before_conversion([mod for mod in changes if isinstance(mod, Float8Module)])
    for change in changes.values():
        change()
    for feature in FEATURES:
        feature.after_conversion(model, config)


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Turn float8 layers and experts of `module` back to high precision, and return `module`.

    Layers and Parameters stay the same objects, with hooks, training mode and attributes, so that
    optimizers and wrappers keep working. Exceptions: weights that exist in float8 only become new,
    frozen Parameters, dequantized; if a compiled graph refers to weights prepared for FSDP2's
    float8 gathers, they become new Parameters, with a warning. Layers get their old class, or
    `nn.Linear` if made as `Float8Linear` or loaded in float8. State of delayed scaling is removed.

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
    """Raise a `ValueError` if `mod`, in float8, cannot change class or config; `fqn` names it."""
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
