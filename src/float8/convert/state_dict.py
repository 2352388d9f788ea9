"""Make checkpoints for models that know nothing of float8."""

from typing import Any

from torch import nn

from float8.config import CAST_SITES, require_module
from float8.tensor import Float8Tensor, dequantise

_BUFFERS = {name for site in CAST_SITES for name in site.buffers}


def high_precision_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` without delayed scaling, all weights in high precision.

    It loads with `strict=True` into the model as it was before the conversion. Raises a
    `TypeError` if `model` is no `nn.Module`.
    """
    require_module(model, "model")
    state: dict[str, Any] = model.state_dict()
    for name, x in [*state.items()]:
        if _is_delayed_scaling(name):
            del state[name]
        elif isinstance(x, Float8Tensor):
            state[name] = dequantise(x)
    return state


def float8_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return what `high_precision_state_dict(model)` leaves out: the state of delayed scaling.

    To be saved beside a checkpoint of the plain model; it loads with `strict=False` into the
    converted one, after that. Raises a `TypeError` if `model` is no `nn.Module`.
    """
    require_module(model, "model")
    return {name: x for name, x in model.state_dict().items() if _is_delayed_scaling(name)}


def _is_delayed_scaling(name: str) -> bool:
    return name.rpartition(".")[2] in _BUFFERS
