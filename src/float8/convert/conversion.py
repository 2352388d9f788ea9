"""Interfaces of a conversion: `Conversion` for a kind of module, `Feature` for extensions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from float8.config import Float8LinearConfig

if TYPE_CHECKING:
    from float8.convert.choice import Chooser

Refusal = tuple[str, str]
"""Why a module cannot be converted: what was got, and what to do about it."""


@dataclass(frozen=True)
class LayerReport:
    """A linear layer of the model."""

    kind: ClassVar[str] = "linear layers"
    fqn: str  # the name in the model, or `(root)`
    in_features: int
    out_features: int
    scaling: str | None  # of each tensor, and other settings; None if it is not in float8
    skip_reason: str | None  # why it is not in float8; None if it is

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.out_features, self.in_features


class Conversion:
    """A kind of module that can be converted: `nn.Linear`, or what wings add to `CONVERSIONS`."""

    def matches(self, mod: nn.Module) -> bool:
        """Return True if `mod` is of this kind, whether it was converted by now or not."""
        raise NotImplementedError

    def parameters(self, mod: nn.Module) -> Sequence[str]:
        """Return names of weights by which `keep_high_precision(names=...)` finds `mod`, too."""
        return ()

    def stored_by_rows(self, mod: nn.Module) -> Sequence[str]:
        """Return the names of weights that are stored as [N, K], or as [E, N, K] of experts."""
        return ["weight"]

    def report(
        self, fqn: str, mod: Any, scaling: str | None, reason: str | None
    ) -> list[LayerReport]:
        """Return the rows of a report about `mod`; `reason`: why it is not in float8, or None."""
        sizes = mod.in_features, mod.out_features
        return [LayerReport(fqn or "(root)", *sizes, scaling, reason)]

    def why_left_out(self, mod: nn.Module, fqn: str, chooser: "Chooser") -> str | None:
        """Return why `mod` is not converted without a filter, for its name `fqn`, or None."""
        return None

    def problem(self, mod: nn.Module, chooser: "Chooser") -> str | None:
        """Return why `mod`, converted or not, cannot take the configuration, or None."""
        raise NotImplementedError

    def why_slower(self, mod: nn.Module, fqn: str, chooser: "Chooser") -> str | None:
        """Return why `mod` is not worth converting if no filter is given, or None."""
        return None

    def prepare(self, mod: nn.Module, chooser: "Chooser") -> Callable[[], None]:
        """Return a function that converts `mod`, whose checks have passed."""
        raise NotImplementedError

    def modules_to_keep(self, chooser: "Chooser") -> dict[nn.Module, str]:
        """Return modules, with reasons, that the whole model keeps from conversion by default."""
        return {}


class Feature:
    """An extension with hooks around conversions and steps, such as FSDP2's gathers in float8."""

    def check_config(self, config: Float8LinearConfig) -> None:
        """Raise a `ValueError` if fields of this feature do not fit the others of `config`."""

    def sharing_ranks(self, config: Float8LinearConfig) -> int:
        """Return how many ranks cast a share of each weight."""
        return 1

    def why_not_changed(self, mod: Any) -> Refusal | None:
        """Return why a converted `mod` cannot get another class or configuration, or None."""
        return None

    def why_not_taken(self, mod: Any, config: Float8LinearConfig) -> Refusal | None:
        """Return why the weights of `mod` cannot be converted with `config`, or None."""
        return None

    def before_conversion(self, converted: Sequence[nn.Module]) -> None:
        """Undo what this feature did to `converted` modules, before their conversion changes."""

    def after_conversion(self, model: nn.Module, config: Float8LinearConfig | None) -> None:
        """Finish a conversion of `model`; `config` is None if it went back to high precision."""

    def attach(self, model: nn.Module) -> None:
        """Prepare a training of `model`, which was just attached to an optimizer."""

    def before_step(self, model: nn.Module, group: Any) -> None:
        """Sync state over `group` before the optimizer steps, or after a step with a closure."""

    def after_step(self, model: nn.Module) -> None:
        """Update what is computed from the weights, after the optimizer has stepped."""


CONVERSIONS: list[Conversion] = []
"""All kinds of modules, filled by `float8.wings`. The first that matches a module converts it."""
FEATURES: list[Feature] = []
"""All features, filled by `float8.wings`."""


def conversion_of(mod: nn.Module) -> Conversion | None:
    """Return the first of `CONVERSIONS` that matches `mod`, or None."""
    for conversion in CONVERSIONS:
        if conversion.matches(mod):
            return conversion
    return None
