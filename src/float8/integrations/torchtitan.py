"""Float8 training with torchtitan 0.3: a converter of model configs, and an optimizer hook.

In a function of a `config_registry`, or wherever a `Trainer.Config` is made:

    spec = model_registry("8B", converters=[Float8Converter.Config(recipe_name="delayed")])
    spec.post_optimizer_build_fn = attach_to_optimizers
"""

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.tools.logging import logger

from float8.config import Float8LinearConfig
from float8.convert.choice import left_out
from float8.experts import convert_experts, unsupported_experts
from float8.experts.plan import EXPECTED, no_grouped_gemm
from float8.fsdp.weights import enable_float8_all_gather
from float8.linear import Float8Linear
from float8.step import attach_to_optimizer


class ConvertedLinear(Float8Linear, Linear):
    """A `Float8Linear` that torchtitan builds from a config, as its own `Linear`."""

    _float8_source_class = Linear

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """The config of a `Linear` with its float8 configuration."""

        float8: Float8LinearConfig

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self._float8_begin(config.float8)
        enable_float8_all_gather(self)

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelize the Parameters; buffers stay plain tensors, the same on all ranks."""
        if parallel_dims.tp_enabled and parallel_dims.spmd_backend == "spmd_types":
            raise ValueError(
                "Float8Converter: got tensor parallel with spmd_backend='spmd_types', expected "
                "'partial_dtensor': parts of weights would have scales of their own"
            )
        buffers, self._buffers = self._buffers, {}
        try:
            super().parallelize(parallel_dims)
        finally:
            self._buffers = buffers


@functools.cache
def converted_config(source: Any) -> Any:
    """Return a subclass of `source`, a config class of experts, that builds them in float8.

    Their own `parallelize` is right: they have no buffers, and multiply plain tensors.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(source):
        """The config of experts with their float8 configuration."""

        float8: Float8LinearConfig

        def build(self, **kwargs: Any) -> Any:
            """Build the experts and convert them; raise `ValueError` if they cannot be."""
            experts = source.build(self, **kwargs)
            if reason := unsupported_experts(experts, self.float8):
                do = "leave it out with filter_fqns"
                raise ValueError(f"Float8Converter: {type(experts).__name__}: {reason}; {do}")
            convert_experts(experts, self.float8)
            return experts

    return Config


class Float8Converter(ModelConfigConverter):
    """Converts the linear layers of a model config to `Float8Linear`, experts to `Float8Experts`.

    Subclasses of torchtitan's `Linear.Config`, which may have another forward, and the gates of
    routers stay. Tensor parallel needs `parallelism.spmd_backend="partial_dtensor"`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Recipes and filters; the other fields are those of `Float8LinearConfig`."""

        recipe_name: str = "tensorwise"
        experts_recipe_name: str | None = None
        """The recipe of experts; None: `recipe_name`. Under `"delayed"`, which grouped GEMMs do not
        support, experts stay in high precision, with a warning in the log."""
        filter_fqns: list[str] = field(default_factory=list)
        """Layers and experts whose names contain one of these stay in high precision."""
        enable_fsdp_float8_all_gather: bool = False
        """Have FSDP2 all-gather linear layers in float8; experts are gathered in high precision."""
        emulate: bool = False

    def __init__(self, config: Config) -> None:
        self._filter_fqns, make = config.filter_fqns, Float8LinearConfig.from_recipe_name
        recipe, experts_recipe = config.recipe_name, config.experts_recipe_name
        experts = make(recipe if experts_recipe is None else experts_recipe)
        self._why_no_experts = no_grouped_gemm(experts)
        if self._why_no_experts and experts_recipe is not None:
            got = f"got experts_recipe_name={experts_recipe!r}: {self._why_no_experts}"
            raise ValueError(f"Float8Converter: {got}; expected {EXPECTED}")
        self._experts = replace(experts, emulate=config.emulate)
        gathers: Any = {"enable_fsdp_float8_all_gather": config.enable_fsdp_float8_all_gather}
        self._linear = replace(make(recipe), emulate=config.emulate, **gathers)

    def convert(self, model_config: Any) -> Any:
        """Replace configs of linear layers and experts in `model_config`, in place, and return it.

        Raises `ValueError` if a converter of torchtitan has quantized some of them.
        """
        if has_quantization(model_config):
            got = "got a model that another converter quantized, expected one in high precision"
            raise ValueError(f"Float8Converter: {got}; have one of the two alone")
        for fqn, linear, parent, name in list(model_config.traverse(Linear.Config)):
            stays = left_out(fqn) or isinstance(parent, TokenChoiceTopKRouter.Config)
            if not stays and type(linear) is Linear.Config and not self._filtered(fqn):
                _replace(parent, name, linear, ConvertedLinear.Config, self._linear)
        stay = []
        for fqn, experts, parent, name in list(model_config.traverse(GroupedExperts.Config)):
            if self._filtered(fqn) or hasattr(experts, "float8"):
                continue
            if self._why_no_experts:
                stay.append(fqn)
            else:
                cls: Any = type(experts)
                _replace(parent, name, experts, converted_config(cls), self._experts)
        if stay:
            logger.warning(
                f"Float8Converter: got {self._why_no_experts}: {len(stay)} modules of experts, the "
                f"first being {stay[0]}, stay in high precision; set experts_recipe_name for them"
            )
        return model_config

    def _filtered(self, fqn: str) -> bool:
        return any(name in fqn for name in self._filter_fqns)


def _replace(parent: Any, name: Any, config: Any, cls: Any, float8: Float8LinearConfig) -> None:
    """Replace `config`, the item or attribute `name` of `parent`, by a `cls` with its fields."""
    new = cls(**{x.name: getattr(config, x.name) for x in fields(config)}, float8=float8)
    if isinstance(parent, list):
        parent[name] = new
    else:
        setattr(parent, name, new)


def attach_to_optimizers(optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
    """Attach each part of the model to its optimizers; use it as `post_optimizer_build_fn`.

    Models with experts have such a function, which balances their load: set one that calls both.
    """
    for mod in model_parts:
        ids = {id(parameter) for parameter in mod.parameters()}
        for optimizer in optimizers:
            if any(id(x) in ids for group in optimizer.param_groups for x in group["params"]):
                attach_to_optimizer(mod, optimizer)
