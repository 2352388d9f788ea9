"""Read checkpoints in float8, tensor by tensor."""

import contextlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.arguments import require_module
from float8.checkpoints.gathering import has_whole_experts
from float8.checkpoints.layouts import Layout, check_pair, layout_of
from float8.checkpoints.names import published_names, saved_tensors, unwrapped
from float8.checkpoints.ranks import Together, groups_of
from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.linear import Float8Layer
from float8.linear.weight import in_float8_only
from float8.scales import Operand, dequantised
from float8.tensor import Float8Tensor, high_precision, is_dtensor, local_tensor, reshard
from float8.tensor.wrapper import as_inference_as

INDEX, CONFIG = "model.safetensors.index.json", "config.json"
NO_SAFETENSORS = "checkpoints in float8 are safetensors: pip install safetensors"


def read_float8_checkpoint(
    folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: Any = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a checkpoint with its name, one after the other.

    Weights in float8 come as `Float8Tensor`: the very bytes and scales of the file. All others come
    as they are. All files are looked at before the first tensor comes.

    Args:
        folder: with `config.json`, whose `quantization_config` says the layout, and safetensors:
            one file, or shards with an index.
        dtype: that of the values that weights in float8 stand for.
        device: where tensors are made.

    Raises:
        ImportError: the package safetensors is not installed.
        FileNotFoundError: a file is missing.
        TypeError: `dtype` is none in high precision.
        ValueError: the layout is none that is known; a weight has no scale, or one that does not
            fit; a file is cut, damaged, or outside of the folder; `device` is none that is here.
    """
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"dtype: got {dtype}, expected one of {HIGH_PRECISION_DTYPES}")
    checkpoint = _Checkpoint(Path(folder), _checked_device(device))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with checkpoint:
            for name in checkpoint.names:
                yield name, checkpoint.read(name, dtype)

    return tensors()


def _checked_device(device: Any) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(f"device: got {device!r}, expected one that is here: {error}") from error


class _Checkpoint(contextlib.ExitStack):
    """The safetensors files of a folder, each opened once, and what their headers say.

    Raises:
        ImportError, FileNotFoundError, ValueError: as `read_float8_checkpoint`.
    """

    def __init__(self, folder: Path, device: Any = "cpu") -> None:
        super().__init__()
        self.layout = layout_of(_read_json(folder / CONFIG).get("quantization_config"))
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = folder / INDEX
        if index.exists():
            self._file_of = _read_weight_map(index)
        files = sorted(set(self._file_of.values())) or [
            path.name for path in sorted(folder.glob("*.safetensors"))
        ]
        if not files:
            raise FileNotFoundError(f"{folder}: got no safetensors file, expected one or an index")
        for name in files:
            self._files[name] = self._opened(folder / name, device)
            there = set(self._files[name].keys())
            if missing := {n for n, of in self._file_of.items() if of == name} - there:
                raise ValueError(
                    f"{folder / name}: got no {min(missing)!r}, which the index says is in it"
                )
            if not index.exists():
                if twice := there & self._file_of.keys():
                    raise ValueError(
                        f"{folder}: got {min(twice)!r} in two files and no index, expected it in "
                        f"one; remove the files that are not of this checkpoint"
                    )
                self._file_of |= dict.fromkeys(there, name)
        suffix, self.in_float8 = self.layout.scale_suffix, set[str]()
        for name in self._file_of:
            weight: Any = self.described(name)
            scale = self.described(name + suffix)
            if scale is not None or weight[0] in FLOAT8_MAX:
                check_pair(self.layout, name, weight, scale)
                self.in_float8.add(name)
        beside = {name + suffix for name in self.in_float8}
        self.names = [
            name
            for name in sorted(self._file_of)
            if name not in beside and not name.endswith(_OF_ACTIVATIONS)
        ]

    def _opened(self, path: Path, device: Any) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(NO_SAFETENSORS) from error
        if not path.is_file():
            raise FileNotFoundError(f"{path}: the index names this file, and it is not there")
        try:
            file = safe_open(path, framework="pt", device=str(device))
        except SafetensorError as error:
            raise ValueError(
                f"{path}: got a file that is cut or damaged ({error}), expected a whole one; fetch "
                f"it again"
            ) from error
        return self.enter_context(file)

    def described(self, name: str) -> tuple[Any, tuple[int, ...]] | None:
        """Return dtype and shape of a tensor, of the header alone; None: it is not there."""
        if name not in self._file_of:
            return None
        of = self._files[self._file_of[name]].get_slice(name)
        return _DTYPES.get(of.get_dtype(), of.get_dtype()), tuple(of.get_shape())

    def read(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a tensor; a weight in float8 as a `Float8Tensor` that stands for `dtype`."""
        data: Tensor = self._files[self._file_of[name]].get_tensor(name)
        if name not in self.in_float8:
            return data
        scale_name = name + self.layout.scale_suffix
        scale = self._files[self._file_of[scale_name]].get_tensor(scale_name)
        return self.layout.weight(data, scale, dtype)

    def are_same(self, one: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors are the same numbers in `dtype`."""
        a, b = (_values(self.read(name)).to(dtype) for name in (one, other))
        return bool(((a == b) | (a != a) & (b != b)).all())


_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")
"""The ends of names of scales of activations and caches, which are of no use here."""

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Names that safetensors gives to dtypes of numbers with a point; others stay names."""


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        ValueError: it has none, or one with a name twice, of which the last would win.
    """

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{twice[0]!r} twice")
        return dict(pairs)

    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=each_once)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: got {error}, expected an object of JSON with each name once; fetch it again"
        ) from error
    return found


def _read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by a path in the folder of the index."""
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(
            f"{index}: got no weight_map of names and files, expected one; fetch it again"
        )
    for name, file in found.items():
        path = PurePath(file) if isinstance(file, str) else None
        if path is None or not path.parts or path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"{index}: got {file!r} as the file of {name!r}, expected one in this folder; "
                f"fetch the checkpoint again, from somebody you trust"
            )
    return found


# ---------------------------------------------------------------- into a model


@torch.no_grad()
def load_float8_checkpoint(
    model: nn.Module, folder: str | Path, *, device: Any = None
) -> nn.Module:
    """Load a checkpoint in float8 into a model, in place, one tensor after the other.

    What a layer is says what it takes. One with `Float8Weights.ONLY` takes the very bytes and
    scales, if it has the granularity of the file: the recipe `blockwise` for `fine-grained-fp8`,
    `rowwise` for channels, `tensorwise` for tensors. Every other Parameter takes the dequantised
    values, rounded to its dtype: masters that train, on all ranks their own part of each.

    Names are those of the model, or those under which transformers publishes it. So the weights of
    experts, which a file has one by one, go into the Parameters that a model has for all of them.

    Ranks that share a model must all call: what one of them cannot read raises on all.

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
        ImportError, FileNotFoundError: as `read_float8_checkpoint`.
    """
    require_module(model, "model")
    reshard(model)
    # As transformers: of layers that predict more tokens, which it has not.
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    together = Together(groups=groups_of(model))
    with contextlib.ExitStack() as files:
        with together:  # nothing is changed where another rank has no such file
            device = _checked_device("cpu" if device is None else device)
            places = _places(model)
            checkpoint = files.enter_context(_Checkpoint(Path(folder)))
            checkpoint.names = [
                name
                for name in checkpoint.names
                if name in places or not any(re.search(each, name) for each in ignored)
            ]
            _require_fitting(model, checkpoint, places)
        files.enter_context(together)
        for name in checkpoint.names:
            place = places[name]
            # In inference mode only what is an inference tensor by now.
            with as_inference_as(_tensor_at(place)), torch.no_grad():
                if isinstance(place, _Expert):
                    _put_expert(place, partial(checkpoint.read, name), device)
                else:
                    _put(place, checkpoint.read(name), device)
    left = [name for name, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    if left:
        warnings.warn(
            f"float8: {len(left)} tensor(s) that no checkpoint has are still on the meta device: "
            f"{', '.join(left[:3])}; make them, for example by the model's own initialisation",
            stacklevel=2,
        )
    return model


Modules = list[tuple[nn.Module, str]]
"""Those that have a Parameter or buffer, each with its name there."""


class _Expert(NamedTuple):
    """The place of a weight [N, K]: part of a Parameter [E, parts * N, K]."""

    of: Modules
    expert: int
    part: int
    parts: int


def _places(model: nn.Module) -> dict[str, Modules | _Expert]:
    """Return the place of each tensor that a checkpoint may have, by its own and published name.

    Tied ones are in several modules, and a checkpoint has them under one name or under all.
    """
    own: dict[str, Modules] = {}
    by_tensor: dict[int, Modules] = {}
    for name, module, inner, x in saved_tensors(model):
        own[name] = by_tensor.setdefault(id(x), [])
        own[name].append((module, inner))
    published = published_names(model)
    places: dict[str, Modules | _Expert] = {**own}
    places |= {new: own[name] for name, new in published.names.items()}
    for name, parts in published.experts.items():
        for part, names in enumerate(parts):
            for expert, new in enumerate(names):
                places[new] = _Expert(own[name], expert, part, len(parts))
    return places


def _require_fitting(
    model: nn.Module, checkpoint: _Checkpoint, places: dict[str, Modules | _Expert]
) -> None:
    """Raise a `ValueError` unless each tensor has a place that takes it, and each place one.

    Of several names of one tensor the checkpoint keeps one.
    """
    cls = type(model).__name__
    if unknown := [name for name in checkpoint.names if name not in places]:
        raise ValueError(
            f"checkpoint: got {len(unknown)} name(s) that {cls} has not, such as {unknown[0]!r}, "
            f"expected those of its Parameters and buffers"
        )
    given = [places[name] for name in checkpoint.names]

    def key(place: Modules | _Expert) -> Any:
        """Return the same for all names of tied Parameters, and of one expert of these."""
        return (id(place.of), *place[1:]) if isinstance(place, _Expert) else id(place)

    there: dict[Any, list[str]] = {}
    for name in checkpoint.names:
        there.setdefault(key(places[name]), []).append(name)
    in_parts = {id(place.of) for place in given if isinstance(place, _Expert)}

    def is_missing(place: Modules | _Expert) -> bool:
        if isinstance(place, _Expert):
            return id(place.of) in in_parts and key(place) not in there
        return id(place) not in there.keys() | in_parts

    missing = {key(place): name for name, place in places.items() if is_missing(place)}
    if missing:
        raise ValueError(
            f"checkpoint: got nothing for {len(missing)} Parameter(s) or buffer(s) of {cls}, such "
            f"as {min(missing.values())!r}, expected all of them"
        )
    for name, place in zip(checkpoint.names, given, strict=True):
        described: Any = checkpoint.described(name)
        layout = checkpoint.layout if name in checkpoint.in_float8 else None
        dtype, takes = described[0], _tensor_at(place).dtype
        if isinstance(dtype, torch.dtype) != takes.is_floating_point:
            raise ValueError(f"{name}: got dtype {dtype}, expected numbers like {takes}")
        if isinstance(place, _Expert):
            _require_expert(name, place, described[1])
            continue
        if id(place) in in_parts:
            raise ValueError(
                f"{name}: got these experts joined and one by one, too, expected one of the two; "
                f"fetch the checkpoint again, or remove one"
            )
        for module, own in place:
            _require_place(name, module, own, described[1], layout)
    for names in there.values():
        # First one in float8, whose bytes a layer may take.
        kept, *others = sorted(names, key=lambda name: name not in checkpoint.in_float8)
        for name in others:
            if not checkpoint.are_same(kept, name, _tensor_at(places[name]).dtype):
                raise ValueError(
                    f"{name}: got other values than those of {kept!r}, expected the same, since "
                    f"they are one tensor of {cls}; untie them (tie_word_embeddings=False in the "
                    f"config of transformers), or remove one"
                )
            checkpoint.names.remove(name)


def _require_expert(name: str, place: _Expert, shape: tuple[int, ...]) -> None:
    """Raise a `ValueError` unless a Parameter can take a weight of one expert."""
    for target in (_tensor_of(*each) for each in place.of):
        _, N, K = target.shape
        if shape != (N // place.parts, K):
            raise ValueError(
                f"{name}: got shape {shape}, expected {(N // place.parts, K)} of the model"
            )
        _require_memory(name, target)
        if is_dtensor(target) and not has_whole_experts(target):
            raise ValueError(
                f"{name}: got a model with experts that are placed {tuple(target.placements)}, "
                f"expected Shard(0) or Replicate(): load it before it is sharded"
            )


def _require_memory(name: str, target: Any) -> None:
    if is_dtensor(target) and target.is_meta:
        raise ValueError(
            f"{name}: got a sharded Parameter on the meta device, expected memory to load into; "
            f"call model.to_empty(device=...) first"
        )


def _require_place(
    name: str, module: nn.Module, own: str, shape: tuple[int, ...], layout: Layout | None
) -> None:
    """Raise a `ValueError` unless `module` can take a tensor; `layout`: of a weight in float8."""
    target = _tensor_of(module, own)
    if tuple(target.shape) != shape:
        raise ValueError(f"{name}: got shape {shape}, expected {tuple(target.shape)} of the model")
    if _keeps_bytes(module, own) and layout is not None:
        of = module._float8_plan.casts.weight.how.scaling_granularity  # type: ignore[union-attr]
        if of is not layout.granularity:
            raise ValueError(
                f"{name}: got scales of {layout.granularity}, expected those of the layer, which "
                f"has float8_weights=ONLY and {of}; convert it by the recipe for this checkpoint"
            )
    else:
        _require_memory(name, target)


def _keeps_bytes(module: nn.Module, own: str) -> bool:
    return own == "weight" and isinstance(module, Float8Layer) and module._float8_keeps_no_master


def _tensor_of(module: nn.Module, own: str) -> Any:
    parameter = module._parameters.get(own)
    return module._buffers[own] if parameter is None else parameter


def _tensor_at(place: Modules | _Expert) -> Any:
    return _tensor_of(*(place.of if isinstance(place, _Expert) else place)[0])


def _values(x: Tensor) -> Tensor:
    """Return a tensor of a checkpoint in high precision."""
    if isinstance(x, Float8Tensor):
        return dequantised(Operand(x._data, x._scale), x._granularity)
    return x


def _put(places: Modules, tensor: Tensor, device: Any) -> None:
    """Give modules that share a Parameter or buffer a tensor of a checkpoint, as they take it."""
    module, own = places[0]
    target = _tensor_of(module, own)
    new: Tensor | None = None
    where = device if target.is_meta else target.device
    if isinstance(tensor, Float8Tensor):
        data, scale = tensor._data.to(where), tensor._scale.to(where)
        tensor = Float8Tensor(data, scale, target.dtype, tensor._granularity)
        new = tensor if all(_keeps_bytes(*place) for place in places) else None
    elif _keeps_bytes(module, own):
        new = in_float8_only(tensor.to(where, target.dtype), module._float8_plan.casts.weight)  # type: ignore[arg-type, union-attr]
    if new is None and not target.is_meta:
        _copy(target, _values(tensor))
        return
    if new is None:
        new = _values(tensor).to(where, target.dtype)
    if is_dtensor(target):
        new = _shared(new, target).clone()  # without the memory of the whole
    _register(places, new, target)


def _register(places: Modules, new: Tensor, old: Tensor) -> None:
    """Put a tensor in the place of another in all modules that have it."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for each, name in places:
        registry: Any = each._parameters if name in each._parameters else each._buffers
        registry[name] = new


def _put_expert(place: _Expert, read: Callable[[], Tensor], device: Any) -> None:
    """Write a weight of one expert into the Parameter of all; read where a rank has that expert."""
    target = _tensor_of(*place.of[0])
    if target.is_meta:
        _register(place.of, torch.empty_like(target, device=device), target)
        target = _tensor_of(*place.of[0])
    here, numbers = local_tensor(high_precision(target)), torch.arange(len(target))
    if is_dtensor(target):
        numbers = _shared(numbers, target).to_local()
    for expert in (numbers == place.expert).nonzero().flatten().tolist():
        tensor = read()
        if isinstance(tensor, Float8Tensor):
            data, scale = tensor._data.to(here.device), tensor._scale.to(here.device)
            tensor = _values(Float8Tensor(data, scale, tensor.dtype, tensor._granularity))
        _copy(here[expert].chunk(place.parts)[place.part], tensor)


def _copy(target: Any, values: Tensor) -> None:
    """Write `values` into a tensor, of which a rank may have a part."""
    values = values.to(target.device, target.dtype)
    # An inference tensor can be written in that mode alone.
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        target.copy_(_shared(values, target) if is_dtensor(target) else values)


def _shared(whole: Tensor, like: Any) -> Any:
    """Return a tensor that each rank has read as the DTensor of which each has a part."""
    from torch.distributed.tensor import distribute_tensor  # slow to import

    # Nothing is sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
