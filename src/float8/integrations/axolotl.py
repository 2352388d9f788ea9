"""Float8 training with axolotl: `plugins: [float8.integrations.axolotl.Float8Plugin]` in YAML."""

from dataclasses import replace
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from float8.config import Float8LinearConfig
from float8.convert.keep import keep_high_precision
from float8.integrations.transformers import Float8Callback


class Float8Args(BaseModel):
    """Keys of axolotl's YAML for `Float8Plugin`: recipe, modules to exclude, float8 all-gather."""

    float8_recipe: str = "tensorwise"
    float8_high_precision: list[str] = []  # the `names` of `keep_high_precision`
    float8_all_gather: bool = False  # by FSDP2; not for MXFP8, "rowwise_with_gw_hp"


class Float8Plugin(BasePlugin):
    """Plugin, listed in axolotl's YAML, that converts a model, with PEFT or without, to float8."""

    def get_input_args(self) -> str:
        """Return the import path of `Float8Args`, so that axolotl accepts its keys in the YAML."""
        return f"{__name__}.{Float8Args.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return [callback] that converts the model; raise for `cfg.fp8` or an unknown recipe."""
        if cfg.fp8:
            raise ValueError("Float8Plugin: got fp8: true, which converts by torchao; leave it out")
        config = Float8LinearConfig.from_recipe_name(cfg.float8_recipe)
        config = replace(config, enable_fsdp_float8_all_gather=bool(cfg.float8_all_gather))
        stay = keep_high_precision(names=cfg.float8_high_precision or ())
        tokens = cfg.micro_batch_size * cfg.sequence_len
        return [Float8Callback(config, module_filter_fn=stay, tokens_per_step=tokens)]
