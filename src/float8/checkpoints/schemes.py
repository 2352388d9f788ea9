"""The schemes of published float8 weights, and layers that others loaded in one of them.

In all of them a weight [N, K] is e4m3 bytes with decode scales beside it, `x ~= data * scale`, as
in this library; they differ in what a scale covers, and in names: `_ALL` lists them.

Scales are float32, but exponents of 8 bits in `block_ue8m0` and `mxfp8`: a byte stands for
2^(byte - 127), 255 for NaN. DeepSeek-V3.1 has these scales in float32, too; both are read.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.config import Float8LinearConfig, Float8Weights, ScalingGranularity, as_config
from float8.formats import E4M3, FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.linear.source import class_with_forward, replaced_forward, shallow_copy
from float8.tensor import Float8Tensor, dequantise, is_dtensor

FINE_GRAINED, COMPRESSED = "fine-grained-fp8", "compressed-tensors"
EXPONENTS = torch.float8_e8m0fnu


def to_exponents(scale: Tensor) -> Tensor:
    """Return the exponents of float32 scales, rounded down; NaN for NaN and Inf."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(EXPONENTS)


class Scheme(NamedTuple):
    """How each weight in float8 lies in a checkpoint."""

    format: str
    strategy: str
    granularity: ScalingGranularity
    recipe: str  # which multiplies the bytes as they are
    exponents: torch.dtype | None = None  # of scales that are exponents; None: they are float32

    @property
    def scale_suffix(self) -> str:
        """The end of the name of a scale, after that of its weight."""
        return "_scale_inv" if self.format == FINE_GRAINED else "_scale"

    @property
    def block(self) -> list[int | None] | None:
        """The `weight_block_size` of `fine-grained-fp8`."""
        covers = self.granularity
        return None if covers.one_scale else [covers.height, covers.width]

    @property
    def scale_fmt(self) -> str:
        """Name the format of the scales as `fine-grained-fp8` does."""
        return "ue8m0" if self.exponents else "float"

    def takes(self, covers: Any) -> bool:
        """Whether scales of this granularity can be published: those of squares for each row."""
        by_rows = ScalingGranularity.BLOCK_32x32, ScalingGranularity.BLOCK_1x32
        return covers is self.granularity or (covers, self.granularity) == by_rows

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [N, K]."""
        if self.granularity.one_scale:
            return () if self.format == FINE_GRAINED else (1,)
        width = self.granularity.width  # their columns are not padded
        return self.granularity.scales(shape)[0], 1 if width is None else -(-shape[1] // width)

    def require_pair(self, name: str, weight: Any, scale: Any) -> None:
        """Raise unless a weight and its scale, each given as dtype and shape, fit this scheme."""
        (dtype, shape), scale_name = weight, name + self.scale_suffix
        kind, size = scale or (None, None)
        right = [self.scale_shape(shape)] if len(shape) == 2 else []
        right += [(), (1,), (1, 1)] if self.granularity.one_scale else []
        right += [shape[:1]] if self.granularity.by_rows else []
        kinds = [EXPONENTS, torch.uint8] if self.exponents else []
        kinds += [] if self.granularity.exponents else HIGH_PRECISION_DTYPES
        if dtype != E4M3:
            got, expected = f"dtype {dtype}", f"{E4M3}"
        elif len(shape) != 2:
            got, expected = f"float8 of shape {shape}", "two dims"
        elif scale is None:
            got, expected = f"float8 without {scale_name}", "a scale for it"
        elif kind not in kinds:
            name, got, expected = scale_name, f"dtype {kind}", f"one of {kinds}"
        elif size not in right:
            name, got = scale_name, f"shape {size} for a weight of shape {shape}"
            expected = f"{right[0]} under {self.granularity}"
        else:
            return
        raise ValueError(
            f"{name}: got {got}, expected {expected}, as config.json says; take the config.json of "
            f"this checkpoint, or load it with transformers, dequantised"
        )

    def weight(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Tensor:
        """Return published bytes [N, K] and scales, not rounded, as a tensor of `dtype`."""
        scale = scale.detach()
        scale = (scale.view(EXPONENTS) if scale.itemsize == 1 else scale).to(torch.float32)
        if self.granularity.one_scale:
            scale = scale.reshape(())
        else:  # GEMMs want columns of scales in fours
            scale = scale[:, None] if scale.dim() == 1 else scale
            columns = self.granularity.scales(tuple(data.shape))[1]
            scale = F.pad(scale, (0, columns - scale.shape[1]))
        return Float8Tensor(data.detach().contiguous(), scale.contiguous(), dtype, self.granularity)

    def published(self, weight: Float8Tensor) -> tuple[Tensor, Tensor] | None:
        """Return bytes and scales of a weight as files have them; None: these cannot be written."""
        if not self.takes(weight._granularity) or weight._data.dtype != E4M3:
            return None
        shape, height = self.scale_shape(tuple(weight.shape)), weight._granularity.height
        if height is None:
            scale = weight._scale.reshape(shape).clone()
        else:
            rows = weight._scale.repeat_interleave(height // (self.granularity.height or height), 0)
            scale = rows[: shape[0], : shape[1]].contiguous()
        if self.exponents:
            exponents = to_exponents(scale)
            powers = exponents.to(torch.float32)
            if not ((powers == scale) | powers.isnan()).all():
                return None
            scale = exponents.view(self.exponents)
        return weight._data, scale

    def config(self, left_out: list[str]) -> dict[str, Any]:
        """Return the `quantization_config`; `left_out`: names of layers in high precision."""
        if self.format == FINE_GRAINED:
            more = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": self.block}
            more |= {"scale_fmt": self.scale_fmt} if self.exponents else {}
            method = "mxfp8" if self.strategy == "mxfp8" else "fp8"
            return {"quant_method": method, **more, "modules_to_not_convert": left_out}
        common = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": self.strategy}
        common |= _MXFP8 if self.exponents else {}
        weights, inputs = common | {"dynamic": False}, common | {"dynamic": True}
        inputs |= {"strategy": "token"} if self.strategy == "channel" else {}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        format = "mxfp8-quantized" if self.exponents else "float-quantized"
        more = {"format": format, "quantization_status": "compressed"}
        groups = {"config_groups": {"group_0": group}}
        return {"quant_method": COMPRESSED, **more, **groups, "ignore": left_out}


_ALL = (
    Scheme(FINE_GRAINED, "block", ScalingGranularity.BLOCK_128x128, "blockwise"),
    Scheme(FINE_GRAINED, "tensor", ScalingGranularity.TENSORWISE, "tensorwise"),
    Scheme(FINE_GRAINED, "block_ue8m0", ScalingGranularity.BLOCK_128x128, "blockwise", EXPONENTS),
    Scheme(FINE_GRAINED, "mxfp8", ScalingGranularity.BLOCK_1x32, "mxfp8", torch.uint8),
    Scheme(COMPRESSED, "channel", ScalingGranularity.AXISWISE, "rowwise"),
    Scheme(COMPRESSED, "tensor", ScalingGranularity.TENSORWISE, "tensorwise"),
    Scheme(COMPRESSED, "mxfp8", ScalingGranularity.BLOCK_1x32, "mxfp8", torch.uint8),
)
_MXFP8 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
"""Of weights and inputs in `mxfp8`, in the words of compressed-tensors."""

SCHEMES = {(each.format, each.strategy): each for each in _ALL}
"""All that can be read and written, by format and strategy."""

_NAMES = ", ".join(f"{format!r} with strategy {strategy!r}" for format, strategy in SCHEMES)
_METHODS = "fp8", "mxfp8"  # of `fine-grained-fp8`


def _fine_grained(block: Any) -> dict[str, Scheme]:
    """Return the schemes of `fine-grained-fp8` with blocks of that size, by their `scale_fmt`."""
    alike = (each for each in _ALL if each.format == FINE_GRAINED and each.block == block)
    return {each.scale_fmt: each for each in alike}


def scheme_named(format: str, strategy: str | None) -> Scheme:
    """Return the scheme of a format and a strategy; None: the first of that format."""
    for (known_format, name), scheme in SCHEMES.items():
        if known_format == format and strategy in (None, name):
            return scheme
    raise ValueError(f"format: got {format!r} with strategy {strategy!r}, expected one of {_NAMES}")


def scheme_of(config: Any) -> Scheme:
    """Return the scheme that the `quantization_config` of a `config.json` describes."""
    config = _object(config)
    method, said = config.get("quant_method"), list[tuple[str, Any, list[Any]]]()
    if method == "mxfp8":
        config = {"weight_block_size": [1, 32], "scale_fmt": "ue8m0", **config}
    if method in _METHODS:
        blocks, scale_fmt = config.get("weight_block_size"), str(config.get("scale_fmt") or "float")
        known = _fine_grained(blocks)
        key = FINE_GRAINED, known[scale_fmt].strategy if scale_fmt in known else ""
        said = [
            ("['weight_block_size']", blocks, [[128, 128], [1, 32], None]),
            ("['scale_fmt']", scale_fmt, [*known]),
            ("['fmt']", config.get("fmt"), ["e4m3", None]),
            ("['expert_dtype']", config.get("expert_dtype"), ["fp8", None]),
        ]
    elif method == COMPRESSED:
        groups = _object(config.get("config_groups"))
        if len(groups) != 1:
            raise _unknown("", f"groups {[*groups]}", "one group: all weights alike")
        (group,) = map(_object, groups.values())
        weights = _object(group.get("weights"))
        key = COMPRESSED, weights.get("strategy", "")
        said = [
            (": weights['type']", weights.get("type"), ["float"]),
            (": weights['num_bits']", weights.get("num_bits"), [8]),
            (": weights['symmetric']", weights.get("symmetric", True), [True]),
            (": weights['strategy']", weights.get("strategy"), ["channel", "tensor", "group"]),
            (": targets", group.get("targets"), [["Linear"]]),
        ]
        if key[1] == "group":
            key = COMPRESSED, "mxfp8"
            said += [(f": weights[{n!r}]", weights.get(n), [x]) for n, x in _MXFP8.items()]
    else:
        expected = f"'fp8', 'mxfp8' or {COMPRESSED!r} in float8"
        raise _unknown("", f"quant_method {method!r}", expected)
    for what, got, right in said:
        if got not in right:
            expected = " or ".join(repr(each) for each in right if each is not None)
            raise _unknown(what, repr(got), expected)
    return SCHEMES[key]


def _object(x: Any) -> dict[str, Any]:
    """Return an object of JSON; of anything else, such as the name of a preset, an empty one."""
    return x if isinstance(x, dict) else {}


def _unknown(what: str, got: str, expected: str) -> ValueError:
    return ValueError(
        f"quantization_config{what}: got {got}, expected {expected}; load it with transformers, "
        f"dequantised, instead"
    )


def values_of(x: Tensor) -> Tensor:
    """Return a tensor of a checkpoint in high precision; a `Float8Tensor` in float32."""
    return dequantise(x, torch.float32) if isinstance(x, Float8Tensor) else x


def part_of(x: Tensor, expert: int, piece: int, pieces: int) -> Tensor:
    """Return a piece [N, K] of one of the weights [E, pieces * N, K] of experts.

    In float8 it has the scales of the whole; values, if one of these covers two pieces.
    """
    N = x.shape[1] // pieces
    begin, end = N * piece, N * piece + N
    if not isinstance(x, Float8Tensor):
        return x[expert, begin:end]
    height = x._granularity.height or 1
    if pieces > 1 and N % height:
        whole: Any = x[expert]
        return dequantise(whole)[begin:end]
    scale = x._scale[expert, begin // height : -(-end // height)]
    return Float8Tensor(x._data[expert, begin:end], scale, x.dtype, x._granularity)


# ---------------------------------------------------------------- layers that others loaded

# transformers has `fine-grained-fp8` in its `FP8Linear`, and compressed-tensors in an `nn.Linear`
# with more Parameters. They are told by a weight of float8 with a scale beside it.
_SCHEME = "quantization_scheme"  # which compressed-tensors leaves on modules, beside a forward


def strategy_of(mod: Any) -> tuple[str, str] | None:
    """Return format and strategy, maybe unknown ones, of a layer in float8; None: it is none."""
    weight = mod._parameters.get("weight") if isinstance(mod, nn.Linear) else None
    if weight is None or weight.dtype not in FLOAT8_MAX:
        return None
    # Their forward computes `input @ weight.T + bias`; that of a grouped one does not.
    if class_with_forward(type(mod)).__name__ not in ("Linear", "FP8Linear", "CompressedLinear"):
        return None
    if "weight_scale_inv" in mod._parameters:
        block: Any = getattr(mod, "block_size", None)
        is_exponents = mod._parameters["weight_scale_inv"].itemsize == 1
        scheme = _fine_grained(block and [*block]).get("ue8m0" if is_exponents else "float")
        return FINE_GRAINED, scheme.strategy if scheme else f"{block} blocks"
    if (scale := mod._parameters.get("weight_scale")) is None:
        return None
    if scale.itemsize == 1:
        return COMPRESSED, "mxfp8"
    return COMPRESSED, "tensor" if scale.numel() == 1 else "channel"


def config_for(mod: Any, config: Float8LinearConfig | None) -> Float8LinearConfig:
    """Return the configuration of a layer that is in float8; None: that which keeps its bytes."""
    if config is not None:
        return config
    scheme = SCHEMES.get(strategy_of(mod) or ("", ""))
    recipe = as_config(scheme.recipe if scheme else "tensorwise")
    runs = recipe.cast_config_weight.scaling_granularity.exponents
    if scheme and scheme.exponents and not runs:  # servers round scales of activations, too
        recipe = replace(recipe, round_scales_to_power_of_2=True)
    return replace(recipe, float8_weights=Float8Weights.ONLY)


def why_not_taken(mod: Any, config: Float8LinearConfig) -> str | None:
    """Say why a layer that is in float8 cannot become a `Float8Linear` of `config`, or None."""
    format, strategy = strategy_of(mod) or ("", "")
    scheme = SCHEMES.get((format, strategy))
    if scheme is None:
        return (
            f"got a weight in float8 with scales of {strategy} ({format}), expected one of "
            f"{_NAMES}; load it dequantised"
        )
    if replaced_forward(mod) and (hasattr(mod, "_hf_hook") or _SCHEME not in vars(mod)):
        got = "got a layer with a `forward` of its own as attribute"
        return f"{got}, expected one without; load the model onto one device"
    if is_dtensor(mod.weight):
        return "got a weight in float8 that ranks share, expected a whole one; load it dequantised"
    pair = mod.weight, mod._parameters["weight" + scheme.scale_suffix]
    try:
        scheme.require_pair("weight", *((x.dtype, tuple(x.shape)) for x in pair))
    except ValueError as error:
        return str(error)
    covers = config.cast_config_weight.scaling_granularity
    if config.float8_weights is not Float8Weights.ONLY or covers is scheme.granularity:
        return None
    return (
        f"got float8_weights=ONLY with scales of {covers} for a weight in float8 that has those of "
        f"{scheme.granularity}, expected the recipe {scheme.recipe!r}"
    )


@torch.inference_mode(False)  # else it could not be saved for a backward
def as_linear(mod: Any, config: Float8LinearConfig, dtype: torch.dtype) -> nn.Linear:
    """Return a copy of a layer that is in float8 as an `nn.Linear`; bias and hooks are its own.

    Its weight is a `Float8Tensor` of the same bytes under `Float8Weights.ONLY`, else the values.
    """
    scheme = SCHEMES[strategy_of(mod) or ("", "")]
    scale = mod._parameters["weight" + scheme.scale_suffix]
    weight: Any = scheme.weight(mod.weight, scale, dtype)
    only = config.float8_weights is Float8Weights.ONLY
    weight = weight if only else values_of(weight).to(dtype)
    new: nn.Linear = shallow_copy(mod, nn.Linear)
    new._parameters["weight"] = nn.Parameter(weight, requires_grad=not only)
    for name in ("weight_scale", "weight_scale_inv", "activation_scale", "input_scale"):
        new._parameters.pop(name, None)
    for name in (_SCHEME, "quantization_status"):
        new.__dict__.pop(name, None)
    return new


def leave_quantizers(model: nn.Module) -> None:
    """Take a model, none of whose layers is in float8 of others any more, from who loaded it.

    The hook of compressed-tensors would give all modules dicts of Parameters of another kind.
    transformers would refuse to train masters, and save them under its `quantization_config`.
    """
    left = any(_SCHEME in vars(mod) for mod in model.modules())
    if left or any(p.dtype in FLOAT8_MAX for p in model.parameters()):
        return
    for mod in model.modules():
        if hook := mod.__dict__.pop("ct_decompress_hook", None):
            hook.remove()
        quantizer = vars(mod).get("hf_quantizer")
        config = getattr(quantizer, "quantization_config", None)
        if quantizer and getattr(config, "quant_method", None) in (*_METHODS, COMPRESSED):
            quantizer.remove_quantization_config(mod)


def values_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model whose weights are in float8: that of its other Parameters."""
    for name, p in model.named_parameters():
        if p.dtype in HIGH_PRECISION_DTYPES and not name.endswith(("_scale", "_scale_inv")):
            return p.dtype
    return torch.bfloat16
