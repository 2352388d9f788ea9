"""Base classes: `Conversion` of one kind of module; `Feature`, a part of the library to add."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from float8.config import Float8LinearConfig

if TYPE_CHECKING:
    from float8.convert.choice import Chooser

Refusal = tuple[str, str]
"""Why a module cannot be converted, as two parts of an error message: got, and what to do."""


@dataclass(frozen=True)
class LayerReport:
    """A row of a `ConversionReport`: a linear layer, and how it runs or why it was skipped."""

    kind: ClassVar[str] = "linear layers"
    fqn: str  # the name in the model, or `(root)`
    in_features: int
    out_features: int
    scaling: str | None  # the casts and settings as text; None if it is not in float8
    skip_reason: str | None  # why it is not in float8; None if it is

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, (out_features, in_features)."""
        return self.out_features, self.in_features


class Conversion:
    """Base class: how one kind of module, such as `nn.Linear`, is converted. See `CONVERSIONS`."""

    has_rules = True  # whether `reason_by_name` and reasons of `modules_to_keep` apply

    def matches(self, mod: nn.Module) -> bool:
        """Return True if `mod` is of this kind; also True after it was converted."""
        raise NotImplementedError

    def parameters(self, mod: nn.Module) -> Sequence[str]:
        """Return names of weights of `mod` that `keep_high_precision(names=...)` accepts for it."""
        return ()

    def stored_by_rows(self, mod: nn.Module) -> Sequence[str]:
        """Return the names of weights of `mod` that are [N, K], or [E, N, K], not transposed."""
        return ["weight"]

    def report(
        self, fqn: str, mod: Any, scaling: str | None, reason: str | None
    ) -> list[LayerReport]:
        """Return report rows of `mod`, called `fqn`; one of `scaling` and `reason` is None."""
        sizes = mod.in_features, mod.out_features
        return [LayerReport(fqn or "(root)", *sizes, scaling, reason)]

    def problem(self, mod: nn.Module, chooser: "Chooser") -> str | None:
        """Return why `mod`, converted or not, cannot run with `chooser.config`, or None."""
        raise NotImplementedError

    def why_slower(self, mod: nn.Module, fqn: str, chooser: "Chooser") -> str | None:
        """Return why float8 does not make `mod` faster, or None; called only without a filter."""
        return None

    def prepare(self, mod: nn.Module, chooser: "Chooser") -> Callable[[], None]:
        """Return a function that converts `mod` in place; `mod` has passed all checks."""
        raise NotImplementedError

    def modules_to_keep(self, chooser: "Chooser") -> dict[nn.Module, str]:
        """Return {module: reason} of modules of the model to skip; called only without a filter."""
        return {}


class Feature:
    """Base class of extensions, such as delayed scaling: hooks around conversions and steps."""

    def check_config(self, config: Float8LinearConfig) -> None:
        """Raise a `ValueError` if this feature's fields of `config` contradict other fields."""

    def sharing_ranks(self, config: Float8LinearConfig) -> int:
        """Return how many ranks share the cast of each weight; 1 if each rank casts all of it."""
        return 1

    def why_not_changed(self, mod: Any) -> Refusal | None:
        """Return a `Refusal` if converted `mod` cannot get another class or config, or None."""
        return None

    def why_not_taken(self, mod: Any, config: Float8LinearConfig) -> Refusal | None:
        """Return a `Refusal` if the weights of `mod` cannot be converted with `config`, or None."""
        return None

    def before_conversion(self, converted: Sequence[nn.Module]) -> None:
        """Undo this feature's changes of `converted` modules before they change class or config."""

    def after_conversion(self, model: nn.Module, config: Float8LinearConfig | None) -> None:
        """Run after modules of `model` got `config`, or their former classes if it is None."""

    def attach(self, model: nn.Module) -> None:
        """Compute what training needs, such as casts of weights; for `attach_to_optimizer`."""

    def before_step(self, model: nn.Module, group: Any) -> None:
        """Sync state over `group` before an optimizer step, or after a step that has a closure."""

    def after_step(self, model: nn.Module) -> None:
        """Update tensors that are computed from weights, such as casts, after an optimizer step."""


CONVERSIONS: list[Conversion] = []
"""All conversions, filled by `float8.wings`. The first that matches a module converts it."""
FEATURES: list[Feature] = []
"""All features, filled by `float8.wings`."""


def conversion_of(mod: nn.Module) -> Conversion | None:
    """Return the first of `CONVERSIONS` that matches `mod`, or None."""
    return next((conversion for conversion in CONVERSIONS if conversion.matches(mod)), None)
