"""Putting modules in the place of others."""

from collections.abc import Mapping

from torch import nn


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put `new[module]` wherever `module` is in `model`, in place; shared ones stay shared.

    Returns:
        `model`; or, if it is itself replaced, its replacement.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)
