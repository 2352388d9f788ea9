"""Read checkpoints in float8, tensor by tensor."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.checkpoints.files import Checkpoint
from float8.checkpoints.names import SavedTensor, published_names, saved_tensors, unwrapped
from float8.checkpoints.ranks import Together
from float8.checkpoints.schemes import part_of, values_of
from float8.config import require_module
from float8.experts import Float8Experts, names_to_gather
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.runtime.private import warn
from float8.linear import Float8Linear
from float8.linear.weight import in_float8_only
from float8.tensor import Float8Tensor, high_precision, is_dtensor, local_tensor, reshard


def read_float8_checkpoint(
    folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: Any = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a checkpoint with its name, one after the other.

    Weights in float8 come as `Float8Tensor`: the very bytes and scales of the file. All others come
    as they are. All files are looked at before the first tensor comes.

    Args:
        folder: with `config.json`, whose `quantization_config` tells format and strategy, and
            safetensors: one file, or shards with an index.
        dtype: the dtype that each `Float8Tensor` reports.
        device: where tensors are made.

    Raises:
        ImportError: the package safetensors is not installed.
        FileNotFoundError: a file is missing.
        TypeError: `dtype` is none in high precision.
        ValueError: format or strategy is unknown; a weight has no scale, or one that does not fit;
            a file is cut, damaged, or outside of the folder.
        RuntimeError, AssertionError: torch's own, for a `device` that is not here.
    """
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"dtype: got {dtype}, expected one of {HIGH_PRECISION_DTYPES}")
    checkpoint = Checkpoint(Path(folder), torch.empty(0, device=device).device)
    return ((name, checkpoint.read(name, dtype)) for name in checkpoint.names)


def load_float8_checkpoint(
    model: nn.Module, folder: str | Path, *, device: Any = None
) -> nn.Module:
    """Load a checkpoint in float8 into a model, in place, one tensor after the other.

    A layer, or experts, with `Float8Weights.ONLY` take the very bytes and scales, by the recipe of
    the file's granularity: `blockwise` for `fine-grained-fp8`, `rowwise` for channels, `tensorwise`
    for tensors, `mxfp8` for MXFP8. Every other Parameter takes the dequantised values, rounded to
    its dtype: masters that train, on all ranks their own part of each.

    Names are those of the model, or those under which transformers publishes it: weights of experts
    that a file has one by one go into the Parameters that a model has for all of them. Ranks that
    share a model must all call: what one of them cannot read raises on all.

    Args:
        model: in high precision or converted; may be on the meta device, or sharded by FSDP2 or
            tensor parallel (Parameters in high precision then, no longer on the meta device; each
            rank with whole experts).
        folder: see `read_float8_checkpoint`.
        device: where Parameters are made that are on the meta device; None: the CPU.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: names or shapes of the checkpoint are not those of the model, a layer cannot
            take its weight, or one is there twice: joined and one by one, or with two values for a
            tied Parameter. Nothing is changed then.
        ImportError, FileNotFoundError, RuntimeError, AssertionError: as `read_float8_checkpoint`.
    """
    require_module(model, "model")
    reshard(model)
    with Together(model) as ranks:
        device = torch.empty(0, device="cpu" if device is None else device).device
        places, checkpoint = _places(model), Checkpoint(Path(folder))
        names = _fitting(model, checkpoint, places)
        if len({*map(tuple, ranks.agree(said=checkpoint.files))}) > 1:
            got = "got other files on other ranks, expected the same, which no save replaces"
            raise ValueError(f"{folder}: {got}; load again")
        ranks.agree()  # nothing is changed where another rank has no such file
        for name in names:
            old = places[name].target.tensor
            # Inference tensors are written in that mode alone, and no others are made.
            with torch.inference_mode(old.is_inference() and not old.is_meta), torch.no_grad():
                _put(places[name], partial(checkpoint.read, name), device)
    left = [name for name, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    if left:
        warn(
            f"float8: {len(left)} tensor(s) that no checkpoint has are still on the meta device: "
            f"{', '.join(left[:3])}; make them, for example by the model's own initialisation"
        )
    return model


class _Place(NamedTuple):
    """A whole Parameter or buffer, or the piece [N, K] of one expert in one [E, pieces * N, K]."""

    target: SavedTensor
    expert: int | None = None
    piece: int = 0
    pieces: int = 1

    @property
    def layers(self) -> list[Any]:
        """Those that have it as weight, and take bytes and scales as they are."""
        ours = (use for use in self.target.uses if isinstance(use[1], Float8Linear | Float8Experts))
        alone = ((x, attr) for _, x, attr in ours if x._float8_keeps_no_master)
        return [x for x, attr in alone if attr in names_to_gather(x)]


def _places(model: nn.Module) -> dict[str, _Place]:
    """Return the place of each tensor that a checkpoint may have, by its own and published name."""
    places = {name: _Place(each) for each in saved_tensors(model) for name, *_ in each.uses}
    published = published_names(model)
    places |= {new: places[name] for name, new in published.names.items()}
    for name, pieces in published.experts.items():
        for piece, names in enumerate(pieces):
            for expert, new in enumerate(names):
                places[new] = _Place(places[name].target, expert, piece, len(pieces))
    return places


def _fitting(model: nn.Module, checkpoint: Checkpoint, places: dict[str, _Place]) -> list[str]:
    """Return the names of tensors to read, one for each place; raises if they do not fit."""
    cls, given = type(model).__name__, dict[_Place, list[str]]()
    # As transformers: of layers that predict more tokens, which it has not.
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in checkpoint.names:
        if name in places:
            given.setdefault(places[name], []).append(name)
        elif not any(re.search(each, name) for each in ignored):
            raise ValueError(f"checkpoint: got {name!r}, expected names of tensors of {cls}")
    one_by_one = {place.target for place in given if place.expert is not None}
    missing = {
        place: name
        for name, place in places.items()
        if place not in given and (place.target in one_by_one) is (place.expert is not None)
    }
    if missing:
        raise ValueError(
            f"checkpoint: got nothing for {len(missing)} Parameter(s) or buffer(s) of {cls}, "
            f"such as {min(missing.values())!r}, expected all of them"
        )
    for place, tied in given.items():
        if place.expert is None and place.target in one_by_one:
            got = "got these experts joined and one by one, too"
            raise ValueError(f"{tied[0]}: {got}, expected one of the two; remove the other")
        tied.sort(key=lambda name: name not in checkpoint.in_float8)  # whose bytes a layer may take
        for name in tied:
            _require_fitting(name, place, checkpoint)
        for name in tied[1:]:
            dtype = place.target.tensor.dtype
            a, b = (values_of(checkpoint.read(each)).to(dtype) for each in (tied[0], name))
            if not ((a == b) | (a != a) & (b != b)).all():
                raise ValueError(
                    f"{name}: got other values than those of {tied[0]!r}, expected the same: they "
                    f"are one tensor of {cls}; untie them, or remove one"
                )
    return [name for name, *_ in given.values()]


def _require_fitting(name: str, place: _Place, checkpoint: Checkpoint) -> None:
    """Raise unless a place can take the tensor of a name."""
    described: Any = checkpoint.dtype_and_shape(name)
    (dtype, shape), target = described, place.target.tensor
    wanted = tuple(target.shape)
    if place.expert is not None:
        wanted = wanted[1] // place.pieces, wanted[2]
    layers = place.layers if name in checkpoint.in_float8 else []
    granularity = checkpoint.scheme.granularity
    covers = {layer._float8_plan.casts.weight.how.scaling_granularity for layer in place.layers}
    cut = place.pieces > 1 and any(not x.height or wanted[0] % x.height for x in covers)
    is_shared = is_dtensor(target)
    placements = target.placements if is_shared else ()
    whole_experts = all(each.is_replicate() or each.is_shard(0) for each in placements)
    if getattr(dtype, "is_floating_point", False) != target.dtype.is_floating_point:
        got, expected = f"dtype {dtype}", f"numbers like {target.dtype}"
    elif shape != wanted:
        got, expected = f"shape {shape}", f"{wanted} of the model"
    elif layers and covers != {granularity}:
        got = f"scales of {granularity} for a layer with float8_weights=ONLY"
        expected = f"those of {covers}; convert it by the recipe for this checkpoint"
    elif cut:
        got = f"experts with float8_weights=ONLY, where {covers} join rows of two projections"
        expected = "scales of each; convert them by another recipe, or without ONLY"
    elif is_shared and target.is_meta and len(layers) < len(place.target.uses):
        got, expected = "a sharded Parameter on the meta device", "memory to load into"
        expected += "; call model.to_empty(device=...) first"
    elif place.expert is not None and not whole_experts:
        got = f"experts that are placed {placements}"
        expected = "Shard(0) or Replicate(): load the model before it is sharded"
    else:
        return
    raise ValueError(f"{name}: got {got}, expected {expected}")


def _put(place: _Place, read: Callable[..., Tensor], device: Any) -> None:
    """Put a tensor of a checkpoint into its place, as that takes it."""
    target, old, layers = place.target, place.target.tensor, place.layers
    if len(layers) == len(target.uses) and place.expert is None:
        new = read(old.dtype).to(device if old.is_meta else old.device, old.dtype)
        new = in_float8_only(new, layers[0]._float8_plan.casts.weight)
        # A part without the memory of the whole.
        target.replace(_shared(new, old).clone() if is_dtensor(old) else new)
        return
    if old.is_meta:
        target.replace(torch.empty_like(old, device=device))
    new = target.tensor
    if place.expert is None:
        _copy(new, read())
        return
    here, numbers = local_tensor(high_precision(new)), torch.arange(len(new))
    if is_dtensor(new):
        numbers = _shared(numbers, new).to_local()
    for expert in (numbers == place.expert).nonzero().flatten().tolist():  # if it is on this rank
        part = part_of(here, expert, place.piece, place.pieces)
        if not isinstance(part, Float8Tensor):
            _copy(part, read())
            continue
        made = in_float8_only(read(old.dtype).to(part.device), layers[0]._float8_plan.casts.weight)
        part._data.copy_(made._data)
        part._scale.copy_(made._scale)


def _copy(to: Any, tensor: Tensor) -> None:
    """Write a tensor of a checkpoint into another one, of which a rank may have a part."""
    values = values_of(tensor.to(to.device)).to(to.dtype)
    to.copy_(_shared(values, to) if is_dtensor(to) else values)


def _shared(whole: Tensor, like: Any) -> Any:
    """Return a tensor that each rank has read as the DTensor of which each has a part."""
    from torch.distributed.tensor import distribute_tensor  # slow to import

    # Nothing is sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
