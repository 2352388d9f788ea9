"""Effects of casts to float8 on the values of a model: underflow, saturation, SQNR in dB.

`numerics_report(model, batch)` shows it for each layer of a user's model.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from float8 import CastConfig, Float8Linear, Float8LinearConfig, Float8Tensor
from float8.config import BASE_SITE, CAST_SITES, GEMM_OPERANDS, ConfigOrRecipe, as_config
from float8.convert.report import percent
from float8.experts import Float8Experts, kind_of, weights_of
from float8.experts.plan import no_grouped_gemm, plan_experts
from float8.linear import Float8Module
from float8.linear.plan import plan_linear
from float8.numerics import (
    as_multiplied,
    device_of,
    measure,
    of_this_rank,
    over_ranks,
    parameter_name,
)
from float8.quantize import Cast, quantize
from float8.scales import dequantised
from float8.tensor import local_tensor

_LAYER_WIDTH = 23  # with it a report has 80 columns


class MeasuredCast(NamedTuple):
    """One cast of a linear layer, which serves one or two of its GEMMs."""

    role: str  # "input", "weight" or "grad_output"
    gemms: tuple[str, ...]  # that read it
    config: CastConfig
    col: bool  # whether scales run along columns
    site: str  # of `Casts`: the one that owns it


def casts_of(config: Float8LinearConfig, grouped: bool = False) -> list[MeasuredCast]:
    """The casts of a layer, or of experts, of this configuration that differ in their values."""
    plan = plan_experts(config) if grouped else plan_linear(config)
    found: dict[tuple[str, bool], MeasuredCast] = {}
    read_by = {site: gemm for gemm, sites in GEMM_OPERANDS.items() for site in sites}
    for site in CAST_SITES:
        if not config.cast_config(site).is_float8:
            continue
        cast_config: CastConfig = getattr(plan.casts, site.value).config
        col = site in BASE_SITE and not cast_config.scaling_granularity.square
        owner = (site if site in config.own_casts else BASE_SITE[site]).value
        same = found.get((owner, col))
        gemms, role = (*(same.gemms if same else ()), read_by[site]), BASE_SITE.get(site, site)
        found[owner, col] = MeasuredCast(role.value, gemms, cast_config, col, owner)
    return list(found.values())


@torch.no_grad()
def measure_cast(x: Tensor, cast: MeasuredCast, bound: Cast | None = None) -> Tensor:
    """Cast x [R, C] as a layer would and compare; `bound`: with a scale source, or ranks.

    Returns:
        [12] float64: what `measure` of float8.numerics counts, then what `compare` returns. All but
        amax may be added up over several tensors.
    """
    bound = Cast(cast.config) if bound is None else bound
    operand = quantize(x, bound, row=not cast.col, col=cast.col)[cast.col]
    values = dequantised(operand, cast.config.scaling_granularity)
    counts, x = measure(x, bound, cast.col), (x.t() if cast.col else x).float()
    return torch.cat([counts, compare(x, values[: x.shape[0], : x.shape[1]])])


def compare(expected: Tensor, found: Tensor) -> Tensor:
    """Compare two tensors [R, C].

    Returns:
        [6] float64: the sums of squares of `expected` and of the errors; then, of rows and of
        columns that are not zero, the sum of errors relative to themselves, at most 1, and how many
        there are. NaN and Inf make the first two so.
    """
    signal = expected.double().square()
    noise = (found.double() - expected).square()
    sums = [signal.sum(), noise.sum()]
    for dim in (1, 0):
        own, errors = signal.sum(dim), noise.sum(dim)
        sums += [torch.where(own > 0, (errors / own).clamp(max=1), 0).sum(), (own > 0).sum()]
    return torch.stack([each.double() for each in sums])


@dataclass(frozen=True)
class LayerCast:
    """Effects of one cast of one layer on its tensor."""

    layer: str
    role: str  # "input", "weight" or "grad_output"
    gemms: tuple[str, ...]  # that read it, of `"output"`, `"grad_input"` and `"grad_weight"`
    amax: float
    underflow: float  # share of the nonzero elements that become zero
    saturation: float  # share of the nonzero elements that are larger than the largest value
    sqnr_db: float  # infinite where nothing changes, NaN where the tensor is not finite
    even_db: float  # of the mean relative error of rows, or of columns, whichever is lower

    @classmethod
    def of(cls, layer: str, cast: MeasuredCast, measured: Sequence[float]) -> "LayerCast":
        """From the numbers that `measure_cast` returns."""
        amax, _, nonzero, vanished, saturated, _, signal, noise, rows, R, columns, C = measured
        count, whole = max(nonzero, 1), decibels(signal, noise)
        even = whole if math.isnan(whole) else min(decibels(R, rows), decibels(C, columns))
        shares = vanished / count, saturated / count
        return cls(layer, cast.role, cast.gemms, amax, *shares, whole, even)


def decibels(signal: float, noise: float) -> float:
    """`10 log10(signal / noise)`; infinite without noise, NaN if one is not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


@contextlib.contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Give modules copies of their buffers; afterwards all attributes are the objects they were."""
    before = {module: dict(module.__dict__) for module in model.modules()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    for module in before:
        own = module._buffers.items()
        module.__dict__["_buffers"] = {k: b if b is None else buffers[b] for k, b in own}
    try:
        yield
    finally:
        for module, attributes in before.items():
            module.__dict__.clear()
            module.__dict__.update(attributes)


@dataclass(frozen=True)
class NumericsReport:
    """Effects of all casts of a model in one step. `str()` gives a table of 80 columns."""

    casts: tuple[LayerCast, ...]  # worst first: tensors that are not finite, then by `even_db`
    left_out: tuple[str, ...]  # layers and experts in high precision, and those that did not run

    def __str__(self) -> str:
        layers = {cast.layer for cast in self.casts}
        width = max([5, *(min(len(layer), _LAYER_WIDTH) for layer in layers)])
        lines = [f"{len(self.casts)} casts of {len(layers)} linear layers, worst first; SQNR in dB"]
        lines += [f"{'layer':<{width}} role        GEMM           amax under- satu-  SQNR  even"]
        lines += [" " * (width + 35) + "flow rated        SQNR"]
        for cast in self.casts:
            layer = cast.layer if len(cast.layer) <= width else "…" + cast.layer[1 - width :]
            gemm = cast.gemms[0] if len(cast.gemms) == 1 else "both"
            under, over = (percent(x) if x else "0" for x in (cast.underflow, cast.saturation))
            numbers = f"{cast.amax:>7.1e} {under:>6} {over:>5} {cast.sqnr_db:>5.1f}"
            numbers += f" {cast.even_db:>5.1f}"
            lines.append(f"{layer:<{width}} {cast.role:<11} {gemm:<11} {numbers}")
        lines += [f"no casts: {', '.join(self.left_out)}"] * bool(self.left_out)
        return "\n".join(lines)


def numerics_report(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    recipe: ConfigOrRecipe | None = None,
) -> NumericsReport:
    """Run one forward and backward of `model` and say what float8 does to what its layers read.

    The model computes as it is, in its mode, and under autocast if that is on. It is left as it
    was, and so is torch's random state. Of layers that run without gradients, as under reentrant
    activation checkpointing, forward alone is measured.

    Args:
        model: with parameters that require gradients. Where ranks share it, under FSDP2 or tensor
            parallel, all of them call this, and get what it is on all of their batches.
        batch: a tensor; a tuple or list of positional arguments; or a dict of keyword arguments.
        loss: takes what the model returns and gives a tensor of one element. None: the model
            returns one, or something with the attribute `loss`, as those of Hugging Face do.
        recipe: measure all linear layers under it, delayed scaling with scales from the data. None:
            each converted layer under its own configuration, with the scales that it has now; in a
            model that has none, all layers under dynamic scaling with one scale per tensor. Experts
            are measured where they are converted, and `recipe` is one that they can have.

    Raises:
        TypeError: `model` is no module, or an argument has another wrong type.
        ValueError: the model holds weights in float8 only, is wrapped in DDP or has no linear
            layers; the loss is not of one element or has no gradient; the recipe is unknown.
    """
    configs = _configs(model, recipe)
    layers = {name: layer for name, layer in model.named_modules() if name in configs}
    differ, keys = dict[nn.Module, list[MeasuredCast]](), dict[tuple[str, int], MeasuredCast]()
    for fqn, layer in layers.items():
        differ[layer] = casts_of(configs[fqn], grouped=isinstance(layer, Float8Experts))
        for name in [fqn, *(_joined(fqn, x.name) for x in weights_of(layer))]:
            keys |= {(name, index): cast for index, cast in enumerate(differ[layer])}
    found: dict[tuple[str, int], list[Tensor]] = {key: [] for key in keys}
    probe = torch.tensor(-0.0, requires_grad=True)  # changes no bits of what it is added to

    def see(
        fqn: str,
        layer: Any,
        casts: Any,
        x: Any,
        weight: Any,
        y: Any,
        offs: Any = None,
        own: str = "",
    ) -> Any:
        name = _joined(fqn, own or (parameter_name(layer, weight) if offs is not None else ""))
        needs = {"grad_input": x.requires_grad, "grad_weight": getattr(weight, "requires_grad", 1)}
        gemms = {"output"} | {gemm for gemm in needs if needs[gemm] and y.requires_grad}
        casts = casts if recipe is None and offs is None else None

        @torch.no_grad()
        def look(role: str, x: Any) -> None:
            if x is None or isinstance(local_tensor(x), Float8Tensor):
                return  # computed at each use, or cast before
            for index, cast in enumerate(differ[layer]):
                needed = [gemm in gemms.intersection(cast.gemms) for gemm in GEMM_OPERANDS]
                if cast.role == role and any(needed):
                    bound = Cast(cast.config) if casts is None else getattr(casts, cast.site)
                    part, bound = of_this_rank(x, bound)
                    for rows in _groups(part, offs):
                        sums = measure_cast(rows, cast, bound if offs is None else None)
                        found[name, index].append(torch.cat([sums, sums.new_tensor(needed)]))

        look("input", as_multiplied(x, weight))
        look("weight", weight)
        if y.requires_grad:
            y = y + probe
            y.register_hook(functools.partial(look, "grad_output"))
        return y

    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices), _put_back(model), contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for fqn, layer in layers.items():
            observer = functools.partial(see, fqn)
            if isinstance(layer, Float8Module):
                layer._float8_observers = (observer,)
                continue

            def after(layer: Any, args: Any, kwargs: Any, y: Any, observer: Any = observer) -> Any:
                weight = layer._parameters.get("weight", vars(layer).get("weight"))
                return observer(layer, None, args[0] if args else kwargs["input"], weight, y)

            handle = layer.register_forward_hook(after, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        with torch.enable_grad():  # no parameter gets a gradient, so none of their hooks run
            torch.autograd.grad(_loss(model, batch, loss), probe, allow_unused=True)
    measured = []
    device = device_of(model)
    none = torch.zeros(1, 15, dtype=torch.float64, device=device)
    calls = [torch.cat([none, *(row[None].to(device) for row in found[key])]) for key in keys]
    rows = torch.stack(
        [torch.cat([x[:, 0].amax(0, True), x[:, 1:].sum(0)]) for x in [none, *calls]]
    )
    table = over_ranks(rows, ["", *keys], 1, None)[1:]
    for ((name, _), cast), row in zip(keys.items(), table, strict=True):
        if row[1]:
            counts = zip(GEMM_OPERANDS, row[12:], strict=True)
            gemms = tuple(gemm for gemm, count in counts if count)
            measured.append(LayerCast.of(name, cast._replace(gemms=gemms), row[:12]))
    measured.sort(key=lambda cast: -math.inf if math.isnan(cast.even_db) else cast.even_db)
    seen = {cast.layer for cast in measured}
    names = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            names.append(name)
        elif kind_of(layer) is not None and name not in seen:
            names += [_joined(name, weight.name) for weight in weights_of(layer)]
    return NumericsReport(tuple(measured), tuple(name for name in names if name not in seen))


def _groups(x: Tensor, offs: Tensor | None) -> Iterable[Tensor]:
    """What has scales of its own: a tensor [R, C], or that of each expert."""
    if offs is None:
        return [x.reshape(-1, x.shape[-1])] if x.numel() else []
    if x.dim() == 3:
        return x
    return [x[a:b] for a, b in itertools.pairwise([0, *offs.tolist()]) if a < b]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _configs(model: nn.Module, recipe: ConfigOrRecipe | None) -> dict[str, Float8LinearConfig]:
    """Under what each layer is measured."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"numerics_report: got model {kind}, expected an nn.Module")
    if isinstance(model, DistributedDataParallel):
        raise _wrong(f"a {kind}, which counts its backwards", "the model in it; pass model.module")
    for name, p in model.named_parameters():
        if isinstance(local_tensor(p), Float8Tensor):
            do = "pass the model before it is in float8, or a copy"
            raise _wrong(f"{name} as a Float8Tensor", f"high precision; {do}")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    experts = {name: m for name, m in model.named_modules() if isinstance(m, Float8Experts)}
    if not linears and not experts:
        raise _wrong(f"a {kind} without linear layers", "at least one nn.Linear")
    own = {name: m.config for name, m in linears.items() if isinstance(m, Float8Linear)}
    own |= {name: m._float8_config for name, m in experts.items()}
    if recipe is None:
        return own or dict.fromkeys(linears, Float8LinearConfig())
    config = as_config(recipe)
    layers = [*linears, *experts] if no_grouped_gemm(config) is None else [*linears]
    return dict.fromkeys(layers, config)


def _loss(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    value = getattr(output, "loss", output) if loss is None else loss(output)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        need = "a tensor of one element; pass loss=, a function of what the model returns"
        raise _wrong(f"a loss of {got}", need)
    if not value.requires_grad:
        need = "one: some parameters must require gradients, and inference mode must be off"
        raise _wrong("a loss without a gradient", need)
    return value


def _wrong(got: str, expected: str) -> ValueError:
    return ValueError(f"numerics_report: got {got}, expected {expected}")
