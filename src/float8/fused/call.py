"""What the fused functions have in common: taking layers apart before, and saving memory after."""

from typing import NamedTuple

import torch
from torch import Tensor

from float8.fused.layers import FusedLayer, fused_layer
from float8.fused.norm import Norm
from float8.linear import Float8Linear
from float8.linear.functional import check_input


class Call(NamedTuple):
    """What an autograd function takes besides tensors with gradients, and keeps."""

    layers: tuple[FusedLayer, ...]
    eps: float
    residual: bool
    record: bool
    need_grad_x: bool
    need_grad_weights: tuple[bool, ...]

    def for_backward(self) -> "Call":
        """Without what only forward reads: what is on a context lives as long as the graph."""
        return self._replace(layers=tuple(layer._replace(ready=None) for layer in self.layers))


class Arguments(NamedTuple):
    """The arguments of an autograd function."""

    x: Tensor
    """[M, K], the compute dtype."""

    norm_weight: Tensor | None
    weights: tuple[Tensor, ...]
    call: Call


def take_apart(
    x: Tensor, layers: tuple[Float8Linear, ...], norm: Norm | None, residual: bool
) -> Arguments:
    """Check `x` [..., K] as `Float8Linear.forward` does, and read each weight once."""
    weights = tuple(layer.weight for layer in layers)  # they may be computed
    x = check_input(x, weights[0])
    for layer in layers:
        layer.check_synced()
    grad = torch.is_grad_enabled()
    norm_weight, eps = (None, 0.0) if norm is None else norm
    need_grad_norm = norm_weight is not None and norm_weight.requires_grad
    call = Call(
        tuple(map(fused_layer, layers, weights)),
        eps,
        residual,
        grad,
        grad and (x.requires_grad or need_grad_norm),
        tuple(grad and weight.requires_grad for weight in weights),
    )
    return Arguments(x.reshape(-1, x.shape[-1]), norm_weight, weights, call)
