"""The layouts of published float8 weights: `fine-grained-fp8` and `compressed-tensors`.

In all of them a weight [N, K] is e4m3 bytes with decode scales beside it, `x ~= data * scale`, as
in this library; they differ in what a scale covers, and in names.

| format | scale beside `weight` | its shape |
|---|---|---|
| `fine-grained-fp8`, `block` | `weight_scale_inv` | [ceil(N / 128), ceil(K / 128)] |
| `fine-grained-fp8`, `tensor` | `weight_scale_inv` | [] |
| `compressed-tensors`, `channel` | `weight_scale` | [N, 1] |
| `compressed-tensors`, `tensor` | `weight_scale` | [1] |
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import ScalingGranularity
from float8.formats import E4M3
from float8.tensor import Float8Tensor

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Layout(NamedTuple):
    """How each weight in float8 lies in a checkpoint."""

    format: str
    """`fine-grained-fp8` or `compressed-tensors`."""

    granularity: ScalingGranularity

    @property
    def method(self) -> str:
        """The `quant_method` of a `quantization_config`."""
        return "fp8" if self.format == FINE_GRAINED else self.format

    @property
    def scale_suffix(self) -> str:
        """The end of the name of a scale, after that of its weight."""
        return "_scale_inv" if self.format == FINE_GRAINED else "_scale"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [N, K]."""
        N, K = shape
        if self.granularity is ScalingGranularity.BLOCK_128x128:
            return -(-N // 128), -(-K // 128)
        if self.granularity is ScalingGranularity.AXISWISE:
            return N, 1
        return () if self.format == FINE_GRAINED else (1,)

    def weight(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Tensor:
        """Return published bytes [N, K] and scales as a tensor of this library.

        Nothing is rounded: bytes stay, scales become float32.

        Args:
            data: e4m3.
            scale: `scale_shape`, one of `SCALE_DTYPES`.
            dtype: that of the values that it stands for.
        """
        scale = scale.detach().to(torch.float32)
        if self.granularity.one_scale:
            scale = scale.reshape(())
        elif self.granularity.by_blocks:  # GEMMs want columns of scales in fours
            scale = F.pad(scale, (0, -scale.shape[1] % 4))
        return Float8Tensor(data.detach().contiguous(), scale.contiguous(), dtype, self.granularity)

    def published(
        self, weight: Float8Tensor, scale_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return bytes and scales as they are published; `weight` has this granularity.

        Raises:
            ValueError: a scale is no number of `scale_dtype`.
        """
        shape = self.scale_shape(tuple(weight.shape))
        one = self.granularity.one_scale
        scale = weight._scale.reshape(shape) if one else weight._scale[:, : shape[1]]
        stored = scale.to(scale_dtype)
        if scale_dtype != torch.float32 and not torch.equal(stored.to(torch.float32), scale):
            raise ValueError(
                f"scale_dtype: got {scale_dtype}, expected torch.float32: it would round the "
                f"scales, and so change all values"
            )
        return weight._data, stored.clone(memory_format=torch.contiguous_format)


FINE_GRAINED, COMPRESSED = "fine-grained-fp8", "compressed-tensors"

LAYOUTS: dict[tuple[str, str], Layout] = {
    (FINE_GRAINED, "block"): Layout(FINE_GRAINED, ScalingGranularity.BLOCK_128x128),
    (FINE_GRAINED, "tensor"): Layout(FINE_GRAINED, ScalingGranularity.TENSORWISE),
    (COMPRESSED, "channel"): Layout(COMPRESSED, ScalingGranularity.AXISWISE),
    (COMPRESSED, "tensor"): Layout(COMPRESSED, ScalingGranularity.TENSORWISE),
}
"""All that can be read and written, by format and strategy."""


def layout_named(format: str, strategy: str | None) -> Layout:
    """Return the layout of a format and a strategy; None: the first of that format.

    Raises:
        ValueError: there is none.
    """
    for (of, name), layout in LAYOUTS.items():
        if of == format and strategy in (None, name):
            return layout
    known = ", ".join(f"{of!r} with strategy {name!r}" for of, name in LAYOUTS)
    raise ValueError(f"format: got {format!r} with strategy {strategy!r}, expected one of {known}")


def layout_of(config: Any) -> Layout:
    """Return the layout that a `quantization_config` describes.

    Raises:
        ValueError: it is none of the layouts above.
    """
    got = config.get("quant_method") if isinstance(config, dict) else None
    if got == "fp8":
        return _fine_grained(config)
    if got == "compressed-tensors":
        return _compressed(config)
    raise ValueError(
        f"quantization_config: got quant_method {got!r}, expected 'fp8' (128x128 blocks) or "
        f"'compressed-tensors' (float8); load it with transformers, dequantised, instead"
    )


def _fine_grained(config: dict[str, Any]) -> Layout:
    blocks = config.get("weight_block_size")
    blocks = (*blocks,) if isinstance(blocks, list | tuple) else blocks
    for name, value, wanted in (
        ("weight_block_size", blocks, [(128, 128), None]),
        ("scale_fmt", config.get("scale_fmt", "float"), ["float", None]),
        ("fmt", config.get("fmt", "e4m3"), ["e4m3", None]),
        ("expert_dtype", config.get("expert_dtype", "fp8"), ["fp8", None]),
    ):
        _require(f"quantization_config[{name!r}]", value, wanted)
    return LAYOUTS[FINE_GRAINED, "tensor" if blocks is None else "block"]


def _compressed(config: dict[str, Any]) -> Layout:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError(
            f"quantization_config['config_groups']: got {groups!r}, expected one group: all "
            f"weights in one layout; load it with transformers, dequantised, instead"
        )
    (group,) = groups.values()
    group = group if isinstance(group, dict) else {}  # else the name of a preset
    of_weights = group.get("weights")
    of_weights = of_weights if isinstance(of_weights, dict) else {}
    for name, value, wanted in (
        ("type", of_weights.get("type"), ["float"]),
        ("num_bits", of_weights.get("num_bits"), [8]),
        ("symmetric", of_weights.get("symmetric", True), [True]),
        ("strategy", of_weights.get("strategy"), ["channel", "tensor"]),
        ("targets", group.get("targets"), [["Linear"]]),
    ):
        _require(f"quantization_config: weights[{name!r}]", value, wanted)
    return LAYOUTS[COMPRESSED, of_weights["strategy"]]


def _require(what: str, got: Any, wanted: list[Any]) -> None:
    if got not in wanted:
        expected = " or ".join(repr(each) for each in wanted if each is not None)
        raise ValueError(
            f"{what}: got {got!r}, expected {expected}; load it with transformers, dequantised, "
            f"instead"
        )


def check_pair(
    layout: Layout, name: str, weight: tuple[Any, Any], scale: tuple[Any, Any] | None
) -> None:
    """Raise a `ValueError` unless a weight and its scale fit a layout.

    Args:
        layout: of the checkpoint.
        name: of the weight, for the message.
        weight: its dtype and shape.
        scale: likewise; None: there is none.
    """
    dtype, shape = weight
    scale_name = f"{name}{layout.scale_suffix}"
    if dtype != E4M3:
        raise ValueError(f"{name}: got dtype {dtype}, expected {E4M3}")
    if len(shape) != 2:
        raise ValueError(f"{name}: got float8 of shape {tuple(shape)}, expected two dims")
    if scale is None:
        raise ValueError(f"{name}: got float8 without {scale_name}, expected a scale for it")
    if scale[0] not in SCALE_DTYPES:
        kinds = ", ".join(map(str, SCALE_DTYPES))
        raise ValueError(f"{scale_name}: got dtype {scale[0]}, expected one of {kinds}")
    wanted, got = layout.scale_shape(tuple(shape)), tuple(scale[1])
    if got != wanted and not (layout.granularity.one_scale and got in ((), (1,), (1, 1))):
        raise ValueError(
            f"{scale_name}: got shape {got} for a weight of shape {tuple(shape)}, expected "
            f"{wanted} under {layout.granularity}"
        )
