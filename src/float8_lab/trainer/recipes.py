"""Recipes with switches, as commands name them."""

from dataclasses import fields, replace
from typing import Any

from float8.config import Float8GemmConfig, Float8LinearConfig, Float8Weights


def recipe_config(recipe: str) -> Float8LinearConfig:
    """Return the configuration of a recipe with switches behind a `+`, as in `delayed+held`.

    Switches are bool fields of `Float8LinearConfig`, `fast_accum` for all three GEMMs, and `held`
    and `only` for `float8_weights`.
    """
    name, *switches = recipe.split("+")
    config = Float8LinearConfig.from_recipe_name(name)
    fast = Float8GemmConfig(use_fast_accum=True)
    known: dict[str, dict[str, Any]] = {
        each.name: {each.name: True}
        for each in fields(config)
        if getattr(config, each.name) is False
    }
    del known["enable_fsdp_float8_all_gather"]  # `bench train` has variants of their own for it
    known["fast_accum"] = {f"gemm_config_{gemm}": fast for gemm in config.float8_gemms}
    kinds = Float8Weights.HELD, Float8Weights.ONLY
    known |= {each.value: {"float8_weights": each} for each in kinds}
    for switch in switches:
        if switch not in known:
            got = f"recipe: got {recipe!r} with the switch {switch!r}"
            raise ValueError(f"{got}, expected one of {', '.join(known)}")
        config = replace(config, **known[switch])
    return config
