"""Inputs of a layer that are no plain tensors: what torch.fx traces with, and other layouts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from float8.kernels.runtime.private import known_lengths


def of_another_kind(
    layer: nn.Module, input: Any, run: Callable[[Tensor], Tensor], **arguments: object
) -> Any:
    """Return the output of `layer` for an input whose layout is not strided, or which is nested.

    Args:
        layer: for which torch.fx notes a call, as of an `nn.Linear`, instead of tracing inside.
        input: a `Proxy`; or a nested tensor [B, *, ..., K] of layout jagged, contiguous as
            `nn.Linear` asks for it.
        run: forward, for the values of a nested tensor, [..., K]: all its sequences have one scale.
        arguments: what the noted call is to have besides `input`, if it is true.

    Raises:
        TypeError: the input has another layout.
        ValueError: it is not contiguous.
        RuntimeError: torch.fx cannot note a call of this layer.
    """
    if isinstance(input, Proxy):
        return _noted_call(layer, input, arguments)
    if input.layout is not torch.jagged:
        got = "nested input of layout" if input.is_nested else "input of layout"
        do = "use layout=torch.jagged" if input.is_nested else "call input.to_dense()"
        raise TypeError(
            f"Float8Linear: got {got} {input.layout}, expected a dense tensor, or a nested one of "
            f"layout torch.jagged; {do}, or leave the layer out with module_filter_fn"
        )
    values = input.values()
    if input.lengths() is not None or input.shape[2:] != values.shape[1:]:
        raise ValueError(
            f"Float8Linear: got a nested input of shape {tuple(input.shape)} that is not "
            f"contiguous, expected one ragged in dim 1 and without holes; call input.contiguous(), "
            f"or transpose it first"
        )
    shortest, longest = known_lengths(input)
    return torch.nested.nested_tensor_from_jagged(
        run(values), input.offsets(), min_seqlen=shortest, max_seqlen=longest
    )


def _noted_call(layer: nn.Module, input: Proxy, arguments: dict[str, Any]) -> Proxy:
    """Note what a tracer does where `is_leaf_module` is true, as for the layers of torch.nn."""
    tracer = input.tracer
    path = tracer.path_of_module(layer)  # type: ignore[attr-defined]
    hooks = layer._forward_pre_hooks or layer._forward_hooks
    if path == "" or hooks:
        what = "forward hooks, which ran while it was traced" if hooks else "no module around it"
        do = (
            "remove them and register them in what is traced, or trace with a Tracer whose "
            "is_leaf_module(layer, name) is true for it"
            if hooks
            else "trace nn.Sequential(layer)"
        )
        raise RuntimeError(
            f"Float8Linear: got torch.fx.symbolic_trace of a layer with {what}, expected a part of "
            f"a model without hooks: it becomes one call, nothing inside is traced; {do}"
        )
    asked = {name: value for name, value in arguments.items() if value}
    return tracer.create_proxy("call_module", path, (input,), asked)
