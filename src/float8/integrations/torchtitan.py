"""torchtitan 0.3: a converter of model configs, and what its optimizers need.

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
from float8.linear import Float8Linear
from float8.linear.plan import EXPECTED, no_grouped_gemm
from float8.parallel.fsdp import enable_float8_all_gather
from float8.step import attach_to_optimizer


class ConvertedLinear(Float8Linear, Linear):
    """A `Float8Linear` that is built as torchtitan builds its own `Linear`."""

    _float8_source_class = Linear

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """The config of a `Linear`, and how it is to run."""

        float8: Float8LinearConfig

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self._float8_begin(config.float8)
        enable_float8_all_gather(self)

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelize the Parameters alone: all ranks have the same buffers, as plain tensors."""
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
    """Return a subclass of this class of configs of experts, that builds them in float8.

    They have no buffers, and all that they multiply are plain tensors: `parallelize` is theirs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(source):
        """The config of some experts, and how they are to run."""

        float8: Float8LinearConfig

        def build(self, **more: Any) -> Any:
            experts = source.build(self, **more)
            if reason := unsupported_experts(experts, self.float8):
                do = "leave it out with filter_fqns"
                raise ValueError(f"Float8Converter: {type(experts).__name__}: {reason}; {do}")
            convert_experts(experts, self.float8)
            return experts

    return Config


class Float8Converter(ModelConfigConverter):
    """Makes the linear layers of a model `Float8Linear` and its experts `Float8Experts`.

    Linear layers with a config of their own, and so perhaps with a forward of their own, stay, and
    so do the gates of routers. Tensor parallel needs `parallelism.spmd_backend="partial_dtensor"`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """The recipe, and which layers; the other fields are those of `Float8LinearConfig`."""

        recipe_name: str = "tensorwise"
        experts_recipe_name: str | None = None
        """The recipe of experts. None: `recipe_name`. No grouped GEMM does `"delayed"`: with
        that experts stay in high precision, which is logged."""
        filter_fqns: list[str] = field(default_factory=list)
        """Layers and experts stay in high precision if their names contain one of these."""
        enable_fsdp_float8_all_gather: bool = False
        """Have FSDP2 gather linear layers in float8; experts are gathered in high precision."""
        emulate: bool = False

    def __init__(self, config: Config) -> None:
        self._filter_fqns, name = config.filter_fqns, config.experts_recipe_name
        recipe = Float8LinearConfig.from_recipe_name
        linear, experts = (recipe(config.recipe_name if x is None else x) for x in (None, name))
        self._no_experts = no_grouped_gemm(experts)
        if self._no_experts and name is not None:
            got = f"got experts_recipe_name={name!r}: {self._no_experts}"
            raise ValueError(f"Float8Converter: {got}; expected {EXPECTED}")
        self._experts = replace(experts, emulate=config.emulate)
        gathers = config.enable_fsdp_float8_all_gather
        self._float8 = replace(
            linear, enable_fsdp_float8_all_gather=gathers, emulate=config.emulate
        )

    def convert(self, model_config: Any) -> Any:
        """Give the linear layers and experts in `model_config` other configs, in place; return it.

        Raises a `ValueError` if a converter of torchtitan's own quantised some of them.
        """
        if has_quantization(model_config):
            got = "got a model that another converter quantised, expected one in high precision"
            raise ValueError(f"Float8Converter: {got}; have one of the two alone")
        for fqn, linear, parent, name in list(model_config.traverse(Linear.Config)):
            stays = left_out(fqn) or isinstance(parent, TokenChoiceTopKRouter.Config)
            if not stays and type(linear) is Linear.Config and not self._filtered(fqn):
                _put(parent, name, linear, ConvertedLinear.Config, self._float8)
        stay = []
        for fqn, experts, parent, name in list(model_config.traverse(GroupedExperts.Config)):
            if self._filtered(fqn) or hasattr(experts, "float8"):
                continue
            if self._no_experts:
                stay.append(fqn)
            else:
                cls: Any = type(experts)
                _put(parent, name, experts, converted_config(cls), self._experts)
        if stay:
            logger.warning(
                f"Float8Converter: got {self._no_experts}: {len(stay)} modules of experts, the "
                f"first being {stay[0]}, stay in high precision; set experts_recipe_name for them"
            )
        return model_config

    def _filtered(self, fqn: str) -> bool:
        return any(name in fqn for name in self._filter_fqns)


def _put(parent: Any, name: Any, config: Any, cls: Any, float8: Float8LinearConfig) -> None:
    """Put a `cls` with the fields of `config` in its place."""
    new = cls(**{each.name: getattr(config, each.name) for each in fields(config)}, float8=float8)
    if isinstance(parent, list):
        parent[name] = new
    else:
        setattr(parent, name, new)


def attach_to_optimizers(optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
    """Attach each part of the model to its optimizers: a `post_optimizer_build_fn`.

    A model with experts has one already, which balances their load: call both in one of your own.
    """
    for mod in model_parts:
        ids = {id(parameter) for parameter in mod.parameters()}
        for optimizer in optimizers:
            if any(id(x) in ids for group in optimizer.param_groups for x in group["params"]):
                attach_to_optimizer(mod, optimizer)
