"""`Float8Linear`: a drop-in `nn.Linear` whose GEMMs run in float8."""

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8.config import ConfigOrRecipe, Float8LinearConfig, Float8Weights, as_config
from float8.delayed.state import StatefulLayer
from float8.linear.functional import apply_linear
from float8.linear.plan import Casts, plan_linear
from float8.linear.sharded import Shards, linear_of_shards
from float8.linear.source import class_of, problem, shallow_copy
from float8.tensor import Float8Tensor, local_tensor
from float8.tensor.ranks import amax_over
from float8.weights.held import hold


class _Config:
    """The configuration as `layer.config`, where its user has nothing of that name."""

    def __get__(self, layer: Any, cls: Any = None) -> Any:
        if layer is None:
            return self
        for each in (layer._parameters, layer._buffers, layer._modules):
            if "config" in each:
                return each["config"]
        return layer._float8_config


class Float8Linear(StatefulLayer, nn.Linear):
    """A linear layer whose GEMMs run in float8: `output = input @ weight.T + bias`.

    The weight [N, K] stays a high-precision `Parameter`. Made from an `nn.Linear` by
    `from_float` or, for a whole model, by `convert_to_float8_training`. Layers with delayed
    scaling carry the buffers `fp8_amax_*`, `fp8_amax_history_*` and `fp8_scale_*`, always float32.
    """

    config: Any = _Config()
    _float8_source_class: ClassVar[type[nn.Module]] = nn.Linear
    _float8_shards: Shards = Shards()
    """The style of tensor parallel, for its input and output."""

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
        cls: Any, mod: nn.Module, config: Float8LinearConfig, keep_master: bool = False
    ) -> "Float8Linear":
        """Make a layer of `mod`, unchecked; for `keep_master` see `_float8_set_up`."""
        source: Any = mod._float8_source_class if isinstance(mod, Float8Linear) else type(mod)
        new: Float8Linear = shallow_copy(mod, class_of(cls, source))
        for name in new._float8_not_copied & vars(new).keys():
            del new.__dict__[name]
        new._float8_set_up(config, keep_master)
        return new

    def _float8_begin(self, config: ConfigOrRecipe | None) -> None:
        """Set up a new layer whose Parameters are registered; raises as `from_float`."""
        config = as_config(config)
        require_supported(self, config)
        self._float8_set_up(config)

    @torch.inference_mode(False)  # else it could not be saved for a backward
    def _float8_set_up(self, config: Float8LinearConfig, keep_master: bool = False) -> None:
        """Set the configuration of the layer, and reset its state.

        `keep_master`: do not cast a weight under `Float8Weights.ONLY`; the caller casts it later.
        """
        self._float8_drop_state()
        self._float8_config, self._float8_plan = config, plan_linear(config)
        self._float8_held = ()
        self._float8_add_state()
        if self._float8_keeps_no_master and not keep_master:
            self._float8_drop_master()

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
        if self._float8_stateful:
            self._float8_check_synced()
        if weight.requires_grad and self._float8_config.float8_weights is Float8Weights.ONLY:
            raise RuntimeError(
                "Float8Linear: got requires_grad=True for a weight that is in float8 only, "
                "expected False: it cannot be trained; call convert_to_high_precision(model) first"
            )
        output: Tensor
        if hasattr(weight, "device_mesh"):
            casts, shards = self._float8_casts(weight.device_mesh), self._float8_shards
            output = linear_of_shards(input, weight, self.bias, shards, plan, casts)
        else:
            casts = plan.casts
            if self._float8_stateful:
                casts = self._float8_with_state(casts)
            held = None
            if self._float8_held:
                held = self._float8_held_or_recast(weight, lambda: hold(weight, plan.casts.weight))
            output = apply_linear(input, weight, self.bias, plan, casts, held)
        for observer in self._float8_observers:
            output = observer(self, casts, input, weight, output)
        return output

    def _float8_casts(self, mesh: Any) -> Casts:
        """Return the casts of a call whose amaxes are those of all ranks of a `mesh` of one dim."""
        casts = self._float8_plan.casts
        if mesh.size() > 1:
            reduce, reduced = amax_over([mesh.get_group(0)]), {}
            for site in casts._fields:
                reduced[site] = getattr(casts, site)._replace(reduce=reduce)
            casts = casts._replace(**reduced)
        return self._float8_with_state(casts) if self._float8_stateful else casts

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a Parameter and free the held float8 data of the old one; refuse torchao's."""
        compiling = torch.compiler.is_compiling()  # as FSDP1 is, which registers views
        if not compiling and type(param).__module__.startswith("torchao."):
            raise TypeError(
                f"Float8Linear: got a {name} of class {type(param).__name__}, expected a tensor in "
                f"high precision; call convert_to_high_precision(model), then quantise"
            )
        super().register_parameter(name, param)
        self._float8_held = ()

    @property
    def _float8_sums_over_ranks(self) -> bool:
        """Return whether tensor parallel shards K of the weight: ranks then sum outputs."""
        placements: Any = getattr(self.weight, "placements", None)
        return placements is not None and placements[-1].is_shard(1)

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`, which calls this."""
        raise RuntimeError(
            "Float8Linear: got torch.jit.script, expected a model in high precision; use "
            "torch.compile or torch.export, or call convert_to_high_precision(model) first"
        )

    def extra_repr(self) -> str:
        """Return the class's own `extra_repr`, and the recipe or the scaling of each tensor."""
        words = [super().extra_repr(), self._float8_config.short_str()]
        weight = local_tensor(self._parameters.get("weight"))
        if self._float8_keeps_no_master and not isinstance(weight, Float8Tensor):
            words.append("weight in high precision")  # which somebody has set
        elif self._float8_held or self._float8_keeps_no_master:
            words.append(f"weight {self._float8_config.float8_weights.value} in float8")
        gathered = None
        if self._float8_shards.tokens_dim is not None:
            gathered, once = "grad_output", self._float8_plan.grad_output_rows_suffice
        elif self._float8_shards.gathers_input and not self._float8_sums_over_ranks:
            gathered, once = "input", self._float8_plan.input_rows_suffice
        if gathered is not None:
            words.append(f"{gathered} gathered in {'float8' if once else 'high precision'}")
        return ", ".join(filter(None, words))


def unsupported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> str | None:
    """Say why `mod`, converted or not, cannot be in float8 with this configuration, or None.

    `linear_classes`: subclasses of `nn.Linear` whose forward may be replaced.
    """
    found = problem(mod, Float8Linear, config, linear_classes)
    return None if found is None else str(found)


def require_supported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> None:
    """Raise the error that `unsupported` returns for `mod`, if any."""
    if not isinstance(mod, nn.Linear):
        raise TypeError(f"Float8Linear: got a {type(mod).__name__}, expected an nn.Linear")
    if found := problem(mod, Float8Linear, config, linear_classes):
        raise type(found)(f"Float8Linear: {found}")
