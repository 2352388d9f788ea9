"""Which layers of a model are faster in float8, estimated or measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from float8.config import Float8LinearConfig
from float8.cost import Ceilings, ceilings_of, linear_cost
from float8.measure import measure_linear

ESTIMATED, MEASURED = "estimated", "measured"
DEFAULT_TOKENS = 8192


@dataclass(frozen=True)
class Verdict:
    """What forward and backward of a layer take in bf16 and in float8.

    Attributes:
        bf16_ms: Milliseconds in bf16.
        float8_ms: Milliseconds in float8.
        how: `estimated` or `measured`.
        tokens: Rows of the layer's input.
        device: Name of the device that this holds for.
    """

    bf16_ms: float
    float8_ms: float
    how: str
    tokens: int
    device: str

    @property
    def speedup(self) -> float:
        """bf16 over float8."""
        return self.bf16_ms / self.float8_ms

    @property
    def worthwhile(self) -> bool:
        """Whether float8 is no slower."""
        return self.speedup >= 1

    def __str__(self) -> str:
        return f"{self.how} {self.speedup:.2f}x of bf16 at {self.tokens} tokens on {self.device}"


Judge = Callable[[int, int], Verdict]
"""`judge(in_features, out_features)`."""


@dataclass(frozen=True)
class LayerPlan:
    """All linear layers of one shape that share a fate.

    Attributes:
        in_features: K.
        out_features: N.
        names: Their names in the model.
        verdict: What one of them takes.
        convert: Whether to convert them.
    """

    in_features: int
    out_features: int
    names: tuple[str, ...]
    verdict: Verdict
    convert: bool

    @property
    def bf16_ms(self) -> float:
        """All of them in bf16."""
        return len(self.names) * self.verdict.bf16_ms

    @property
    def planned_ms(self) -> float:
        """All of them as planned."""
        each = self.verdict.float8_ms if self.convert else self.verdict.bf16_ms
        return len(self.names) * each


@dataclass(frozen=True)
class Plan:
    """What to convert of a model, and what that gains."""

    layers: tuple[LayerPlan, ...]

    @property
    def bf16_ms(self) -> float:
        """All linear layers in bf16."""
        return sum(layer.bf16_ms for layer in self.layers)

    @property
    def planned_ms(self) -> float:
        """All linear layers as planned."""
        return sum(layer.planned_ms for layer in self.layers)

    def step_speedup(self, rest_ms: float) -> float:
        """Gain of a whole step.

        Args:
            rest_ms: What else there is in it, which does not change.
        """
        return (self.bf16_ms + rest_ms) / (self.planned_ms + rest_ms)


def estimator(
    tokens: int, config: Float8LinearConfig, ceilings: Ceilings, device_name: str
) -> Judge:
    """A judge that runs nothing: from the stored ceilings of a device."""

    def judge(in_features: int, out_features: int) -> Verdict:
        cost = linear_cost(tokens, in_features, out_features, ceilings, config)
        return Verdict(cost.bf16_ms, cost.float8_ms, ESTIMATED, tokens, device_name)

    return judge


def measurer(tokens: int, config: Float8LinearConfig, device: torch.device) -> Judge:
    """A judge that runs a layer of each shape once on `device`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    @functools.cache
    def judge(in_features: int, out_features: int) -> Verdict:
        # The user's random numbers must not depend on whether something was measured.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            times = measure_linear(tokens, in_features, out_features, device, config)
        return Verdict(times.bf16_ms, times.float8_ms, MEASURED, tokens, name)

    return judge


def plan_conversion(
    model: nn.Module,
    *,
    tokens_per_step: int = DEFAULT_TOKENS,
    config: Float8LinearConfig | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    judge: Judge | None = None,
) -> Plan:
    """Judge every `nn.Linear` of a model without changing it.

    Args:
        model: Any model; on the meta device, too.
        tokens_per_step: Rows of a layer's input: tokens per forward on one device.
        config: How layers would run; None: `Float8LinearConfig()`.
        module_filter_fn: Layers for which it returns False are left in high precision.
        judge: What decides about the others, from `estimator` or `measurer`; None: measured on the
            current GPU.

    Returns:
        The layers grouped by shape, in the order of the model.

    Raises:
        ValueError: There is neither a `judge` nor a GPU.
    """
    config = Float8LinearConfig() if config is None else config
    if judge is None:
        judge = measurer(tokens_per_step, config, current_gpu())
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for fqn, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            wanted = module_filter_fn is None or module_filter_fn(linear, fqn)
            key = (linear.in_features, linear.out_features, wanted)
            groups.setdefault(key, []).append(fqn or "(root)")
    layers = []
    for (in_features, out_features, wanted), names in groups.items():
        verdict = judge(in_features, out_features)
        convert = wanted and verdict.worthwhile
        layers.append(LayerPlan(in_features, out_features, tuple(names), verdict, convert))
    return Plan(tuple(layers))


def current_gpu() -> torch.device:
    """The current CUDA device.

    Raises:
        ValueError: There is none.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "measuring layers needs a CUDA GPU, and there is none here; estimate instead"
        )
    return torch.device("cuda", torch.cuda.current_device())


def known_ceilings(device: torch.device) -> tuple[Ceilings, str] | None:
    """The ceilings and name of the GPU that weights on `device` are for; None if not known.

    Weights on the CPU or the meta device are taken to be on their way to the current GPU.
    """
    if device.type in ("cpu", "meta") and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    ceilings = ceilings_of(device)
    return None if ceilings is None else (ceilings, torch.cuda.get_device_name(device))
