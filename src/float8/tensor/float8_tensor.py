"""`Float8Tensor`: float8 data and their scale as one tensor, for borders and for saving."""

from typing import Any

import torch
from torch import Tensor

from float8.autograd import computed_before
from float8.config import CastConfig, Granularity, ScalingGranularity
from float8.formats import E4M3, FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.quantize import Cast, quantize
from float8.scales import Operand, check_scale, dequantised
from float8.tensor.dtensor import dtensor_like, is_dtensor
from float8.tensor.ranks import amax_over, sharding_groups
from float8.tensor.wrapper import Wrapper


class Float8Tensor(Wrapper):
    """A tensor held as float8 data and a scale, which reports its original dtype.

    `x ~= data.to(float32) * scale`. It carries float8 where autograd, FSDP or DTensor must see
    one tensor; the layers' hot path passes data and scale directly. A 2-D product of two of them
    is a scaled float8 GEMM; one with a high-precision tensor dequantises. Ops without a float8
    meaning raise and name `.to_original_precision()`.

    Args:
        data: float8, any shape and strides; 2-D and contiguous under finer scales, of which
            `AXISWISE` allows more leading dims, or that the last two of a contiguous one are
            turned.
        scale: float32, the decode scales, in the shape of their granularity (`check_scale`), with
            the leading dims of `data`. For a matrix [R, C] under `AXISWISE` also [1, C]: one for
            each column, as `.t()` makes them of those of rows.
        orig_dtype: the dtype the tensor reports: float32, bfloat16 or float16.
        granularity: what one scale covers. Under others than `TENSORWISE` a tensor can be copied
            and dequantised, but not cut into views; under `AXISWISE` transposed, and where rows
            have the scales cut into whole rows.
        amax: 0-dim float32: what delayed scaling has to record at each use in training, if
            anything.

    Raises:
        TypeError: a dtype is not one of those named above.
        ValueError: `scale` has another shape than the granularity says.
    """

    _data: Tensor
    _scale: Tensor
    _orig_dtype: torch.dtype
    _granularity: Granularity
    _has_column_scales: bool
    """Whether each column has a scale, under `AXISWISE`, and not each row."""
    _amax: Tensor | None

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor,
        orig_dtype: torch.dtype,
        granularity: Granularity = ScalingGranularity.TENSORWISE,
        amax: Tensor | None = None,
    ) -> "Float8Tensor":
        """See the class."""
        if data.dtype not in FLOAT8_MAX:
            raise TypeError(f"data: got dtype {data.dtype}, expected one of {tuple(FLOAT8_MAX)}")
        if scale.dtype != torch.float32:
            raise TypeError(f"scale: got dtype {scale.dtype}, expected torch.float32")
        if orig_dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"orig_dtype: got {orig_dtype}, expected one of {HIGH_PRECISION_DTYPES}"
            )
        axiswise = granularity.by_rows
        fits = data.is_contiguous() and (data.dim() == 2 or (axiswise and data.dim() > 2))
        fits = fits or (axiswise and data.dim() > 1 and data.mT.is_contiguous())
        if not granularity.one_scale and not fits:
            raise ValueError(
                f"data: got shape {tuple(data.shape)} with strides {data.stride()}, expected a "
                f"contiguous matrix under {granularity}"
            )
        self = cls._unchecked(data, scale, orig_dtype, granularity, amax)
        operand = Operand(data.mT, scale.mT) if self._has_column_scales else Operand(data, scale)
        check_scale(operand, granularity)
        return self

    @classmethod
    def _unchecked(
        cls,
        data: Tensor,
        scale: Tensor,
        orig_dtype: torch.dtype,
        granularity: Granularity,
        amax: Tensor | None,
    ) -> "Float8Tensor":
        self: Float8Tensor = cls._around(data, orig_dtype)
        self._data, self._scale, self._amax = data, scale, amax
        self._orig_dtype, self._granularity = orig_dtype, granularity
        self._has_column_scales = granularity.by_rows and _has_scales_of_columns(data, scale)
        return self

    def _like(
        self, data: Tensor, scale: Tensor | None = None, amax: Tensor | None = None
    ) -> "Float8Tensor":
        """Return `data` under `scale`, with the other fields of this tensor; None: its own."""
        scale = self._scale if scale is None else scale
        amax = self._amax if amax is None else amax
        return self._unchecked(data, scale, self._orig_dtype, self._granularity, amax)

    @staticmethod
    def from_high_precision(
        x: Tensor,
        dtype: torch.dtype = E4M3,
        *,
        scale: Tensor | None = None,
        round_scales_to_power_of_2: bool = False,
    ) -> "Float8Tensor":
        """Cast `x`; differentiable, the gradient passes through unchanged.

        Args:
            x: float32, bfloat16 or float16, any shape. Or a DTensor of them, which becomes a
                DTensor of `Float8Tensor`s under the scale of the whole; then all ranks must call.
            dtype: float8 format.
            scale: float32 with one element; None: from the amax of `x`.
            round_scales_to_power_of_2: round a scale from the amax up to a power of two.

        Raises:
            TypeError: the dtype of `x`, or of `scale`, is not one of those named above.
            ValueError: `dtype` is no float8 format, or a DTensor is a sum still to be made.
        """
        spec = CastConfig(target_dtype=dtype, power_of_2=round_scales_to_power_of_2)
        if not is_dtensor(x):
            return to_float8(x, Cast(spec, scale=scale))
        whole: Any = x
        if any(placement.is_partial() for placement in whole.placements):
            raise ValueError(
                f"from_high_precision: got a DTensor placed {whole.placements}, expected no "
                f"Partial: its values are still to be summed up; redistribute it first"
            )
        cast = Cast(spec, scale=scale, reduce=amax_over(sharding_groups(whole)))
        local = to_float8(whole.to_local(), cast)
        return dtensor_like(local, whole)  # type: ignore[no-any-return]

    def to_original_precision(self) -> Tensor:
        """Dequantise; differentiable, the gradient passes through unchanged."""
        return _ToOriginalPrecision.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def _assign(self, new: Tensor) -> None:
        """Refuse a tensor that would take the place of data and scale, which would not notice."""
        raise RuntimeError(
            "data: got a tensor to take the place of float8 data and scale, expected none; assign "
            "a new Float8Tensor or Parameter to the attribute that holds this one"
        )

    def storage(self) -> Any:
        """Refuse to name one storage, as safetensors asks for: there are two."""
        raise RuntimeError(
            "Float8Tensor: got a request for its storage, as save_pretrained and safetensors make, "
            "expected tensors in high precision; save high_precision_state_dict(model), as in "
            "model.save_pretrained(path, state_dict=high_precision_state_dict(model)), or call "
            "convert_to_high_precision(model) first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Float8Tensor(data={self._data}, scale={self._scale}, "
            f"orig_dtype={self._orig_dtype}, granularity={self._granularity.value}, "
            f"amax={self._amax})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = ["_data", "_scale"] if self._amax is None else ["_data", "_scale", "_amax"]
        return names, {"orig_dtype": self._orig_dtype, "granularity": self._granularity}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> "Float8Tensor":
        return cls(inner["_data"], inner["_scale"], **context, amax=inner.get("_amax"))

    @property
    def _has_row_scales(self) -> bool:
        """Whether each row has a scale."""
        return self._granularity.by_rows and not self._has_column_scales

    @property
    def _scaling(self) -> str:
        """Describe the granularity for messages, and the dim of the scales if that differs."""
        return f"{self._granularity}{' by columns' if self._has_column_scales else ''}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = OP_HANDLERS.get(func) or OP_HANDLERS.get(func.name())
        if handler is None:
            # In inference mode nobody has taken compound ops apart.
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
            raise NotImplementedError(
                f"Float8Tensor: got {func}, expected one of the ops that have a float8 meaning "
                f"(views, copies, cat, mm); {CURE}"
            )
        return handler(func, args, kwargs or {})


def _has_scales_of_columns(data: Tensor, scale: Tensor) -> bool:
    """Whether matrices have a scale for each column; of ones with one element rows have it."""
    # In this order: a compiler is then asked about the features, not about the tokens.
    alike = data.dim() == scale.dim() > 1 and scale.shape[-1] == data.shape[-1]
    return alike and scale.shape[-2] == 1 and data.shape[-2:] != (1, 1)


CURE = (
    "for a weight that FSDP2 gathers, convert its layer once more before fully_shard, with "
    "enable_fsdp_float8_all_gather=False and a module_filter_fn that takes this layer alone; for "
    "one in float8 only, call convert_to_high_precision(model); else call .to_original_precision()"
)
"""What to do about an op that has no float8 meaning."""

OP_HANDLERS: dict[Any, Any] = {}
"""aten op, or its name -> handler(func, args, kwargs); filled by `float8.tensor.ops`."""


def to_float8(x: Tensor, cast: Cast) -> Float8Tensor:
    """Cast `x`, of any shape, under one scale or one for each row; differentiable.

    What delayed scaling has to record goes along with the result, for those who use it.
    """
    computed = computed_before(_ToFloat8, x, cast) if torch.compiler.is_compiling() else None
    return _ToFloat8.apply(x, cast, computed)  # type: ignore[no-any-return, no-untyped-call]


class _ToFloat8(torch.autograd.Function):
    @staticmethod
    def compute(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor, Tensor | None]:
        granularity, amax = cast.how.scaling_granularity, None
        if granularity.by_blocks:
            raise ValueError(f"to_float8: got {granularity}, expected TENSORWISE or AXISWISE")
        if cast.state is not None:
            state = cast.state.apart()
            cast, amax = cast._replace(state=state, record=True), state.amax
        rows = x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)
        data, scale = quantize(rows, cast, row=True).row
        if data.shape != rows.shape:  # padded for a GEMM
            data = data[:, : rows.shape[1]].clone(memory_format=torch.contiguous_format)
        if granularity.by_rows:
            scale = scale.reshape(*x.shape[:-1], 1)
        return data.reshape(x.shape), scale, amax

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Cast, computed: Any) -> Float8Tensor:
        data, scale, amax = _ToFloat8.compute(x, cast) if computed is None else computed
        return Float8Tensor(data, scale, x.dtype, cast.how.scaling_granularity, amax)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _ToOriginalPrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Float8Tensor) -> Tensor:
        return dequantise(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def dequantise(x: Float8Tensor) -> Tensor:
    """Return `data * scale` in float32, rounded to the original dtype; not differentiable."""
    return dequantised(Operand(x._data, x._scale), x._granularity).to(x._orig_dtype)


torch.serialization.add_safe_globals([Float8Tensor, ScalingGranularity])
