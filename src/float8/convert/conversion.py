"""Base classes: `Conversion` of one kind of module; `Feature`, a part of the library to add."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from float8.config import Float8LinearConfig

if TYPE_CHECKING:
    from float8.convert.choice import Chooser

Refusal = tuple[str, str]
"""Why a module cannot change class or config, as parts of an error text: (problem, advice)."""


@dataclass(frozen=True)
class LayerReport:
    """One linear layer in a `ConversionReport`: name, sizes, and its casts or why it has none."""

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
    """Base class of objects, each of which recognizes and converts one kind of module to float8."""

    has_rules = True  # whether `reason_by_name` and reasons of `modules_to_keep` apply

    def matches(self, mod: nn.Module) -> bool:
        """Return whether this object handles `mod`; once converted, another object may do so."""
        raise NotImplementedError

    def parameters(self, mod: nn.Module) -> Sequence[str]:
        """Return names of Parameters of `mod` by which `keep_high_precision` can exclude `mod`."""
        return ()

    def stored_by_rows(self, mod: nn.Module) -> Sequence[str]:
        """Return names of Parameters [..., out, in] of `mod`, which FSDP2 can gather in float8."""
        return ["weight"]

    def report(
        self, fqn: str, mod: Any, scaling: str | None, reason: str | None
    ) -> list[LayerReport]:
        """Return a row per weight of `mod`, named `fqn`: `scaling` (casts as text) or `reason`."""
        sizes = mod.in_features, mod.out_features
        return [LayerReport(fqn or "(root)", *sizes, scaling, reason)]

    def problem(self, mod: nn.Module, chooser: "Chooser") -> str | None:
        """Return why `mod` cannot run in float8 with `chooser.config`, or None if it can."""
        raise NotImplementedError

    def why_slower(self, mod: nn.Module, fqn: str, chooser: "Chooser") -> str | None:
        """Return why float8 would not speed up `mod`, or None. Not called with a user's filter."""
        return None

    def prepare(self, mod: nn.Module, chooser: "Chooser") -> Callable[[], None]:
        """Return a function that converts `mod`, which passed all checks, in place when called."""
        raise NotImplementedError

    def modules_to_keep(self, chooser: "Chooser") -> dict[nn.Module, str]:
        """Return {module of the model: why to skip it}. Not called with a user's filter."""
        return {}


class Feature:
    """Base class of features, as delayed scaling, that conversions and optimizer steps call."""

    def check_config(self, config: Float8LinearConfig) -> None:
        """Raise a `ValueError` if this feature's fields in a new `config` contradict others."""

    def sharing_ranks(self, config: Float8LinearConfig) -> int:
        """Return over how many ranks the cast of a weight is split; 1 if each casts all of it."""
        return 1

    def why_not_changed(self, mod: Any) -> Refusal | None:
        """Return (problem, advice) if `mod`, in float8, must keep its class and config; or None."""
        return None

    def why_not_taken(self, mod: Any, config: Float8LinearConfig) -> Refusal | None:
        """Return (problem, advice), as text, if weights of `mod` cannot take `config`, or None."""
        return None

    def before_conversion(self, converted: Sequence[nn.Module]) -> None:
        """Undo what this feature did to `converted`, float8 modules that will be changed next."""

    def after_conversion(self, model: nn.Module, config: Float8LinearConfig | None) -> None:
        """Adapt `model` after its conversion to `config` or, if that is None, to high precision."""

    def attach(self, model: nn.Module) -> None:
        """Prepare `model` when `attach_to_optimizer` is called, for example by casting weights."""

    def before_step(self, model: nn.Module, group: Any) -> None:
        """Sync state, such as scales, over process group `group`; None: the feature chooses groups.

        `attach_to_optimizer` has it called right before each step, or after a step with a closure.
        """

    def after_step(self, model: nn.Module) -> None:
        """Update tensors that are computed from weights, such as casts, after an optimizer step."""


CONVERSIONS: list[Conversion] = []
"""All conversions, filled by `float8.wings`. The first that matches a module converts it."""
FEATURES: list[Feature] = []
"""All features, filled by `float8.wings`."""


def conversion_of(mod: nn.Module) -> Conversion | None:
    """Return the first registered `Conversion` whose `matches(mod)` is true, or None."""
    return next((conversion for conversion in CONVERSIONS if conversion.matches(mod)), None)
