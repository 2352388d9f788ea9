"""Helpers that the autograd functions of this library share.

`compute` of each multiplies, and lists what backward reads; `forward` saves that.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def computed_before(function: Any, *args: Any) -> Any:
    """Return `function.compute(*args)`, for compiled code, which hands it on to `function.apply`.

    All that compiled code computes is traced before the autograd function, whose forward then only
    saves. Inside an autograd function torch 2.11 loses the recompute tags of
    `torch.utils.checkpoint`: it kept the outputs of GEMMs.
    """
    with torch.no_grad():
        return function.compute(*args)


def another(x: Tensor) -> Tensor:
    """Return `x` as another tensor, without a copy: as what an autograd function may return.

    When one returns what it was given, the gradients that torch 2.11's Dynamo traces for it are
    zero.
    """
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Wrap `backward` as torch's decorator of this name, with an error that says what to do."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        # A dummy that requires grad, so that the results are never constants, as `grads` may be.
        dummy = torch.zeros((), requires_grad=True)
        return _Refusing.apply(len(grads), dummy, *grads, *results)  # type: ignore[no-any-return, no-untyped-call]

    return wrapper


class _Refusing(torch.autograd.Function):
    """Return the last tensors as functions of the first ones, whose derivative is refused."""

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
