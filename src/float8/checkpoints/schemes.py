"""Schemes that store float8 weights in files, and layers that other libraries loaded from these.

Each of `_SCHEMES` stores a weight [N, K] as e4m3 data with scales: `x ~= data * scale`. Scales are
in float32, but under `block_ue8m0` and `mxfp8` 8-bit exponents: a byte is 2^(byte - 127), 255 NaN.
Files of `block_ue8m0` with float32 scales, such as those of DeepSeek-V3.1, are read, too.
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
Header = tuple[Any, tuple[int, ...]]  # dtype of a tensor in a file (a str if unknown), and shape


class Scheme(NamedTuple):
    """Describes how a checkpoint stores float8 weights: dtype, granularity and names of scales."""

    format: str  # "fine-grained-fp8" or "compressed-tensors"
    strategy: str  # such as "block" or "channel"
    granularity: ScalingGranularity
    recipe: str  # the recipe whose GEMMs read data with these scales
    exponents: torch.dtype | None = None  # dtype of 8-bit exponents in files; None: float32 scales

    @property
    def scale_suffix(self) -> str:
        """What follows the name of a weight in the name of its scale, such as `_scale_inv`."""
        return "_scale_inv" if self.format == FINE_GRAINED else "_scale"

    @property
    def block(self) -> list[int | None] | None:
        """[rows, columns] that share a scale; [1, None]: one per row; None: one for the tensor."""
        granularity = self.granularity
        return None if granularity.one_scale else [granularity.height, granularity.width]

    def accepts(self, granularity: ScalingGranularity) -> bool:
        """Return whether files can store scales of `granularity` (32x32 repeated, for 1x32)."""
        if self.granularity is ScalingGranularity.BLOCK_1x32:  # repeat those of 32x32 for each row
            return granularity in (ScalingGranularity.BLOCK_1x32, ScalingGranularity.BLOCK_32x32)
        return granularity is self.granularity

    def scale_shape(self, shape: tuple[int, ...], is_expert: bool = False) -> tuple[int, ...]:
        """Return the shape in files of the scale of a weight, or expert's weight, of `shape`."""
        if self.granularity.one_scale:  # transformers concatenates scales of experts
            return (1,) if self.format == COMPRESSED else (1, 1) if is_expert else ()
        width = self.granularity.width  # unlike in memory, columns of scales are not padded
        return self.granularity.scales(shape)[0], 1 if width is None else -(-shape[1] // width)

    def require_pair(self, name: str, weight: Header, scale: Header | None) -> None:
        """Raise `ValueError` if `scale` is None, or one (dtype, shape) is not of this scheme."""
        (dtype, shape), scale_name = weight, name + self.scale_suffix
        scale_dtype, scale_shape = scale or (None, None)
        shapes = [self.scale_shape(shape)] if len(shape) == 2 else []
        shapes += [(), (1,), (1, 1)] if self.granularity.one_scale else []  # as others write it
        shapes += [shape[:1]] if self.granularity.by_rows else []  # [N] instead of [N, 1]
        dtypes = [EXPONENTS, torch.uint8] if self.exponents else []
        dtypes += [] if self.strategy == "mxfp8" else HIGH_PRECISION_DTYPES  # also in block_ue8m0
        if dtype != E4M3:
            got, expected = f"dtype {dtype}", f"{E4M3}"
        elif len(shape) != 2:
            got, expected = f"float8 of shape {shape}", "two dims"
        elif scale is None:
            got, expected = f"float8 without {scale_name}", "a scale for it"
        elif scale_dtype not in dtypes:
            name, got, expected = scale_name, f"dtype {scale_dtype}", f"one of {dtypes}"
        elif scale_shape not in shapes:
            name, got = scale_name, f"shape {scale_shape} for a weight of shape {shape}"
            expected = f"{shapes[0]} under {self.granularity}"
        else:
            return
        fix = "take the config.json of this checkpoint, or load it with transformers, dequantized"
        raise ValueError(f"{name}: got {got}, expected {expected}, as config.json says; {fix}")

    def weight(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Tensor:
        """Return `data` [N, K] and `scale`, read from a file, as a `Float8Tensor` of `dtype`."""
        scale = scale.detach()  # scales of one byte are exponents, even if the dtype is uint8
        scale = (scale.view(EXPONENTS) if scale.itemsize == 1 else scale).to(torch.float32)
        if self.granularity.one_scale:
            scale = scale.reshape(())
        else:  # pad columns of scales to multiples of 4, as GEMMs read them
            scale = scale[:, None] if scale.dim() == 1 else scale  # [N] -> [N, 1]
            columns = self.granularity.scales(tuple(data.shape))[1]
            scale = F.pad(scale, (0, columns - scale.shape[1]))
        return Float8Tensor(data.detach().contiguous(), scale.contiguous(), dtype, self.granularity)

    def published(self, weight: Any, is_expert: bool) -> tuple[Tensor, Tensor] | None:
        """Return (data, scale) of `weight`, a `Float8Tensor` [N, K], as files store them, or None.

        None: it needs a new cast (e4m3, granularity, powers of 2). `is_expert`: it is an expert's.
        """
        if not self.accepts(weight._granularity) or weight._data.dtype != E4M3:
            return None
        shape, in_memory = self.scale_shape((*weight.shape,), is_expert), weight._granularity
        if in_memory.one_scale:
            scale = weight._scale.reshape(shape).clone()
        else:  # repeat scales of 32x32 for each row, and remove the padding of columns
            repeats = 1 if in_memory is self.granularity else in_memory.height
            scale = weight._scale.repeat_interleave(repeats, 0)[: shape[0], : shape[1]].contiguous()
        if self.exponents:
            # Bits 23 to 30 of a float32 are its exponent: 255 for NaN and Inf, which becomes NaN.
            exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).view(EXPONENTS)
            powers = exponents.to(torch.float32)
            if not ((powers == scale) | powers.isnan()).all():  # a scale is no power of two
                return None
            scale = exponents.view(self.exponents)
        return weight._data, scale

    def config(self, left_out: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` to write, with names `left_out` of layers not cast."""
        if self.format == FINE_GRAINED:
            method = "mxfp8" if self.strategy == "mxfp8" else "fp8"
            config: dict[str, Any] = {"quant_method": method, "fmt": "e4m3"}
            config |= {"activation_scheme": "dynamic", "weight_block_size": self.block}
            config |= {"scale_fmt": "ue8m0"} if self.exponents else {}
            return config | {"modules_to_not_convert": left_out}
        common = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": self.strategy}
        if self.exponents:  # "group": `group_size` elements of a row
            common |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        weights, inputs = common | {"dynamic": False}, common | {"dynamic": True}
        inputs |= {"strategy": "token"} if self.strategy == "channel" else {}  # both: one per row
        if self.strategy == "block":
            weights |= {"block_structure": self.block}
            inputs |= {"strategy": "group", "group_size": 128}
        layers = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        layout = "mxfp8-quantized" if self.exponents else "float-quantized"
        config = {"quant_method": COMPRESSED, "format": layout, "quantization_status": "compressed"}
        return config | {"config_groups": {"group_0": layers}, "ignore": left_out}


_SCHEMES = (
    Scheme(FINE_GRAINED, "block", ScalingGranularity.BLOCK_128x128, "blockwise"),
    Scheme(FINE_GRAINED, "tensor", ScalingGranularity.TENSORWISE, "tensorwise"),
    Scheme(FINE_GRAINED, "block_ue8m0", ScalingGranularity.BLOCK_128x128, "blockwise", EXPONENTS),
    Scheme(FINE_GRAINED, "mxfp8", ScalingGranularity.BLOCK_1x32, "mxfp8", torch.uint8),
    Scheme(COMPRESSED, "channel", ScalingGranularity.AXISWISE, "rowwise"),
    Scheme(COMPRESSED, "tensor", ScalingGranularity.TENSORWISE, "tensorwise"),
    Scheme(COMPRESSED, "block", ScalingGranularity.BLOCK_128x128, "blockwise"),
    Scheme(COMPRESSED, "mxfp8", ScalingGranularity.BLOCK_1x32, "mxfp8", torch.uint8),
)
_NAMES = ", ".join(f"{x.format!r} with strategy {x.strategy!r}" for x in _SCHEMES)
FP8_METHODS = "fp8", "mxfp8"  # values of `quant_method` for `fine-grained-fp8`


def scheme_named(format: str, strategy: str | None) -> Scheme:  # "compressed-tensors", "channel"
    """Return the `Scheme` with these names (None: the format's default), or raise `ValueError`."""
    for scheme in _SCHEMES:
        if scheme.format == format and strategy in (None, scheme.strategy):
            return scheme
    raise ValueError(f"format: got {format!r} with strategy {strategy!r}, expected one of {_NAMES}")


def scheme_of(config: Any) -> Scheme:
    """Return the `Scheme` that a `quantization_config` describes; raise `ValueError` if none."""
    config = _dict_or_empty(config)
    method = config.get("quant_method")
    fixes = (fix for prefix, fix in _FIX_BY_METHOD.items() if str(method).startswith(prefix))
    _require("['quant_method']", method, [*FP8_METHODS, COMPRESSED], next(fixes, None))
    format = COMPRESSED if method == COMPRESSED else FINE_GRAINED
    schemes = [scheme for scheme in _SCHEMES if scheme.format == format]
    for field, got in _fields(config).items():
        value_of = {scheme: _fields(scheme.config([]))[field] for scheme in schemes}
        _require(field, got, [*value_of.values()])
        schemes = [scheme for scheme in schemes if value_of[scheme] == got]
    return schemes[0]  # the only one: any two of a format differ in a field


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return {"['fmt']": "e4m3", ...}: those fields of a `quantization_config` that must match."""
    if config["quant_method"] != COMPRESSED:
        is_mxfp8 = config["quant_method"] == "mxfp8"
        block, scale_fmt = ([1, 32], "ue8m0") if is_mxfp8 else (None, "float")
        defaults: dict[str, Any] = {"weight_block_size": block, "scale_fmt": scale_fmt}
        defaults |= {"fmt": "e4m3", "expert_dtype": "fp8"}
        values = {name: config[name] for name in defaults if config.get(name) is not None}
        return {f"[{name!r}]": value for name, value in (defaults | values).items()}
    groups = _dict_or_empty(config.get("config_groups"))
    group = _dict_or_empty(next(iter(groups.values()), None))
    weights = {"symmetric": True} | _dict_or_empty(group.get("weights"))
    names = ["type", "num_bits", "symmetric", "strategy"]  # of fields that all strategies have
    names += ["group_size", "scale_dtype"] if weights.get("strategy") == "group" else []
    names += ["block_structure"] if weights.get("strategy") == "block" else []
    if weights.get("block_structure") == "128x128":  # in older files
        weights["block_structure"] = [128, 128]
    fields: dict[str, Any] = {"['config_groups']: number of groups": len(groups)}
    fields |= {f": weights[{name!r}]": weights.get(name) for name in names}
    return fields | {": targets": group.get("targets")}


def _dict_or_empty(x: Any) -> dict[str, Any]:
    return x if isinstance(x, dict) else {}  # some configs name a preset instead


_FIX_BY_METHOD = {
    "mxfp4": "load it with transformers and Mxfp4Config(dequantize=True)",
    "modelopt": "if its quant_algo is 'FP8', write {'quant_method': 'fp8'} there, which reads the "
    "same tensors; else take the model in 16 bits",
    "comfy": "take the model in 16 bits, or multiply its weights by their scales",
}
"""What to do with files of formats that are not read, by a prefix of their `quant_method`."""


def _require(field: str, got: Any, supported: list[Any], fix: str | None = None) -> None:
    """Raise `ValueError`, with advice `fix`, if `supported` lacks `got`, the value of `field`."""
    if got not in supported:
        expected = " or ".join(dict.fromkeys(repr(x) for x in supported if x is not None))
        fix = fix or "load it with transformers, dequantized, instead"
        raise ValueError(f"quantization_config{field}: got {got!r}, expected {expected}; {fix}")


def values_of(x: Tensor) -> Tensor:
    """Return `x` dequantized to float32 if `x` is a `Float8Tensor`, else `x` itself."""
    return dequantise(x, torch.float32) if isinstance(x, Float8Tensor) else x


COMPRESSED_MARK = "quantization_scheme"  # compressed-tensors sets it, and a `forward`, on layers


def scheme_of_layer(mod: Any) -> Scheme | str | None:
    """Return the `Scheme` of `mod` if it is a linear layer that another library loaded in float8.

    Such layers are of transformers (`FP8Linear`) or compressed-tensors. If no scheme has scales as
    theirs, return a text that describes the scales; for all other modules, return None.
    """
    weight = mod._parameters.get("weight") if isinstance(mod, nn.Linear) else None
    if weight is None or weight.dtype not in FLOAT8_MAX:
        return None
    # Only these compute `input @ weight.T + bias`; a grouped linear layer, for one, does not.
    if class_with_forward(type(mod)).__name__ not in ("Linear", "FP8Linear", "CompressedLinear"):
        return None
    if (scale := mod._parameters.get("weight_scale_inv")) is not None:
        block: Any = getattr(mod, "block_size", None)  # (rows, columns), or None for one scale
        layout = FINE_GRAINED, list(block) if block else block, scale.itemsize == 1  # exponents
        fits = (x for x in _SCHEMES if (x.format, x.block, x.exponents is not None) == layout)
        return next(fits, f"{block} blocks ({FINE_GRAINED})")
    if (scale := mod._parameters.get("weight_scale")) is None:
        return None
    inferred = "tensor" if scale.numel() == 1 else "channel"  # if the layer names no strategy
    weights = getattr(getattr(mod, COMPRESSED_MARK, None), "weights", None)  # says "group" if MXFP8
    strategy = "mxfp8" if scale.itemsize == 1 else getattr(weights, "strategy", inferred)
    fits = (x for x in _SCHEMES if (x.format, x.strategy) == (COMPRESSED, strategy))
    return next(fits, f"strategy {strategy!r} ({COMPRESSED})")


def config_for(mod: Any, config: Float8LinearConfig | None) -> Float8LinearConfig:
    """Return `config`, or if None one that keeps the bytes of `mod`, if a scheme has its scales."""
    if config is not None:
        return config
    if not isinstance(scheme := scheme_of_layer(mod), Scheme):
        return as_config("tensorwise")  # any one: `why_not_taken` refuses `mod`
    recipe = as_config(scheme.recipe)
    if scheme.exponents and not recipe.cast_config_weight.scaling_granularity.exponents:
        recipe = replace(recipe, round_scales_to_power_of_2=True)  # as servers do in activations
    return replace(recipe, float8_weights=Float8Weights.ONLY)


def why_not_taken(mod: Any, config: Float8LinearConfig) -> str | None:
    """Return why `mod`, loaded in float8 by another library, cannot take `config`, or None."""
    scheme = scheme_of_layer(mod)  # or a text that describes its scales
    if not isinstance(scheme, Scheme):
        got = f"got a weight in float8 with scales of {scheme}"
        return f"{got}, expected one of {_NAMES}; load it dequantized"
    # Conversion drops `mod.forward`: one set by compressed-tensors may go, one by accelerate not.
    if replaced_forward(mod) and (hasattr(mod, "_hf_hook") or COMPRESSED_MARK not in vars(mod)):
        got = "got a layer with a `forward` of its own as attribute"
        return f"{got}, expected one without; load the model onto one device"
    if is_dtensor(mod.weight):
        return "got a weight in float8 that ranks share, expected a whole one; load it dequantized"
    tensors = mod.weight, mod._parameters["weight" + scheme.scale_suffix]
    try:
        scheme.require_pair("weight", *((x.dtype, tuple(x.shape)) for x in tensors))
    except ValueError as error:
        return str(error)
    granularity = config.cast_config_weight.scaling_granularity
    if config.float8_weights is not Float8Weights.ONLY or granularity is scheme.granularity:
        return None
    got = f"got float8_weights=ONLY with scales of {granularity} for a weight in float8"
    return f"{got} that has those of {scheme.granularity}, expected the recipe {scheme.recipe!r}"


@torch.inference_mode(False)  # autograd does not save inference tensors for backward
def as_linear(mod: Any, config: Float8LinearConfig, dtype: torch.dtype) -> nn.Linear:
    """Return an `nn.Linear` with bias and hooks of `mod`, which another library loaded in float8.

    If `config` has `Float8Weights.ONLY` (weights exist in float8 only), the new weight is a frozen
    `Float8Tensor` of the same bytes that reports `dtype`; otherwise it is dequantized to `dtype`.
    """
    scheme: Any = scheme_of_layer(mod)  # a `Scheme`: `why_not_taken` has returned None
    quantized = scheme.weight(mod.weight, mod._parameters["weight" + scheme.scale_suffix], dtype)
    only = config.float8_weights is Float8Weights.ONLY
    weight = quantized if only else values_of(quantized).to(dtype)
    new: nn.Linear = shallow_copy(mod, nn.Linear)  # its dicts are copies: `mod` does not change
    new._parameters["weight"] = nn.Parameter(weight, requires_grad=not only)
    for name in ("weight_scale", "weight_scale_inv", "activation_scale", "input_scale"):
        new._parameters.pop(name, None)
    for name in (COMPRESSED_MARK, "quantization_status"):
        new.__dict__.pop(name, None)
    return new
