"""A linear layer that was the `Conv1D` of transformers, which keeps its weight transposed."""

from typing import Any

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.linear.module import Float8Linear
from float8.linear.source import own_containers


class Float8Conv1D(Float8Linear):
    """A `Float8Linear` that was a `Conv1D`: weight [N, K], but [K, N] in state dicts.

    So it is to all others what it says it is, an `nn.Linear`, and its checkpoints are those of the
    original. In state dicts the weight is a view, through which it can be written.
    """

    source_class: type[nn.Module]  # type: ignore[misc]

    @classmethod
    def from_conv1d(cls, mod: Any, config: Float8LinearConfig) -> "Float8Conv1D":
        """Make one with the Parameters of `mod`, whose weight [K, N] it transposes in place."""
        new = cls.__new__(cls)
        new.__dict__.update(mod.__dict__)
        new.__dict__.update(own_containers(mod))
        new.in_features, new.out_features = mod.weight.shape
        new.source_class = type(mod)
        transpose_in_place(mod.weight)
        new.set_up(config)
        return new

    def become_high_precision(self) -> None:
        """As `Float8Linear`, with the weight [K, N] again."""
        super().become_high_precision()
        for name in ("in_features", "out_features", "source_class"):
            del self.__dict__[name]
        transpose_in_place(self.weight)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = prefix + "weight"
        destination[key] = destination[key].t()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
    ) -> None:
        key = prefix + "weight"
        if getattr(state_dict.get(key), "ndim", None) == 2:
            weight = state_dict[key].t()
            if local_metadata.get("assign_to_params_buffers", False):
                weight = weight.contiguous()
            state_dict = {**state_dict, key: weight}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@torch.no_grad()
def transpose_in_place(weight: Tensor) -> None:
    """Make `weight` [K, N] and its gradient [N, K], contiguous; they stay the same objects."""
    grad = weight.grad
    weight.grad = None  # or its shape would be compared
    weight.data = weight.data.t().contiguous()
    if grad is not None:
        weight.grad = grad.t().contiguous()
