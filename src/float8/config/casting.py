"""Configuration of one cast: scaling, granularity and format."""

import enum
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch

from float8.formats import E4M3, FLOAT8_MAX, SHORT_NAME


def of_torchao(value: object) -> str:
    """Return the end of an error about an object of torchao or float8_experimental; else ""."""
    library = type(value).__module__.partition(".")[0]
    module = {"torchao": "torchao.float8", "float8_experimental": "float8_experimental.config"}
    if library not in module:
        return ""
    name = type(value).__name__
    return (
        f"; this one is of {library}: change `from {module[library]} import {name}` to `from "
        f"float8 import {name}`"
    )


def require_types(config: Any) -> None:
    """Raise a `TypeError` if a field of a dataclass is not of the type that it is declared with."""
    for field in fields(config):
        value, kinds = getattr(config, field.name), get_args(field.type) or (field.type,)
        if not isinstance(value, kinds):
            kind, example = kinds[0], ""
            if issubclass(kind, enum.Enum):
                example = f", for example {next(iter(kind))}"
            raise TypeError(
                f"{field.name}: got {value!r}, expected a {kind.__name__}{example}"
                f"{of_torchao(value)}"
            )


class ScalingType(enum.Enum):
    """The source of the scale of a cast."""

    DYNAMIC = "dynamic"
    """From this tensor's own amax."""

    DELAYED = "delayed"
    """From the history of amaxes of the last steps; needs a sync once per optimizer step."""

    DISABLED = "disabled"
    """No cast: the tensor stays in high precision."""


class Granularity(enum.Enum):
    """The extent of one scale, as a block of so many rows and columns of row data.

    All that differs between granularities follows from the sides of the block. Rows run along the
    dim that a GEMM contracts; column data are row data of the transposed tensor.
    """

    height: int | None
    """The rows that one scale covers; None: all."""
    width: int | None
    """The elements that it covers along the contraction dim; None: all."""
    one_scale: bool
    """Whether one scale covers the whole tensor."""
    by_rows: bool
    """Whether each whole row has a scale."""
    by_blocks: bool
    """Whether scales cover parts of rows."""
    square: bool
    """Whether the transposed copy has the same scales, so that its bytes are a transpose."""

    def __new__(
        cls, value: str, height: int | None = None, width: int | None = None
    ) -> "Granularity":
        """Make a member, whose value is a string; the others follow from the block."""
        self = object.__new__(cls)
        self._value_ = value
        self.height = height
        self.width = width
        self.one_scale = height is None
        self.by_rows = height == 1 and width is None
        self.by_blocks = width is not None
        self.square = height == width
        return self

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of data [..., R, C]; of symbolic sizes without a guard.

        `()` for one scale, [..., R, 1] by rows, [R, ceil(C / width)] by parts of a row. By squares
        [ceil(R / height), ceil(C / width)] with the columns padded to 4, as cuBLASLt wants.
        """
        if self.height is None:
            return ()
        if self.width is None:
            return (*shape[:-1], 1)
        # Not -(-n // width): torch 2.11 fails on negative symbols.
        columns = (shape[-1] + self.width - 1) // self.width
        if self.height == 1:
            return (*shape[:-1], columns)
        return ((shape[0] + self.height - 1) // self.height, (columns + 3) // 4 * 4)


class ScalingGranularity(Granularity):
    """The granularities that a `CastConfig` takes."""

    TENSORWISE = "tensorwise", None, None
    """The whole tensor."""

    AXISWISE = "axiswise", 1, None
    """A run along the dim that a GEMM contracts: a row of row data, a column of column data."""

    BLOCK_1x128 = "block_1x128", 1, 128
    """128 elements along the dim that a GEMM contracts (DeepSeek-V3, arXiv 2412.19437, 3.3)."""

    BLOCK_128x128 = "block_128x128", 128, 128
    """A square of 128 rows and 128 columns, the same for both layouts."""


@dataclass(frozen=True)
class CastConfig:
    """The cast of one tensor to float8.

    Args:
        scaling_type: where the scale comes from.
        scaling_granularity: what one scale covers. Scales finer than `TENSORWISE` are dynamic.
        target_dtype: `torch.float8_e4m3fn`, `torch.float8_e5m2`, or None for the default: e5m2
            for a grad_output with one scale, else e4m3. Where nothing is cast it becomes None.
        power_of_2: round the scale up to a power of two. `round_scales_to_power_of_2` of
            `Float8LinearConfig` does so for all casts.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a finer granularity comes with delayed scaling, or the dtype is no supported
            float8 format, or a finer granularity is given although nothing is cast.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None
    power_of_2: bool = False

    def __post_init__(self) -> None:
        if self.target_dtype is not None and self.target_dtype not in FLOAT8_MAX:
            expected = " or ".join(str(dtype) for dtype in FLOAT8_MAX)
            raise ValueError(
                f"target_dtype: got {self.target_dtype}, expected {expected}, or None for the "
                f"default of the role"
            )
        require_types(self)
        dynamic = self.scaling_type is ScalingType.DYNAMIC
        if not (dynamic or self.scaling_granularity.one_scale):
            raise ValueError(
                f"scaling_granularity: got {self.scaling_granularity} with {self.scaling_type}, "
                f"expected TENSORWISE: only dynamic scaling has finer scales; use "
                f"ScalingType.DYNAMIC, or leave scaling_granularity out"
            )
        if not self.is_float8:  # so that such configurations are equal
            object.__setattr__(self, "target_dtype", None)

    @property
    def is_float8(self) -> bool:
        """Whether the tensor is cast at all."""
        return self.scaling_type is not ScalingType.DISABLED

    @property
    def dtype(self) -> torch.dtype:
        """The format of the data: e4m3 where none is said."""
        return self.target_dtype or E4M3

    @property
    def delayed(self) -> bool:
        """Whether the scale comes from a history of amaxes."""
        return self.scaling_type is ScalingType.DELAYED

    def short_str(self) -> str:
        """Return a few words for `repr`s: `dynamic/e4m3`, `axiswise/e4m3` or `high precision`."""
        if not self.is_float8:
            return "high precision"
        dtype = "default" if self.target_dtype is None else SHORT_NAME[self.target_dtype]
        one_scale = self.scaling_granularity.one_scale
        how = self.scaling_type if one_scale else self.scaling_granularity
        return f"{how.value}/{dtype}{'/power_of_2' if self.power_of_2 else ''}"


@dataclass(frozen=True)
class DelayedScalingConfig:
    """The rule by which delayed scaling turns recent amaxes into a scale.

    Args:
        history_len: how many steps of amaxes are kept, >= 1.
        scale_fn_name: `"max"`, the largest amax in the history, or `"most_recent"`, the last one.

    Raises:
        ValueError: either is out of range.
    """

    history_len: int = 16
    scale_fn_name: str = "max"

    def __post_init__(self) -> None:
        if isinstance(self.history_len, bool) or not isinstance(self.history_len, int):
            raise TypeError(f"history_len: got {self.history_len!r}, expected an int >= 1")
        if self.history_len < 1:
            raise ValueError(f"history_len: got {self.history_len}, expected an int >= 1")
        if self.scale_fn_name not in ("max", "most_recent"):
            raise ValueError(
                f"scale_fn_name: got {self.scale_fn_name!r}, expected 'max' or 'most_recent'"
            )
