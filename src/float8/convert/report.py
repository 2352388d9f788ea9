"""Report which layers of a model run in float8, and why others do not."""

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
from float8.convert.choice import CHOICE, Choice, reason_by_name
from float8.convert.conversion import LayerReport, conversion_of
from float8.linear import Float8Module

_NO_MATMUL = (nn.Embedding, nn.EmbeddingBag, _ConvNd, _NormBase, nn.LayerNorm)
"""Classes of modules with weights of two or more dims that are no operands of GEMMs."""

_Row = tuple[str, str, str]  # of `str(report)`: the name and shape of a weight, and how it runs


@dataclass(frozen=True)
class OtherWeight:
    """A weight of a module that cannot be converted: its name and shape, and the module's class."""

    fqn: str
    shape: tuple[int, ...]
    module: str  # the class of the module that has the weight


@dataclass(frozen=True)
class ConversionReport:
    """Lists linear layers, experts and other weights of a model; `str(report)` is a table.

    The table merges rows alike but for a number in the name that counts up, as of equal blocks.
    """

    layers: tuple[LayerReport, ...]
    """Each `nn.Linear`: `fqn`, `in_features`, `out_features`, `scaling`, `skip_reason`."""
    others: tuple[OtherWeight, ...] = ()
    """Weights that no conversion handles, not in float8 unless you call `grouped_linear` on them:
    `fqn`, `shape`, `module` (a class). Without vectors, embeddings, norms, convolutions, biases."""
    chosen_for: tuple[str, ...] = ()
    """Sentences on how layers were chosen, one for each GPU or for none; () if a filter chose."""
    experts: tuple[Any, ...] = ()
    """Weights of experts, converted or not: the fields of `layers`, and `experts`, their number."""

    @property
    def _all_reports(self) -> tuple[LayerReport, ...]:
        return (*self.layers, *self.experts)

    @property
    def share(self) -> float:
        """The fraction of elements of listed weights that belong to float8 layers and experts."""
        in_float8 = sum(math.prod(x.shape) for x in self._all_reports if x.skip_reason is None)
        all_weights = sum(math.prod(x.shape) for x in self._all_reports)
        all_weights += sum(math.prod(x.shape) for x in self.others)
        return in_float8 / all_weights if all_weights else 0.0

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        """The linear layers (not the experts) that run in float8."""
        return tuple(layer for layer in self.layers if layer.skip_reason is None)

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        """The linear layers (not the experts) that this library does not run in float8."""
        return tuple(layer for layer in self.layers if layer.skip_reason is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts: `share`, and all fields of the report."""
        return {"share": self.share, **json.loads(json.dumps(asdict(self), default=int))}

    def __str__(self) -> str:
        in_float8, total = {LayerReport.kind: 0}, {LayerReport.kind: 0}  # numbers by kind
        rows = []
        for layer in self._all_reports:
            in_float8[layer.kind] = in_float8.get(layer.kind, 0) + (layer.skip_reason is None)
            total[layer.kind] = total.get(layer.kind, 0) + 1
            status = layer.scaling or f"skipped: {layer.skip_reason}"
            rows.append((layer.fqn, str([*layer.shape]), status))
        for weight in self.others:
            status = f"not converted: a weight of {weight.module}, which is no nn.Linear"
            if len(weight.shape) > 2:  # may be weights of experts
                status = f"not seen: of {weight.module}; in float8 if that calls grouped_linear"
            rows.append((weight.fqn, str([*weight.shape]), status))
        if rows:
            rows = [("layer", "[out, in]", "what runs how"), *_merged(rows)]
        width = max((len(fqn) for fqn, _, _ in rows), default=0)
        table = (f"  {fqn:<{width}}  {shape:<16} {status}" for fqn, shape, status in rows)
        counts = " and ".join(f"{in_float8[kind]} of {total[kind]} {kind}" for kind in total)
        first_line = f"{counts} run in float8, {percent(self.share)} of all matmul weights"
        return "\n".join([first_line, *self.chosen_for, *table])


def percent(share: float) -> str:
    """Format `share`, 0 to 1, in percent: "0.0%" only if exactly 0, "100.0%" only if exactly 1."""
    if 0 < share < 5e-4:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= share < 1 else f"{share:.1%}"


def _merged(rows: list[_Row]) -> list[_Row]:
    """Merge rows (name, shape, status) that count up in the name: `b.0.a`, `b.1.a` to `b.0-1.a`."""
    # The last number of a name is merged first, so that `b.0.e.0-7` and `b.1.e.0-7` merge, too.
    for position in reversed(range(1 + max(name.count(".") for name, _, _ in rows))):
        merged: list[_Row] = []  # a row for each run of rows that count up at `position`
        runs: dict[_Row, tuple[int, str]] = {}  # next row: index of its run, and first number
        for name, shape, status in rows:
            words = name.split(".")
            number = words[position] if position < len(words) else ""
            if not number.isdecimal():
                merged.append((name, shape, status))
                continue
            index, first = runs.pop((name, shape, status), (len(merged), number))  # or a new run
            words[position] = number if first == number else f"{first}-{number}"
            merged[index : index + 1] = [(".".join(words), shape, status)]  # also appends
            words[position] = str(int(number) + 1)
            runs[".".join(words), shape, status] = index, first
        rows = merged
    return rows


def conversion_report(model: nn.Module) -> ConversionReport:
    """Return which layers of `model` run in float8, which do not, and why.

    Modules are inspected as they are now. Reasons to skip them are those of the last conversion.
    Raises a `TypeError` if `model` is no `nn.Module`.
    """
    require_module(model, "model")
    rows: list[LayerReport] = []
    others: list[OtherWeight] = []
    sentences: list[str | None] = []  # of each module: which GPU it was chosen for
    for fqn, module in model.named_modules():
        choice = Choice(*module.__dict__.get(CHOICE, ()))  # empty if no conversion saw `module`
        sentences.append(choice.chosen_for)
        scaling, reason = None, choice.skip_reason or reason_by_name(fqn)
        if not isinstance(module, Float8Module):
            reason = reason or "not converted, or turned back into high precision"
        elif not module._float8_config.float8_gemms:
            reason = "all casts of its config are DISABLED"
        else:
            scaling, reason = _scaling(module), None
        if (conversion := conversion_of(module)) is not None:
            rows += conversion.report(fqn, module, scaling, reason)
        else:
            others += _other_weights(f"{fqn}." if fqn else "", module)
    layers = tuple(row for row in rows if type(row) is LayerReport)
    experts = tuple(row for row in rows if type(row) is not LayerReport)  # but of a subclass
    chosen_for = tuple(filter(None, dict.fromkeys(sentences)))  # each sentence once
    return ConversionReport(layers, tuple(others), chosen_for, experts)


def _scaling(module: Float8Module) -> str:
    """Return casts and settings of `module` as text: "input dynamic/e4m3, weight ..., emulate"."""
    casts, config = module._float8_plan.casts, module._float8_config
    words = [f"{x.value} {getattr(casts, x.value).config.short_str()}" for x in config.own_casts]
    if config.float8_weights is not Float8Weights.ON_THE_FLY:
        words.append(f"weight {config.float8_weights.value} in float8")
    return ", ".join(words + ["emulate"] * config.emulate)


def _other_weights(prefix: str, module: nn.Module) -> list[OtherWeight]:
    """Return Parameters of `module` itself that GEMMs may read, named `prefix` + attribute name."""
    if isinstance(module, (*_NO_MATMUL, parametrize.ParametrizationList)):
        return []  # Parameters of a ParametrizationList are listed with the module around it
    weights: dict[str, Any] = dict(module._parameters)
    lists: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    for name, parts in lists.items():  # the largest part of a parametrized weight stands for it
        weights[name] = max(parts.parameters(recurse=False), key=nn.Parameter.numel, default=None)
    return [
        OtherWeight(prefix + name, tuple(weight.shape), type(module).__name__)
        for name, weight in weights.items()
        if isinstance(weight, nn.Parameter)  # not None
        and not isinstance(weight, UninitializedParameter)  # it has no shape yet
        and weight.dim() > 1
        and min(weight.shape) > 1  # else it is a vector
        and not any(word in name for word in ("bias", "embed", "token", "pos"))  # not for GEMMs
    ]
