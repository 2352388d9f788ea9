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
    """Descriptor: returns a layer's tensor or module named `config`, else its float8 settings."""

    def __get__(self, layer: Any, cls: Any = None) -> Any:
        if layer is None:
            return self
        for registry in (layer._parameters, layer._buffers, layer._modules):
            if "config" in registry:
                return registry["config"]
        return layer._float8_config


class Float8Linear(StatefulLayer, nn.Linear):
    """A linear layer whose GEMMs run in float8: `output = input @ weight.T + bias`.

    Takes the arguments of `nn.Linear`, and a `config` as `from_float`, which converts one layer;
    `convert_to_float8_training` converts a model. The weight [N, K] is in high precision unless
    under `Float8Weights.ONLY`. Delayed scaling adds buffers `fp8_*`, which always stay float32.
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
        one layer do not affect the other: handles from before remove a hook from `mod` only.
        `enable_fsdp_float8_all_gather` takes effect in `convert_to_float8_training` only.

        Args:
            mod: the layer to convert. The new layer shares its Parameters except those in float8
                only, not its state of delayed scaling, and is an instance of its class, too.
            config: a `Float8LinearConfig`, or the name of a recipe. None means dynamic tensorwise
                scaling.
            linear_classes: subclasses of `nn.Linear` that override forward, but compute the same,
                so that the forward of `Float8Linear` may replace theirs.

        Raises:
            TypeError: `mod` is no `nn.Linear`, may compute something else, or `fully_shard` has it;
                its weight is not float32, bfloat16 or float16; or `config` is of a wrong type.
            ValueError: no recipe has that name, or `mod` cannot have `config`; the text says why.
        """
        config = as_config(config)
        require_supported(mod, config, linear_classes)
        return cls._float8_made_of(mod, config)

    @classmethod
    def _float8_made_of(
        cls: Any, mod: nn.Module, config: Float8LinearConfig, finish: bool = True
    ) -> "Float8Linear":
        """Return a float8 layer with the attributes of `mod`, which is not checked or changed.

        If not `finish`, a later `_float8_finish()` must quantize weights of `Float8Weights.ONLY`.
        """
        source: Any = mod._float8_source_class if isinstance(mod, Float8Linear) else type(mod)
        new: Float8Linear = shallow_copy(mod, class_of(cls, source))
        for name in not_copied(cls) & vars(new).keys():
            del new.__dict__[name]
        new._float8_set_up(config, finish)
        return new

    def _float8_begin(self, config: ConfigOrRecipe | None) -> None:
        """Apply `config` (None: dynamic tensorwise) to a new layer; raise if it is unsupported."""
        config = as_config(config)
        require_supported(self, config)
        self._float8_set_up(config)

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.T + bias`.

        Args:
            input: [..., K] float32, bfloat16 or float16; autocast converts all but `Float8Tensor`s.

        Returns:
            [..., N], in the dtype of `input`, or of autocast if that converts it.

        Raises:
            TypeError: dtypes of `input` and weight differ without autocast or are not supported;
                `input` is not dense; or only one of `input` and weight is a DTensor.
            ValueError: the shape, placement or float8 cast of `input` does not match the layer.
            RuntimeError: a missing sync of delayed scaling was detected; a weight that exists only
                in float8 requires grad; the device lacks a float8 GEMM; or the call is in ONNX
                export, torch.func or, with gradients of delayed scaling, torch.jit.trace.
        """
        if getattr(input, "layout", None) is not torch.strided or input.is_nested:  # or no Tensor
            layout = f" of layout {input.layout}" if isinstance(input, Tensor) else ""
            raise TypeError(
                f"Float8Linear: got a {type(input).__name__}{layout} as input, expected a dense "
                f"tensor; call input.to_dense(), or input.values() of a jagged one; to trace by "
                f"torch.fx, use a Tracer whose is_leaf_module is true for Float8Linear"
            )
        plan, weight = self._float8_plan, self.weight  # read once: a property may compute it
        if weight.requires_grad and self._float8_never_trains:
            raise RuntimeError(
                "Float8Linear: got requires_grad=True for a weight that is in float8 only, "
                "expected False: it cannot be trained; call convert_to_high_precision(model) first"
            )
        if hasattr(weight, "device_mesh"):  # a DTensor
            casts = self._float8_shards.casts(self, weight.device_mesh)
            output: Tensor = self._float8_shards.linear(input, weight, self.bias, plan, casts)
        else:
            casts = self._float8_with_state(plan.casts) if self._float8_stateful else plan.casts
            held_weight = self._float8_held_of(weight) if self._float8_held else None
            output = apply_linear(input, weight, self.bias, plan, casts, held_weight)
        for observer in self._float8_observers:
            output = observer(self, casts, input, weight, output)
        return output

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a Parameter; in eager mode, raise a `TypeError` for a class of torchao."""
        compiling = torch.compiler.is_compiling()  # no graph breaks: FSDP1 registers views
        if not compiling and type(param).__module__.startswith("torchao."):
            raise TypeError(
                f"Float8Linear: got a {name} of class {type(param).__name__}, expected a tensor in "
                f"high precision; call convert_to_high_precision(model), then quantise"
            )
        super().register_parameter(name, param)

    def __prepare_scriptable__(self) -> None:
        """Raise a `RuntimeError`: `torch.jit.script`, which calls this, is not supported."""
        raise RuntimeError(
            "Float8Linear: got torch.jit.script, expected a model in high precision; use "
            "torch.compile or torch.export, or call convert_to_high_precision(model) first"
        )

    def extra_repr(self) -> str:
        """Return the text of the original class, the recipe or casts, and how weights are kept."""
        words = [super().extra_repr(), self._float8_config.short_str(), *self._float8_words()]
        return ", ".join(filter(None, words))


def unsupported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> str | None:
    """Return why `mod`, an `nn.Linear`, cannot run in float8 with `config`, or None if it can.

    `linear_classes`: subclasses of `nn.Linear` that override its forward, but compute the same.
    """
    error = problem(mod, Float8Linear, config, linear_classes)
    return None if error is None else str(error)


def require_supported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> None:
    """Raise if `mod` cannot run with `config`; `linear_classes` compute the same as `nn.Linear`."""
    if not isinstance(mod, nn.Linear):
        raise TypeError(f"Float8Linear: got a {type(mod).__name__}, expected an nn.Linear")
    if error := problem(mod, Float8Linear, config, linear_classes):
        raise type(error)(f"Float8Linear: {error}")
