"""Make state dicts that load into a model in high precision."""

import contextlib
from typing import Any

from torch import nn

from float8.config import require_module
from float8.linear import Float8Linear, Float8Module
from float8.tensor import Float8Tensor, dequantise


def high_precision_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` with dequantized weights, without buffers of delayed scaling.

    A model in high precision loads it strictly. Raises `TypeError` if `model` is no `nn.Module`.
    """
    require_module(model, "model")
    with contextlib.ExitStack() as stack:
        # Each layer removes its own keys, before a wrapper around it renames them.
        for layer in model.modules():
            if isinstance(layer, Float8Module):
                stack.enter_context(layer.register_state_dict_post_hook(_to_high_precision))  # type: ignore[no-untyped-call]
        state: dict[str, Any] = model.state_dict()
    return state


def float8_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the buffers of delayed scaling, which `high_precision_state_dict(model)` leaves out.

    Save both dicts. To resume, load the high-precision one into a converted model, then this one
    with `strict=False`. Raises a `TypeError` if `model` is no `nn.Module`.
    """
    high_precision = high_precision_state_dict(model)
    return {name: x for name, x in model.state_dict().items() if name not in high_precision}


def _to_high_precision(
    layer: Float8Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Hook after `layer.state_dict()`: dequantizes weights, drops buffers of delayed scaling."""
    for name in layer._float8_state() if isinstance(layer, Float8Linear) else ():
        state_dict.pop(prefix + name, None)
    for name in layer._parameters:
        if isinstance(weight := state_dict.get(prefix + name), Float8Tensor):
            state_dict[prefix + name] = dequantise(weight)
