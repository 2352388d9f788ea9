"""Merge adapters of PEFT into copies of weights, layer by layer; the model is not changed."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from float8.checkpoints.schemes import values_of
from float8.tensor import high_precision
from float8.tensor.ranks import is_fsdp_module


def without_adapters(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, Any]]:
    """Return `model` without the modules that PEFT added, and a dict {base layer: its PEFT layer}.

    The dict has only base layers with an active adapter that is not merged into them yet. If
    `modules_to_save` has an active copy of a module, the copy replaces it. `model` is not changed:
    modules that contain PEFT's are copied, all other modules and all Parameters are shared. Raises
    `ValueError` for adapters that PEFT cannot merge, on integer weights, or disabled but merged.
    """
    peft_layer_of = dict[nn.Module, Any]()
    replacement_of = dict[nn.Module, nn.Module]()  # module -> copy, or itself if nothing changes

    def active(module: Any) -> set[str]:
        return set() if module.disable_adapters else {*module.active_adapters}

    def base_of(module: Any) -> Any:
        """Return `module` without PEFT's modules: itself, a copy, or the one that PEFT wraps."""
        # Classes of PEFT by name, since PEFT need not be installed.
        class_names = {x.__name__ for x in type(module).__mro__ if x.__module__.startswith("peft.")}
        if class_names & {"PeftModel", "PeftMixedModel"}:
            tuner = module.base_model
            if not hasattr(tuner, "merge_and_unload") or type(tuner).__name__ == "XLoraModel":
                raise _refusal(f"a {type(module).__name__} that cannot be merged")
            return base_of(tuner)
        if "BaseTuner" in class_names:
            return base_of(module.model)  # `module` is a `LoraModel` or the like
        if "TrainableTokensWrapper" in class_names:
            return base_of(module.token_adapter)  # a `BaseTunerLayer`
        if "MultiheadAttention" in class_names:
            raise _refusal("a MultiheadAttention, to whose output PEFT adds the adapter twice")
        if "BaseTunerLayer" in class_names:
            base = module.get_base_layer()
            if any(not x.is_floating_point() for x in base.parameters()):
                raise _refusal(f"a {type(base).__name__} that another library has quantized")
            base = base_of(base)  # a copy if it contains other adapters
            if any(x.disable_adapters and x.merged for x in layers_of_peft(module)):
                raise _refusal("adapters that are disabled, but merged: call unmerge_adapter()")
            if any(active(x) - {*x.merged_adapters} for x in layers_of_peft(module)):
                peft_layer_of[base] = module  # some active adapter is not merged yet
            return base
        if "ModulesToSaveWrapper" in class_names:
            chosen = (x for name, x in module.modules_to_save.items() if name in active(module))
            return base_of(next(chosen, module.original_module))
        if module not in replacement_of:  # a module of the model, not PEFT's
            children = {name: x if x is None else base_of(x) for name, x in module._modules.items()}
            replacement_of[module] = module
            if any(x is not module._modules[name] for name, x in children.items()):
                replacement_of[module] = new = object.__new__(type(module))  # not FSDP2's `__new__`
                vars(new).update(vars(module), _modules=children)
        return replacement_of[module]

    return base_of(model), peft_layer_of


def layers_of_peft(layer: nn.Module) -> list[Any]:
    """Return `layer`, if it is a PEFT layer, and all PEFT layers nested in it, outermost first."""
    return [x for x in layer.modules() if hasattr(x, "merged_adapters")]


def _inactive_parameters(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the Parameters of adapters in the PEFT layer `layer` that no active adapter uses."""
    for x in layers_of_peft(layer):
        for child in x.children():
            if isinstance(child, nn.ModuleDict | nn.ParameterDict):  # keys are names of adapters
                named = [*child.named_parameters(remove_duplicate=False)]
                active = {p for name, p in named if name.split(".")[0] in x.active_adapters}
                yield from {p for _, p in named} - active


def _refusal(got: str) -> ValueError:
    return ValueError(
        f"model: got {got}, expected adapters, such as LoRA, that PEFT can merge, on layers in "
        f"high precision or of this library; load the base dequantized, or without adapters"
    )


# Attributes to leave empty in copies: hooks, PEFT's arguments (a tied layer), FSDP2's state.
_LEFT_EMPTY = re.compile("_hooks$|^kwargs$|^__composable")


@torch.no_grad()
def merged_base_layer(*layers: Any, gather: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """Return a float32 (or float64) copy of a PEFT layer's base layer, active adapters merged.

    `layers` is one PEFT layer, or several whose base layers share a weight: then that of the first
    is returned, with the adapters of all merged into its weight. `gather` is called with each
    Parameter in use, and must return it whole. Raises `ValueError` if PEFT cannot merge an adapter.
    """
    # The memo of `deepcopy`: id of an object -> its copy. Inactive adapters are not copied.
    copies: dict[int, Any] = {id(p): p for layer in layers for p in _inactive_parameters(layer)}
    for p in (p for layer in layers for p in layer.parameters() if id(p) not in copies):
        full = gather(high_precision(p.detach()))
        values: Any = values_of(full)  # a new tensor if `full` is in float8
        values = values.to(torch.promote_types(values.dtype, torch.float32), copy=values is full)
        copies[id(p)] = nn.Parameter(values, requires_grad=False)
    # Children first, so that `deepcopy` finds the copies of submodules in its memo.
    modules = (x for layer in layers for x in reversed([*layer.modules()]))
    for module in (x for x in modules if id(x) not in copies):
        cls = type(module).__bases__[1] if is_fsdp_module(module) else type(module)  # not FSDP2's
        copies[id(module)] = object.__new__(cls)  # first, since attributes may refer to `module`
        empty = {name: type(x)() for name, x in vars(module).items() if _LEFT_EMPTY.search(name)}
        vars(copies[id(module)]).update(copy.deepcopy(vars(module) | empty, copies))
    with torch.autocast(values.device.type, enabled=False):  # device of the last Parameter
        for layer in layers:
            try:
                for peft_layer in reversed(layers_of_peft(copies[id(layer)])):  # innermost first
                    peft_layer.merge()
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                why = str(error) or type(error).__name__
                raise _refusal(f"an adapter that cannot be merged ({why})") from error
    return copies[id(layers[0])].get_base_layer()
