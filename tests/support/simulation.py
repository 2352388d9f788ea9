"""Delayed scaling in plain Python: what the library must agree with, bit for bit."""

import math

import numpy as np

SMALLEST_AMAX = 2.0**-100


class SimulatedHistory:
    """One cast's history and scale over the steps; numbers are Python floats (float64)."""

    def __init__(
        self, history_len: int, scale_fn_name: str, float8_max: float, power_of_2: bool = False
    ) -> None:
        self.history = [0.0] * history_len
        self.scale: float | None = None  # unknown
        self.scale_fn_name = scale_fn_name
        self.float8_max = float8_max
        self.power_of_2 = power_of_2

    def step(self, amax: float) -> None:
        """Push the amax of one optimizer step, most recent first; 0 means nothing was recorded."""
        if amax == 0:
            return
        latest, before = amax if math.isfinite(amax) else 0.0, max(self.history)
        self.history = [latest, *self.history[:-1]]
        if self.scale is None and not 0 < latest < 2 * before:
            return
        peak = max(self.history) if self.scale_fn_name == "max" else self.history[0]
        if peak > 0:
            self.scale = self.scale_of(peak)

    def scale_of(self, amax: float) -> float:
        """The decode scale, rounded to float32."""
        scale = float(np.float32(max(amax, SMALLEST_AMAX) / self.float8_max))
        if self.power_of_2:
            mantissa, exponent = math.frexp(scale)
            scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
        return scale
