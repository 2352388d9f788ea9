"""Report what a conversion did, layer by layer."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from float8.config import Float8Weights, require_module
from float8.convert.choice import KEPT, Choice, left_out
from float8.experts import Float8Experts, kind_of, weights_of
from float8.linear import Float8Linear

_NO_MATMUL = (nn.Embedding, nn.EmbeddingBag, _ConvNd, _NormBase, nn.LayerNorm)
"""Modules whose Parameters of two dims and more are not multiplied as matrices."""

_Row = tuple[str, str, str]
"""A name, a shape and what becomes of it: a line of `str(report)`."""


@dataclass(frozen=True)
class LayerReport:
    """One linear layer of the model."""

    fqn: str
    """Its name in the model, or `(root)`."""
    in_features: int
    out_features: int
    scaling: str | None
    """The scaling of its tensors, and other settings; None: it was not converted."""
    skip_reason: str | None
    """The reason why it was not converted; None: it was."""


@dataclass(frozen=True)
class ExpertsReport(LayerReport):
    """The weights of experts in one Parameter."""

    experts: int
    """The number of weights of this shape, on all ranks."""


@dataclass(frozen=True)
class OtherWeight:
    """A weight of unknown experts, GPT2's `Conv1D`, `nn.MultiheadAttention` and the like."""

    fqn: str
    shape: tuple[int, ...]
    module: str
    """The class that has it."""


@dataclass(frozen=True)
class ConversionReport:
    """All linear layers of a model, converted or not. `str()` gives a readable table.

    Rows whose names differ only in a number, as those of equal blocks, are merged.
    """

    layers: tuple[LayerReport, ...]
    """Each `nn.Linear`: `fqn`, `in_features`, `out_features`, `scaling`, `skip_reason`."""
    others: tuple[OtherWeight, ...] = ()
    """Weights that conversion does not know, in high precision unless `grouped_linear` has them:
    `fqn`, `shape`, `module` (its class). No vectors, embeddings, norms, convolutions, biases."""
    chosen_for: tuple[str, ...] = ()
    """One sentence per GPU, or for a CPU: what chose the layers. Empty with filters."""
    experts: tuple[ExpertsReport, ...] = ()
    """The weights of known experts, converted or not: as `layers`, with `experts`, their number."""

    @property
    def share(self) -> float:
        """The fraction of the elements of all matmul weights that runs in float8, 0 to 1."""
        in_float8 = all_weights = 0
        for x in (*self.layers, *self.experts):
            size = getattr(x, "experts", 1) * x.in_features * x.out_features
            all_weights += size
            in_float8 += size if x.skip_reason is None else 0
        all_weights += sum(math.prod(x.shape) for x in self.others)
        return in_float8 / all_weights if all_weights else 0.0

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        """The layers that run in float8."""
        return tuple(layer for layer in self.layers if layer.skip_reason is None)

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        """The layers that stayed in high precision."""
        return tuple(layer for layer in self.layers if layer.skip_reason is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return `share` and all fields in plain dicts, lists, strings and numbers, as of JSON."""
        plain = json.loads(json.dumps(asdict(self), default=int))  # lists for tuples
        return {"share": self.share, **plain}

    def __str__(self) -> str:
        count = f"{len(self.converted)} of {len(self.layers)} linear layers"
        if self.experts:
            there = sum(each.skip_reason is None for each in self.experts)
            count += f" and {there} of {len(self.experts)} weights of experts"
        rows = []
        for layer in (*self.layers, *self.experts):
            fate = layer.scaling or f"skipped: {layer.skip_reason}"
            experts = f"{layer.experts}, " if isinstance(layer, ExpertsReport) else ""
            rows.append((layer.fqn, f"[{experts}{layer.out_features}, {layer.in_features}]", fate))
        for other in self.others:
            fate = f"not converted: a weight of {other.module}, which is no nn.Linear"
            if len(other.shape) > 2:
                fate = f"not seen: of {other.module}; in float8 if that calls grouped_linear"
            rows.append((other.fqn, str([*other.shape]), fate))
        if rows:
            rows = [("layer", "[out, in]", "what runs how"), *_numbers_joined(rows)]
        width = max((len(fqn) for fqn, _, _ in rows), default=0)
        table = (f"  {fqn:<{width}}  {what:<16} {fate}" for fqn, what, fate in rows)
        head = f"{count} run in float8, {percent(self.share)} of all matmul weights"
        return "\n".join([head, *self.chosen_for, *table])


def percent(share: float) -> str:
    """Write a fraction in percent: 0.0 and 100.0 are said of nothing and of all alone."""
    if 0 < share < 5e-4:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= share < 1 else f"{share:.1%}"


def _numbers_joined(rows: list[_Row]) -> list[_Row]:
    """Return rows that go on from each other, as `b.0.a`, `b.1.a`, `b.2.a`, as one, `b.0-2.a`.

    The last number of a name comes first, so that `b.0.e.0-7` and `b.1.e.0-7` are one, too.
    """
    for at in reversed(range(1 + max(name.count(".") for name, _, _ in rows))):
        joined: list[_Row] = []
        awaited: dict[_Row, tuple[int, str]] = {}  # with the place of its run, and how that begins
        for name, shape, fate in rows:
            words = name.split(".")
            if at >= len(words) or not words[at].isdecimal():
                joined.append((name, shape, fate))
                continue
            number = words[at]
            place, first = awaited.pop((name, shape, fate), (len(joined), number))
            words[at] = number if first == number else f"{first}-{number}"
            joined[place : place + 1] = [(".".join(words), shape, fate)]
            words[at] = str(int(number) + 1)
            awaited[".".join(words), shape, fate] = place, first
        rows = joined
    return rows


def conversion_report(model: nn.Module) -> ConversionReport:
    """Report what runs in float8 in `model`, what does not, and why.

    It inspects the modules as they are now: also after partial conversion, deepcopy and wrapping.
    Raises a `TypeError` if `model` is no `nn.Module`.
    """
    require_module(model, "model")
    layers, others, experts = [], [], []
    chosen_for: dict[str | None, None] = {}  # in order, each once
    for fqn, module in model.named_modules():
        choice = Choice(*module.__dict__.get(KEPT, ()))
        chosen_for[choice.chosen_for] = None
        scaling: str | None = None
        reason: str | None = choice.reason or left_out(fqn)
        if not isinstance(module, Float8Linear | Float8Experts):
            reason = reason or "not converted, or turned back into high precision"
        elif not module._float8_config.float8_gemms:
            reason = "all casts of its config are DISABLED"
        else:
            casts, config = module._float8_plan.casts, module._float8_config
            sites = config.own_casts
            each = [f"{site.value} {getattr(casts, site.value).how.short_str()}" for site in sites]
            if config.float8_weights is not Float8Weights.ON_THE_FLY:
                each.append(f"weight {config.float8_weights.value} in float8")
            scaling, reason = ", ".join(each + ["emulate"] * config.emulate), None
        path = f"{fqn}." if fqn else ""
        if kind_of(module) is not None:
            for name, count, N, K in weights_of(module):
                experts.append(ExpertsReport(path + name, K, N, scaling, reason, count))
        elif isinstance(module, nn.Linear):
            sizes = module.in_features, module.out_features
            layers.append(LayerReport(fqn or "(root)", *sizes, scaling, reason))
        else:
            others += _other_weights(path, module)
    sentences = tuple(filter(None, chosen_for))
    return ConversionReport(tuple(layers), tuple(others), sentences, tuple(experts))


def _other_weights(path: str, module: nn.Module) -> list[OtherWeight]:
    if isinstance(module, _NO_MATMUL) or type(module).__module__ == parametrize.__name__:
        return []
    return [
        OtherWeight(path + name, tuple(weight.shape), type(module).__name__)
        for name, weight in module._parameters.items()
        if isinstance(weight, nn.Parameter)
        and not isinstance(weight, UninitializedParameter)
        and weight.dim() > 1
        and min(weight.shape) > 1
        and not any(word in name for word in ("bias", "embed", "token", "pos"))
    ]
