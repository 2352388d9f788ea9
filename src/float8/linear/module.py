"""`Float8Linear`: a drop-in `nn.Linear` whose GEMMs run in float8."""

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8.config import ConfigOrRecipe, Float8LinearConfig, as_config
from float8.delayed.state import StatefulLayer
from float8.linear.base import not_copied
from float8.linear.functional import apply_linear
from float8.linear.source import class_of, problem, shallow_copy


class _Config:
    """The configuration as `layer.config`, where its user has nothing of that name."""

    def __get__(self, layer: Any, cls: Any = None) -> Any:
        if layer is None:
            return self
        for registry in (layer._parameters, layer._buffers, layer._modules):
            if "config" in registry:
                return registry["config"]
        return layer._float8_config


class Float8Linear(StatefulLayer, nn.Linear):
    """A linear layer whose GEMMs run in float8: `output = input @ weight.T + bias`.

    The weight [N, K] stays a high-precision `Parameter`. Made from an `nn.Linear` by
    `from_float` or, for a whole model, by `convert_to_float8_training`. Layers with delayed
    scaling carry the buffers `fp8_amax_*`, `fp8_amax_history_*` and `fp8_scale_*`, always float32.
    """

    config: Any = _Config()
    _float8_source_class: ClassVar[type[nn.Module]] = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: ConfigOrRecipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._float8_begin(config)

    @classmethod
    def from_float(
        cls,
        mod: nn.Module,
        config: ConfigOrRecipe | None = None,
        *,
        linear_classes: Collection[type[nn.Linear]] = (),
    ) -> "Float8Linear":
        """Make a `Float8Linear` with the Parameters, hooks and training mode of `mod`.

        `mod` stays unchanged. Hooks, Parameters and buffers that are registered or removed later in
        one layer do not affect the other: `handle.remove()` of a hook of `mod` removes that only.
        `enable_fsdp_float8_all_gather` takes effect in `convert_to_float8_training` only.

        Args:
            mod: the layer; its Parameters are shared, not copied. If its class is a subclass of
                `nn.Linear`, so is that of the new layer. A `Float8Linear` gets new state.
            config: a `Float8LinearConfig`, or the name of a recipe. None means dynamic tensorwise
                scaling.
            linear_classes: subclasses of `nn.Linear` whose own forward may be replaced.

        Raises:
            TypeError: `mod` is not a linear layer, its subclass may compute something else, or its
                dtype cannot be cast to float8.
            ValueError: `config` cannot be honoured for this layer.
        """
        config = as_config(config)
        require_supported(mod, config, linear_classes)
        return cls._float8_made_of(mod, config)

    @classmethod
    def _float8_made_of(
        cls: Any, mod: nn.Module, config: Float8LinearConfig, finish: bool = True
    ) -> "Float8Linear":
        """Make a layer of `mod`, unchecked; `finish`: see `_float8_set_up`."""
        source: Any = mod._float8_source_class if isinstance(mod, Float8Linear) else type(mod)
        new: Float8Linear = shallow_copy(mod, class_of(cls, source))
        for name in not_copied(cls) & vars(new).keys():
            del new.__dict__[name]
        new._float8_set_up(config, finish)
        return new

    def _float8_begin(self, config: ConfigOrRecipe | None) -> None:
        """Set up a new layer whose Parameters are registered; raises as `from_float`."""
        config = as_config(config)
        require_supported(self, config)
        self._float8_set_up(config)

    # ---------------------------------------------------------------- forward

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.T + bias`.

        Args:
            input: [..., K] float32, bfloat16 or float16; converted to autocast's dtype under it.

        Returns:
            [..., N], dtype of the (autocast) input.

        Raises:
            TypeError: the dtype of `input` is not that of the weight, or no supported one; or
                `input` is no dense tensor.
            ValueError: the last dim of `input` is not `in_features`.
            RuntimeError: a sync of delayed scaling is missing; or the call is to be exported to
                ONNX, or within torch.func, or delayed scaling within torch.jit.trace.
        """
        if getattr(input, "layout", None) is not torch.strided or input.is_nested:
            layout = f" of layout {input.layout}" if isinstance(input, Tensor) else ""
            raise TypeError(
                f"Float8Linear: got a {type(input).__name__}{layout} as input, expected a dense "
                f"tensor; call input.to_dense(), or input.values() of a jagged one; to trace by "
                f"torch.fx, use a Tracer whose is_leaf_module is true for Float8Linear"
            )
        plan, weight = self._float8_plan, self.weight  # once: each access may compute it
        if weight.requires_grad and self._float8_never_trains:
            raise RuntimeError(
                "Float8Linear: got requires_grad=True for a weight that is in float8 only, "
                "expected False: it cannot be trained; call convert_to_high_precision(model) first"
            )
        output: Tensor
        if hasattr(weight, "device_mesh"):
            casts = self._float8_shards.casts(self, weight.device_mesh)
            output = self._float8_shards.linear(input, weight, self.bias, plan, casts)
        else:
            casts = self._float8_with_state(plan.casts) if self._float8_stateful else plan.casts
            kept = self._float8_held_of(weight) if self._float8_held else None
            output = apply_linear(input, weight, self.bias, plan, casts, kept)
        for observer in self._float8_observers:
            output = observer(self, casts, input, weight, output)
        return output

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a Parameter; raise a `TypeError` for a tensor subclass of torchao."""
        compiling = torch.compiler.is_compiling()  # as FSDP1 is, which registers views
        if not compiling and type(param).__module__.startswith("torchao."):
            raise TypeError(
                f"Float8Linear: got a {name} of class {type(param).__name__}, expected a tensor in "
                f"high precision; call convert_to_high_precision(model), then quantise"
            )
        super().register_parameter(name, param)

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`, which calls this."""
        raise RuntimeError(
            "Float8Linear: got torch.jit.script, expected a model in high precision; use "
            "torch.compile or torch.export, or call convert_to_high_precision(model) first"
        )

    def extra_repr(self) -> str:
        """Return the class's own `extra_repr`, and the recipe or the scaling of each tensor."""
        words = [super().extra_repr(), self._float8_config.short_str(), *self._float8_words()]
        return ", ".join(filter(None, words))


def unsupported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> str | None:
    """Say why `mod`, converted or not, cannot be in float8 with this configuration, or None.

    `linear_classes`: subclasses of `nn.Linear` whose forward may be replaced.
    """
    error = problem(mod, Float8Linear, config, linear_classes)
    return None if error is None else str(error)


def require_supported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> None:
    """Raise the error that `unsupported` returns for `mod`, if any."""
    if not isinstance(mod, nn.Linear):
        raise TypeError(f"Float8Linear: got a {type(mod).__name__}, expected an nn.Linear")
    if error := problem(mod, Float8Linear, config, linear_classes):
        raise type(error)(f"Float8Linear: {error}")
