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
    """Return `model` without PEFT's modules, and a dict: base layer -> PEFT layer to merge with it.

    `model` is not changed: modules that contain PEFT's are copied, others and all Parameters are
    shared. Modules that PEFT trains (`modules_to_save`) replace the original ones. The dict lacks
    layers whose active adapters are all merged. Raises `ValueError` if adapters cannot be merged.
    """
    adapters, copies = dict[nn.Module, Any](), dict[nn.Module, nn.Module]()  # copy, or itself

    def active(module: Any) -> set[str]:
        return set() if module.disable_adapters else {*module.active_adapters}

    def base_of(module: Any) -> Any:
        """Return the module that stands for `module` in a model without adapters."""
        names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__[:5] == "peft."}
        if names & {"PeftModel", "PeftMixedModel"}:
            tuner = module.base_model
            if not hasattr(tuner, "merge_and_unload") or type(tuner).__name__ == "XLoraModel":
                raise _refusal(f"a {type(module).__name__} that cannot be merged")
            return base_of(tuner)
        if "BaseTuner" in names:
            return base_of(module.model)  # inside `LoraModel` and the like
        if "TrainableTokensWrapper" in names:
            return base_of(module.token_adapter)  # a `BaseTunerLayer`
        if "MultiheadAttention" in names:
            raise _refusal("a MultiheadAttention, to whose output PEFT adds the adapter twice")
        if "BaseTunerLayer" in names:
            base = module.get_base_layer()
            if any(not x.is_floating_point() for x in base.parameters()):
                raise _refusal(f"a {type(base).__name__} that another library has quantized")
            base = base_of(base)  # a copy if it contains other adapters
            if any(x.disable_adapters and x.merged for x in layers_of_peft(module)):
                raise _refusal("adapters that are disabled, but merged: call unmerge_adapter()")
            if any(active(x) - {*x.merged_adapters} for x in layers_of_peft(module)):
                adapters[base] = module  # some active adapter is not merged yet
            return base
        if "ModulesToSaveWrapper" in names:
            chosen = (x for name, x in module.modules_to_save.items() if name in active(module))
            return base_of(next(chosen, module.original_module))
        if module not in copies:  # not one of PEFT's
            children = {name: x if x is None else base_of(x) for name, x in module._modules.items()}
            copies[module] = module
            if any(x is not module._modules[name] for name, x in children.items()):
                copies[module] = new = object.__new__(type(module))  # FSDP2 overrides `__new__`
                vars(new).update(vars(module), _modules=children)
        return copies[module]

    return base_of(model), adapters


def layers_of_peft(layer: nn.Module) -> list[Any]:
    """Return the PEFT layers in `layer`, itself included, outermost first: PEFT may nest them."""
    return [x for x in layer.modules() if hasattr(x, "merged_adapters")]


def _inactive(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the Parameters of inactive adapters in `layer`, except those that active ones share."""
    for x in layers_of_peft(layer):
        for parts in x.children():  # one for each adapter, by its name
            if isinstance(parts, nn.ModuleDict | nn.ParameterDict):
                named = [*parts.named_parameters(remove_duplicate=False)]
                active = {p for name, p in named if name.split(".")[0] in x.active_adapters}
                yield from {p for _, p in named} - active


def _refusal(got: str) -> ValueError:
    return ValueError(
        f"model: got {got}, expected adapters, such as LoRA, that PEFT can merge, on layers in "
        f"high precision or of this library; load the base dequantized, or without adapters"
    )


_LEFT_EMPTY = re.compile("_hooks$|^kwargs$|^__composable")
"""Attributes left empty in copies: hooks, FSDP2's state, and tensors of a tied layer in PEFT's."""


@torch.no_grad()
def merged_base_layer(*layers: Any, gather: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """Return a float32 copy of the base layer of a PEFT layer, with the active adapters merged.

    `layers` is one PEFT layer, or several whose base layers share a weight. PEFT merges in
    the copy, which needs memory for it and for PEFT's temporaries. Raises `ValueError` if PEFT
    cannot. `gather`, a collective, returns the full tensor of a sharded one.
    """
    copies: dict[int, Any] = {id(x): x for layer in layers for x in _inactive(layer)}  # not copied
    for x in (x for layer in layers for x in layer.parameters() if id(x) not in copies):
        whole: Any = values_of(gathered := gather(high_precision(x.detach())))
        dtype = torch.promote_types(whole.dtype, torch.float32)
        whole = whole.to(dtype, copy=whole is gathered)  # else it is dequantized, so a copy already
        copies[id(x)] = nn.Parameter(whole, requires_grad=False)
    # `copies` is the memo of `deepcopy`, so it reuses the Parameters, and submodules, copied first.
    modules = (x for layer in layers for x in reversed([*layer.modules()]))  # children first
    for x in (x for x in modules if id(x) not in copies):
        cls = type(x).__bases__[1] if is_fsdp_module(x) else type(x)  # not FSDP2's subclass
        copies[id(x)] = object.__new__(cls)
        empty = {name: type(y)() for name, y in vars(x).items() if _LEFT_EMPTY.search(name)}
        vars(copies[id(x)]).update(copy.deepcopy(vars(x) | empty, copies))
    merged = [copies[id(layer)] for layer in layers]
    with torch.autocast(whole.device.type, enabled=False):  # device of the last Parameter
        for layer in merged:
            try:
                for x in reversed(layers_of_peft(layer)):  # innermost first
                    x.merge()
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                why = str(error) or type(error).__name__
                raise _refusal(f"an adapter that cannot be merged ({why})") from error
    return merged[0].get_base_layer()
