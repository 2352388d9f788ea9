"""Functions on models and layers, under the module name that torchao has for them."""

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from float8.config import ConfigOrRecipe
from float8.config import linear_requires_sync as linear_requires_sync
from float8.convert.choice import Chooser, all_linears
from float8.convert.convert import convert_to_float8_training as convert_to_float8_training
from float8.convert.convert import swap_linear_with_float8_linear as swap_linear_with_float8_linear
from float8.convert.keep import ModuleFilter
from float8.delayed.sync import (
    sync_float8_amax_and_scale_history as sync_float8_amax_and_scale_history,
)
from float8.linear import Float8Linear


def _auto_filter_for_recipe(recipe: ConfigOrRecipe, filter_fqns: Collection[str]) -> ModuleFilter:
    """Return a `module_filter_fn` for the `nn.Linear` layers that `recipe` converts by default.

    It judges layers one by one, for 8192 tokens per forward, without the rule for routers of
    experts. It rejects names that contain one of `filter_fqns`, and accepts other float8 layers.
    """
    chooser = Chooser(nn.Identity(), recipe)  # `nn.Identity` stands for the unknown model

    def module_filter_fn(mod: nn.Module, fqn: str) -> bool:
        if any(name in fqn for name in filter_fqns) or not isinstance(mod, nn.Linear):
            return False
        choice = chooser.choose(mod, fqn)  # None or with a `skip_reason` if `mod` stays
        return isinstance(mod, Float8Linear) or (choice is not None and choice.skip_reason is None)

    return module_filter_fn


def get_float8_layers(model: nn.Module) -> list[Float8Linear]:
    """Return all `Float8Linear` layers in `model`, each once."""
    return [layer for layer in model.modules() if isinstance(layer, Float8Linear)]


def swap_linear_layers(
    module: nn.Module,
    from_float_func: Callable[[nn.Linear], nn.Module],
    *,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Replace each `nn.Linear` that the filter accepts (None: all) by `from_float_func(layer)`.

    Changes `module` in place and returns it, or its replacement if `module` itself is replaced.
    """
    filter_fn = module_filter_fn or all_linears
    linears = [(mod, fqn) for fqn, mod in module.named_modules() if isinstance(mod, nn.Linear)]
    replacements: Any = {mod: from_float_func(mod) for mod, fqn in linears if filter_fn(mod, fqn)}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in replacements:  # a shared layer has several parents
                parent._modules[name] = replacements[child]
    return replacements.get(module, module)  # type: ignore[no-any-return]
