"""Write the weights of a model in float8, one tensor after the other."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.arguments import require_module
from float8.checkpoints.gathering import (
    gathered,
    has_whole_experts,
    parts_have_own_scales,
    sum_over_parts,
    whole,
    whole_of,
)
from float8.checkpoints.layouts import COMPRESSED, FINE_GRAINED, Layout, layout_named
from float8.checkpoints.names import (
    PublishedNames,
    plain_name,
    published_names,
    saved_tensors,
    unwrapped,
)
from float8.checkpoints.reading import CONFIG, INDEX, NO_SAFETENSORS
from float8.experts import Float8Experts
from float8.formats import E4M3, FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.linear import Float8Layer, is_conv1d
from float8.linear.weight import in_float8_only
from float8.quantize.quantize import Cast
from float8.quantize.spec import CastSpec, Operand, dequantised
from float8.tensor import Float8Tensor, high_precision, is_dtensor, local_tensor, reshard
from float8.tensor.ranks import amax_over, sharding_groups


@dataclass(frozen=True)
class WrittenWeight:
    """One weight in float8 that was written."""

    name: str

    as_trained: bool
    """Whether the bytes are those that training multiplies."""

    sqnr: float
    """Of the values that were written against the weight, in dB; infinite if they are the same."""


def float8_weights(
    model: nn.Module,
    format: str = FINE_GRAINED,
    *,
    strategy: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a converted model as servers of float8 read them.

    Weights of `Float8Linear` come as e4m3 bytes, each followed by its scales; all else in `dtype`.
    Names are those under which transformers publishes the model; of other models those of
    `model.state_dict()`, without what torch.compile and DDP add. Experts of transformers that are
    published one by one come so, in float8, converted or not. One tensor is made at a time. With
    the granularity of the recipe the bytes are those that training multiplies;
    `save_float8_checkpoint` says which are. What is not cast may share the memory of the model:
    copy it before the next step.

    Of weights that ranks share (FSDP2, tensor parallel) each rank casts its own part, and ranks
    gather bytes and scales: the same as of one rank. Where a scale would cover parts of two ranks,
    the weight is gathered in high precision and then cast: blocks unless each part begins at a
    multiple of 128, channels and experts that are cut. All ranks must iterate alike. What FSDP2
    keeps gathered is resharded.

    Args:
        model: converted; in training or evaluation, sharded by FSDP2 or whole.
        format: `"fine-grained-fp8"` (as DeepSeek-V3 and Qwen3 are published) or
            `"compressed-tensors"`.
        strategy: what a scale covers. Of the first `"block"`, 128x128, or `"tensor"`; of the other
            `"channel"`, one output, or `"tensor"`. None: the first of these.
        dtype: of what is not in float8.
        scale_dtype: of scales: float32, or one in which they are the same numbers.
        param_dtype: that of FSDP2's `MixedPrecisionPolicy`, if it has one: training rounds weights
            to it before it casts them, and so are these. None: they are cast as they are.

    Raises:
        TypeError: `model` is no `nn.Module`; `dtype` is none in high precision.
        ValueError: `format` and `strategy` are none that is known, no layer is converted, one is in
            the float8 of another library, or `scale_dtype` cannot hold a scale.
    """
    layout = _checked(model, format, strategy, dtype, param_dtype)
    how = _How(layout, dtype, scale_dtype, param_dtype)
    for name, tensor, scale, _ in _written(model, how):
        yield name, tensor
        if scale is not None:
            yield name + layout.scale_suffix, scale


def quantization_config(
    model: nn.Module, format: str = FINE_GRAINED, *, strategy: str | None = None
) -> dict[str, Any]:
    """Return what `config.json` says beside weights that `float8_weights` yields.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: as `float8_weights`.
    """
    layout = _checked(model, format, strategy, torch.bfloat16)
    by_tensor = layout.granularity.one_scale
    published = published_names(model)
    in_float8 = _layers_in_float8(model) | _experts_in_float8(model, published)
    own_names = layout.format == COMPRESSED  # transformers looks for these among its modules
    left_out = [
        plain_name(name) if own_names else _published_module(plain_name(name), published)
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, nn.Linear | Float8Layer) or is_conv1d(module) or _has_experts(module)
        if in_float8.isdisjoint(module.modules())  # a name stands for all beneath it
    ]
    if layout.format == FINE_GRAINED:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": None if by_tensor else [128, 128],
            "modules_to_not_convert": left_out,
        }
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {"strategy": "tensor" if by_tensor else "channel", "dynamic": False}
    inputs = {"strategy": "tensor" if by_tensor else "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": common | weights,
        "input_activations": common | inputs,
    }
    return {
        "quant_method": COMPRESSED,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": left_out,
    }


def save_float8_checkpoint(
    model: nn.Module,
    folder: str | Path,
    format: str = FINE_GRAINED,
    *,
    strategy: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
) -> tuple[WrittenWeight, ...]:
    """Write `float8_weights` as safetensors shards with an index, and `config.json`.

    `config.json` is that of `model.config`, if there is one (as transformers has them), with the
    `quantization_config`. Tied weights are written once. On several ranks all must call; the first
    one writes. It holds one shard in memory.

    Files of an older model in the folder are removed first, and the index and `config.json` come
    last: what an error or a crash leaves behind has neither.

    Args:
        model: as for `float8_weights`, as are all but the folder and the size.
        folder: is made if it is not there.
        format: see there.
        strategy: see there.
        dtype: see there.
        scale_dtype: see there.
        param_dtype: see there.
        max_shard_size: bytes of a file at most, but for a single tensor that is larger.

    Returns:
        For each weight in float8 whether its bytes are those of training, and its SQNR.

    Raises:
        ImportError: the package safetensors is not installed.
        TypeError: as `float8_weights`; or `model.config` has something that JSON has not.
        ValueError: as `float8_weights`; or `max_shard_size` is no positive number of bytes.
    """
    layout = _checked(model, format, strategy, dtype, param_dtype)
    if not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise ValueError(f"max_shard_size: got {max_shard_size!r}, expected bytes, 1 or more")
    how = _How(layout, dtype, scale_dtype, param_dtype)
    described = _config_of(unwrapped(model), dtype)
    described["quantization_config"] = quantization_config(model, format, strategy=strategy)
    config = json.dumps(described, indent=2)
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(NO_SAFETENSORS) from error
    writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    folder, notes = Path(folder), []
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / INDEX, folder / CONFIG, *folder.glob("model*.safetensors")):
            path.unlink(missing_ok=True)
    shard: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    files = total = 0

    def flush() -> None:
        nonlocal files
        files += 1
        name = f"model-{files:05d}.safetensors"
        file_of.update(dict.fromkeys(shard, name))
        if writes:
            save_file(shard, folder / name, metadata={"format": "pt"})
        shard.clear()

    size = 0
    for name, tensor, scale, note in _written(model, how, measured=True):
        pair = {name: tensor}
        if scale is not None:
            pair[name + layout.scale_suffix] = scale
        adds = sum(x.nbytes for x in pair.values())
        if shard and size + adds > max_shard_size:
            flush()
            size = 0
        if writes:
            shard |= {key: x.detach().cpu().contiguous() for key, x in pair.items()}
        size, total = size + adds, total + adds
        if note is not None:
            notes.append(note)
    flush()
    if writes:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        (folder / CONFIG).write_text(config, encoding="utf-8")
    return tuple(notes)


def _config_of(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Return `model.config` as transformers saves it beside weights of `dtype`; none: {}."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    cls = type(model).__name__.removeprefix("FSDP")  # which fully_shard adds
    plain: dict[str, Any] = config.to_dict()
    return plain | {"architectures": [cls], "dtype": str(dtype).removeprefix("torch.")}


# ---------------------------------------------------------------- one after the other


def _checked(
    model: nn.Module,
    format: str,
    strategy: str | None,
    dtype: torch.dtype,
    param_dtype: torch.dtype | None = None,
) -> Layout:
    require_module(model, "model")
    for name, given in (("dtype", dtype), ("param_dtype", param_dtype or dtype)):
        if given not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"{name}: got {given}, expected one of {HIGH_PRECISION_DTYPES}")
    if hasattr(model, "peft_config"):
        raise ValueError(
            "model: got one with adapters of PEFT, whose names no server knows, expected one "
            "without; call model.unload() for the base, and save adapters by PEFT"
        )
    if not _layers_in_float8(model) and not any(
        isinstance(x, Float8Experts) for x in _experts_in_float8(model, published_names(model))
    ):
        raise ValueError(
            "model: got one without a Float8Linear or Float8Experts whose weights can be written "
            "(not a Conv1D's), expected one; call convert_to_float8_training(model, config=...) "
            "first"
        )
    for name, module, _, x in saved_tensors(model):
        if x.dtype in FLOAT8_MAX:
            raise ValueError(
                f"{name}: got float8 of a {type(module).__name__} of another library, expected "
                f"layers of this one or high precision; load the model dequantised"
            )
    return layout_named(format, strategy)


def _has_experts(module: nn.Module) -> bool:
    """Whether it holds weights [E, N, K], which transformers would take to be in float8."""
    return any(x is not None and x.dim() == 3 for x in module._parameters.values())


class _How(NamedTuple):
    """Arguments of `float8_weights`."""

    layout: Layout
    dtype: torch.dtype
    scale_dtype: torch.dtype
    param_dtype: torch.dtype | None


Written = tuple[str, Tensor, Tensor | None, WrittenWeight | None]


@torch.no_grad()
def _written(model: nn.Module, how: _How, measured: bool = False) -> Iterator[Written]:
    """Yield name, tensor, scale and note of each Parameter and buffer that is saved, once."""
    reshard(model)
    in_float8, published = _layers_in_float8(model), published_names(model)
    experts = _experts_in_float8(model, published)
    seen: set[int] = set()
    for name, module, own, x in saved_tensors(model):
        if id(x) in seen:
            continue
        seen.add(id(x))
        if module in experts and name in published.experts:
            yield from _each_expert(published.experts[name], module, x, how, measured)
        elif own == "weight" and module in in_float8:
            yield _in_float8(published.names[name], module, how, measured)
        else:
            values = high_precision(x.detach())
            is_float = values.dtype in HIGH_PRECISION_DTYPES
            values = whole(values.to(how.dtype) if is_float else values)
            yield published.names[name], values, None, None


def _layers_in_float8(model: nn.Module) -> set[nn.Module]:
    """Return the layers that multiply outputs in float8, and have a weight [N, K] for themselves.

    One that is tied to an embedding is none of these, nor one that transformers keeps in float32,
    such as `wo` of T5: it would read the bytes, and no scales.
    """
    root: Any = unwrapped(model)
    # As it matches: a module, what is in it, and names that end so.
    kept = [
        rf"(^|\.)({each})\.|({each})$"
        for each in getattr(root, "_keep_in_fp32_modules", None) or ()
    ]
    found: set[nn.Module] = {
        layer
        for name, layer in root.named_modules()
        if isinstance(layer, Float8Layer) and not layer.transposed and layer.plan.output is not None
        if not any(re.search(each, plain_name(name)) for each in kept)
    }
    of_others = {id(x) for m in model.modules() if m not in found for x in m._parameters.values()}
    return {layer for layer in found if id(layer._parameters.get("weight")) not in of_others}


def _experts_in_float8(model: nn.Module, published: PublishedNames) -> set[nn.Module]:
    """Return the modules of experts, converted or not, whose weights are published one by one."""
    cut: dict[nn.Module, list[bool]] = {}
    for name, module, _, x in saved_tensors(model):
        if x.dim() == 3:
            in_16_bits = local_tensor(high_precision(x)).dtype in HIGH_PRECISION_DTYPES
            cut.setdefault(module, []).append(name in published.experts and in_16_bits)
    return {module for module, each in cut.items() if all(each)}


def _published_module(name: str, published: PublishedNames) -> str:
    """Return the name of a module as its weight is published."""
    return published.names.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")


def _each_expert(
    parts: list[list[str]], module: Any, weight: Any, how: _How, measured: bool
) -> Iterator[Written]:
    """Yield the weights [N, K] of a Parameter [E, parts * N, K] of experts, part by part.

    On several ranks each casts the experts that it has, if it has whole ones.
    """
    layout, _, scale_dtype, param_dtype = how
    spec, as_trained = CastSpec(E4M3, layout.granularity), False
    if isinstance(module, Float8Experts):
        of_module = module.float8_plan.casts.weight.spec
        spec = spec._replace(power_of_2=of_module.power_of_2)
        # Under one scale training has the parts of a weight together.
        as_trained = of_module == spec and (len(parts) == 1 or not spec.granularity.one_scale)
    weight = high_precision(weight.detach())
    weight = weight if param_dtype is None else weight.to(param_dtype)
    if is_dtensor(weight) and not has_whole_experts(weight):
        weight = whole(weight)
    here, shape = local_tensor(weight), (weight.shape[1] // len(parts), weight.shape[2])

    def cast(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = in_float8_only(values, Cast(spec))
        noise = _powers(made, values) if measured else values.new_zeros(2, dtype=torch.float64)
        return *layout.published(made), noise

    for names, values in zip(parts, here.split(shape[0], 1), strict=True):
        each: Any = map(cast, values)
        if is_dtensor(weight):
            sizes = shape, layout.scale_shape(shape), (2,)
            each = zip(*_of_all_ranks([*each], weight, sizes), strict=True)
        for name, (data, scale, noise) in zip(names, each, strict=True):
            made = layout.weight(data, scale, weight.dtype)
            data, scale = layout.published(made, scale_dtype)
            scale = scale if scale.dim() else scale.reshape(1, 1)  # transformers joins these
            note = WrittenWeight(name, as_trained, _sqnr(noise)) if measured else None
            yield name, data, scale, note


def _of_all_ranks(
    made: list[tuple[Tensor, ...]], weight: Any, sizes: tuple[tuple[int, ...], ...]
) -> list[Tensor]:
    """Return what ranks made of each expert of a DTensor, stacked: of `sizes`; collective."""
    stacked = []
    for i, (size, dtype) in enumerate(zip(sizes, _OF_EXPERTS, strict=True)):
        mine = torch.empty(len(made), *size, dtype=dtype, device=weight.device)
        for row, each in zip(mine, made, strict=True):
            row.copy_(each[i])
        stacked.append(whole_of(mine, weight, (len(weight), *size)))
    return stacked


_OF_EXPERTS = (E4M3, torch.float32, torch.float64)
"""The dtypes of data, scales and noise."""


def _in_float8(name: str, layer: Any, how: _How, measured: bool) -> Written:
    """Return a weight as it is published; without a note unless it is `measured`.

    On several ranks from the part of each, if that has scales of its own.
    """
    weight: Any = high_precision(layer.weight.detach())
    layout, _, scale_dtype, param_dtype = how
    of_layer, granularity = layer.plan.casts.weight.spec, layout.granularity
    spec = CastSpec(E4M3, granularity, power_of_2=of_layer.power_of_2)
    if param_dtype is not None and not isinstance(local_tensor(weight), Float8Tensor):
        weight = weight.to(param_dtype)
    if is_dtensor(weight) and not parts_have_own_scales(weight, granularity):
        weight = whole(weight)
    made = part = local_tensor(weight)
    if not isinstance(part, Float8Tensor) or part._granularity is not granularity:
        part = part.to_original_precision() if isinstance(part, Float8Tensor) else part
        reduce = amax_over(sharding_groups(weight)) if is_dtensor(weight) else None
        made = in_float8_only(part, Cast(spec, reduce=reduce))
    full = gathered(made, weight, layout) if is_dtensor(weight) else made
    note = None
    if measured:  # which waits for a GPU
        same = made is part
        sqnr = float("inf") if same else _sqnr(sum_over_parts(_powers(made, part), weight))
        note = WrittenWeight(name, of_layer == spec, sqnr)
    return name, *layout.published(full, scale_dtype), note


def _powers(made: Float8Tensor, values: Tensor) -> Tensor:
    """Return the sums of squares of values, and of the noise of their cast: [2] float64."""
    got = dequantised(Operand(made._data, made._scale), made._granularity)
    values = values.float()
    return torch.stack([x.double().square().sum() for x in (values, got - values)])


def _sqnr(powers: Tensor) -> float:
    """Return an SQNR in dB, of the sums that `_powers` returns."""
    signal, noise = powers.unbind()
    return 10 * torch.log10(signal / noise).item() if noise else float("inf")
