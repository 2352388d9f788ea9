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
            cast = CastConfig(scaling_type=ScalingType.DELAYED)
            return {f"cast_config_{role}": cast for role in ("input", "weight", "grad_output")}
