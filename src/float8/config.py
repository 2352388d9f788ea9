"""Configuration of float8 layers: how tensors are cast, how GEMMs run, and named recipes."""

import copy
import enum
import functools
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from float8.formats import BLACKWELL, E4M3, E5M2, FLOAT8_MAX, HOPPER, SHORT_NAME

e4m3_dtype, e5m2_dtype = E4M3, E5M2  # the names of torchao


def torchao_hint(value: object) -> str:
    """Return advice on imports if `value` is of torchao or float8_experimental, or else ""."""
    library, name = type(value).__module__.partition(".")[0], type(value).__name__
    is_theirs = library in ("torchao", "float8_experimental")
    return f"; this one is of {library}: `from float8 import {name}`" if is_theirs else ""


def require_module(value: object, name: str) -> None:
    """Raise a `TypeError` if `value`, the argument called `name`, is not an `nn.Module`."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an nn.Module")


def require_types(config: Any) -> None:
    """Raise a `TypeError` if a field of the dataclass `config` is not of its annotated type."""
    for item in fields(config):
        value, types = getattr(config, item.name), get_args(item.type) or (item.type,)
        if not isinstance(value, types):
            cls = types[0]  # X of a field that is annotated X or X | None
            example = f", for example {next(iter(cls))}" if issubclass(cls, enum.Enum) else ""
            expected = f"a {cls.__name__}{example}{torchao_hint(value)}"
            raise TypeError(f"{item.name}: got {value!r}, expected {expected}")


class ScalingType(enum.Enum):
    """Where the scale of a cast comes from."""

    DYNAMIC = "dynamic"
    """From the amax of the tensor that is cast."""
    DELAYED = "delayed"
    """In training from amaxes of recent steps (see `attach_to_optimizer`), else as `DYNAMIC`."""
    DISABLED = "disabled"
    """The tensor is not cast: it stays in high precision."""


class Granularity(enum.Enum):
    """The part of a tensor that shares one scale: a block of `height` rows and `width` columns.

    A `height` or `width` of None covers all rows or columns. GEMMs sum over the columns of an
    operand. To sum over its rows, a tensor is transposed, and blocks are those of that copy.
    """

    height: int | None
    width: int | None
    one_scale: bool  # for the whole tensor
    by_rows: bool  # one scale for each whole row
    by_blocks: bool  # scales for parts of rows
    square: bool  # the transposed copy has the same scales: its bytes are a transpose
    exponents: bool  # scales are 8-bit exponents, 2**-127 to 2**127, as in MXFP8
    only_on: tuple[int, ...]  # major compute capabilities of GPUs with such a GEMM; (): no limit

    def __new__(cls, value: str, height: int | None = None, width: int | None = None) -> Any:
        """Make a member of value `value`, whose scales cover `height` rows and `width` columns."""
        self = object.__new__(cls)
        self._value_, self.height, self.width = value, height, width
        self.one_scale = height is None
        self.by_rows = height == 1 and width is None
        self.by_blocks = width is not None
        self.square = height == width  # also for one scale, where both are None
        self.exponents = width == 32
        self.only_on = BLACKWELL if self.exponents else HOPPER if self.by_blocks else ()
        return self

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales for data of `shape` [..., R, C]. Adds no guard on SymInts.

        `()` for one scale per tensor, [..., R, 1] for one per row, [..., R, ceil(C / width)] for
        blocks of one row; for squares [..., ceil(R / height), ceil(C / width)], whose last dim is
        rounded up to a multiple of 4, as cuBLASLt requires.
        """
        if self.height is None:
            return ()
        if self.width is None:
            return (*shape[:-1], 1)
        # Not -(-n // width): torch 2.11 fails on negative symbols.
        columns = (shape[-1] + self.width - 1) // self.width
        if self.height == 1:
            return (*shape[:-1], columns)
        rows = (shape[-2] + self.height - 1) // self.height
        return (*shape[:-2], rows, (columns + 3) // 4 * 4)


class ScalingGranularity(Granularity):
    """The elements that share one scale of a cast. A GEMM contracts over the elements of a row."""

    TENSORWISE = "tensorwise", None, None
    """One scale for the whole tensor."""
    AXISWISE = "axiswise", 1, None
    """One scale for each row."""
    BLOCK_1x128 = "block_1x128", 1, 128
    """One scale for 128 elements of a row (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""
    BLOCK_128x128 = "block_128x128", 128, 128
    """One scale for a square of 128 rows and 128 columns, the same in the transposed copy."""
    BLOCK_1x32 = "block_1x32", 1, 32
    """One 8-bit exponent for 32 elements of a row: MXFP8 (OCP Microscaling 1.0), but rounded up."""
    BLOCK_32x32 = "block_32x32", 32, 32
    """One 8-bit exponent for a square of 32 rows and columns, the same in the transposed copy."""


@dataclass(frozen=True)
class CastConfig:
    """How one tensor is cast to float8: the origin and granularity of its scales, and its format.

    Raises a `ValueError` if `target_dtype` is not e4m3, e5m2 or None, or if `scaling_type` is not
    `DYNAMIC` and the granularity not `TENSORWISE`; a `TypeError` for other fields of a wrong type.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    """Where the scale comes from."""
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    """Which elements share a scale. All but `TENSORWISE` require `DYNAMIC`."""
    target_dtype: torch.dtype | None = None
    """`torch.float8_e4m3fn`, `torch.float8_e5m2`, or None for the default: e5m2 for a grad_output
    with one scale, else e4m3. Always None under `DISABLED`. Experts use e4m3 in any case."""
    power_of_2: bool = False
    """Whether scales are rounded up to a power of two. `Float8LinearConfig` sets it for all casts
    by `round_scales_to_power_of_2`. Always True for blocks of 32, and False under `DISABLED`."""

    if TYPE_CHECKING:  # set in __post_init__: no field
        dtype: torch.dtype = field(init=False)
        """The format of the data: e4m3 by default; only `Float8LinearConfig` fills in e5m2."""

    def __post_init__(self) -> None:
        if self.target_dtype is not None and self.target_dtype not in FLOAT8_MAX:
            expected = f"{' or '.join(map(str, FLOAT8_MAX))}, or None for the default of the role"
            raise ValueError(f"target_dtype: got {self.target_dtype}, expected {expected}")
        require_types(self)
        if self.scaling_type is not ScalingType.DYNAMIC and not self.scaling_granularity.one_scale:
            got = f"scaling_granularity: got {self.scaling_granularity} with {self.scaling_type}"
            raise ValueError(f"{got}, expected TENSORWISE: only dynamic scaling has finer scales")
        if not self.is_float8:  # so that all disabled casts are equal
            object.__setattr__(self, "target_dtype", None)
            object.__setattr__(self, "power_of_2", False)
        elif self.scaling_granularity.exponents:  # an 8-bit exponent is a power of two
            object.__setattr__(self, "power_of_2", True)
        object.__setattr__(self, "dtype", self.target_dtype or E4M3)  # E5M2: see `_resolve_casts`

    @property
    def is_float8(self) -> bool:
        """Whether the tensor is cast to float8."""
        return self.scaling_type is not ScalingType.DISABLED

    def short_str(self) -> str:
        """Return text like "dynamic/e4m3", "axiswise/e4m3/power_of_2" or "high precision"."""
        if not self.is_float8:
            return "high precision"
        dtype = "default" if self.target_dtype is None else SHORT_NAME[self.target_dtype]
        granularity = self.scaling_granularity
        scaling = self.scaling_type if granularity.one_scale else granularity
        rounded = self.power_of_2 and not granularity.exponents  # exponents always are
        return f"{scaling.value}/{dtype}{'/power_of_2' if rounded else ''}"


@dataclass(frozen=True)
class DelayedScalingConfig:
    """Settings of delayed scaling. Raises `TypeError` or `ValueError` if a field is invalid."""

    history_len: int = 16
    """The number of steps whose amaxes are kept, at least 1."""
    scale_fn_name: str = "max"
    """`"max"`: scale by the largest amax of the history. `"most_recent"`: that of the last step."""

    def __post_init__(self) -> None:
        if type(steps := self.history_len) is not int or steps < 1:
            error = ValueError if type(steps) is int else TypeError
            raise error(f"history_len: got {steps!r}, expected an int >= 1")
        if (name := self.scale_fn_name) not in ("max", "most_recent"):
            raise ValueError(f"scale_fn_name: got {name!r}, expected 'max' or 'most_recent'")


class CastSite(enum.Enum):
    """An operand of one of the three GEMMs of a linear layer, which may be cast to float8.

    Each tensor is an operand of two GEMMs; the member with `FOR` in its name is of the second.
    """

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"
    INPUT_FOR_GRAD_WEIGHT = "input_for_grad_weight"
    WEIGHT_FOR_GRAD_INPUT = "weight_for_grad_input"
    GRAD_OUTPUT_FOR_GRAD_WEIGHT = "grad_output_for_grad_weight"


CAST_SITES: tuple[CastSite, ...] = tuple(CastSite)
"""The members of `CastSite`: Dynamo (torch 2.11) cannot iterate over the enum itself."""

BASE_SITE = {x: CastSite(x.value.split("_for_")[0]) for x in CAST_SITES if "_for_" in x.value}
"""A tensor as operand of its second GEMM -> of its first, whose cast is the default for it."""

GEMM_OPERANDS: dict[str, tuple[CastSite, CastSite]] = {
    "output": (CastSite.INPUT, CastSite.WEIGHT),
    "grad_input": (CastSite.GRAD_OUTPUT, CastSite.WEIGHT_FOR_GRAD_INPUT),
    "grad_weight": (CastSite.GRAD_OUTPUT_FOR_GRAD_WEIGHT, CastSite.INPUT_FOR_GRAD_WEIGHT),
}

_TENSOR, _ROW = ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE
_ROW_128, _SQUARE_128 = ScalingGranularity.BLOCK_1x128, ScalingGranularity.BLOCK_128x128
_ROW_32, _SQUARE_32 = ScalingGranularity.BLOCK_1x32, ScalingGranularity.BLOCK_32x32

GEMM_GRANULARITIES = (
    *((_TENSOR, _TENSOR), (_ROW, _ROW), (_ROW, _TENSOR), (_TENSOR, _ROW)),
    *((_ROW_128, _SQUARE_128), (_SQUARE_128, _ROW_128), (_ROW_128, _ROW_128)),
    *((_ROW_32, _ROW_32), (_ROW_32, _SQUARE_32), (_SQUARE_32, _ROW_32)),
)
"""The pairs of granularities that the operands of one GEMM may have."""


class Float8LinearRecipeName(enum.Enum):
    """Names of recipes (ready configurations), for `Float8LinearConfig.from_recipe_name`."""

    TENSORWISE = "tensorwise"
    """Dynamic scaling with one scale per tensor."""
    DELAYED = "delayed"
    """Delayed scaling of input and grad_output, dynamic scaling of the weight, one scale per
    tensor. Requires a sync once per step, see `attach_to_optimizer`."""
    ROWWISE = "rowwise"
    """Dynamic scaling with one scale per row of each operand, a power of two. All in e4m3."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """`ROWWISE`, but grad_weight in high precision, and one scale for the weight in grad_input."""
    BLOCKWISE = "blockwise"
    """Dynamic scaling with one scale per 1x128 elements of input and grad_output, and per 128x128
    of the weight, and of the input for grad_weight: in experts 1x128, or if you set its cast to
    `cast_config_input` (slower). All in e4m3. GPUs other than Hopper require `emulate`."""
    MXFP8 = "mxfp8"
    """Dynamic scaling with one 8-bit exponent per 1x32 elements along the contraction dim of each
    GEMM. All in e4m3. Runs on Blackwell. Other GPUs require `emulate`; CPUs always emulate."""
    MXFP8_WITH_GW_HP = "mxfp8_with_gw_hp"
    """The same as `MXFP8`, but with grad_weight in high precision."""


class Float8Weights(enum.Enum):
    """When weights are cast to float8, and which copies are kept."""

    ON_THE_FLY = "on_the_fly"
    """Weights are cast in each forward, and again in backward."""
    HELD = "held"
    """Weights are cast once per optimizer step (`attach_to_optimizer`, `update_float8_weights`) for
    training; evaluation casts on the fly. Row and column data, two bytes per element, and scales
    are kept, too; FSDP2 keeps and gathers casts of shards. Same results as `ON_THE_FLY`."""
    ONLY = "only"
    """Frozen weights are cast in the conversion, and replaced: one byte per element is left, and
    the scales, which take an eighth of a byte per element under `BLOCK_1x32`."""


@dataclass(frozen=True)
class Float8GemmConfig:
    """Settings of one GEMM. Raises a `TypeError` if `use_fast_accum` is not a bool."""

    use_fast_accum: bool = False
    """Whether tensor cores may accumulate with fewer bits: faster on some shapes, less exact.
    Ignored where sums are always in float32 (CPU, `emulate`, block scales)."""

    def __post_init__(self) -> None:
        require_types(self)


CONFIG_CHECKS: list[Callable[["Float8LinearConfig"], None]] = []
"""Functions that raise a `ValueError` if fields contradict each other; set by `float8.wings`."""


@dataclass(frozen=True)
class Float8LinearConfig:
    """The immutable configuration of `Float8Linear`: how it casts tensors and runs GEMMs.

    `input` is [M, K], `weight` [N, K] and `grad_output` [M, N]. `gemm_config_*` are the settings of
    the GEMMs: `output = input @ weight.T`, `grad_input = grad_output @ weight` and `grad_weight =
    grad_output.T @ input`.

    Raises a `TypeError` for a field of the wrong type, and a `ValueError` for unsupported values.
    """

    cast_config_input: CastConfig = field(default_factory=CastConfig)
    """The cast of the input for `output`."""
    cast_config_input_for_grad_weight: CastConfig | None = None
    """The cast of the input for `grad_weight`. None: the same as for `output`."""
    cast_config_weight: CastConfig = field(default_factory=CastConfig)
    """The cast of the weight for `output`."""
    cast_config_weight_for_grad_input: CastConfig | None = None
    """The cast of the weight for `grad_input`. None: the same as for `output`."""
    cast_config_grad_output: CastConfig = field(default_factory=CastConfig)
    """The cast of grad_output for `grad_input`."""
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    """The cast of grad_output for `grad_weight`. None: the same as for `grad_input`."""
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    """Under FSDP2, cast each rank's shard of the weight and all-gather float8. Requires equal casts
    for `output` and `grad_input`, by `TENSORWISE`, squares, or rows with power-of-2 scales. Ignored
    if the weight is not sharded, or stored as [E, K, N]. Weights with scales of rows or squares are
    gathered in high precision, with a warning, if shards are uneven or cut a row or square."""
    float8_weights: Float8Weights = Float8Weights.ON_THE_FLY
    """When weights are cast. `HELD` and `ONLY` need equal casts for `output` and `grad_input`."""
    pad_inner_dim: bool = True
    """Must be True: casts zero-pad dims to multiples of 16 or of block width; results are equal."""
    emulate: bool = False
    """Compute GEMMs in high precision on the dequantized values: the same numerics on any device,
    slowly. On GPUs in bfloat16 if scales surely are powers of two, else in float32."""
    round_scales_to_power_of_2: bool = False
    """Round computed scales up to powers of two, so that scaling itself adds no rounding error."""
    delayed_scaling_config: DelayedScalingConfig = field(default_factory=DelayedScalingConfig)
    enable_amax_init: bool = True
    """Under delayed scaling, use dynamic scales until the amax of a step is below twice the largest
    in the history. False: scales are 1.0 in training until a sync with a recorded amax."""
    enable_pre_and_post_forward: bool = True
    """Under delayed scaling, have a forward with gradients raise a `RuntimeError` if it detects a
    missing sync. Compiled code and layers attached to an optimizer do not check."""
    force_recompute_fp8_weight_in_bwd: InitVar[bool] = False
    """Accepted for compatibility with torchao, not stored, no effect: see `float8_weights`."""

    if TYPE_CHECKING:
        _casts: dict[CastSite, CastConfig] = field(init=False)

    def __post_init__(self, force_recompute_fp8_weight_in_bwd: bool) -> None:
        if not isinstance(option := force_recompute_fp8_weight_in_bwd, bool):
            raise TypeError(f"force_recompute_fp8_weight_in_bwd: got {option!r}, expected a bool")
        require_types(self)
        if not self.pad_inner_dim:  # a field of torchao: only True is supported
            expected = "True: casts pad all dims; leave layers out by a module_filter_fn"
            raise ValueError(f"pad_inner_dim: got False, expected {expected}")
        object.__setattr__(self, "_casts", self._resolve_casts())
        for gemm in GEMM_OPERANDS:
            self._check_gemm(gemm)
        self._check_widths()
        _ = self.delayed_sites  # cached now: `cached_property` of Python < 3.12 stops Dynamo later
        for check in CONFIG_CHECKS:  # of features, such as delayed scaling
            check(self)

    def _resolve_casts(self) -> dict[CastSite, CastConfig]:
        """Fill in default formats in `cast_config_*`; return the final cast of each operand."""
        casts = dict[CastSite, CastConfig]()
        for site in CastSite:  # each tensor's first site comes before its second
            first_site, name = BASE_SITE.get(site, site), f"cast_config_{site.value}"
            cast = getattr(self, name)
            if cast is None:  # only a second site may be None
                cast = casts[first_site]
            elif cast.is_float8 and cast.target_dtype is None:
                is_gradient = first_site is CastSite.GRAD_OUTPUT
                dtype = E5M2 if is_gradient and cast.scaling_granularity.one_scale else E4M3
                cast = replace(cast, target_dtype=dtype)  # a copy: the user's may serve other roles
                object.__setattr__(self, name, cast)
            rounded = self.round_scales_to_power_of_2
            casts[site] = replace(cast, power_of_2=True) if rounded else cast
        return casts

    def _check_gemm(self, gemm: str) -> None:
        """Raise a `ValueError` if GEMM `gemm` ("output", ...) does not support its two casts."""
        a, b = map(self.cast_config, GEMM_OPERANDS[gemm])
        fields_of_both = " and ".join(f"cast_config_{x.value}" for x in GEMM_OPERANDS[gemm])
        got = f"GEMM '{gemm}': got {fields_of_both}"
        if a.is_float8 != b.is_float8:
            types = f"scaling types {a.scaling_type.value} and {b.scaling_type.value}"
            expected = "both operands in float8 or neither; set both or neither to DISABLED"
            raise ValueError(f"{got} of {types}, expected {expected}")
        if not a.is_float8:  # nor is `b`
            return
        pair = a.scaling_granularity, b.scaling_granularity
        if pair not in GEMM_GRANULARITIES:
            scales = f"scales of {pair[0].value} and {pair[1].value}"
            pairs = ", ".join(f"{x.value} x {y.value}" for x, y in GEMM_GRANULARITIES)
            raise ValueError(f"{got} with {scales}, expected one of {pairs}")
        by_blocks = pair[0].by_blocks  # `b` then has block scales, too: see `GEMM_GRANULARITIES`
        allowed_e5m2 = 0 if by_blocks else 1  # operands
        if [a.target_dtype, b.target_dtype].count(E5M2) > allowed_e5m2 and not self.emulate:
            dtypes = f"one of {E5M2} under {pair[0]}" if by_blocks else f"both of {E5M2}"
            expected = f"{E4M3} for both" if by_blocks else f"at least one {E4M3}"
            fix = "change one target_dtype or set emulate=True"
            raise ValueError(f"{got} {dtypes}, expected {expected}, as tensor cores require; {fix}")

    def _check_widths(self) -> None:
        """Raise a `ValueError` if casts have blocks of 32 and of 128 and `emulate` is False."""
        widths: set[Any] = {x.scaling_granularity.width for x in self._casts.values()} - {None}
        if len(widths) > 1 and not self.emulate:
            got = f"scaling_granularity: got blocks of {' and '.join(map(str, sorted(widths)))}"
            expected = "one of them: no GPU multiplies both; or set emulate=True"
            raise ValueError(f"{got}, expected {expected}")

    def cast_config(self, site: CastSite) -> CastConfig:
        """Return the cast of the GEMM operand `site` with all settings and defaults applied."""
        return self._casts[site]

    @functools.cached_property
    def own_casts(self) -> dict[CastSite, CastConfig]:
        """Casts by GEMM operand; a tensor's operand in a second GEMM only if cast differently."""
        casts = self._casts
        return {x: casts[x] for x in casts if x not in BASE_SITE or casts[x] != casts[BASE_SITE[x]]}

    @functools.cached_property
    def delayed_sites(self) -> tuple[CastSite, ...]:
        """The GEMM operands with delayed scaling: for each, a layer has three buffers."""
        own = self.own_casts.items()
        return tuple(site for site, x in own if x.scaling_type is ScalingType.DELAYED)

    @functools.cached_property
    def only_on(self) -> tuple[int, ...]:
        """Major compute capabilities of GPUs with all GEMMs of this config; (): any from 8.9."""
        # () is the least tuple. BLACKWELL and HOPPER are both in a config only under `emulate`.
        return max(cast.scaling_granularity.only_on for cast in self.own_casts.values())

    @property
    def float8_gemms(self) -> tuple[str, ...]:
        """The GEMMs that run in float8, out of `"output"`, `"grad_input"` and `"grad_weight"`."""
        return tuple(x for x, (a, _) in GEMM_OPERANDS.items() if self.cast_config(a).is_float8)

    def short_str(self) -> str:
        """Return the name of the recipe with these casts or, if none has, `own_casts` as text.

        Adds `emulate`, `round_scales_to_power_of_2` and `enable_fsdp_float8_all_gather` if they
        differ from that recipe's or, without one, from those of "tensorwise".
        """
        recipe = _RECIPE_BY_CASTS.get((self.round_scales_to_power_of_2, *self._casts.values()))
        defaults = RECIPES[recipe or "tensorwise"]
        own = self.own_casts.items()
        words = [recipe] if recipe else [f"{site.value}={x.short_str()}" for site, x in own]
        for switch in ("emulate", "round_scales_to_power_of_2", "enable_fsdp_float8_all_gather"):
            if (value := getattr(self, switch)) != getattr(defaults, switch):
                words.append(switch if value else f"{switch}=False")
        return ", ".join(words)

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> "Float8LinearConfig":
        """Return a new configuration of the recipe `recipe_name`; raise `ValueError` if unknown."""
        return copy.deepcopy(_recipe(recipe_name))


_delayed, _high = CastConfig(ScalingType.DELAYED), CastConfig(ScalingType.DISABLED)
_by_rows, _1x128 = CastConfig(scaling_granularity=_ROW), CastConfig(scaling_granularity=_ROW_128)
_128x128 = CastConfig(scaling_granularity=_SQUARE_128)
_1x32 = CastConfig(scaling_granularity=_ROW_32)
_rowwise = Float8LinearConfig(
    cast_config_input=_by_rows,
    cast_config_weight=_by_rows,
    cast_config_grad_output=_by_rows,
    round_scales_to_power_of_2=True,
)
_grad_weight_in_high_precision: dict[str, Any] = {
    "cast_config_input_for_grad_weight": _high,
    "cast_config_grad_output_for_grad_weight": _high,
}
_mxfp8 = Float8LinearConfig(
    cast_config_input=_1x32, cast_config_weight=_1x32, cast_config_grad_output=_1x32
)

RECIPES: dict[str, Float8LinearConfig] = {
    "tensorwise": Float8LinearConfig(),
    # Weights are scaled dynamically: a history is a step behind, and cuts weights that start at
    # zero, while the amax of a weight can be taken at each use.
    "delayed": Float8LinearConfig(cast_config_input=_delayed, cast_config_grad_output=_delayed),
    "rowwise": _rowwise,
    "rowwise_with_gw_hp": replace(
        _rowwise, cast_config_weight_for_grad_input=CastConfig(), **_grad_weight_in_high_precision
    ),
    "blockwise": Float8LinearConfig(
        cast_config_input=_1x128,
        cast_config_input_for_grad_weight=_128x128,
        cast_config_weight=_128x128,
        cast_config_grad_output=_1x128,
    ),
    "mxfp8": _mxfp8,
    "mxfp8_with_gw_hp": replace(_mxfp8, **_grad_weight_in_high_precision),
}
"""The recipes by the values of `Float8LinearRecipeName`. Layers share these objects."""

_RECIPE_BY_CASTS = {
    (rounded, *replace(config, round_scales_to_power_of_2=rounded)._casts.values()): name
    for name, config in RECIPES.items()
    for rounded in (False, True)
}
"""(`round_scales_to_power_of_2`, effective casts) -> the name of the recipe with these."""

ConfigOrRecipe = Float8LinearConfig | Float8LinearRecipeName | str


def _recipe(recipe_name: Any) -> Float8LinearConfig:
    """Return the shared configuration of recipe `recipe_name`; raise `ValueError` if unknown."""
    name = recipe_name.value if isinstance(recipe_name, Float8LinearRecipeName) else recipe_name
    if not isinstance(name, str) or name not in RECIPES:
        names = f"{', '.join(map(repr, RECIPES))}{torchao_hint(recipe_name)}"
        raise ValueError(f"recipe: got {recipe_name!r}, expected one of {names}")
    return RECIPES[name]


def as_config(config: ConfigOrRecipe | None) -> Float8LinearConfig:
    """Return `config` or the recipe it names (None: "tensorwise"); raise an error if neither."""
    if isinstance(config, Float8LinearConfig):
        return config
    if config is None or isinstance(config, Float8LinearRecipeName | str):
        return _recipe("tensorwise" if config is None else config)
    raise TypeError(
        f"config: got {type(config).__name__}, expected a Float8LinearConfig or the name of a "
        f"recipe, for example 'tensorwise'{torchao_hint(config)}"
    )


def linear_requires_sync(config: ConfigOrRecipe) -> bool:
    """Return whether layers with `config` need `sync_float8_amax_and_scale_history` each step."""
    return bool(as_config(config).delayed_sites)
