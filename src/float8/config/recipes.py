"""Named configurations."""

import enum
from typing import Any

from float8.config.casting import CastConfig, ScalingType


class Float8LinearRecipeName(enum.Enum):
    """Names that `Float8LinearConfig.from_recipe_name` knows."""

    TENSORWISE = "tensorwise"
    """Dynamic scaling, one scale per tensor."""

    DELAYED = "delayed"
    """Delayed scaling, one scale per tensor; sync once per step, see `attach_to_optimizer`."""

    SPECULATIVE = "speculative"
    """As delayed, one scale per tensor, but nothing saturates; the same sync."""


def recipe_fields(recipe_name: Float8LinearRecipeName | str) -> dict[str, Any]:
    """The fields of `Float8LinearConfig` that a recipe sets.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    try:
        recipe = Float8LinearRecipeName(recipe_name)
    except ValueError:
        known = ", ".join(f"'{recipe.value}'" for recipe in Float8LinearRecipeName)
        raise ValueError(f"recipe: got {recipe_name!r}, expected one of {known}") from None
    match recipe:
        case Float8LinearRecipeName.TENSORWISE:
            return {}
        case Float8LinearRecipeName.DELAYED:
            return _all_casts(ScalingType.DELAYED)
        case Float8LinearRecipeName.SPECULATIVE:
            return _all_casts(ScalingType.SPECULATIVE)


def _all_casts(scaling_type: ScalingType) -> dict[str, Any]:
    cast = CastConfig(scaling_type=scaling_type)
    return {f"cast_config_{role}": cast for role in ("input", "weight", "grad_output")}
