"""Which layers to convert: those that a filter takes, or those that float8 makes no slower."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from float8.config import Float8LinearConfig
from float8.linear import unsupported
from float8.measure import measure_linear

DEFAULT_TOKENS = 8192

ModuleFilter = Callable[[nn.Module, str], bool]

SkipReason = Callable[[nn.Linear, str], str | None]
"""Why a layer is left in high precision; None: it is not."""


class Smallest(NamedTuple):
    """Below any of these a layer, forward and backward, takes longer in float8 than in bf16."""

    tokens: int
    features: int
    """K and N alike."""
    product: float
    """tokens * K * N"""


# GPU time of the recipe `tensorwise`, from a model of it (three GEMMs, the bytes that casts move, a
# fixed time per kernel) that was fitted to GEMMs measured on both GPUs and came within 9 % of the
# speedups of measured layers (benchmarks/results/h100-linear-eager.json, which all gain and are
# all above these limits). Over a grid of 9,477 shapes, tokens 512 to 32,768, K and N 256 to 32,768,
# 95 % are judged as that model does; of the others its speedups lie from 0.86 to 1.11.
SMALLEST = {
    "H100": Smallest(tokens=1024, features=640, product=32e9),
    "H200": Smallest(tokens=640, features=512, product=16e9),
}


class Verdict(NamedTuple):
    """What is known of layers of one shape."""

    slower: str | None
    """What says that float8 is slower; None: it is not."""
    bf16_ms: float | None = None
    """Forward and backward, if measured."""
    float8_ms: float | None = None


Judge = Callable[[int, int], Verdict]
"""`judge(in_features, out_features)`."""


def all_linears(mod: nn.Module, fqn: str) -> bool:
    """The `module_filter_fn` that takes every layer, however slow float8 makes it."""
    return True


def by_size(tokens: int, gpu: str) -> Judge:
    """A judge that runs nothing: by what `SMALLEST` says of a GPU."""
    least = SMALLEST[gpu]

    def judge(in_features: int, out_features: int) -> Verdict:
        for name, value, minimum in (
            ("tokens", tokens, least.tokens),
            ("K", in_features, least.features),
            ("N", out_features, least.features),
            ("tokens*K*N", tokens * in_features * out_features, least.product),
        ):
            if value < minimum:
                compared = f"{name}={value:.4g} is less than {minimum:.4g}"
                return Verdict(f"{compared}: float8 is slower there on {gpu}")
        return Verdict(None)

    return judge


def by_measuring(tokens: int, config: Float8LinearConfig, device: torch.device) -> Judge:
    """A judge that runs a layer of each shape once on `device`."""
    on_gpu = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if on_gpu else device.type

    @functools.cache
    def judge(in_features: int, out_features: int) -> Verdict:
        # The user's random numbers must not depend on whether something was measured.
        with torch.random.fork_rng([device] if on_gpu else []):
            times = measure_linear(tokens, in_features, out_features, device, config)
        speedup = times.bf16_ms / times.float8_ms
        measured = f"measured {speedup:.2f}x of bf16 at {tokens} tokens on {where}"
        return Verdict(measured if speedup < 1 else None, *times)

    return judge


def current_gpu() -> torch.device:
    """The current CUDA device.

    Raises:
        ValueError: There is none.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "measuring layers needs a CUDA GPU, and there is none here: leave auto_filter out, or "
            "give plan_conversion a judge such as float8.convert.by_size(8192, 'H100')"
        )
    return torch.device("cuda", torch.cuda.current_device())


def known_gpu(device: torch.device) -> str | None:
    """Which of `SMALLEST` weights on `device` are for; None: none of them.

    Weights on the CPU or the meta device are taken to be on their way to the current GPU.
    """
    if device.type in ("cpu", "meta") and torch.cuda.is_available():
        device = current_gpu()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((gpu for gpu in SMALLEST if gpu in name), None)


def choose_filter(
    module_filter_fn: ModuleFilter | None,
    config: Float8LinearConfig,
    tokens_per_step: int,
    auto_filter: bool,
) -> SkipReason:
    """The filter that the arguments of `convert_to_float8_training` ask for.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the arguments cannot be honoured, alone or together.
    """
    if module_filter_fn is not None and not callable(module_filter_fn):
        raise TypeError(
            f"module_filter_fn: got {type(module_filter_fn).__name__}, expected a function of a "
            f"module and its name that returns a bool, or None"
        )
    if not isinstance(tokens_per_step, int) or isinstance(tokens_per_step, bool):
        raise TypeError(f"tokens_per_step: got {tokens_per_step!r}, expected an int")
    if tokens_per_step < 1:
        raise ValueError(
            f"tokens_per_step: got {tokens_per_step}, expected at least 1: the rows of a layer's "
            f"input, tokens per forward on one device"
        )
    if module_filter_fn is not None:
        if auto_filter:
            raise ValueError(
                "auto_filter: got True and a module_filter_fn, expected one of the two: a given "
                "filter decides alone"
            )
        return lambda mod, fqn: (
            None if module_filter_fn(mod, fqn) else "module_filter_fn returned False"
        )
    here = current_gpu() if auto_filter else None

    @functools.cache
    def judge_for(device: torch.device) -> Judge | None:
        if here is not None:
            return by_measuring(tokens_per_step, config, device if device.type == "cuda" else here)
        gpu = known_gpu(device)
        return None if gpu is None else by_size(tokens_per_step, gpu)

    def skip(linear: nn.Linear, fqn: str) -> str | None:
        # Emulation is for its numerics; what cannot be converted has a better reason than speed.
        if config.emulate or not config.float8_gemms or unsupported(linear, config) is not None:
            return None
        judge = judge_for(linear.weight.device)
        return None if judge is None else judge(linear.in_features, linear.out_features).slower

    return skip
