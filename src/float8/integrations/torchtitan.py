"""torchtitan 0.3: a converter of model configs, and what its optimizers need.

In a function of a `config_registry`, or wherever a `Trainer.Config` is made:

    spec = model_registry("8B", converters=[Float8Converter.Config(recipe_name="delayed")])
    spec.post_optimizer_build_fn = attach_to_optimizers
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter

from float8.config import Float8LinearConfig
from float8.convert.filters import left_out
from float8.linear import Float8Linear
from float8.parallel.fsdp import enable_float8_all_gather
from float8.sync import attach_to_optimizer


class ConvertedLinear(Float8Linear, Linear):
    """A `Float8Linear` that is built as torchtitan builds its own `Linear`."""

    source_class = Linear

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """The config of a `Linear`, and how it is to run."""

        float8: Float8LinearConfig

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.begin(config.float8)
        enable_float8_all_gather(self)

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelize the Parameters alone: all ranks have the same buffers, as plain tensors."""
        if parallel_dims.tp_enabled and parallel_dims.spmd_backend == "spmd_types":
            raise ValueError(
                "Float8Converter: got tensor parallel with spmd_backend='spmd_types', expected "
                "'partial_dtensor': parts of weights that are plain tensors would be cast under "
                "scales of their own; set parallelism.spmd_backend"
            )
        buffers, self._buffers = self._buffers, {}
        try:
            super().parallelize(parallel_dims)
        finally:
            self._buffers = buffers


class Float8Converter(ModelConfigConverter):
    """Makes the linear layers of a model `Float8Linear`, by a recipe of this library.

    Those with a config of their own, and so perhaps with a forward of their own, stay. Tensor
    parallel needs `parallelism.spmd_backend="partial_dtensor"`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """The recipe, and the layers; the other fields as in `Float8LinearConfig`."""

        recipe_name: str = "tensorwise"

        filter_fqns: list[str] = field(default_factory=list)
        """Layers stay in high precision if their names contain one of these; the head always."""

        enable_fsdp_float8_all_gather: bool = False

        emulate: bool = False

    def __init__(self, config: Config) -> None:
        self._filter_fqns = config.filter_fqns
        self._float8 = replace(
            Float8LinearConfig.from_recipe_name(config.recipe_name),
            enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
            emulate=config.emulate,
        )

    def convert(self, model_config: Any) -> Any:
        """Give the linear layers in `model_config` other configs, in place; return it."""
        for fqn, linear, parent, name in list(model_config.traverse(Linear.Config)):
            if left_out(fqn) or any(part in fqn for part in self._filter_fqns):
                continue
            if type(linear) is not Linear.Config:
                continue
            new = ConvertedLinear.Config(
                **{each.name: getattr(linear, each.name) for each in fields(linear)},
                float8=self._float8,
            )
            if isinstance(parent, list):
                parent[name] = new
            else:
                setattr(parent, name, new)
        return model_config


def attach_to_optimizers(optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
    """Attach each part of the model to its optimizers: a `post_optimizer_build_fn`."""
    for part in model_parts:
        own = {id(parameter) for parameter in part.parameters()}
        for optimizer in optimizers:
            if any(id(x) in own for group in optimizer.param_groups for x in group["params"]):
                attach_to_optimizer(part, optimizer)
