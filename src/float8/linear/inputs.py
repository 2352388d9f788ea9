"""Take inputs of a layer that are no plain tensors: Proxies of torch.fx, other layouts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from float8.kernels.runtime.private import known_lengths


def of_another_kind(layer: nn.Module, input: Any, run: Callable[[Tensor], Tensor]) -> Any:
    """Return the output of `layer` for an input whose layout is not strided, or which is nested.

    Args:
        layer: for which torch.fx notes a call, as of an `nn.Linear`, instead of tracing inside.
        input: a `Proxy`; or a nested tensor [B, *, ..., K] of layout jagged, contiguous as
            `nn.Linear` asks for it.
        run: forward, for the values of a nested tensor, [..., K]: all its sequences have one scale.

    Raises:
        TypeError: the input is no tensor, or has another layout.
        ValueError: it is not contiguous.
        RuntimeError: torch.fx cannot note a call of this layer.
    """
    if isinstance(input, Proxy):
        return _noted_call(layer, input)
    if not hasattr(input, "layout"):
        raise TypeError(f"Float8Linear: got {type(input).__name__} as input, expected a tensor")
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


def _noted_call(layer: nn.Module, input: Proxy) -> Proxy:
    """Note what a tracer does where `is_leaf_module` is true, as for the layers of torch.nn."""
    tracer = input.tracer
    path = tracer.path_of_module(layer)  # type: ignore[attr-defined]
    what, do = "no module around it", "trace nn.Sequential(layer)"
    if layer._forward_pre_hooks or layer._forward_hooks:
        what = "forward hooks, which ran while it was traced"
        do = "trace with a Tracer whose is_leaf_module(layer, name) is true for it, or remove them"
    elif path:
        return tracer.create_proxy("call_module", path, (input,), {})
    raise RuntimeError(
        f"Float8Linear: got torch.fx.symbolic_trace of a layer with {what}, expected a part of a "
        f"model without hooks: it becomes one call, nothing inside is traced; {do}"
    )
