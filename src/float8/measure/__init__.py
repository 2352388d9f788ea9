"""Measuring: fair times, and the check that comes before them."""

from float8.measure.layer import LinearTimes, measure_linear
from float8.measure.quality import WrongResultError, check, sqnr
from float8.measure.timing import (
    call_sampler,
    issue_microseconds,
    kernel_sampler,
    steady_sampler,
    take_turns,
)

__all__ = [
    "LinearTimes",
    "WrongResultError",
    "call_sampler",
    "check",
    "issue_microseconds",
    "kernel_sampler",
    "measure_linear",
    "sqnr",
    "steady_sampler",
    "take_turns",
]
