"""What a conversion did, layer by layer."""

from dataclasses import dataclass

from torch import nn

from float8.arguments import require_module
from float8.config import CastSite
from float8.linear import Float8Linear

_SKIP_REASON = "_float8_skip_reason"


@dataclass(frozen=True)
class LayerReport:
    """One linear layer of the model."""

    fqn: str
    """Its name in the model, or `(root)`."""

    in_features: int
    out_features: int

    scaling: str | None
    """How its tensors are scaled; None: it was not converted."""

    skip_reason: str | None
    """Why it was not converted; None: it was."""


@dataclass(frozen=True)
class ConversionReport:
    """All linear layers of a model, converted or not. `str()` gives a readable table."""

    layers: tuple[LayerReport, ...]

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        """The layers that run in float8."""
        return tuple(layer for layer in self.layers if layer.skip_reason is None)

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        """The layers that stayed in high precision."""
        return tuple(layer for layer in self.layers if layer.skip_reason is not None)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} of {len(self.layers)} linear layers run in float8"]
        width = max((len(layer.fqn) for layer in self.layers), default=0)
        for layer in self.layers:
            shape = f"[{layer.out_features}, {layer.in_features}]"
            fate = layer.scaling or f"skipped: {layer.skip_reason}"
            lines.append(f"  {layer.fqn:<{width}}  {shape:<16} {fate}")
        return "\n".join(lines)


def set_skip_reason(linear: nn.Linear, reason: str | None) -> None:
    """Note on a layer why it was not converted (None: nothing to note)."""
    linear.__dict__.pop(_SKIP_REASON, None)
    if reason is not None:
        linear.__dict__[_SKIP_REASON] = reason


def conversion_report(model: nn.Module) -> ConversionReport:
    """What runs in float8 in `model`, and what does not and why.

    Read off the model as it is now, so it holds after several partial conversions, `deepcopy`
    and wrapping.

    Raises:
        TypeError: `model` is no `nn.Module`.
    """
    require_module(model, "model")
    layers = []
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        scaling = reason = None
        if not isinstance(module, Float8Linear):
            reason = module.__dict__.get(_SKIP_REASON, "not seen by convert_to_float8_training")
        elif not module.config.float8_gemms:
            reason = "all casts of its config are DISABLED"
        else:
            scaling = ", ".join(
                f"{site.value} {module.config.cast_config(site).short_str()}"
                for site in CastSite
                if module.config.owner(site) is site
            )
        layers.append(
            LayerReport(fqn or "(root)", module.in_features, module.out_features, scaling, reason)
        )
    return ConversionReport(tuple(layers))
