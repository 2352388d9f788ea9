"""Models with adapters of PEFT as they are once merged; weights are merged one layer at a time."""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from float8.tensor import Float8Tensor, dequantise, high_precision
from float8.tensor.ranks import is_fsdp_module


def without_adapters(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, Any]]:
    """Return `model` with the names it has once merged, and PEFT's layers to merge by base layer.

    The result shares all Parameters with `model`, which stays as it is. It has the modules that
    PEFT trains (`modules_to_save`) in the place of the original ones. Adapters that are disabled,
    inactive or merged already are not to be merged.
    """
    adapters, seen = dict[nn.Module, Any](), dict[nn.Module, nn.Module]()

    def active(module: Any) -> set[str]:
        return set() if module.disable_adapters else {*module.active_adapters}

    def base_of(module: Any) -> Any:
        """Return what is in the place of `module` in a model without adapters."""
        names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__[:5] == "peft."}
        if names & {"PeftModel", "PeftMixedModel"}:
            tuner = type(module.base_model)
            if not hasattr(tuner, "merge_and_unload") or tuner.__name__ == "XLoraModel":
                raise _refusal(f"a {type(module).__name__} that cannot be merged")
            return base_of(module.base_model)
        if "BaseTuner" in names:
            return base_of(module.model)
        if "MultiheadAttention" in names:
            raise _refusal("a MultiheadAttention, to whose output PEFT adds the adapter twice")
        if "BaseTunerLayer" in names:
            base = module.get_base_layer()
            if any(not x.is_floating_point() for x in base.parameters()):
                raise _refusal(f"a {type(base).__name__} that another library has quantized")
            base = base_of(base)  # a copy, if other adapters are in it
            nested = _layers_of_peft(module)
            if any(x.disable_adapters and x.merged for x in nested):
                raise _refusal("adapters that are disabled, but merged: call unmerge_adapter()")
            if any(active(x) - {*x.merged_adapters} for x in nested):
                adapters[base] = module
            return base
        if "TrainableTokensWrapper" in names:
            return base_of(module.token_adapter)
        if "ModulesToSaveWrapper" in names:
            chosen = [x for name, x in module.modules_to_save.items() if name in active(module)]
            return base_of(chosen[0] if chosen else module.original_module)
        if module not in seen:
            children = {name: x if x is None else base_of(x) for name, x in module._modules.items()}
            seen[module] = module
            if any(x is not module._modules[name] for name, x in children.items()):
                seen[module] = new = object.__new__(type(module))  # FSDP2's has a `__new__`
                vars(new).update(vars(module), _modules=children)
        return seen[module]

    return base_of(model), adapters


def _layers_of_peft(layer: nn.Module) -> list[Any]:
    """Return `layer`, and layers in it: adapters of another kind, or of another Parameter."""
    return [x for x in layer.modules() if hasattr(x, "merged_adapters")]


def _refusal(got: str) -> ValueError:
    return ValueError(
        f"model: got {got}, expected adapters, such as LoRA, that PEFT can merge, on layers in "
        f"high precision or of this library; load the base dequantized, or without adapters"
    )


_LEFT_OUT = re.compile("_hooks$|^kwargs$|^__composable")
"""Fields that copies of layers do without: hooks, FSDP2, and tensors of a tied layer in PEFT's."""


@torch.no_grad()
def merged_base_layer(*layers: Any, gather: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """Return a float32 copy of the base layer of a PEFT layer, with the active adapters merged.

    PEFT itself merges them in the copy. So its values are those of merging the model in float32,
    and its cast is the only rounding. Memory is needed for one layer in float32, and for what PEFT
    adds to it. Raises `ValueError` if PEFT cannot merge.

    Args:
        layers: a module of PEFT around a layer that may be in float8 only, such as
            `model.layers[0].self_attn.q_proj`; or several, around layers that share a weight.
        gather: returns the whole of a tensor that ranks share; collective.
    """
    copies: dict[int, Any] = {}
    for x in (x for layer in layers for x in layer.parameters() if id(x) not in copies):
        whole: Any = gather(high_precision(x.detach()))
        if isinstance(whole, Float8Tensor):
            whole = dequantise(whole, torch.float32)
        else:
            whole = whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)
        copies[id(x)] = nn.Parameter(whole, requires_grad=False)
    # `deepcopy` takes these for its copies of Parameters. Hooks, and FSDP2, are left out.
    for x in (x for layer in layers for x in reversed([*layer.modules()])):
        if id(x) not in copies:
            cls = type(x).__bases__[1] if is_fsdp_module(x) else type(x)
            new: Any = object.__new__(cls)
            copies[id(x)] = new
            fields = vars(x).items()
            empty = {name: type(value)() for name, value in fields if _LEFT_OUT.search(name)}
            vars(new).update(copy.deepcopy(vars(x) | empty, copies))
    merged = [copies[id(layer)] for layer in layers]
    with torch.autocast(whole.device.type, enabled=False):
        for layer in merged:
            try:
                for x in reversed(_layers_of_peft(layer)):
                    x.merge()
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                why = str(error) or type(error).__name__
                raise _refusal(f"an adapter that cannot be merged ({why})") from error
    return merged[0].get_base_layer()
