"""Measuring: fair times, and the check that comes before them."""

from float8.measure.layer import LinearTimes, measure_linear
from float8.measure.quality import WrongResultError, check, sqnr
from float8.measure.timing import (
    Call,
    Sampler,
    call_sampler,
    kernel_sampler,
    take_turns,
)

__all__ = [
    "Call",
    "LinearTimes",
    "Sampler",
    "WrongResultError",
    "call_sampler",
    "check",
    "kernel_sampler",
    "measure_linear",
    "sqnr",
    "take_turns",
]
