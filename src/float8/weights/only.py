"""`Float8Weights.ONLY`: frozen weights that have float8 data and no high-precision master."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig, Float8Weights
from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.tensor import Float8Tensor, dequantise, is_dtensor, local_tensor
from float8.tensor.weights import in_float8_only
from float8.tensor.wrapper import PLAIN

if TYPE_CHECKING:
    from float8.linear.plan import LinearPlan


class OnlyWeights(nn.Module):
    """Mixin of float8 modules that keeps frozen weights in float8 only, under `Float8Weights.ONLY`.

    Quantizes them at conversion and on load, moves them between devices, and can dequantize them.
    """

    _float8_config: Float8LinearConfig
    _float8_plan: "LinearPlan"
    _float8_of_this_rank: tuple[str, ...]
    _float8_noun: str
    _float8_never_trains: bool  # whether the configuration has `ONLY`

    def _float8_without_masters(self) -> dict[str, Float8Tensor]:
        """Return {name: weight} of weights in float8 only, no DTensors; {} if not under `ONLY`."""
        if not self._float8_never_trains:
            return {}
        parameters: Any = self._parameters.items()
        return {name: x for name, x in parameters if isinstance(x, Float8Tensor)}

    def _float8_start_state(self) -> None:
        super()._float8_start_state()  # type: ignore[misc]
        self._float8_never_trains = self._float8_config.float8_weights is Float8Weights.ONLY

    @torch.inference_mode(False)
    def _float8_finish(self) -> None:
        """Under `Float8Weights.ONLY`, replace the weights by frozen Parameters in float8."""
        super()._float8_finish()  # type: ignore[misc]
        if self._float8_never_trains:
            for name in self._float8_matrices():  # type: ignore[operator]
                quantized = self._float8_quantize_only(getattr(self, name).detach())
                self._parameters[name] = nn.Parameter(quantized, requires_grad=False)
                self._float8_of_this_rank += (name,)  # each rank loads it, and DDP sends none

    @torch.inference_mode(False)
    def _float8_drop_state(self) -> None:
        """Replace weights in float8 only, unless DTensors, by frozen dequantized Parameters."""
        super()._float8_drop_state()  # type: ignore[misc]
        for name, weight in self._float8_without_masters().items():
            self._parameters[name] = nn.Parameter(dequantise(weight), requires_grad=False)

    def _float8_quantize_only(self, weight: Tensor) -> Float8Tensor:
        return in_float8_only(weight, self._float8_plan.casts.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Hidden from `nn.Module._apply`, which would dequantize them for another dtype.
        weights = {name: moved(x, fn) for name, x in self._float8_without_masters().items()}
        self._parameters.update(dict.fromkeys(weights))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, weight in weights.items():
            self._parameters[name] = nn.Parameter(weight, requires_grad=False)
        return self

    def _float8_words(self) -> list[str]:
        words: list[str] = super()._float8_words()  # type: ignore[misc]
        if not self._float8_never_trains:
            return words
        if not any(isinstance(local_tensor(x), Float8Tensor) for x in self._parameters.values()):
            return ["weight in high precision", *words]  # which the user assigned
        return [f"{self._float8_noun} {Float8Weights.ONLY.value} in float8", *words]

    def _float8_loadable(self, old: Any, values: Any, assign: bool) -> Any:
        """Return a checkpoint's `values` for `old`, quantized if it is in float8 under `ONLY`.

        Only plain tensors of its shape are, rounded to its dtype first unless `assign`.
        """
        if not self._float8_never_trains:
            return super()._float8_loadable(old, values, assign)  # type: ignore[misc]
        # Unchanged: biases, values in float8 already, and a wrong shape, for which torch raises.
        fits = isinstance(old, Float8Tensor) and getattr(values, "shape", None) == old.shape
        if type(values) not in PLAIN or not fits or values.dtype not in HIGH_PRECISION_DTYPES:
            return values
        if not assign:  # round as `copy_` would
            values = values.to(old.dtype)
        return self._float8_quantize_only(values if old.is_meta else values.to(old.device))


def refuse_only(layer: Any, config: Float8LinearConfig) -> ValueError | None:
    """Return an error if `config` has `ONLY`, but the weight is sharded, trained or computed."""
    if config.float8_weights is not Float8Weights.ONLY:
        return None
    if "weight" not in {**layer._parameters, **layer._buffers}:  # frozen ones may be buffers
        got = "got a weight that hooks compute with float8_weights=ONLY, expected a Parameter"
        return ValueError(f"{got}; call prune.remove or the like of torch.nn.utils first")
    groups = layer._float8_shard_groups() if isinstance(layer, OnlyWeights) else ()  # type: ignore[operator]
    is_sharded = is_dtensor(layer.weight) or groups
    if is_sharded or layer.weight.requires_grad:
        state = "that ranks share" if is_sharded else "with requires_grad=True"
        return ValueError(
            f"got a weight {state} with float8_weights=ONLY, expected one that is whole and "
            f"frozen; call weight.requires_grad_(False) first, or convert it with another config"
        )
    return None


def moved(weight: Float8Tensor, fn: Callable[[Tensor], Tensor]) -> Float8Tensor:
    """Return `weight` moved by `fn` of `nn.Module._apply`; a new dtype sets `.dtype`, not bits."""
    template = fn(torch.empty((), dtype=weight.dtype, device=weight.device))

    def move(x: Tensor) -> Tensor:
        bits = torch.uint8 if x.dtype in FLOAT8_MAX else torch.int32
        result = fn(x.view(bits))
        # Some functions change the dtype of integers, too.
        return result.view(x.dtype) if result.dtype == bits else x.to(template.device)

    data, scale = move(weight._data), move(weight._scale)
    return Float8Tensor(data, scale, template.dtype, weight._granularity)
