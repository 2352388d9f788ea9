"""Write the weights of a model in float8, one tensor after the other."""

import contextlib
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from float8.arguments import require_module
from float8.checkpoints.files import NewFiles
from float8.checkpoints.gathering import (
    gathered,
    has_whole_experts,
    parts_have_own_scales,
    sum_over_parts,
    whole,
    whole_of,
)
from float8.checkpoints.layouts import (
    COMPRESSED,
    FINE_GRAINED,
    SCALE_DTYPES,
    Layout,
    layout_named,
)
from float8.checkpoints.names import (
    PublishedNames,
    plain_name,
    published_names,
    replaced_by_transformers,
    saved_tensors,
    unwrapped,
)
from float8.checkpoints.ranks import Together, groups_of, meshes_of, rank_and_size
from float8.checkpoints.reading import NO_SAFETENSORS
from float8.config import CastConfig
from float8.experts import Float8Experts
from float8.formats import E4M3, FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.linear import Float8Layer
from float8.linear.weight import in_float8_only
from float8.quantize import Cast
from float8.scales import Operand, dequantised
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
    dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a converted model as servers of float8 read them.

    Weights of `Float8Linear` come as e4m3 bytes, each followed by its scales; all else as `dtype`
    says.
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
        dtype: of what is not in float8. None: as the model has it, if most of its weights for
            float8 have 16 bits: what it holds in float32 beside these stays so. Else float32
            becomes bfloat16, but for what the classes of transformers keep in float32.
        scale_dtype: of scales: float32, or one in which they are the same numbers.
        param_dtype: that of FSDP2's `MixedPrecisionPolicy`, if it has one: training rounds weights
            to it before it casts them, and so are these. None: they are cast as they are.

    Raises:
        TypeError: `model` is no `nn.Module`; `dtype` or `param_dtype` is none in high precision,
            or `scale_dtype` none in which scales can be read.
        ValueError: `format` and `strategy` are none that is known, no layer is converted, one is in
            the float8 of another library or on the meta device, transformers could not load the
            experts, or `scale_dtype` cannot hold a scale; safetensors cannot have a tensor (sparse,
            nested, complex128), or two tensors have one name, such as that of a scale.
    """
    require_module(model, "model")
    ranks = Together(groups=groups_of(model))
    with ranks:
        how = _how(model, format, strategy, dtype, scale_dtype, param_dtype)
    for name, tensor, scale, _ in _written(model, how, ranks):
        yield name, tensor
        if scale is not None:
            yield name + how.layout.scale_suffix, scale


def quantization_config(
    model: nn.Module, format: str = FINE_GRAINED, *, strategy: str | None = None
) -> dict[str, Any]:
    """Return what `config.json` says beside weights that `float8_weights` yields.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: as `float8_weights`.
    """
    require_module(model, "model")
    return _quantization_config(model, _how(model, format, strategy))


def _quantization_config(model: nn.Module, how: "_How") -> dict[str, Any]:
    """Return the `quantization_config` of `config.json`."""
    layout, published, in_float8 = how.layout, how.published, how.layers | how.experts
    by_tensor = layout.granularity.one_scale
    own_names = layout.format == COMPRESSED  # transformers looks for these among its modules
    left_out = [
        plain_name(name) if own_names else _published_module(plain_name(name), published)
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, nn.Linear | Float8Layer) or _has_experts(module)
        if in_float8.isdisjoint(module.modules())  # a name stands for all beneath it
    ]
    if layout.format == FINE_GRAINED:
        return {
            "quant_method": layout.method,
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
        "quant_method": layout.method,
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
    dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
) -> tuple[WrittenWeight, ...]:
    """Write `float8_weights` as safetensors shards with an index, and `config.json`.

    `config.json` is that of `model.config`, if there is one (as transformers has them), with the
    `quantization_config`. Tied weights are written once. It holds one shard in memory.

    On several ranks rank 0 writes. All that share a sharded model must call, and what one of them
    cannot do is an error on all. A model that is whole waits for nobody: the one of rank 0 is
    written. Other ranks may call, which checks their model and writes nothing of it: join the
    stages of a pipeline first.

    Files are written beside those of an older model in the folder, which go when the new ones are
    on the disk. It has to have room for both. After an error the older ones are as they were. A
    warning names older ones that cannot be removed.

    Args:
        model: as for `float8_weights`, as are all but the folder and the size.
        folder: the folder of the checkpoint; made if it does not exist.
        format: see there.
        strategy: see there.
        dtype: see there.
        scale_dtype: see there.
        param_dtype: see there.
        max_shard_size: bytes of a file at most, but for a single tensor that is larger.

    Returns:
        For each weight in float8 whether its bytes are those of training, and its SQNR; of a model
        that is whole empty on ranks other than 0, which write nothing.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: the files cannot be written.
        TypeError: as `float8_weights`; or `model.config` has something that JSON has not.
        ValueError: as `float8_weights`; `max_shard_size` is no positive number of bytes; or ranks
            have other models or arguments.
    """
    require_module(model, "model")
    rank, _ = rank_and_size()
    writes, notes, groups = rank == 0, [], groups_of(model)
    ranks = Together(groups=groups)
    with ranks, contextlib.ExitStack() as stack:
        if type(max_shard_size) is not int or max_shard_size < 1:
            raise ValueError(f"max_shard_size: got {max_shard_size!r}, expected bytes, 1 or more")
        how = _how(model, format, strategy, dtype, scale_dtype, param_dtype)
        described = _config_of(unwrapped(model), how.dtype)
        described["quantization_config"] = _quantization_config(model, how)
        config = json.dumps(described, indent=2)
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise ImportError(NO_SAFETENSORS) from error
        if not writes and not groups:
            return ()
        tensors = [(name, x.dtype, x.shape) for name, *_, x in saved_tensors(model)]
        mine = repr((how[:4], dtype, max_shard_size, tensors))
        if len({*ranks.agree(said=hashlib.sha256(mine.encode()).digest())}) > 1:
            raise ValueError(
                "model: got ranks with other models or arguments, expected the same on all: "
                "together they write one checkpoint"
            )
        meshes = meshes_of(model)
        if meshes and not any(0 in each.mesh for each in meshes):
            raise ValueError("model: got one that rank 0 has no part of, expected one: it writes")
        files = stack.enter_context(NewFiles.beside(Path(folder), save_file)) if writes else None
        shard: dict[str, Tensor] = {}
        storages: set[int] = set()
        size = total = 0

        def flush() -> None:
            if files is not None:
                files.add(shard)
            shard.clear()
            storages.clear()
            ranks.agree()

        for name, tensor, scale, note in _written(model, how, ranks, measured=True):
            pair = {name: tensor}
            if scale is not None:
                pair[name + how.layout.scale_suffix] = scale
            adds = sum(x.nbytes for x in pair.values())
            if size and size + adds > max_shard_size:
                flush()
                size = 0
            for key, x in pair.items() if writes else ():
                x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
                if (storage := x.untyped_storage().data_ptr()) in storages:
                    x = x.clone()  # safetensors refuses two views of one memory
                shard[key] = x
                storages.add(storage)
            size, total = size + adds, total + adds
            if note is not None:
                notes.append(note)
        flush()
        if files is not None:
            files.replace(total, config)
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


_STORED = {
    *(torch.float64, *HIGH_PRECISION_DTYPES, torch.complex64, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
}
"""The dtypes of tensors beside weights in float8 that safetensors has."""


def _require_stored(model: nn.Module) -> None:
    """Raise a `ValueError` unless files can have all tensors of a model."""
    if hasattr(model, "peft_config"):
        raise ValueError(
            "model: got one with adapters of PEFT, whose names no server knows, expected one "
            "without; call model.unload() for the base, and save adapters by PEFT"
        )
    for name, module, _, x in saved_tensors(model):
        if is_lazy(x):
            raise ValueError(f"{name}: got a lazy tensor, expected values; run the model once")
        if x.dtype in FLOAT8_MAX:
            raise ValueError(
                f"{name}: got float8 of a {type(module).__name__} of another library, expected "
                f"layers of this one or high precision; load the model dequantised"
            )
        if x.is_meta:
            raise ValueError(f"{name}: got a tensor on the meta device, expected one with values")
        if x.layout != torch.strided or x.is_nested or x.dtype not in _STORED:
            raise ValueError(
                f"{name}: got a tensor of {x.dtype} and {x.layout}{', nested' * x.is_nested}, "
                f"expected a dense one of a dtype that safetensors has; convert it, or register "
                f"the buffer with persistent=False"
            )


def _require_own_names(model: nn.Module, how: "_How") -> None:
    """Raise a `ValueError` if two tensors, or a tensor and a scale, have one name in files."""
    published, names = how.published, Counter[str]()
    own = {id(x): (name, module) for name, module, _, x in reversed([*saved_tensors(model)])}
    for name, module in own.values():
        each = published.experts.get(name) if module in how.experts else None
        names.update(itertools.chain(*each) if each else [published.names[name]])
    suffix = how.layout.scale_suffix
    scales = {name + suffix for name in names}  # also of none: readers take it for one
    if taken := [name for name, count in names.items() if count > 1 or name in scales]:
        raise ValueError(
            f"{taken[0]}: got a tensor that has in files the name of another, or of its scale "
            f"({suffix!r} is added to a name), expected one of its own; rename it, or register a "
            f"buffer with persistent=False"
        )


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has weights [E, N, K], which transformers takes for float8."""
    return any(x is not None and x.dim() == 3 for x in module._parameters.values())


class _How(NamedTuple):
    """Arguments of `float8_weights`, and what they mean for a model."""

    layout: Layout
    dtype: torch.dtype
    scale_dtype: torch.dtype
    param_dtype: torch.dtype | None
    stays: Callable[[str], bool]
    """Whether a tensor of this name keeps its dtype, in high precision, instead of `dtype`."""
    published: PublishedNames
    layers: set[nn.Module]
    experts: set[nn.Module]
    """Modules whose weights are written in float8."""


def _how(
    model: nn.Module,
    format: str,
    strategy: str | None,
    dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
) -> _How:
    """Return how a model is written; raises unless it can be."""
    for name, given, known in (
        ("dtype", dtype, (None, *HIGH_PRECISION_DTYPES)),
        ("param_dtype", param_dtype, (None, *HIGH_PRECISION_DTYPES)),
        ("scale_dtype", scale_dtype, SCALE_DTYPES),
    ):
        if given not in known:
            raise TypeError(f"{name}: got {given!r}, expected one of {known}")
    layout = layout_named(format, strategy)
    reshard(model)
    _require_stored(model)
    kept, published = _kept_in_float32(model), published_names(model)
    layers, experts = _layers_in_float8(model, kept), _experts_in_float8(model, published, kept)
    if not layers and not any(isinstance(each, Float8Experts) for each in experts):
        raise ValueError(
            "model: got one without a Float8Linear or Float8Experts whose weights can be written "
            "(in 16 or 32 bits, not parametrized), expected one; call "
            "convert_to_float8_training(model, config=...) first"
        )
    if found := replaced_by_transformers(model, layout.method):
        raise ValueError(
            f"format: got {format!r} for a model with {found}, which transformers takes for linear "
            f"layers when it loads that format, and finds no weights for; expected "
            f"{FINE_GRAINED!r}"
        )
    body = Counter[torch.dtype]()
    for name, module, own, x in saved_tensors(model):
        if (own == "weight" and module in layers) or (x.dim() == 3 and module in experts):
            body[x.dtype] += x.numel()
        elif hasattr(local_tensor(high_precision(x)), "__tensor_flatten__"):
            raise ValueError(
                f"{name}: got a {type(local_tensor(x)).__name__}, expected a plain tensor beside "
                f"the weights in float8; load the model dequantised, or untie that weight, or "
                f"remove its parametrization; for one in float8 only call "
                f"convert_to_high_precision on its layer"
            )
    (most, _), *_ = body.most_common(1)
    masters = dtype is None and most == torch.float32
    rest = dtype or (torch.bfloat16 if masters else most)
    stays = kept if masters else lambda name: dtype is None
    how = _How(layout, rest, scale_dtype, param_dtype, stays, published, layers, experts)
    _require_own_names(model, how)
    return how


def _kept_in_float32(model: nn.Module) -> Callable[[str], bool]:
    """Return whether transformers keeps the tensor of a name in float32 in a model of 16 bits."""
    kept = {
        each.replace("*", ".*")  # as it matches
        for module in model.modules()
        for names in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for each in getattr(module, names, None) or ()
    }
    return lambda name: any(re.search(each, name) for each in kept)


Written = tuple[str, Tensor, Tensor | None, WrittenWeight | None]


@torch.no_grad()
def _written(
    model: nn.Module, how: _How, ranks: Together, measured: bool = False
) -> Iterator[Written]:
    """Yield name, tensor, scale and note of each Parameter and buffer that is saved, once."""
    published, seen = how.published, set[int]()
    for name, module, own, x in saved_tensors(model):
        if id(x) in seen:
            continue
        seen.add(id(x))
        if module in how.experts and name in published.experts:
            yield from _each_expert(published.experts[name], module, x, how, ranks, measured)
        elif own == "weight" and module in how.layers:
            yield _in_float8(published.names[name], module, how, ranks, measured)
        else:
            with ranks:
                values = high_precision(x.detach())
                if values.dtype in HIGH_PRECISION_DTYPES and not how.stays(name):
                    values = values.to(how.dtype)
            yield published.names[name], whole(values), None, None


def _layers_in_float8(model: nn.Module, kept: Callable[[str], bool]) -> set[nn.Module]:
    """Return the layers that multiply outputs in float8, and have a weight for themselves.

    One that is tied to an embedding is none of these, nor one that is parametrized or in float64,
    nor one that transformers keeps in float32, such as `wo` of T5: it would read the bytes, and no
    scales.
    """
    found: set[nn.Module] = {
        layer
        for name, layer in unwrapped(model).named_modules()
        if isinstance(layer, Float8Layer)
        and layer._float8_plan.output is not None
        and getattr(layer._parameters.get("weight"), "dtype", None) in HIGH_PRECISION_DTYPES
        if not kept(plain_name(f"{name}.weight"))
    }
    of_others = {id(x) for m in model.modules() if m not in found for x in m._parameters.values()}
    return {layer for layer in found if id(layer._parameters["weight"]) not in of_others}


def _experts_in_float8(
    model: nn.Module, published: PublishedNames, kept: Callable[[str], bool]
) -> set[nn.Module]:
    """Return the modules of experts, converted or not, whose weights are published one by one."""
    cut: dict[nn.Module, list[bool]] = {}
    for name, module, _, x in saved_tensors(model):
        if x.dim() == 3:
            in_16_bits = local_tensor(high_precision(x)).dtype in HIGH_PRECISION_DTYPES
            is_cast = name in published.experts and in_16_bits and not kept(name)
            cut.setdefault(module, []).append(is_cast)
    return {module for module, each in cut.items() if all(each)}


def _published_module(name: str, published: PublishedNames) -> str:
    """Return the name of a module as its weight is published."""
    return published.names.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")


def _each_expert(
    parts: list[list[str]], module: Any, weight: Any, how: _How, ranks: Together, measured: bool
) -> Iterator[Written]:
    """Yield the weights [N, K] of a Parameter [E, parts * N, K] of experts, part by part.

    On several ranks each casts the experts that it has, if it has whole ones.
    """
    layout, _, scale_dtype, param_dtype, *_ = how
    spec, as_trained = CastConfig(target_dtype=E4M3, scaling_granularity=layout.granularity), False
    if isinstance(module, Float8Experts):
        of_module = module._float8_plan.casts.weight.how
        spec = replace(spec, power_of_2=of_module.power_of_2)
        # Under one scale training has the parts of a weight together.
        as_trained = of_module == spec and (
            len(parts) == 1 or not spec.scaling_granularity.one_scale
        )
    with ranks:
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
            with ranks:
                each = [*each]
            sizes = shape, layout.scale_shape(shape), (2,)
            each = zip(*_of_all_ranks(each, weight, sizes), strict=True)
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


def _in_float8(name: str, layer: Any, how: _How, ranks: Together, measured: bool) -> Written:
    """Return a weight as it is published; without a note unless it is `measured`.

    On several ranks from the part of each, if that has scales of its own.
    """
    layout, _, scale_dtype, param_dtype, *_ = how
    of_layer, granularity = layer._float8_plan.casts.weight.how, layout.granularity
    spec = CastConfig(
        target_dtype=E4M3, scaling_granularity=granularity, power_of_2=of_layer.power_of_2
    )
    with ranks:
        weight: Any = high_precision(layer.weight.detach())
        if param_dtype is not None and not isinstance(local_tensor(weight), Float8Tensor):
            weight = weight.to(param_dtype)
    if is_dtensor(weight) and not parts_have_own_scales(weight, granularity):
        weight = whole(weight)
    with ranks:
        made = part = local_tensor(weight)
        if not isinstance(part, Float8Tensor) or part._granularity is not granularity:
            part = part.to_original_precision() if isinstance(part, Float8Tensor) else part
            reduce = _amax_of_all(weight, ranks) if is_dtensor(weight) else None
            made = in_float8_only(part, Cast(spec, reduce=reduce))
        same = made is part
        powers = _powers(made, part) if measured and not same else None
    full = gathered(made, weight, layout) if is_dtensor(weight) else made
    note = None
    if measured:  # which waits for a GPU
        sqnr = float("inf") if powers is None else _sqnr(sum_over_parts(powers, weight))
        note = WrittenWeight(name, of_layer == spec, sqnr)
    return name, *layout.published(full, scale_dtype), note


def _amax_of_all(weight: Any, ranks: Together) -> Callable[[Tensor], Tensor]:
    """Return a function that makes amaxes those of the whole of a weight that ranks share."""
    reduce = amax_over(sharding_groups(weight))

    def of_all(amax: Tensor) -> Tensor:
        ranks.agree()  # a rank that could not measure its part is not in this collective
        return reduce(amax)

    return of_all


def _powers(made: Float8Tensor, values: Tensor) -> Tensor:
    """Return the sums of squares of values, and of the noise of their cast: [2] float64."""
    got = dequantised(Operand(made._data, made._scale), made._granularity)
    values = values.float()
    return torch.stack([x.double().square().sum() for x in (values, got - values)])


def _sqnr(powers: Tensor) -> float:
    """Return an SQNR in dB, of the sums that `_powers` returns."""
    signal, noise = powers.unbind()
    return 10 * torch.log10(signal / noise).item() if noise else float("inf")
