"""Models with adapters of PEFT as they are once merged; weights are merged one layer at a time."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from float8.tensor import Float8Tensor, dequantise, high_precision

AdapterLayers = dict[nn.Module, Any]
"""The layers of PEFT that are to be merged, by their base layers."""


def without_adapters(model: nn.Module) -> tuple[nn.Module, AdapterLayers]:
    """Return `model` as its names are once merged, and the adapter layers that are to be merged.

    The result shares all base layers and Parameters with `model`, which stays as it is. Modules
    that PEFT trains in the place of others (`modules_to_save`) are at the place of these. Adapters
    that are disabled, inactive or merged already are left out.
    """
    adapters: AdapterLayers = {}
    seen: dict[nn.Module, nn.Module] = {}

    def base_of(module: Any) -> Any:
        """Return what is in the place of `module` in a model without adapters."""
        names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__[:5] == "peft."}
        if "PeftModel" in names or "PeftMixedModel" in names:
            tuner = type(module.base_model)
            if not hasattr(tuner, "merge_and_unload") or tuner.__name__ == "XLoraModel":
                raise ValueError(
                    f"model: got a {type(module).__name__} with adapters that PEFT cannot merge, "
                    f"expected LoRA or the like; give the base model, and save adapters by PEFT"
                )
            return base_of(module.get_base_model())
        if "BaseTuner" in names:
            return base_of(module.model)
        is_on = bool(names) and module.active_adapters and not module.disable_adapters
        if "BaseTunerLayer" in names:
            base = module.get_base_layer()
            if any(not x.is_floating_point() for x in base.parameters()):
                raise ValueError(
                    f"model: got an adapter on a {type(base).__name__} that another library has "
                    f"quantized, expected one in high precision or converted by this library; load "
                    f"the base model dequantized"
                )
            if is_on and {*module.active_adapters} - {*module.merged_adapters}:
                adapters[base] = module
            return base_of(base)
        if "TrainableTokensWrapper" in names:
            return base_of(module.token_adapter)
        if "ModulesToSaveWrapper" in names:
            saved = module.modules_to_save
            chosen = [saved[name] for name in module.active_adapters if is_on and name in saved]
            return base_of(chosen[0] if chosen else module.original_module)
        if module not in seen:
            children = {name: x and base_of(x) for name, x in module._modules.items()}
            seen[module] = module
            if any(x is not module._modules[name] for name, x in children.items()):
                seen[module] = new = object.__new__(type(module))  # FSDP2's has a `__new__`
                vars(new).update(vars(module), _modules=children)
        return seen[module]

    return base_of(model), adapters


@torch.no_grad()
def merged_base_layer(layer: Any, gather: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    """Return a float32 copy of the base layer of a PEFT adapter layer, with its adapters merged.

    PEFT itself merges the active adapters, of any kind, into the copy; `layer` stays as it is. So
    the values are those of merging the model in float32, and casting the copy is the one rounding.
    Memory is needed for one layer in float32, and for what PEFT adds to it.

    Args:
        layer: a module of PEFT around a layer that may be in float8 only, such as
            `model.layers[0].self_attn.q_proj`.
        gather: returns the whole of a tensor that ranks share; collective.

    Raises:
        ValueError: PEFT cannot merge adapters of this kind.
    """
    tensors: dict[int, Any] = {}
    for x in layer.parameters():
        whole: Any = gather(high_precision(x.detach()))
        if isinstance(whole, Float8Tensor):
            whole = dequantise(whole, torch.float32)
        else:
            whole = whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)
        tensors[id(x)] = nn.Parameter(whole, requires_grad=False)
    new = copy.deepcopy(layer, tensors)  # which takes these for its copies of the Parameters
    with torch.autocast(whole.device.type, enabled=False):
        try:
            if hasattr(new, "unload_and_optionally_merge_module"):  # layers in each other
                return new.unload_and_optionally_merge_module(True, False, None)  # type: ignore[no-any-return]
            new.merge()
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"model: got an adapter that PEFT cannot merge ({error}), expected LoRA or the "
                f"like; call model.unload() for the base, and save adapters by PEFT"
            ) from error
    return new.get_base_layer()  # type: ignore[no-any-return]
