"""Helpers that the autograd functions of this library share.

`compute` of each function runs the GEMMs, and lists what backward reads; `forward` saves that.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def computed_before(function: Any, *args: Any) -> Any:
    """Return `function.compute(*args)`, without gradients, to be handed to `function.apply`.

    Only for compiled code: what it computes is then traced before the autograd function, whose
    forward just saves it. Inside of an autograd function torch 2.11 loses the recompute tags of
    `torch.utils.checkpoint`: it kept the outputs of GEMMs.
    """
    with torch.no_grad():
        return function.compute(*args)


def new_alias(x: Tensor) -> Tensor:
    """Return a new tensor over the memory of `x`, which autograd does not treat as a view.

    An autograd function must not return its input itself: Dynamo of torch 2.11 then traces
    gradients of zero.
    """
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Decorate `backward` as torch's `once_differentiable`, with an error that says what to do."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        # A dummy that requires grad, so that the results are never constants, as `grads` may be.
        dummy = torch.zeros((), requires_grad=True)
        return _NotDifferentiable.apply(len(grads), dummy, *grads, *results)  # type: ignore[no-any-return, no-untyped-call]

    return wrapper


class _NotDifferentiable(torch.autograd.Function):
    """Return `tensors[count:]` as functions of all other tensors; their derivative raises."""

    @staticmethod
    def forward(ctx: Any, count: int, dummy: Tensor, *tensors: Any) -> tuple[Any, ...]:
        return tuple(x.detach() if isinstance(x, Tensor) else x for x in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "Float8Linear: got a derivative of a gradient (create_graph=True), expected first "
            "derivatives only: GEMMs in float8 cannot differentiate twice; leave the layers that "
            "it concerns out with module_filter_fn, or call convert_to_high_precision(model)"
        )
