"""Write the weights of a model in float8: checked `_Contents` first, then the bytes."""

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from float8.checkpoints.files import import_safetensors, write_files
from float8.checkpoints.names import (
    Names,
    PublishedNames,
    SavedTensor,
    plain_name,
    published_names,
    replaced_by_transformers,
    saved_tensors,
    unwrapped,
)
from float8.checkpoints.ranks import Together
from float8.checkpoints.schemes import FINE_GRAINED, Scheme, part_of, scheme_named
from float8.config import CastConfig, require_module
from float8.experts import Float8Experts
from float8.formats import E4M3, HIGH_PRECISION_DTYPES
from float8.linear import Float8Linear
from float8.quantize import Cast
from float8.tensor import Float8Tensor, high_precision, local_tensor, reshard
from float8.weights.only import in_float8_only


@dataclass(frozen=True)
class WrittenWeight:
    """One weight in float8 that was written."""

    name: str
    as_trained: bool
    """Whether the bytes are those that training multiplies."""


def float8_weights(
    model: nn.Module,
    format: str = FINE_GRAINED,
    *,
    strategy: str | None = None,
    dtype: torch.dtype | None = None,
    param_dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a converted model as servers of float8 read them.

    Weights of `Float8Linear` come as e4m3 bytes, each followed by its scales; all else as `dtype`
    says. With the granularity of the recipe the bytes are those that training multiplies. Names are
    those under which transformers publishes the model; of other models those of
    `model.state_dict()`, without what torch.compile and DDP add. Experts come one by one
    where transformers publishes them so, in float8, converted or not. One tensor is made at a time.
    What is not cast may have the memory of the model: copy it before the next step.

    Ranks that share a model (FSDP2, tensor parallel) gather one weight at a time and cast it as one
    rank does: each needs memory for it, in high precision unless it is in float8 only. All ranks
    must iterate alike. FSDP2's weights are resharded.

    Args:
        model: converted; in training or evaluation, sharded by FSDP2 or whole.
        format: `"fine-grained-fp8"` (as DeepSeek-V3 and Qwen3 are published) or
            `"compressed-tensors"`.
        strategy: what a scale covers. `"fine-grained-fp8"`: `"block"`, 128x128 (default),
            `"block_ue8m0"`, the same with 8-bit exponents as scales, `"mxfp8"`, 1x32 with these,
            or `"tensor"`. `"compressed-tensors"`: `"channel"`, one output (default), `"mxfp8"` or
            `"tensor"`. Scales that are no powers of two are cast anew where exponents are written.
        dtype: that of what is not in float8. None: as the model has it, if most of its weights for
            float8 have 16 bits; else float32 becomes bfloat16, but for what the classes of
            transformers keep in float32.
        param_dtype: that of FSDP2's `MixedPrecisionPolicy`, if it has one: weights are rounded to
            it before they are cast, as in training. None: they are cast as they are.

    Raises:
        TypeError: `model` is no `nn.Module`; `dtype` or `param_dtype` is none in high precision.
        ValueError: `format` and `strategy` are none that is known, no layer is converted, one is in
            the float8 of another library or on the meta device, transformers could not load the
            experts, or two tensors have one name, such as that of a scale.
    """
    require_module(model, "model")
    with Together(model) as ranks:
        contents = _contents(model, format, strategy, dtype, param_dtype)
        for tensors, _ in _written(contents, ranks):
            yield from tensors.items()


def quantization_config(
    model: nn.Module, format: str = FINE_GRAINED, *, strategy: str | None = None
) -> dict[str, Any]:
    """Return what `config.json` says beside weights that `float8_weights` yields.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: as `float8_weights`.
    """
    require_module(model, "model")
    return _contents(model, format, strategy).config


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
    """Write what `float8_weights(model)` yields: safetensors shards, an index, and `config.json`.

    `config.json` is that of `model.config`, if there is one (as transformers has them), with the
    `quantization_config`. Tied weights are written once. One shard is in memory at a time.

    On several ranks rank 0 writes. All that share a sharded model must call, and an error on one
    rank is raised on all. If the model is not sharded, ranks do not wait: rank 0 writes, others
    only check and return `()`. Join the stages of a pipeline first.

    At any time `read_float8_checkpoint` finds the older checkpoint of the folder or the new one,
    whole: also after an error, which leaves the older one, or a kill, after which the next save
    tidies up. Readers of other libraries may meet files of both in the moment in which files are
    replaced. Of two saves to one folder at a time one raises; those of another host are seen if the
    file system shares its locks (`flock`), as NFS does. What is no file of a checkpoint stays.

    The disk needs room for both. A warning names older files that cannot be removed.

    Args:
        model: as for `float8_weights`.
        folder: the folder of the checkpoint; made if it does not exist.
        format: `"fine-grained-fp8"` or `"compressed-tensors"`.
        strategy: what a scale covers. None: the default of the format, see `float8_weights`.
        dtype: that of what is not in float8. None: chosen as by `float8_weights`.
        param_dtype: that of FSDP2's `MixedPrecisionPolicy`, if it has one.
        max_shard_size: bytes of a file at most, but for a single tensor that is larger.

    Returns:
        For each weight in float8 whether its bytes are those of training. Empty on ranks > 0 of a
        model that is not sharded.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: the files cannot be written, or another process or thread saves to the folder.
        TypeError: as `float8_weights`; or `model.config` has something that JSON has not.
        ValueError: as `float8_weights`; `max_shard_size` is no positive number of bytes; or ranks
            have other models or arguments.
    """
    require_module(model, "model")
    with Together(model) as ranks:
        if type(max_shard_size) is not int or max_shard_size < 1:
            raise ValueError(f"max_shard_size: got {max_shard_size!r}, expected bytes, 1 or more")
        contents = _contents(model, format, strategy, dtype, param_dtype)
        described = _config_of(unwrapped(model), contents.dtype)
        config = json.dumps(described | {"quantization_config": contents.config}, indent=2)
        import_safetensors()
        if ranks.number != 0 and not ranks.meshes:
            return ()
        sources = [(each.x.dtype, each.x.shape, *each[1:]) for each in contents.sources]
        if len({*ranks.agree(said=repr((*contents[:2], max_shard_size, sources)))}) > 1:
            raise ValueError(
                "model: got ranks with other models or arguments, expected the same on all: "
                "together they write one checkpoint"
            )
        if ranks.meshes and not any(0 in mesh.mesh for mesh in ranks.meshes):
            raise ValueError("model: got one that rank 0 has no part of, expected one: it writes")
        notes = list[WrittenWeight]()

        def tensors() -> Iterator[dict[str, Tensor]]:
            for pair, note in _written(contents, ranks):
                notes.extend([note] if note else [])
                yield pair
            ranks.agree()  # an older checkpoint is replaced only if all ranks are here

        if ranks.number == 0:
            write_files(Path(folder), tensors(), config, max_shard_size)
        else:
            deque(tensors(), maxlen=0)
    return tuple(notes)


def _config_of(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Return `model.config` as transformers saves it beside weights of `dtype`; none: {}."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    cls = type(model).__name__.removeprefix("FSDP")  # which fully_shard adds
    plain: dict[str, Any] = config.to_dict()
    return plain | {"architectures": [cls], "dtype": str(dtype).removeprefix("torch.")}


# ---------------------------------------------------------------- what will be written


class _Source(NamedTuple):
    """A Parameter or buffer that is written."""

    x: Tensor
    names: Names  # in files; [[name]] unless these are experts that are published one by one
    dtype: torch.dtype | None  # of values before a cast, or as they are written; None: they stay
    how: CastConfig | None = None  # of the cast to float8; None: written in high precision
    as_trained: bool = False


class _Contents(NamedTuple):
    """The tensors of a model that are written, and how."""

    scheme: Scheme
    dtype: torch.dtype  # of most of what is not in float8
    sources: list[_Source]
    config: dict[str, Any]  # the `quantization_config` of `config.json`


def _contents(
    model: nn.Module,
    format: str,
    strategy: str | None,
    dtype: torch.dtype | None = None,
    param_dtype: torch.dtype | None = None,
) -> _Contents:
    """Return what is written of a model; raises, as `float8_weights`, unless it can be."""
    for name, got in (("dtype", dtype), ("param_dtype", param_dtype)):
        if got not in (None, *HIGH_PRECISION_DTYPES):
            expected = f"None or one of {HIGH_PRECISION_DTYPES}"
            raise TypeError(f"{name}: got {got!r}, expected {expected}")
    scheme = scheme_named(format, strategy)
    reshard(model)
    if hasattr(model, "peft_config"):
        raise ValueError(
            "model: got one with adapters of PEFT, whose names no server knows, expected one "
            "without; call model.unload() for the base, and save adapters by PEFT"
        )
    saved, kept, published = saved_tensors(model), _kept_in_float32(model), published_names(model)
    in_float8 = _in_float8(saved, published, kept)
    modules = {module for each in in_float8 for _, module, _ in each.uses}
    if not any(isinstance(module, Float8Linear | Float8Experts) for module in modules):
        raise ValueError(
            "model: got one without a Float8Linear or Float8Experts whose weights can be written "
            "(neither in float64 nor parametrized), expected one; call convert_to_float8_training"
        )
    body = Counter[torch.dtype]()
    for each in saved:
        _require_stored(each, each in in_float8)
        body[each.tensor.dtype] += each.tensor.numel() * (each in in_float8)
    config = scheme.config(_left_out(model, modules, published, scheme))
    if found := replaced_by_transformers(model, config["quant_method"]):
        raise ValueError(
            f"format: got {format!r} for a model with {found}, for which transformers finds no "
            f"weights when it loads that format; expected {FINE_GRAINED!r}"
        )
    ((most, _),) = body.most_common(1)
    masters = dtype is None and most == torch.float32
    rest, sources = dtype or (torch.bfloat16 if masters else most), list[_Source]()
    for each in saved:
        x, (name, module, _) = each.tensor, each.uses[0]
        names = [[published.names[name]]]
        if each in in_float8:
            names = published.experts.get(name, names)
            how = _cast_of(module, scheme, x.shape[-2], len(names))
            sources.append(_Source(x, names, param_dtype, *how))
        else:
            stays = kept(name) if masters else dtype is None
            sources.append(_Source(x, names, None if stays else rest))
    _require_own_names(sources, scheme.scale_suffix)
    return _Contents(scheme, rest, sources, config)


def _require_stored(saved: SavedTensor, in_float8: bool) -> None:
    """Raise a `ValueError` unless a tensor has values of its own, and safetensors can store it."""
    x, (name, module, _) = saved.tensor, saved.uses[0]
    inner = local_tensor(high_precision(x))
    is_8_bit = x.dtype.is_floating_point and x.dtype.itemsize == 1
    if is_lazy(x) or x.is_meta:
        got, do = f"a tensor without values, on {x.device}", "run the model once, or load it"
    elif not in_float8 and (hasattr(inner, "__tensor_flatten__") or is_8_bit):
        got = f"a {type(inner).__name__} of {inner.dtype}, in a {type(module).__name__}"
        do = "load the model dequantised, or call convert_to_high_precision(model)"
    elif x.layout != torch.strided or x.is_nested or x.is_quantized or x.dtype == torch.complex128:
        got, do = f"a tensor of {x.dtype} and {x.layout}", "make it a buffer with persistent=False"
    else:
        return
    raise ValueError(f"{name}: got {got}, expected a plain tensor with values; {do}")


def _kept_in_float32(model: nn.Module) -> Callable[[str], Any]:
    """Return what tells if transformers keeps a name in float32 in a model of 16 bits."""
    kept = {
        each.replace("*", ".*")
        for module in model.modules()
        for names in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for each in getattr(module, names, None) or ()
    }
    return re.compile("|".join(kept) or "(?!)").search  # as it matches


def _in_float8(
    saved: list[SavedTensor], published: PublishedNames, kept: Callable[[str], Any]
) -> set[SavedTensor]:
    """Return the tensors that are written in float8.

    They are weights of layers that multiply outputs in float8, and experts, converted or not, that
    are published one by one, if all of their module are. None is in float64, or tied to something
    else, or kept in float32, such as `wo` of T5: transformers would read bytes without scales.
    """

    def can_be(name: str, module: Any, attr: str, x: Tensor) -> bool:
        dtype = local_tensor(high_precision(x)).dtype
        if is_lazy(x) or kept(name) or dtype not in HIGH_PRECISION_DTYPES:
            return False
        is_weight = attr == "weight" and isinstance(module, Float8Linear)
        return module._float8_plan.output is not None if is_weight else name in published.experts

    chosen = {each for each in saved if all(can_be(*use, each.tensor) for use in each.uses)}
    stay = [each for each in saved if each not in chosen and not is_lazy(each.tensor)]
    cut = {module for each in stay if each.tensor.dim() == 3 for _, module, _ in each.uses}
    return {x for x in chosen if x.tensor.dim() == 2 or cut.isdisjoint(m for _, m, _ in x.uses)}


def _cast_of(module: Any, scheme: Scheme, rows: int, pieces: int) -> tuple[CastConfig, bool]:
    """Return the cast of a weight of so many rows, and whether training casts it so, too."""
    rounded = scheme.exponents is not None
    how = CastConfig(target_dtype=E4M3, scaling_granularity=scheme.granularity, power_of_2=rounded)
    if not isinstance(module, Float8Linear | Float8Experts):
        return how, False
    of_training = module._float8_plan.casts.weight.how
    covers = of_training.scaling_granularity
    covers = covers if scheme.takes(covers) else scheme.granularity
    rounded = rounded or of_training.power_of_2
    how = replace(how, scaling_granularity=covers, power_of_2=rounded)
    # Training has the pieces of the weights of experts together: no scale may cover two of them.
    apart = pieces == 1 or rows // pieces % (covers.height or rows) == 0
    return how, of_training == how and apart


def _left_out(
    model: nn.Module, in_float8: set[nn.Module], published: PublishedNames, scheme: Scheme
) -> list[str]:
    """Return the names of modules that readers would take for float8, and that are not."""
    names = []
    for name, module in unwrapped(model).named_modules():
        name, has_experts = plain_name(name), any(x.dim() == 3 for x in module.parameters(False))
        if scheme.format == FINE_GRAINED:  # else transformers looks for them among its modules
            weight = f"{name}.weight"
            name = published.names.get(weight, weight).removesuffix(".weight")
        # A name stands for all beneath it.
        if has_experts or isinstance(module, nn.Linear):
            names += [name] if in_float8.isdisjoint(module.modules()) else []
    return names


def _require_own_names(sources: list[_Source], suffix: str) -> None:
    """Raise a `ValueError` if two tensors, or a tensor and a scale, have one name in files."""
    names = Counter(name for each in sources for piece in each.names for name in piece)
    scales = {name + suffix for name in names}  # also of none: readers take it for one
    if taken := [name for name, count in names.items() if count > 1 or name in scales]:
        raise ValueError(
            f"{taken[0]}: got a tensor that has in files the name of another, or of its scale "
            f"({suffix!r} is added), expected one of its own; rename it, or leave it out"
        )


# ---------------------------------------------------------------- one after the other


@torch.no_grad()
def _written(
    contents: _Contents, ranks: Together
) -> Iterator[tuple[dict[str, Tensor], WrittenWeight | None]]:
    """Yield each tensor by its name, with its scales, and a note of it if it is in float8."""
    for source in contents.sources:
        x: Any = high_precision(source.x.detach())
        in_8_bits = isinstance(local_tensor(x), Float8Tensor)
        if source.dtype and x.dtype in HIGH_PRECISION_DTYPES and not in_8_bits:
            x = x.to(source.dtype)
        x = ranks.whole(x)
        if source.how is None:
            yield {source.names[0][0]: x}, None
            continue
        experts = x.dim() == 3
        for piece, names in enumerate(source.names):
            for expert, name in enumerate(names):
                weight: Any = part_of(x, expert, piece, len(source.names)) if experts else x
                held = isinstance(weight, Float8Tensor)
                # What is in float8 training multiplies as it is.
                pair: Any = contents.scheme.published(weight) if held else None
                as_trained = pair is not None if held else source.as_trained
                if pair is None:
                    plain = weight.to_original_precision() if held else weight
                    pair = contents.scheme.published(in_float8_only(plain, Cast(source.how)))
                data, scale = pair
                if experts and scale.dim() == 0:
                    scale = scale.reshape(1, 1)  # transformers joins these
                tensors = {name: data, name + contents.scheme.scale_suffix: scale}
                yield tensors, WrittenWeight(name, as_trained)
