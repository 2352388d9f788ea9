"""The backward of an autograd function that has no derivative of its own."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """As torch's decorator of this name, with an error that says what to do."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        # Of something that needs a gradient, too: else they would be constants where `grads` are.
        of = torch.zeros((), requires_grad=True)
        return _Refusing.apply(len(grads), of, *grads, *results)  # type: ignore[no-any-return, no-untyped-call]

    return wrapper


class _Refusing(torch.autograd.Function):
    """The last tensors, as functions of the first ones whose derivative is refused."""

    @staticmethod
    def forward(ctx: Any, count: int, of: Tensor, *tensors: Any) -> tuple[Any, ...]:
        return tuple(x.detach() if isinstance(x, Tensor) else x for x in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "Float8Linear: got a derivative of a gradient (create_graph=True), expected first "
            "derivatives only: GEMMs in float8 cannot differentiate twice; leave the layers that "
            "it concerns out with module_filter_fn, or call convert_to_high_precision(model)"
        )
