"""Checkpoints for models that know nothing of float8."""

from typing import Any

from torch import nn

from float8.linear import Float8Linear, buffer_names


def high_precision_state_dict(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` without the state of delayed scaling.

    It loads with `strict=True` into the model as it was before the conversion. For a model
    without delayed scaling it is `model.state_dict()`.
    """
    ours = {
        f"{fqn}.{name}" if fqn else name
        for fqn, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, Float8Linear)
        for name in buffer_names(layer.config)
    }
    return {key: value for key, value in model.state_dict().items() if key not in ours}
