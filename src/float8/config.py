"""Frozen dataclasses that say how a linear layer runs in float8: casts, GEMMs, recipes."""

import copy
import enum
import functools
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from float8.formats import BLACKWELL, E4M3, E5M2, FLOAT8_MAX, HOPPER, SHORT_NAME

e4m3_dtype, e5m2_dtype = E4M3, E5M2  # the names of torchao


def of_torchao(value: object) -> str:
    """Return the end of an error about an object of torchao or float8_experimental; else ""."""
    library, name = type(value).__module__.partition(".")[0], type(value).__name__
    theirs = library in ("torchao", "float8_experimental")
    return f"; this one is of {library}: `from float8 import {name}`" if theirs else ""


def require_module(value: object, name: str) -> None:
    """Raise a `TypeError` if the argument `name` is anything but an `nn.Module`."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an nn.Module")


def require_types(config: Any) -> None:
    """Raise a `TypeError` if a field of a dataclass is not of the type that it is declared with."""
    for each in fields(config):
        value, kinds = getattr(config, each.name), get_args(each.type) or (each.type,)
        if not isinstance(value, kinds):
            kind = kinds[0]
            example = f", for example {next(iter(kind))}" if issubclass(kind, enum.Enum) else ""
            expected = f"a {kind.__name__}{example}{of_torchao(value)}"
            raise TypeError(f"{each.name}: got {value!r}, expected {expected}")


class ScalingType(enum.Enum):
    """The source of the scale of a cast."""

    DYNAMIC = "dynamic"
    """The scale comes from the amax of this very tensor."""
    DELAYED = "delayed"
    """The scale comes from the amaxes of the last steps; needs a sync once per optimizer step."""
    DISABLED = "disabled"
    """No cast: the tensor stays in high precision."""


class Granularity(enum.Enum):
    """The extent of one scale, as a block of `height` rows and `width` columns; None: all of them.

    All that differs between granularities follows from the block. Rows run along the dim that a
    GEMM contracts; column data are row data of the transposed tensor.
    """

    height: int | None
    width: int | None
    one_scale: bool
    """Whether one scale covers the whole tensor."""
    by_rows: bool
    """Whether each whole row has a scale."""
    by_blocks: bool
    """Whether scales cover parts of rows."""
    square: bool
    """Whether the transposed copy has the same scales, so that its bytes are a transpose."""
    exponents: bool
    """Whether scales are 8-bit exponents, powers of two from 2**-127 to 2**127, as in MXFP8."""

    def __new__(
        cls, value: str, height: int | None = None, width: int | None = None
    ) -> "Granularity":
        """Make a member, whose value is a string."""
        self = object.__new__(cls)
        self._value_, self.height, self.width = value, height, width
        self.one_scale = height is None
        self.by_rows = height == 1 and width is None
        self.by_blocks = width is not None
        self.square = height == width
        self.exponents = width == 32
        return self

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of data [..., R, C]; symbolic sizes get no guard.

        `()` for one scale, [..., R, 1] by rows, [..., R, ceil(C / width)] by runs. By squares
        [..., ceil(R / height), ceil(C / width)], the columns padded to 4, as cuBLASLt wants.
        """
        if self.height is None:
            return ()
        if self.width is None:
            return (*shape[:-1], 1)
        # Not -(-n // width): torch 2.11 fails on negative symbols.
        runs = (shape[-1] + self.width - 1) // self.width
        if self.height == 1:
            return (*shape[:-1], runs)
        below = (shape[-2] + self.height - 1) // self.height
        return (*shape[:-2], below, (runs + 3) // 4 * 4)


class ScalingGranularity(Granularity):
    """The granularities that a `CastConfig` takes."""

    TENSORWISE = "tensorwise", None, None
    """One scale for the whole tensor."""
    AXISWISE = "axiswise", 1, None
    """One scale for each row, of row data or column data: along the dim that a GEMM contracts."""
    BLOCK_1x128 = "block_1x128", 1, 128
    """One scale for 128 elements along that dim (DeepSeek-V3, arXiv 2412.19437, 3.3)."""
    BLOCK_128x128 = "block_128x128", 128, 128
    """One scale for a square of 128 rows and 128 columns, the same in row and column data."""
    BLOCK_1x32 = "block_1x32", 1, 32
    """One scale for 32 elements along that dim, an 8-bit exponent: MXFP8 (OCP Microscaling Formats
    1.0), the exponent rounded up, as tensor cores of Blackwell and their libraries have it."""
    BLOCK_32x32 = "block_32x32", 32, 32
    """Such a scale for a square of 32 rows and 32 columns, the same in row and column data."""


@dataclass(frozen=True)
class CastConfig:
    """The cast of one tensor to float8.

    Args:
        scaling_type: where the scale comes from.
        scaling_granularity: what one scale covers. All but `TENSORWISE` require `DYNAMIC`.
        target_dtype: `torch.float8_e4m3fn`, `torch.float8_e5m2`, or None for the default: e5m2
            for a grad_output with one scale, else e4m3. `DISABLED` resets it to None.
        power_of_2: round the scale up to a power of two. `round_scales_to_power_of_2` of
            `Float8LinearConfig` does so for all casts. Scales of blocks of 32 always are.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a finer granularity comes with delayed scaling, or the dtype is no supported
            float8 format, or a finer granularity is given although nothing is cast.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None
    power_of_2: bool = False

    if TYPE_CHECKING:  # no field: it follows from these
        dtype: torch.dtype = field(init=False)
        """The format of the data: e4m3 by default; only `Float8LinearConfig` fills in e5m2."""

    def __post_init__(self) -> None:
        if self.target_dtype is not None and self.target_dtype not in FLOAT8_MAX:
            expected = f"{' or '.join(map(str, FLOAT8_MAX))}, or None for the default of the role"
            raise ValueError(f"target_dtype: got {self.target_dtype}, expected {expected}")
        require_types(self)
        dynamic = self.scaling_type is ScalingType.DYNAMIC
        if not (dynamic or self.scaling_granularity.one_scale):
            raise ValueError(
                f"scaling_granularity: got {self.scaling_granularity} with {self.scaling_type}, "
                f"expected TENSORWISE: only dynamic scaling has finer scales"
            )
        if not self.is_float8:  # so that such configurations are equal
            object.__setattr__(self, "target_dtype", None)
            object.__setattr__(self, "power_of_2", False)
        elif self.scaling_granularity.exponents:
            object.__setattr__(self, "power_of_2", True)
        object.__setattr__(self, "dtype", self.target_dtype or E4M3)

    @property
    def is_float8(self) -> bool:
        """Whether the tensor is cast at all."""
        return self.scaling_type is not ScalingType.DISABLED

    def short_str(self) -> str:
        """Return a few words for `repr`s: `dynamic/e4m3`, `axiswise/e4m3` or `high precision`."""
        if not self.is_float8:
            return "high precision"
        dtype = "default" if self.target_dtype is None else SHORT_NAME[self.target_dtype]
        one_scale = self.scaling_granularity.one_scale
        scales_by = self.scaling_type if one_scale else self.scaling_granularity
        rounded = self.power_of_2 and not self.scaling_granularity.exponents
        return f"{scales_by.value}/{dtype}{'/power_of_2' if rounded else ''}"


@dataclass(frozen=True)
class DelayedScalingConfig:
    """The rule by which delayed scaling turns recent amaxes into a scale.

    Args:
        history_len: how many steps of amaxes are kept, >= 1.
        scale_fn_name: `"max"`, the largest amax in the history, or `"most_recent"`, the last one.

    Raises:
        TypeError: `history_len` is no int.
        ValueError: either is out of range.
    """

    history_len: int = 16
    scale_fn_name: str = "max"

    def __post_init__(self) -> None:
        if isinstance(self.history_len, bool) or not isinstance(self.history_len, int):
            raise TypeError(f"history_len: got {self.history_len!r}, expected an int >= 1")
        if self.history_len < 1:
            raise ValueError(f"history_len: got {self.history_len}, expected an int >= 1")
        if (name := self.scale_fn_name) not in ("max", "most_recent"):
            raise ValueError(f"scale_fn_name: got {name!r}, expected 'max' or 'most_recent'")


# ---------------------------------------------------------------- a linear layer


class CastSite(enum.Enum):
    """The six places where a linear layer may cast a tensor: each GEMM has two operands.

    A site whose `cast_config` equals that of the same tensor's other site reuses its cast. With
    delayed scaling it has three buffers in a layer; `amax`, `history` and `scale` are their names.
    """

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"
    INPUT_FOR_GRAD_WEIGHT = "input_for_grad_weight"
    WEIGHT_FOR_GRAD_INPUT = "weight_for_grad_input"
    GRAD_OUTPUT_FOR_GRAD_WEIGHT = "grad_output_for_grad_weight"

    def __init__(self, name: str) -> None:
        self.amax, self.history = f"fp8_amax_{name}", f"fp8_amax_history_{name}"
        self.scale = f"fp8_scale_{name}"
        self.buffers = self.amax, self.history, self.scale


CAST_SITES: tuple[CastSite, ...] = tuple(CastSite)
"""The members of `CastSite`: Dynamo (torch 2.11) cannot iterate over the enum itself."""

BASE_SITE = {x: CastSite(x.value.split("_for_")[0]) for x in CAST_SITES if "_for_" in x.value}
"""A tensor's second use -> its first use, whose configuration it takes when it has none."""

GEMM_OPERANDS: dict[str, tuple[CastSite, CastSite]] = {
    "output": (CastSite.INPUT, CastSite.WEIGHT),
    "grad_input": (CastSite.GRAD_OUTPUT, CastSite.WEIGHT_FOR_GRAD_INPUT),
    "grad_weight": (CastSite.GRAD_OUTPUT_FOR_GRAD_WEIGHT, CastSite.INPUT_FOR_GRAD_WEIGHT),
}

_T, _A = ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE
_B1, _B2 = ScalingGranularity.BLOCK_1x128, ScalingGranularity.BLOCK_128x128
_M1, _M2 = ScalingGranularity.BLOCK_1x32, ScalingGranularity.BLOCK_32x32

GEMM_GRANULARITIES = (
    *((_T, _T), (_A, _A), (_A, _T), (_T, _A)),
    *((_B1, _B2), (_B2, _B1), (_B1, _B1)),
    *((_M1, _M1), (_M1, _M2), (_M2, _M1)),
)
"""The pairs of granularities that the operands of one GEMM may have."""


class Float8LinearRecipeName(enum.Enum):
    """Names that `Float8LinearConfig.from_recipe_name` knows."""

    TENSORWISE = "tensorwise"
    """Dynamic scaling, one scale per tensor."""
    DELAYED = "delayed"
    """Delayed scaling of input and grad_output, dynamic scaling of the weight, one scale per
    tensor; sync once per step, see `attach_to_optimizer`."""
    ROWWISE = "rowwise"
    """Dynamic scaling, a scale per row of each operand, powers of two; e4m3 everywhere."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """As `ROWWISE`, with grad_weight in high precision and one scale per weight for grad_input."""
    BLOCKWISE = "blockwise"
    """Dynamic scaling, a scale per 1x128 elements of input and grad_output and per 128x128 of the
    weight, and of the input for grad_weight; e4m3 everywhere. DeepSeek-V3 (arXiv 2412.19437,
    section 3.3) has 1x128 there, too, as experts here do; for linear layers, whose GEMM is slower
    so on Hopper, set `cast_config_input_for_grad_weight` to `cast_config_input`."""
    MXFP8 = "mxfp8"
    """Dynamic scaling, an 8-bit exponent per 1x32 elements along the dim that each GEMM contracts;
    e4m3 everywhere. Blackwell multiplies it. Other GPUs need `emulate`, and CPUs always do so."""
    MXFP8_WITH_GW_HP = "mxfp8_with_gw_hp"
    """As `MXFP8`, with grad_weight in high precision."""


class Float8Weights(enum.Enum):
    """The times at which weights are cast, and the copies that are kept."""

    ON_THE_FLY = "on_the_fly"
    """Weights are cast in each forward, and again in backward."""
    HELD = "held"
    """Weights are cast once per optimizer step (`attach_to_optimizer`, `update_float8_weights`) for
    training; evaluation casts on the fly. Row and column data stay beside the weight, two bytes per
    element, and scales; under FSDP2 row data of the shard. Results are those of `ON_THE_FLY`."""
    ONLY = "only"
    """Frozen weights are cast at the conversion, and replaced: one byte per element is left, and
    the scales: under `BLOCK_1x32` an eighth of a byte."""


@dataclass(frozen=True)
class Float8GemmConfig:
    """Switches of one GEMM.

    Args:
        use_fast_accum: let the tensor cores add with fewer bits: faster on some shapes and less
            exact. Ignored where sums are always in float32 (CPU, `emulate`, block scales).

    Raises:
        TypeError: `use_fast_accum` is no bool.
    """

    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        require_types(self)


@dataclass(frozen=True)
class Float8LinearConfig:
    """The immutable configuration of `Float8Linear`. Combinations that cannot work raise.

    Args:
        cast_config_input, cast_config_weight: casts of the input [M, K] and of the weight [N, K]
            for `output = input @ weight.T`.
        cast_config_grad_output: cast of grad_output [M, N] for `grad_input = grad_output @ weight`.
        cast_config_input_for_grad_weight, cast_config_grad_output_for_grad_weight: casts of these
            for `grad_weight = grad_output.T @ input`. None: one cast serves both GEMMs.
        cast_config_weight_for_grad_input: likewise of the weight for `grad_input`.
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight: switches of each GEMM.
        enable_fsdp_float8_all_gather: under FSDP2, cast each rank's shard of the weight and
            gather it in float8. Requires equal casts of the weight for `output` and `grad_input`.
            Without effect on weights that are not sharded, and on experts stored as [E, K, N].
        float8_weights: when weights are cast. All but `ON_THE_FLY` require equal casts of the
            weight for `output` and `grad_input`.
        pad_inner_dim: pad dims that are not divisible by 16, or the width of blocks, with zeros
            inside the cast, which changes no result. Only True is accepted.
        emulate: compute GEMMs in high precision on the dequantised values: the same numerics on any
            device, slowly. In bfloat16 where it holds the values exactly, else in float32.
        round_scales_to_power_of_2: round every scale up to a power of two, so that scaling
            itself adds no rounding error. Applies to dynamic and delayed scales.
        delayed_scaling_config: for delayed scaling: how long a history is, and which amax counts.
        enable_amax_init: for delayed scaling. True: each cast uses dynamic scales until the amax of
            one step is below twice the largest amax before it. False: until the first sync every
            scale is 1.0.
        enable_pre_and_post_forward: for delayed scaling. True: a forward with gradients raises a
            `RuntimeError` if the optimizer stepped without a sync before it. Not checked while the
            layer is attached to an optimizer, or in compiled code.
        force_recompute_fp8_weight_in_bwd: accepted for code written for torchao. It is not stored
            and has no effect: backward always makes what it needs of a weight itself.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field or a combination of fields cannot be honoured.
    """

    cast_config_input: CastConfig = field(default_factory=CastConfig)
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = field(default_factory=CastConfig)
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = field(default_factory=CastConfig)
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    float8_weights: Float8Weights = Float8Weights.ON_THE_FLY
    pad_inner_dim: bool = True
    emulate: bool = False
    round_scales_to_power_of_2: bool = False
    delayed_scaling_config: DelayedScalingConfig = field(default_factory=DelayedScalingConfig)
    enable_amax_init: bool = True
    enable_pre_and_post_forward: bool = True
    force_recompute_fp8_weight_in_bwd: InitVar[bool] = False

    if TYPE_CHECKING:
        _casts: dict[CastSite, CastConfig] = field(init=False)

    def __post_init__(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"force_recompute_fp8_weight_in_bwd: got {value!r}, expected a bool")
        require_types(self)
        if not self.pad_inner_dim:
            do = "leave layers out by a module_filter_fn"
            raise ValueError(f"pad_inner_dim: got False, expected True: casts pad all dims; {do}")
        # Fill in each role's dtype in a copy: the object that came in may serve other roles too.
        casts: dict[CastSite, CastConfig] = {}
        for site in CastSite:
            name = f"cast_config_{site.value}"
            given = getattr(self, name)
            if given is not None and given.is_float8 and given.target_dtype is None:
                wide = BASE_SITE.get(site, site) is CastSite.GRAD_OUTPUT
                dtype = E5M2 if wide and given.scaling_granularity is _T else E4M3
                given = replace(given, target_dtype=dtype)
                object.__setattr__(self, name, given)
            how = casts[BASE_SITE[site]] if given is None else given
            casts[site] = replace(how, power_of_2=True) if self.round_scales_to_power_of_2 else how
        object.__setattr__(self, "_casts", casts)
        self._check_gemms()
        widths = {how.scaling_granularity.width or 0 for how in casts.values()} - {0}
        if len(widths) > 1 and not self.emulate:
            raise ValueError(
                f"scaling_granularity: got blocks of {' and '.join(map(str, sorted(widths)))}, "
                f"expected one of them: no GPU multiplies both; or set emulate=True"
            )
        only = self.float8_weights is Float8Weights.ONLY
        if only and self.enable_fsdp_float8_all_gather:
            raise ValueError(
                "float8_weights: got ONLY with enable_fsdp_float8_all_gather=True, expected False: "
                "no weight without a master is sharded; give it to fully_shard's ignored_params"
            )
        if only and self.cast_config_weight.scaling_type is ScalingType.DELAYED:
            raise ValueError(
                "float8_weights: got ONLY with delayed scaling of the weight, expected dynamic "
                "scaling, as it is cast once; set cast_config_weight=CastConfig()"
            )
        self._check_one_cast("enable_fsdp_float8_all_gather", row_only=True)
        self._check_one_cast("float8_weights", row_only=only)
        if not self.delayed_sites and self.delayed_scaling_config != DelayedScalingConfig():
            raise ValueError(
                f"delayed_scaling_config: got {self.delayed_scaling_config!r}, expected the "
                f"default, as nothing has delayed scaling; leave it out or use a "
                f"CastConfig(scaling_type=ScalingType.DELAYED)"
            )

    def _check_gemms(self) -> None:
        for gemm, sites in GEMM_OPERANDS.items():
            a, b = (self.cast_config(site) for site in sites)
            names = " and ".join(f"cast_config_{site.value}" for site in sites)
            got = f"GEMM '{gemm}': got {names}"
            if a.is_float8 != b.is_float8:
                raise ValueError(
                    f"{got} of scaling types {a.scaling_type.value} and {b.scaling_type.value}, "
                    f"expected both operands in float8 or neither; set both or neither to DISABLED"
                )
            pair = a.scaling_granularity, b.scaling_granularity
            if a.is_float8 and pair not in GEMM_GRANULARITIES:
                expected = ", ".join(f"{a.value} x {b.value}" for a, b in GEMM_GRANULARITIES)
                values = f"{pair[0].value} and {pair[1].value}"
                raise ValueError(f"{got} with scales of {values}, expected one of {expected}")
            wide, blocks = [a.target_dtype, b.target_dtype].count(E5M2), pair[0].by_blocks
            if wide > (0 if blocks else 1) and not self.emulate:
                which = f"one of {E5M2} under {pair[0]}" if blocks else f"both of {E5M2}"
                expected = f"{E4M3} for both" if blocks else f"at least one {E4M3}"
                raise ValueError(
                    f"{got} {which}, expected {expected}, as tensor cores want; change one "
                    f"target_dtype or set emulate=True"
                )

    def _check_one_cast(self, name: str, *, row_only: bool) -> None:
        """Raise if `name` needs one cast of the weight, or its row data, and that is not enough."""
        value, default = getattr(self, name), getattr(type(self), name)
        if value == default:
            return
        weight, again = map(self.cast_config, (CastSite.WEIGHT, CastSite.WEIGHT_FOR_GRAD_INPUT))
        if again != weight or not weight.is_float8:
            raise ValueError(
                f"{name}: got {value} with a weight that is {weight.short_str()} for output and "
                f"{again.short_str()} for grad_input, expected one cast in float8 for both; set it "
                f"to {default}, or configure both alike"
            )
        granularity = weight.scaling_granularity
        by_runs = granularity.by_blocks and not granularity.square
        kept = granularity.exponents and not self.enable_fsdp_float8_all_gather
        lossy = (by_runs and not kept) or (granularity is _A and not weight.power_of_2)
        if row_only and lossy:
            raise ValueError(
                f"{name}: got {value} with a weight under {granularity}, expected TENSORWISE, a "
                f"square BLOCK, or AXISWISE with round_scales_to_power_of_2: columns for "
                f"grad_input are made of its float8 data; set it to {default}, or change these"
            )

    def cast_config(self, site: CastSite) -> CastConfig:
        """Return the effective configuration of a cast, with a dtype unless it is DISABLED."""
        return self._casts[site]

    @functools.cached_property
    def own_casts(self) -> dict[CastSite, CastConfig]:
        """The sites with a cast of their own, in a fixed order; others reuse that of their base."""
        casts = self._casts
        own = [x for x in CAST_SITES if x not in BASE_SITE or casts[x] != casts[BASE_SITE[x]]]
        return {site: casts[site] for site in own}

    @functools.cached_property
    def delayed_sites(self) -> tuple[CastSite, ...]:
        """The sites that own delayed-scaling state, in a fixed order."""
        own = self.own_casts.items()
        return tuple(site for site, x in own if x.scaling_type is ScalingType.DELAYED)

    @functools.cached_property
    def only_on(self) -> tuple[int, ...]:
        """The major compute capabilities of GPUs with such GEMMs of linear layers; (): of many."""
        covers = [how.scaling_granularity for how in self.own_casts.values()]
        if any(each.exponents for each in covers):
            return BLACKWELL
        return HOPPER if any(each.by_blocks for each in covers) else ()

    @property
    def float8_gemms(self) -> tuple[str, ...]:
        """The GEMMs, of `"output"`, `"grad_input"` and `"grad_weight"`, that run in float8."""
        operands = GEMM_OPERANDS.items()
        return tuple(gemm for gemm, (site, _) in operands if self.cast_config(site).is_float8)

    def short_str(self) -> str:
        """Return a few words for `repr`s: a recipe, or each tensor's scaling; then switches."""
        recipe = _BY_CASTS.get((self.round_scales_to_power_of_2, *self._casts.values()))
        like = RECIPES[recipe or "tensorwise"]
        own = self.own_casts.items()
        words = [recipe] if recipe else [f"{x.value}={how.short_str()}" for x, how in own]
        for switch in ("emulate", "round_scales_to_power_of_2", "enable_fsdp_float8_all_gather"):
            value = getattr(self, switch)
            if value != getattr(like, switch):
                words.append(switch if value else f"{switch}=False")
        return ", ".join(words)

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> "Float8LinearConfig":
        """Return the configuration of a named recipe, a new object at each call.

        Takes a `Float8LinearRecipeName` or its value, for example `"delayed"`. Raises a
        `ValueError` that lists the known names for another one.
        """
        return copy.deepcopy(_recipe(recipe_name))


_delayed, _high = CastConfig(ScalingType.DELAYED), CastConfig(ScalingType.DISABLED)
_rows, _runs = CastConfig(scaling_granularity=_A), CastConfig(scaling_granularity=_B1)
_squares, _mx = CastConfig(scaling_granularity=_B2), CastConfig(scaling_granularity=_M1)
_rowwise = Float8LinearConfig(
    cast_config_input=_rows,
    cast_config_weight=_rows,
    cast_config_grad_output=_rows,
    round_scales_to_power_of_2=True,
)
_mxfp8 = Float8LinearConfig(
    cast_config_input=_mx, cast_config_weight=_mx, cast_config_grad_output=_mx
)

RECIPES: dict[str, Float8LinearConfig] = {
    "tensorwise": Float8LinearConfig(),
    # A weight is at hand at each use, and its amax exact: a history would be a step behind it,
    # which cuts weights that begin at zero.
    "delayed": Float8LinearConfig(cast_config_input=_delayed, cast_config_grad_output=_delayed),
    "rowwise": _rowwise,
    "rowwise_with_gw_hp": replace(
        _rowwise,
        cast_config_input_for_grad_weight=_high,
        cast_config_weight_for_grad_input=CastConfig(),
        cast_config_grad_output_for_grad_weight=_high,
    ),
    "blockwise": Float8LinearConfig(
        cast_config_input=_runs,
        cast_config_input_for_grad_weight=_squares,
        cast_config_weight=_squares,
        cast_config_grad_output=_runs,
    ),
    "mxfp8": _mxfp8,
    "mxfp8_with_gw_hp": replace(
        _mxfp8,
        cast_config_input_for_grad_weight=_high,
        cast_config_grad_output_for_grad_weight=_high,
    ),
}
"""Each recipe, by the values of `Float8LinearRecipeName`: one object, which layers share."""


_BY_CASTS = {
    (rounded, *replace(config, round_scales_to_power_of_2=rounded)._casts.values()): name
    for name, config in RECIPES.items()
    for rounded in (False, True)
}
"""Recipes by `round_scales_to_power_of_2` and the casts that they have with it."""


ConfigOrRecipe = Float8LinearConfig | Float8LinearRecipeName | str
"""A configuration, or the name of a recipe."""


def _recipe(recipe_name: Any) -> Float8LinearConfig:
    named = isinstance(recipe_name, Float8LinearRecipeName)
    name = recipe_name.value if named else recipe_name
    if not isinstance(name, str) or name not in RECIPES:
        names = f"{', '.join(map(repr, RECIPES))}{of_torchao(recipe_name)}"
        raise ValueError(f"recipe: got {recipe_name!r}, expected one of {names}")
    return RECIPES[name]


def as_config(config: ConfigOrRecipe | None) -> Float8LinearConfig:
    """Return the configuration that an argument `config` stands for; None: `tensorwise`.

    Raises as `from_recipe_name`, and a `TypeError` for what is no name.
    """
    if isinstance(config, Float8LinearConfig):
        return config
    if config is None or isinstance(config, Float8LinearRecipeName | str):
        return _recipe("tensorwise" if config is None else config)
    raise TypeError(
        f"config: got {type(config).__name__}, expected a Float8LinearConfig or the name of a "
        f"recipe, for example 'tensorwise'{of_torchao(config)}"
    )


def linear_requires_sync(config: ConfigOrRecipe) -> bool:
    """Tell whether layers of a configuration need `sync_float8_amax_and_scale_history`."""
    return bool(as_config(config).delayed_sites)
