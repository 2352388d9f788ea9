"""Read float8 checkpoints, and load them into models, one tensor at a time."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.checkpoints.files import Checkpoint
from float8.checkpoints.names import WHOLE, Part, SavedTensor, published_parts, saved_tensors
from float8.checkpoints.ranks import ModelRanks
from float8.checkpoints.schemes import values_of
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.runtime.private import warn
from float8.linear import Float8Module
from float8.names import unwrapped
from float8.tensor import Float8Tensor, high_precision, is_dtensor, local_tensor


def read_float8_checkpoint(
    folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: Any = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (name, tensor) pairs of a checkpoint, which reads a tensor at a time.

    A float8 weight is yielded as `Float8Tensor` with the data and scales of the file, others as
    stored; scales, also of activations, have no pairs. Headers are checked before this returns.

    Args:
        folder: has `config.json` with a `quantization_config`, and one or more safetensors files.
        dtype: the dtype that each `Float8Tensor` reports, and dequantizes to.
        device: the device that tensors are read to.

    Raises:
        ImportError: the package safetensors is not installed.
        FileNotFoundError: a file is missing.
        TypeError: `dtype` is not a high-precision dtype.
        ValueError: the format is not supported; a weight lacks a scale of the format's dtype and
            shape; a file is cut, damaged, outside of `folder`, or contradicts the index or others.
        RuntimeError, AssertionError: torch's own, for a `device` that does not exist.
    """
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"dtype: got {dtype}, expected one of {HIGH_PRECISION_DTYPES}")
    checkpoint = Checkpoint(Path(folder), torch.empty(0, device=device).device)
    return ((name, checkpoint.read(name, dtype)) for name in checkpoint.names)


def load_float8_checkpoint(
    model: nn.Module, folder: str | Path, *, device: Any = None
) -> nn.Module:
    """Load a float8 checkpoint into `model`, one tensor at a time, and return `model`.

    Layers and experts with `Float8Weights.ONLY` (weights exist in float8 only) take float8 data and
    scales of files unchanged, and quantize weights that files have in high precision. Their recipe
    must have the granularity of the scales: `blockwise` for 128x128 blocks, `rowwise` for a scale
    per row (channel), `tensorwise` for one, `mxfp8` for MXFP8. Other Parameters and buffers take
    the values (dequantized), rounded to their dtype. Each rank copies its own shards of DTensors.
    Names in files must be those of `model`, or those under which transformers saves it (experts
    often one by one) or which it ignores. Warns if a tensor is left on the meta device. All ranks
    that share `model` must call this; an error on one is raised on all.

    Args:
        model: in high precision or converted to float8. It may be on the meta device, except for
            DTensors that take no float8 data. Experts saved one by one: sharded on dim 0 only.
        folder: has `config.json` with a `quantization_config`, and one or more safetensors files.
        device: where to make Parameters and buffers that are on the meta device; None: the CPU.

    Raises:
        ImportError: safetensors is missing; transformers 5 is too old to tell how it saves experts.
        FileNotFoundError, TypeError: a file is missing; `model` is not an `nn.Module`.
        ValueError: a file is damaged or of no supported format; names, shapes or kinds of numbers
            are not those of `model`; a DTensor is excluded above; a layer with `ONLY` has another
            granularity, or experts one scale for gate and up; files have experts joined and one by
            one, or differ by rank; tied tensors have other values. `model` is unchanged then.
        RuntimeError, AssertionError: torch's own, for a `device` that does not exist.
    """
    with ModelRanks(model) as ranks:
        device = torch.empty(0, device="cpu" if device is None else device).device  # checked
        targets = {name: _Target(x) for x in saved_tensors(model) for name, *_ in x.uses}
        for name, parts in published_parts(model).items():
            targets |= {new: _Target(targets[name].saved, part) for new, part in parts.items()}
        checkpoint = Checkpoint(Path(folder))
        names = _match(model, checkpoint, targets)
        if len({*map(tuple, ranks.agree(checkpoint.files))}) > 1:
            got = "got other files on other ranks, expected the same, which no save replaces"
            raise ValueError(f"{folder}: {got}; load again")
        ranks.agree()  # ranks of another process group may have raised: change nothing then
        for name in names:
            old = targets[name].saved.tensor
            # Inference tensors can be written in inference mode only; create no others in it.
            with torch.inference_mode(old.is_inference() and not old.is_meta), torch.no_grad():
                _load(targets[name], partial(checkpoint.read, name), device)
    named_tensors = (*model.named_parameters(), *model.named_buffers())
    if on_meta := [name for name, x in named_tensors if x.is_meta]:
        got = f"{len(on_meta)} tensor(s) that no checkpoint has are still on the meta device"
        fix = "make them, for example by the model's own initialisation"
        warn(f"float8: {got}: {', '.join(on_meta[:3])}; {fix}")
    return model


class _Target(NamedTuple):
    """Describes where a tensor is loaded to: a Parameter or buffer, or the weight of one expert."""

    saved: SavedTensor
    part: Part = WHOLE

    @property
    def only_layers(self) -> list[Any]:
        """The modules that have this tensor as weight in float8 only (`Float8Weights.ONLY`)."""
        uses: Any = ((m, attr) for _, m, attr in self.saved.uses if isinstance(m, Float8Module))
        return [m for m, attr in uses if m._float8_never_trains and attr in m._float8_matrices()]


def _match(model: nn.Module, checkpoint: Checkpoint, targets: dict[str, _Target]) -> list[str]:
    """Return the names of the tensors to load: one for each of `model`, or each expert's weight.

    `targets` is {name in `model` or in files: where to load it}. Raises `ValueError` if a tensor of
    `model` is missing, one is unknown (unless transformers ignores it) or refused by
    `_require_fitting`, tied ones have other values, or experts are both joined and one by one.
    """
    class_name = type(model).__name__
    names_in_files = dict[_Target, list[str]]()  # files may have a tied tensor under several names
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in checkpoint.names:
        if name in targets:
            names_in_files.setdefault(targets[name], []).append(name)
        elif not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(f"checkpoint: got {name!r}, expected names of tensors of {class_name}")
    one_by_one = {target.saved for target in names_in_files if target.part != WHOLE}
    missing = {  # all parts of a tensor if the checkpoint has some of them, else the whole tensor
        target: name
        for name, target in targets.items()
        if target not in names_in_files and (target.saved in one_by_one) == (target.part != WHOLE)
    }
    if missing:
        got = f"got nothing for {len(missing)} Parameter(s) or buffer(s) of {class_name}, such as"
        raise ValueError(f"checkpoint: {got} {min(missing.values())!r}, expected all of them")
    for target, tied_names in names_in_files.items():
        if target.part == WHOLE and target.saved in one_by_one:
            got = "got these experts joined and one by one, too"
            raise ValueError(f"{tied_names[0]}: {got}, expected one of the two; remove the other")
        tied_names.sort(key=lambda name: name not in checkpoint.in_float8)  # a float8 one first
        for name in tied_names:
            _require_fitting(name, target, checkpoint)
        first, *others = tied_names  # `first` is loaded
        for name in others:
            dtype = target.saved.tensor.dtype
            x, y = (values_of(checkpoint.read(each)).to(dtype) for each in (first, name))
            if not ((x == y) | ((x != x) & (y != y))).all():  # equal, or both NaN
                got = f"got other values than those of {first!r}, expected the same"
                why = f"they are one tensor of {class_name}; untie them, or remove one"
                raise ValueError(f"{name}: {got}: {why}")
    return [name for name, *_ in names_in_files.values()]


def _require_fitting(name: str, target: _Target, checkpoint: Checkpoint) -> None:
    """Raise `ValueError` if `target` cannot take tensor `name`: dtype, shape, scales, sharding."""
    (dtype, shape), tensor = checkpoint.headers[name], target.saved.tensor
    shape_of_part = target.part.shape(tuple(tensor.shape))
    only_layers, granularity = target.only_layers, checkpoint.scheme.granularity
    granularities = {x._float8_plan.casts.weight.config.scaling_granularity for x in only_layers}
    pieces_share_scales = any(x.one_scale or shape_of_part[0] % x.height for x in granularities)
    in_float8 = name in checkpoint.in_float8
    takes_data = in_float8 and len(only_layers) == len(target.saved.uses)  # without dequantizing
    placements = tensor.placements if is_dtensor(tensor) else ()
    is_floating_point = getattr(dtype, "is_floating_point", False)  # a str if torch lacks it
    if is_floating_point != tensor.dtype.is_floating_point:
        got, expected = f"dtype {dtype}", f"numbers like {tensor.dtype}"
    elif shape != shape_of_part:
        got, expected = f"shape {shape}", f"{shape_of_part} of the model"
    elif in_float8 and only_layers and granularities != {granularity}:
        got = f"scales of {granularity} for a layer with float8_weights=ONLY"
        expected = f"those of {granularities}; convert it by the recipe for this checkpoint"
    elif target.part.pieces > 1 and pieces_share_scales:
        got = f"experts with float8_weights=ONLY whose projections share scales of {granularities}"
        expected = "separate scales; convert them by another recipe, or without ONLY"
    elif placements and tensor.is_meta and not takes_data:  # `_load` does not allocate DTensors
        got = "a sharded Parameter on the meta device"
        expected = "memory to load into; call model.to_empty(device=...) first"
    elif target.part != WHOLE and not all(x.is_replicate() or x.is_shard(0) for x in placements):
        got = f"experts that are placed {placements}"
        expected = "Shard(0) or Replicate(): load the model before it is sharded"
    else:
        return
    raise ValueError(f"{name}: got {got}, expected {expected}")


def _load(target: _Target, read: Callable[..., Tensor], device: torch.device) -> None:
    """Load what `read(dtype)` returns into `target`, which is made on `device` if it is on meta."""
    saved, old, only_layers = target.saved, target.saved.tensor, target.only_layers
    if len(only_layers) == len(saved.uses) and target.part == WHOLE:  # all uses are in float8 only
        new = read(old.dtype).to(device if old.is_meta else old.device, old.dtype)
        new = only_layers[0]._float8_quantize_only(new)  # no-op if `new` is in float8
        # Clone a shard, which is a view that keeps the full tensor in memory.
        saved.replace(_distribute(new, old).clone() if is_dtensor(old) else new)
        return
    if old.is_meta:
        saved.replace(torch.empty_like(old, device=device))
    stored = saved.tensor
    if target.part == WHOLE:
        _copy(stored, read())
        return
    experts: Any = torch.arange(len(stored))  # indices of all experts, then of those of this rank
    experts = _distribute(experts, stored).to_local() if is_dtensor(stored) else experts
    for index in (experts == target.part.expert).nonzero().flatten().tolist():
        part = target.part._replace(expert=index).of(local_tensor(high_precision(stored)))
        if not isinstance(part, Float8Tensor):
            _copy(part, read())
            continue
        weight = only_layers[0]._float8_quantize_only(read(old.dtype).to(part.device))
        part._data.copy_(weight._data)
        part._scale.copy_(weight._scale)


def _copy(destination: Any, tensor: Tensor) -> None:
    """Copy `tensor`, dequantized, to `destination`, or this rank's shard if that is a DTensor."""
    values = values_of(tensor.to(destination.device)).to(destination.dtype)
    destination.copy_(_distribute(values, destination) if is_dtensor(destination) else values)


def _distribute(whole: Tensor, template: Any) -> Any:
    """Return `whole`, equal on all ranks, as a DTensor like `template`, without communication."""
    from torch.distributed.tensor import distribute_tensor  # slow to import

    return distribute_tensor(whole, template.device_mesh, template.placements, src_data_rank=None)
