"""Recipes with switches, and a user's own configurations, as commands name them."""

import sys
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from float8.config import Float8GemmConfig, Float8LinearConfig, Float8Weights
from float8_lab.errors import ConfigError


def imported(option: str, name: str, what: str) -> Any:
    """Import `"module:name"` as in the folder here, which is `what`; else raise a `ConfigError`."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        folder, expected = Path(module).parent, f"{Path(module).stem}:{attribute or 'NAME'}"
        there = "" if folder == Path() else f", called in the folder {folder}"
        raise ConfigError(f"{option}: got {name!r}, expected {expected}, without .py{there}")
    if not module or not attribute:
        raise ConfigError(f"{option}: got {name!r}, expected module:name of {what}")
    if (here := str(Path.cwd())) not in sys.path:  # the folder of a script is there, not ours
        sys.path.insert(0, here)
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else module
        inside = f"{module}.".startswith(f"{missing}.")
        do = "call it in the folder of the module"
        do = do if inside else f"install {missing}, which it imports"
        got = f"{option}: {name!r} cannot be imported in {here}"
        raise ConfigError(f"{got}: {error}; {do}") from error


def recipe_config(recipe: str) -> Float8LinearConfig:
    """Return the configuration of a recipe with switches behind a `+`, as in `delayed+held`.

    `module:name` is a `Float8LinearConfig` of the user's own, or a function that returns one.
    Switches are bool fields of `Float8LinearConfig`, `fast_accum` for all three GEMMs, and `held`
    and `only` for `float8_weights`. Raises a `ValueError` for one that is not known, is on already,
    or contradicts another.
    """
    name, *switches = recipe.split("+")
    if ":" in name:
        config = imported("recipe", name, what := "a Float8LinearConfig, or a function of one")
        config = config() if callable(config) else config
        if not isinstance(config, Float8LinearConfig):
            raise ConfigError(f"recipe: {name!r} is a {type(config).__name__}, expected {what}")
    else:
        config = Float8LinearConfig.from_recipe_name(name)
    fast = Float8GemmConfig(use_fast_accum=True)
    for switch in switches:
        off = [each.name for each in fields(config) if getattr(config, each.name) is False]
        valid: dict[str, dict[str, Any]] = {name: {name: True} for name in off}
        valid.pop("enable_fsdp_float8_all_gather", None)  # `bench train` sets it on several ranks
        gemms = [f"gemm_config_{gemm}" for gemm in config.float8_gemms]
        if any(getattr(config, gemm) != fast for gemm in gemms):
            valid["fast_accum"] = dict.fromkeys(gemms, fast)
        if config.float8_weights is Float8Weights.ON_THE_FLY:
            kinds = Float8Weights.HELD, Float8Weights.ONLY
            valid |= {each.value: {"float8_weights": each} for each in kinds}
        if switch not in valid:
            got = f"recipe: got {recipe!r} with the switch {switch!r}"
            raise ValueError(f"{got}, expected one of {', '.join(valid)}; no other can be on here")
        config = replace(config, **valid[switch])
    return config
