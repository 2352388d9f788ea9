"""Helpers that the autograd functions of this library share.

`Linear` is one such function. Its method `compute` returns the output and the tensors to save.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def computed_before(function: Any, *args: Any) -> Any:
    """Return `function.compute(*args)`, run without grad, to pass to `function.apply` with `args`.

    `function` is an autograd function with a static method `compute`. Use this in compiled code
    only: GEMMs are then traced before the autograd function, whose forward just saves the results.
    Inside an autograd function, torch 2.11 loses the recompute tags of `torch.utils.checkpoint`,
    and so would keep the outputs of GEMMs.
    """
    with torch.no_grad():
        return function.compute(*args)


def new_alias(x: Tensor) -> Tensor:
    """Return a new tensor over the memory of `x`, which autograd does not treat as a view.

    Autograd functions return such an alias where they would return an input itself, for which
    Dynamo of torch 2.11 traces gradients of zero.
    """
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Decorate `backward` to run without grad; eager code cannot differentiate its results."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results  # not create_graph=True: nothing differentiates `results`
        dummy = torch.zeros((), requires_grad=True)  # results require grad even if no `grads` do
        return _NotDifferentiable.apply(len(grads), dummy, *grads, *results)  # type: ignore[no-any-return, no-untyped-call]

    return wrapper


class _NotDifferentiable(torch.autograd.Function):
    """Return `tensors[count:]`, made to require grad by `dummy`, so that their backward raises."""

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
