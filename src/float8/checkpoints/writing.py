"""Write the weights of a model in float8: plan and check everything first, then cast."""

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from float8.checkpoints import names
from float8.checkpoints.adapters import layers_of_peft, merged_base_layer, without_adapters
from float8.checkpoints.files import import_safetensors, write_files
from float8.checkpoints.names import WHOLE, Part, Parts, SavedTensor
from float8.checkpoints.ranks import ModelRanks
from float8.checkpoints.schemes import FINE_GRAINED, Scheme, scheme_named
from float8.config import CastConfig, require_module
from float8.formats import E4M3, HIGH_PRECISION_DTYPES
from float8.linear import Float8Linear, Float8Module
from float8.names import plain_name, unwrapped
from float8.quantize import Cast
from float8.tensor import Float8Tensor, high_precision, local_tensor, reshard
from float8.tensor.weights import in_float8_only


@dataclass(frozen=True)
class WrittenWeight:
    """Names a float8 weight in files, and says whether training multiplies the same bytes."""

    name: str
    as_trained: bool  # whether training multiplies these bytes, if it casts weights whole


def float8_weights(
    model: nn.Module,
    format: str = FINE_GRAINED,
    *,
    strategy: str | None = None,
    dtype: torch.dtype | None = None,
    param_dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a converted model in a format that inference servers read.

    A weight [N, K] of a `Float8Linear` whose output GEMM is in float8 is yielded as e4m3 data, then
    scales under a name with `_scale_inv` ("fine-grained-fp8") or `_scale` added. Experts that
    transformers saves one by one are cast one by one, even if not converted. Not cast are weights
    in float64, shared with a module in high precision, or marked by transformers to stay float32.
    Data are the bytes that training multiplies if it casts each weight whole and alone to e4m3,
    dynamically, with the granularity of `strategy` (for exponents: by powers of two). Names are
    those by which transformers saves tensors, if it could load them again so; others are as in
    `model.state_dict()`, without the parts of wrappers. Buffers of delayed scaling are left out.
    Tensors may share memory with the model: copy them before the next step. Active adapters of PEFT
    are merged in float32 copies before the cast, layer by layer; names are those without adapters.

    Ranks that share a model (FSDP2, tensor parallel) all-gather one weight at a time, and must all
    iterate to the end. FSDP2 modules are resharded first.

    Args:
        model: a model that `convert_to_float8_training` has converted, whole or sharded.
        format: `"fine-grained-fp8"`, as of DeepSeek-V3 and Qwen3, or `"compressed-tensors"`.
        strategy: the granularity of the scales. `"fine-grained-fp8"`: `"block"`, 128x128 (default),
            `"block_ue8m0"`, the same with 8-bit exponents as scales, `"mxfp8"`, 1x32 with 8-bit
            exponents, or `"tensor"`. `"compressed-tensors"`: `"channel"`, one scale per row
            (default), `"block"`, `"mxfp8"` or `"tensor"`.
        dtype: that of float32, bfloat16 and float16 tensors that are not cast. None: theirs, or
            bfloat16 if most weights to cast are float32, except tensors marked to stay float32.
        param_dtype: that of FSDP2's mixed precision, if set: weights are rounded to it first.

    Raises:
        ImportError: transformers 5 is too old to tell how it saves the experts of `model`.
        TypeError: `model` is not an `nn.Module`, or a dtype is not a high-precision one.
        ValueError: format or strategy is unknown; no converted layer has a weight to cast; a tensor
            is meta, lazy, sparse, or in another library's float8; transformers could not load the
            experts in this format; names repeat; or adapters cannot be merged, or differ on ranks.
    """
    with ModelRanks(model) as ranks:
        plan = _plan(model, format, strategy, dtype, param_dtype)
        for tensors in _cast_tensors(plan, ranks, []):
            yield from tensors.items()


def quantization_config(
    model: nn.Module, format: str = FINE_GRAINED, *, strategy: str | None = None
) -> dict[str, Any]:
    """Return the `quantization_config` for what `float8_weights` yields for the same arguments."""
    return _plan(model, format, strategy).config


class TensorMetadata(NamedTuple):
    """Describes a tensor that `float8_weights` yields: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def float8_metadata(
    model: nn.Module,  # converted by `convert_to_float8_training`
    format: str = FINE_GRAINED,  # or "compressed-tensors"
    *,
    strategy: str | None = None,  # granularity of scales, such as "block"; None: by `format`
    dtype: torch.dtype | None = None,  # of tensors not in float8; None: theirs or bfloat16
    param_dtype: torch.dtype | None = None,  # to which FSDP2 rounds weights before a cast, if any
) -> list[TensorMetadata]:
    """Return name, dtype and shape of each tensor that `float8_weights` yields, in the same order.

    Takes the same arguments. Gathers and casts nothing, nor does it try to merge adapters.
    """
    plan, metadata = _plan(model, format, strategy, dtype, param_dtype), list[TensorMetadata]()
    scheme = plan.scheme
    for entry in plan.entries:
        is_rounded = entry.dtype and entry.tensor.dtype in HIGH_PRECISION_DTYPES
        new_dtype: Any = entry.dtype if is_rounded else entry.tensor.dtype
        for name, part in entry.parts.items():
            shape = part.shape((*entry.tensor.shape,))
            metadata.append(TensorMetadata(name, E4M3 if entry.cast_config else new_dtype, shape))
            if entry.cast_config:
                suffix, scale_dtype = scheme.scale_suffix, scheme.exponents or torch.float32
                scale_shape = scheme.scale_shape(shape, is_expert=part is not WHOLE)
                metadata.append(TensorMetadata(name + suffix, scale_dtype, scale_shape))
    return metadata


def save_float8_checkpoint(
    model: nn.Module,
    folder: str | Path,
    format: str = FINE_GRAINED,
    *,
    strategy: str | None = None,
    dtype: torch.dtype | None = None,
    param_dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
) -> tuple[WrittenWeight, ...]:
    """Write the tensors of `float8_weights(model)` as safetensors shards with an index.

    `config.json` has the values of `model.config`, if there is one (as in transformers), and the
    `quantization_config`. Tied weights are written once. One shard is in memory at a time.
    Rank 0 writes. All ranks of a sharded model must call this; an error on one is raised on all. If
    the model is not sharded, ranks do not wait for each other, and ranks > 0 only check the model.
    Files are written to a folder within `folder`, and moved when all are complete: the disk needs
    room for the old and the new. An error leaves the old checkpoint in place. Success removes old
    shards (as this library and transformers name them); other files in `folder` stay.

    Args:
        model: a model that `convert_to_float8_training` has converted, whole or sharded.
        folder: the folder of the checkpoint, made if it does not exist.
        format: `"fine-grained-fp8"`, as of DeepSeek-V3 and Qwen3, or `"compressed-tensors"`.
        strategy: the granularity of scales, such as `"block"`; `float8_weights` lists all values.
        dtype: that of tensors not cast; None: theirs, or bfloat16 if most weights are float32.
        param_dtype: the dtype to which FSDP2's mixed precision rounds weights first, if it does.
        max_shard_size: the most bytes of tensors in a file; a larger tensor gets its own file.

    Returns:
        A `WrittenWeight` per float8 weight; () on ranks > 0 of a model that is not sharded.

    Raises:
        ImportError: safetensors is missing; transformers 5 is too old to tell how it saves experts.
        OSError: files cannot be written, or another process or thread saves to `folder`.
        TypeError: `model`, a dtype, or a value in `model.config` is of an unsupported type.
        ValueError: an argument is invalid or differs between ranks; no layer is converted; adapters
            cannot be merged; a tensor cannot be stored so; rank 0 has no part of a sharded model.
    """
    with ModelRanks(model) as ranks:
        if type(max_shard_size) is not int or max_shard_size < 1:
            raise ValueError(f"max_shard_size: got {max_shard_size!r}, expected bytes, 1 or more")
        plan = _plan(model, format, strategy, dtype, param_dtype)
        config = _model_config(plan.model, plan.dtype) | {"quantization_config": plan.config}
        config_text = json.dumps(config, indent=2)
        import_safetensors()
        if ranks.number != 0 and not ranks.meshes:  # not sharded: rank 0 writes all of it
            return ()
        # Compare everything but the values of tensors, which are other shards on other ranks.
        entries = [(x.tensor.dtype, x.tensor.shape, *x[1:]) for x in plan.entries]
        if len({*ranks.agree(repr((plan.scheme, plan.dtype, max_shard_size, entries)))}) > 1:
            got = "got ranks with other models or arguments, expected the same on all"
            raise ValueError(f"model: {got}: together they write one checkpoint")
        if ranks.meshes and not any(0 in mesh.mesh for mesh in ranks.meshes):
            raise ValueError("model: got one that rank 0 has no part of, expected one: it writes")
        written = list[WrittenWeight]()

        def cast_all() -> Iterator[dict[str, Tensor]]:
            yield from _cast_tensors(plan, ranks, written)
            ranks.agree()  # if any rank has failed, raise before an older checkpoint is replaced

        if ranks.number == 0:
            write_files(Path(folder), cast_all(), config_text, max_shard_size)
        else:
            deque(cast_all(), maxlen=0)  # drop all tensors: this rank only takes part in gathers
    return tuple(written)


def _model_config(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Return `model.config` as the dict that transformers saves for a model of `dtype`, or {}."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    cls = type(model).__name__.removeprefix("FSDP")  # which fully_shard adds
    values: dict[str, Any] = config.to_dict()
    if values.get("tie_word_embeddings") and hasattr(model, "get_output_embeddings"):
        last: Any = model.get_output_embeddings()  # type: ignore[operator]
        if last is not None and last.weight is not model.get_input_embeddings().weight:  # type: ignore[operator]
            values["tie_word_embeddings"] = False  # PEFT trained one of the two
    return values | {"architectures": [cls], "dtype": str(dtype).removeprefix("torch.")}


class _Entry(NamedTuple):
    """Describes how to write one Parameter or buffer: names in files, dtype, cast to float8."""

    tensor: Tensor
    parts: Parts  # name in files -> part of `tensor`
    dtype: torch.dtype | None  # the dtype to round values to, before any cast; None: keep theirs
    cast_config: CastConfig | None = None  # the cast to float8; None: write in high precision
    as_trained: bool = False  # whether training casts `tensor` in the same way


class _Plan(NamedTuple):
    """Holds how to write each tensor of a model, and the `quantization_config` for the files."""

    scheme: Scheme
    dtype: torch.dtype  # of most tensors that are not in float8
    entries: list[_Entry]
    config: dict[str, Any]  # the `quantization_config` of `config.json`
    model: nn.Module  # without wrappers and adapters
    peft_layers: dict[Tensor, tuple[Any, ...]]  # PEFT layers to merge into each tensor, or ()
    base_attr: dict[Tensor, str]  # the attribute of their base layer that is the tensor, or ""


def _plan(
    model: nn.Module,
    format: str,
    strategy: str | None,  # granularity of scales; None: the default of `format`
    dtype: torch.dtype | None = None,  # of tensors not in float8; None: theirs or bfloat16
    param_dtype: torch.dtype | None = None,  # to round weights to before the cast; None: do not
) -> _Plan:
    """Reshard `model`, check it and the arguments; return how to write each tensor. No casts."""
    require_module(model, "model")
    reshard(model)
    for name, x in (("dtype", dtype), ("param_dtype", param_dtype)):
        if x not in (None, *HIGH_PRECISION_DTYPES):
            raise TypeError(f"{name}: got {x!r}, expected None or one of {HIGH_PRECISION_DTYPES}")
    scheme = scheme_named(format, strategy)
    model, peft_layer_of = without_adapters(unwrapped(model))
    model = unwrapped(model)  # the model in PEFT's modules may be wrapped, too
    tensors, published = names.saved_tensors(model), names.published_parts(model)
    stays_float32 = _float32_names(model)
    in_float8 = _select_float8(tensors, published, stays_float32)
    float8_modules = {module for saved in in_float8 for _, module, _ in saved.uses}
    if not any(isinstance(module, Float8Module) for module in float8_modules):
        got = "got one without a Float8Linear or Float8Experts whose weights can be written"
        why = "(neither in float64 nor parametrized)"
        raise ValueError(f"model: {got} {why}, expected one; call convert_to_float8_training")
    elements_of = Counter[torch.dtype]()  # dtype -> number of elements of weights to cast
    for saved in tensors:
        _require_storable(saved, in_float8=saved in in_float8)
        if saved in in_float8:
            elements_of[saved.tensor.dtype] += saved.tensor.numel()
    config = scheme.config(_high_precision_modules(model, float8_modules, published, scheme))
    if replaced := names.replaced_by_transformers(model, config["quant_method"]):
        got = f"got {format!r} for a model with {replaced}, for which transformers finds no weights"
        raise ValueError(f"format: {got} when it loads that format; expected {FINE_GRAINED!r}")
    ((model_dtype, _),) = elements_of.most_common(1)
    new_dtype = dtype or (torch.bfloat16 if model_dtype == torch.float32 else None)
    entries, peft_layers, base_attr = [], {}, {}
    for saved in tensors:
        x, (name, module, _) = saved.tensor, saved.uses[0]
        # PEFT layer -> attribute of its base layer. A tied tensor may be in several of them.
        attrs = {peft_layer_of[m]: attr for _, m, attr in saved.uses if m in peft_layer_of}
        peft_layers[x] = tuple(attrs)
        base_attr[x] = next(iter(attrs.values()), "")
        parts = published[name]
        if saved in in_float8:
            pieces = max(part.pieces for part in parts.values())
            cast, as_trained = _cast_of(module, scheme, x.shape[-2], pieces)
            entries.append(_Entry(x, parts, param_dtype, cast, as_trained and not attrs))
        else:
            parts = parts if WHOLE in parts.values() else {name: WHOLE}  # split only to cast
            keeps_dtype = dtype is None and stays_float32(name)
            entries.append(_Entry(x, parts, None if keeps_dtype else new_dtype))
    _require_unique_names(entries, scheme.scale_suffix)
    return _Plan(scheme, new_dtype or model_dtype, entries, config, model, peft_layers, base_attr)


def _require_storable(saved: SavedTensor, in_float8: bool) -> None:
    """Raise `ValueError` if files cannot store `saved` (as it is, or cast if `in_float8`)."""
    x, (name, module, _) = saved.tensor, saved.uses[0]
    inner = local_tensor(high_precision(x))
    is_foreign_float8 = x.dtype.is_floating_point and x.dtype.itemsize == 1
    if is_lazy(x) or x.is_meta:
        got, fix = f"a tensor without values, on {x.device}", "run the model once, or load it"
    elif not in_float8 and (hasattr(inner, "__tensor_flatten__") or is_foreign_float8):
        got = f"a {type(inner).__name__} of {inner.dtype}, in a {type(module).__name__}"
        fix = "load the model dequantized, or call convert_to_high_precision(model)"
    elif x.layout != torch.strided or x.is_nested or x.is_quantized or x.dtype == torch.complex128:
        got, fix = f"a tensor of {x.dtype} and {x.layout}", "make it a buffer with persistent=False"
    else:
        return
    raise ValueError(f"{name}: got {got}, expected a plain tensor with values; {fix}")


def _float32_names(model: nn.Module) -> Callable[[str], Any]:
    """Return a function, true for names that transformers marks to stay in float32."""
    patterns = {
        name.replace("*", ".*")
        for module in model.modules()
        for attr in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for name in getattr(module, attr, None) or ()
    }
    return re.compile("|".join(patterns) or "(?!)").search  # "(?!)" matches no name


def _select_float8(
    saved: list[SavedTensor], published: dict[str, Parts], stays_float32: Callable[[str], Any]
) -> set[SavedTensor]:
    """Return the tensors in `saved` to write in float8.

    These are weights of each `Float8Linear` whose output GEMM is in float8, and of experts,
    converted or not, that files have one by one: `published` is {name in model: {name in files:
    part}}. Left out are tensors in float64 or kept in float32 (`stays_float32(name)`), those shared
    with a module in high precision, and all experts of a module if one of them is left out.
    """

    def is_float8(name: str, module: Any, attr: str, x: Tensor) -> bool:
        dtype = local_tensor(high_precision(x)).dtype
        if is_lazy(x) or stays_float32(name) or dtype not in HIGH_PRECISION_DTYPES:
            return False
        if attr == "weight" and isinstance(module, Float8Linear):
            return module._float8_plan.output is not None
        return WHOLE not in published[name].values()  # experts that are saved one by one

    selected = {x for x in saved if all(is_float8(*use, x.tensor) for use in x.uses)}
    experts = [x for x in saved if not is_lazy(x.tensor) and x.tensor.dim() == 3]
    # Readers expect all weights [E, N, K] of a module of experts in float8, or none of them.
    excluded = {module for x in experts if x not in selected for _, module, _ in x.uses}
    return selected - {x for x in experts if any(module in excluded for _, module, _ in x.uses)}


def _cast_of(module: Any, scheme: Scheme, rows: int, pieces: int) -> tuple[CastConfig, bool]:
    """Return the cast to write a weight of `module` in `scheme`, and whether training casts it so.

    The weight, of a layer or one expert, has `rows` rows; files have it as `pieces` equal weights.
    """
    granularity, power_of_2 = scheme.granularity, scheme.exponents is not None
    trained_cast = None  # for experts in high precision
    if isinstance(module, Float8Module):
        trained_cast = module._float8_plan.casts.weight.config
        power_of_2 = power_of_2 or trained_cast.power_of_2
        if scheme.accepts(trained_cast.scaling_granularity):  # also 32x32 for 1x32
            granularity = trained_cast.scaling_granularity
    cast = CastConfig(target_dtype=E4M3, scaling_granularity=granularity, power_of_2=power_of_2)
    pieces_share_scales = pieces > 1 and rows // pieces % (granularity.height or rows) != 0
    return cast, cast == trained_cast and not pieces_share_scales


def _high_precision_modules(
    model: nn.Module, in_float8: set[nn.Module], published: dict[str, Parts], scheme: Scheme
) -> list[str]:
    """Return names, for `quantization_config`, of linear layers and experts not cast to float8.

    Modules with a 3-dim Parameter count as experts; none is or contains one of `in_float8`. Names
    are those in `model`, or under "fine-grained-fp8" in `published`: {name: {name in files: part}}.
    """
    in_model = []
    for name, module in model.named_modules():
        is_experts = any(x.dim() == 3 for x in module.parameters(recurse=False))
        if (is_experts or isinstance(module, nn.Linear)) and in_float8.isdisjoint(module.modules()):
            in_model.append(plain_name(name))
    if scheme.format != FINE_GRAINED:
        return in_model
    weights = (f"{name}.weight" for name in in_model)
    return [next(iter(published.get(x, [x]))).removesuffix(".weight") for x in weights]


def _require_unique_names(entries: list[_Entry], suffix: str) -> None:
    """Raise `ValueError` if two tensors share a name, or one has another's name with `suffix`."""
    counts = Counter(name for entry in entries for name in entry.parts)
    scales = {name + suffix for name in counts}  # readers take a tensor of such a name for a scale
    if ambiguous := [name for name, count in counts.items() if count > 1 or name in scales]:
        got = "got a tensor that has in files the name of another, or of its scale"
        expected = f"({suffix!r} is added), expected one of its own; rename it, or leave it out"
        raise ValueError(f"{ambiguous[0]}: {got} {expected}")


@torch.no_grad()
def _cast_tensors(
    plan: _Plan, ranks: ModelRanks, written: list[WrittenWeight]
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of `plan` as files have them: all-gathered, adapters merged, and cast.

    A dict is {name: tensor} in high precision, or {name: float8 data, name of scale: scale}; for
    each of the latter, a `WrittenWeight` is appended to `written` first.
    """
    to_merge = [layer for layers in plan.peft_layers.values() for layer in layers]
    active = [[*x.active_adapters] for layer in to_merge for x in layers_of_peft(layer)]
    if len({*ranks.agree(repr(active))}) > 1:
        raise ValueError("model: got ranks with other active adapters, expected the same on all")
    # Weight and bias of a layer follow each other, so that `groupby` merges its adapters once.
    for layers, entries in groupby(plan.entries, lambda entry: plan.peft_layers[entry.tensor]):
        merged = merged_base_layer(*layers, gather=ranks.gather) if layers else None
        for entry in entries:
            x: Any = high_precision(entry.tensor.detach())  # `Float8Tensor` if in float8 only
            if layers:
                x = getattr(merged, plan.base_attr[entry.tensor])  # not rounded yet
                if not (entry.cast_config or entry.dtype):  # nothing below rounds it
                    x = x.to(entry.tensor.dtype)
            has_float8_data = isinstance(local_tensor(x), Float8Tensor)
            if entry.dtype and x.dtype in HIGH_PRECISION_DTYPES and not has_float8_data:
                x = x.to(entry.dtype)
            x = ranks.gather(x)
            if entry.cast_config is None:
                yield dict.fromkeys(entry.parts, x)
                continue
            for name, part in entry.parts.items():
                data, scale, as_trained = _quantize(part, x, entry, plan.scheme)
                written.append(WrittenWeight(name, as_trained))
                yield {name: data, name + plan.scheme.scale_suffix: scale}
        merged = x = None  # free memory before the next layer is merged


def _quantize(part: Part, x: Any, entry: _Entry, scheme: Scheme) -> tuple[Tensor, Tensor, bool]:
    """Quantize `part` of `x`; return (data, scale, whether training multiplies these bytes)."""
    weight, as_trained, is_expert = part.of(x), entry.as_trained, part is not WHOLE
    if isinstance(weight, Float8Tensor):
        if published := scheme.published(weight, is_expert):
            return *published, True
        weight, as_trained = weight.to_original_precision(), False  # files have other scales
    cast: Any = entry.cast_config
    quantized: Any = scheme.published(in_float8_only(weight, Cast(cast)), is_expert)
    return *quantized, as_trained
