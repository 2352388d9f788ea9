"""What functions that take a model ask of their argument."""

from torch import nn


def require_module(value: object, name: str) -> None:
    """Raise a `TypeError` for anything but an `nn.Module`.

    Args:
        value: the argument.
        name: what the function calls it.
    """
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an nn.Module")
