"""Float8 training with torchtitan: a converter of model configs, and a hook for its optimizers.

Where a `Trainer.Config` is made, such as in a function of a `config_registry`, write:

    config.model_spec = model_registry("8B", converters=[Float8Converter.Config()])
    config.model_spec.post_optimizer_build_fn = attach_to_optimizers  # both lines: torchtitan 0.3.0
    config.model = build_model_config("8B", converters=[Float8Converter.Config()])
    config.optim = attached(config.optim)  # both lines with later releases
"""

import functools
import logging
import operator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torchtitan.models.common.linear as titan_linear
import torchtitan.models.common.moe as titan_moe
from torch import Tensor
from torchtitan.models.common.linear import Linear

try:  # after 0.3.0, where transforms will replace converters
    from torchtitan.config.transform import ModelConfigConverter, ModelConfigTransform
except ImportError:
    from torchtitan.protocols.model import ModelConfigConverter

    ModelConfigTransform = object

from float8.config import Float8LinearConfig
from float8.convert.choice import reason_by_name
from float8.experts import convert_experts, grouped_linear, unsupported_experts
from float8.experts.plan import EXPECTED, no_grouped_gemm
from float8.fsdp.weights import enable_float8_all_gather
from float8.linear import Float8Linear
from float8.linear.functional import apply_linear
from float8.step import attach_to_optimizer

logger = logging.getLogger(__name__)
GroupedLinear: Any = getattr(titan_linear, "GroupedLinear", None)  # of experts, after 0.3.0
GroupedExperts: Any = getattr(titan_moe, "GroupedExperts", None)  # in 0.3.0
_LINEARS = {"Linear", "ColumnParallelLinear", "RowParallelLinear"}


class ConvertedLinear(Float8Linear, Linear):
    """torchtitan's `Linear` with float8 GEMMs; configs changed by `Float8Converter` build it."""

    _float8_source_class = Linear

    if hasattr(Linear, "_linear"):  # forwards call it, between collectives of tensor parallel

        def forward(self, input: Tensor) -> Tensor:
            """Run torchtitan's forward; it calls `_linear`, which computes the GEMM in float8."""
            return self._float8_source_class.forward(self, input)  # type: ignore[no-any-return]

        def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self.weight.dim() == 2:  # `weight` and `bias` are those of this layer
                return super().forward(input)
            casts = self._float8_plan.casts  # L layers share [L, N, K]; `weight` is [L * N, K]
            casts = self._float8_with_state(casts) if self._float8_stateful else casts
            output: Tensor = apply_linear(input, weight, bias, self._float8_plan, casts)
            for observer in self._float8_observers:
                output = observer(self, casts, input, weight, output)
            return output

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard Parameters, not buffers, by `parallel_dims`; raise if TP is by spmd_types."""
        backend = getattr(parallel_dims, "spmd_backend", "spmd_types")
        if parallel_dims.tp_enabled and backend == "spmd_types":
            got = "got tensor parallel with spmd_backend='spmd_types', expected 'partial_dtensor'"
            why = "parts of weights would have scales of their own"
            raise ValueError(f"Float8Converter: {got}, which torchtitan 0.3.0 has: {why}")
        buffers, self._buffers = self._buffers, {}
        try:
            (getattr(super(), "_parallelize", None) or super().parallelize)(parallel_dims)
        finally:
            self._buffers = buffers

    _parallelize = parallelize  # its name after 0.3.0


@functools.cache
def _grouped_class(cls: Any) -> Any:
    """Return a subclass of `cls`, a `GroupedLinear` (layer of experts), that runs float8 GEMMs."""

    def _grouped_mm(
        self: Any, *, input_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor
    ) -> Tensor:
        weight = weight_EOI.to(input_RI.dtype)
        return grouped_linear(input_RI, weight, offsets_E, config=self._float8_grouped)

    return type(f"Float8{cls.__name__}", (cls,), {"_grouped_mm": _grouped_mm})


@functools.cache
def converted_config(source: Any) -> Any:
    """Return a subclass of config class `source` that builds in float8, by the field `float8`."""

    @dataclass(kw_only=True, slots=True)
    class Config(source):
        float8: Float8LinearConfig

        def build(self, **kwargs: Any) -> Any:
            """Return the module of `source` in float8; raise if unsupported (experts: in use)."""
            mod = source.build(self, **kwargs)
            if isinstance(mod, Linear):
                mod = ConvertedLinear.from_float(mod, self.float8, linear_classes=[type(mod)])
                if mod.weight.dim() == 2:  # [L, N, K] of L layers is gathered in high precision
                    enable_float8_all_gather(mod)
            elif GroupedLinear is not None:  # then `mod` is one; in 0.3.0 it is a GroupedExperts
                mod.__class__ = _grouped_class(mod.__class__)
                mod._float8_grouped = self.float8  # its `_grouped_mm` reads this
            elif reason := unsupported_experts(mod, self.float8):
                do = "leave it out with filter_fqns"
                raise ValueError(f"Float8Converter: {type(mod).__name__}: {reason}; {do}")
            else:
                convert_experts(mod, self.float8)
            return mod

    return Config


class Float8Converter(ModelConfigConverter, ModelConfigTransform):
    """torchtitan converter that has a model config build linear layers and experts in float8.

    The output head, gates of routers, and layers of other classes than `Linear`, experts,
    `ColumnParallelLinear` and `RowParallelLinear` stay in high precision. Tensor parallel works in
    torchtitan 0.3.0 only, with `spmd_backend="partial_dtensor"`. After 0.3.0, `Config(...).build()`
    is also a transform of model configs. Raises `ValueError` for recipes that `Config` excludes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Options of `Float8Converter`: recipes, layers to exclude, all-gather, emulated GEMMs."""

        recipe_name: str = "tensorwise"
        experts_recipe_name: str | None = None
        """The recipe of experts; None: `recipe_name`. `"delayed"`, which no grouped GEMM supports,
        raises a `ValueError` here; as `recipe_name`, it leaves experts in high precision."""
        filter_fqns: list[str] = field(default_factory=list)
        """Layers and experts whose names contain one of these stay in high precision."""
        enable_fsdp_float8_all_gather: bool = False
        """FSDP2 gathers weights [N, K], no experts, in float8: not MXFP8, "rowwise_with_gw_hp"."""
        emulate: bool = False  # run GEMMs on dequantized data, on any device

    def __init__(self, config: Config) -> None:
        self._filter_fqns, make = config.filter_fqns, Float8LinearConfig.from_recipe_name
        recipe, experts_recipe = config.recipe_name, config.experts_recipe_name
        experts = make(recipe if experts_recipe is None else experts_recipe)
        self._why_experts_stay = no_grouped_gemm(experts)
        if self._why_experts_stay and experts_recipe is not None:
            got = f"got experts_recipe_name={experts_recipe!r}: {self._why_experts_stay}"
            raise ValueError(f"Float8Converter: {got}; expected {EXPECTED}")
        self._experts = None if self._why_experts_stay else replace(experts, emulate=config.emulate)
        gathers: Any = {"enable_fsdp_float8_all_gather": config.enable_fsdp_float8_all_gather}
        self._linear = replace(make(recipe), emulate=config.emulate, **gathers)

    def convert(self, model_config: Any) -> Any:
        """Return `model_config`, changed in place to build linear layers and experts in float8.

        Raises `ValueError` if another converter has quantized layers, or none is left to convert.
        """
        experts = (GroupedLinear or GroupedExperts).Config  # the latter in 0.3.0
        # Each is (fqn, config, parent, name); `parent` has `config` as attribute or element `name`.
        found = [*model_config.traverse(Linear.Config), *model_config.traverse(experts)]
        if any(".quantization" in type(config).__module__ for _, config, *_ in found):
            got = "got a model that another converter quantized, expected one in high precision"
            raise ValueError(f"Float8Converter: {got}; have one of the two alone")
        allowed = [getattr(titan_linear, x).Config for x in _LINEARS if hasattr(titan_linear, x)]
        changes, kept = list[Any](), list[Any]()
        for fqn, config, parent, name in found:
            if hasattr(config, "float8") or any(x in fqn for x in self._filter_fqns):
                continue  # converted before, or excluded
            is_gate = type(parent).__qualname__ == "TokenChoiceTopKRouter.Config"  # in 0.3.0
            if isinstance(config, experts):  # `_experts` is None if no grouped GEMM has the recipe
                (changes if self._experts else kept).append((fqn, config, parent, name))
            elif type(config) in allowed and not (is_gate or reason_by_name(fqn)):
                changes.append((fqn, config, parent, name))
        if kept:
            got = f"got {self._why_experts_stay}: {len(kept)} modules of experts, the first being"
            do = "set experts_recipe_name for them"
            logger.warning(f"Float8Converter: {got} {kept[0][0]}, stay in high precision; {do}")
        if not changes:
            got = f"got {len(found)} linear layers and experts, none of which can be converted"
            raise ValueError(f"Float8Converter: {got}; apply it before LoRA and other transforms")
        for _, old, parent, name in changes:
            float8 = self._experts if isinstance(old, experts) else self._linear
            assign: Any = operator.setitem if isinstance(parent, list) else setattr
            assign(parent, name, _copy_as(converted_config(old.__class__), old, float8=float8))
        return model_config

    def transform(self, model: Any, *, context: Any = None) -> Any:
        """Return the model config `model`, changed by `self.convert`; `context` is not used."""
        return self.convert(model)


def _copy_as(config_class: Any, config: Any, **new_fields: Any) -> Any:
    return config_class(**{x.name: getattr(config, x.name) for x in fields(config)}, **new_fields)


def attach_to_optimizers(optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
    """Register hooks by which steps of `optimizers` update scales and casts in `model_parts`.

    Set this function as `post_optimizer_build_fn` of a `ModelSpec`: torchtitan 0.3.0 then calls it
    with its optimizers and modules; `parallel_dims` is not used. Specs of models with experts have
    such a function already, for load balancing: set one that calls both.
    """
    for mod in model_parts:
        ids = {id(parameter) for parameter in mod.parameters()}
        for optimizer in optimizers:  # those that step a Parameter of this part
            if any(id(x) in ids for group in optimizer.param_groups for x in group["params"]):
                attach_to_optimizer(mod, optimizer)


def attached(optim: Any) -> Any:
    """Return a copy of torchtitan's optimizer config `optim` that adds hooks to what it builds.

    For torchtitan after 0.3.0. Hooks update scales and float8 weights at each step. The copy's
    `build` raises `ValueError` if `enable_cuda_graph` is set: a replayed graph runs no hooks.
    """
    source: Any = type(optim)

    @dataclass(kw_only=True, slots=True)
    class Config(source):
        def build(self, **kwargs: Any) -> Any:
            if self.enable_cuda_graph:
                raise ValueError("attached: got enable_cuda_graph=True, expected False")
            container = source.build(self, **kwargs)
            attach_to_optimizers(container.optimizers, kwargs["model_parts"], None)
            return container

    return _copy_as(Config, optim)
