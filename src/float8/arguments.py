"""Checks of arguments that many functions take."""

from torch import nn


def require_module(value: object, name: str) -> None:
    """Raise a `TypeError` if the argument `name` is anything but an `nn.Module`."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an nn.Module")
