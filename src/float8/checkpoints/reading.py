"""Read checkpoints in float8, tensor by tensor."""

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from float8.arguments import require_module
from float8.checkpoints.layouts import Layout, check_pair, layout_of
from float8.formats import FLOAT8_MAX
from float8.linear import Float8Layer
from float8.linear.weight import in_float8_only
from float8.quantize.spec import Operand, dequantised
from float8.tensor import Float8Tensor, is_dtensor, reshard

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
        ValueError: the layout is none that is known; a weight has no scale, or one that does not
            fit; a file is cut or damaged.
    """
    checkpoint = _Checkpoint(Path(folder), device)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with checkpoint:
            for name in checkpoint.names:
                yield name, checkpoint.read(name, dtype)

    return tensors()


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
            self._file_of = _read_json(index).get("weight_map") or {}
            if not self._file_of:
                raise ValueError(f"{index}: got no weight_map, expected one; fetch it again")
        files = sorted(set(self._file_of.values())) or [
            path.name for path in sorted(folder.glob("*.safetensors"))
        ]
        if not files:
            raise FileNotFoundError(f"{folder}: got no safetensors file, expected one or an index")
        for name in files:
            self._open(folder / name, device)
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

    def _open(self, path: Path, device: Any) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(NO_SAFETENSORS) from error
        if not path.exists():
            raise FileNotFoundError(f"{path}: the index names this file, and it is not there")
        try:
            file = safe_open(path, framework="pt", device=str(device))
        except SafetensorError as error:
            raise ValueError(
                f"{path}: got a file that is cut or damaged ({error}), expected a whole one; fetch "
                f"it again"
            ) from error
        self._files[path.name] = self.enter_context(file)

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


_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")
"""The ends of names of scales of activations and caches, which are of no use here."""

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Names that safetensors gives to dtypes; others stay names."""


def _read_json(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
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

    Args:
        model: in high precision or converted; may be on the meta device, or sharded by FSDP2 or
            tensor parallel (Parameters in high precision then, no longer on the meta device).
        folder: see `read_float8_checkpoint`.
        device: where Parameters are made that are on the meta device; None: the CPU.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: names or shapes of the checkpoint are not those of the model, or a layer cannot
            take its weight. Nothing is changed then.
        ImportError, FileNotFoundError: as `read_float8_checkpoint`.
    """
    require_module(model, "model")
    reshard(model)
    places = _places(model)
    with _Checkpoint(Path(folder)) as checkpoint:
        _require_fitting(model, checkpoint, places)
        for name in checkpoint.names:
            _put(places[name], checkpoint.read(name), device)
    left = [name for name, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    if left:
        warnings.warn(
            f"float8: {len(left)} tensor(s) that no checkpoint has are still on the meta device: "
            f"{', '.join(left[:3])}; make them, for example by the model's own initialisation",
            stacklevel=2,
        )
    return model


def plain_name(name: str) -> str:
    """Return the name of a module or tensor without what wrappers within a model add to it."""
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module"):  # of torch.compile, of checkpoints
        name = f"{name}.".replace(f"{wrapper}.", "")[:-1]
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile or DDP wraps, or itself."""
    is_ddp = isinstance(model, DistributedDataParallel)
    inner = model._modules.get("module" if is_ddp else "_orig_mod")
    return model if inner is None else unwrapped(inner)


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the Parameters and buffers that are saved, tied ones under each of their names.

    Each with its name, and the module that has it, and its name there. The state of delayed scaling
    is none of them.
    """
    for prefix, module in unwrapped(model).named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        for own, x in {**module._parameters, **module._buffers}.items():
            if x is not None and own not in passing and not own.startswith(_STATE):
                yield plain_name(f"{prefix}.{own}" if prefix else own), module, own, x


_STATE = ("fp8_amax_", "fp8_scale_")

Places = dict[str, list[tuple[nn.Module, str]]]


def _places(model: nn.Module) -> Places:
    """Return, for each name of a Parameter or buffer that is saved, the modules that have it.

    Tied ones are in several modules, and a checkpoint has them under one name or under all.
    """
    places: Places = {}
    by_tensor: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, module, own, x in saved_tensors(model):
        places[name] = by_tensor.setdefault(id(x), [])
        places[name].append((module, own))
    return places


def _require_fitting(model: nn.Module, checkpoint: _Checkpoint, places: Places) -> None:
    """Raise a `ValueError` unless each tensor has a place that takes it, and each place one."""
    cls = type(model).__name__
    if unknown := [name for name in checkpoint.names if name not in places]:
        raise ValueError(
            f"checkpoint: got {len(unknown)} name(s) that {cls} has not, such as {unknown[0]!r}, "
            f"expected those of its Parameters and buffers"
        )
    there = {id(places[name]) for name in checkpoint.names}
    if missing := [name for name, place in places.items() if id(place) not in there]:
        raise ValueError(
            f"checkpoint: got nothing for {len(missing)} Parameter(s) or buffer(s) of {cls}, such "
            f"as {missing[0]!r}, expected all of them"
        )
    for name in checkpoint.names:
        described: Any = checkpoint.described(name)
        layout = checkpoint.layout if name in checkpoint.in_float8 else None
        for module, own in places[name]:
            _require_place(name, module, own, described[1], layout)


def _require_place(
    name: str, module: nn.Module, own: str, shape: tuple[int, ...], layout: Layout | None
) -> None:
    """Raise a `ValueError` unless `module` can take a tensor; `layout`: of a weight in float8."""
    target = _tensor_of(module, own)
    if tuple(target.shape) != shape:
        raise ValueError(f"{name}: got shape {shape}, expected {tuple(target.shape)} of the model")
    if _keeps_bytes(module, own) and layout is not None:
        of = module.plan.casts.weight.spec.granularity  # type: ignore[union-attr]
        if of is not layout.granularity:
            raise ValueError(
                f"{name}: got scales of {layout.granularity}, expected those of the layer, which "
                f"has float8_weights=ONLY and {of}; convert it by the recipe for this checkpoint"
            )
    elif is_dtensor(target) and target.is_meta:
        raise ValueError(
            f"{name}: got a sharded Parameter on the meta device, expected memory to load into; "
            f"call model.to_empty(device=...) first"
        )


def _keeps_bytes(module: nn.Module, own: str) -> bool:
    return own == "weight" and isinstance(module, Float8Layer) and module.keeps_no_master


def _tensor_of(module: nn.Module, own: str) -> Any:
    parameter = module._parameters.get(own)
    return module._buffers[own] if parameter is None else parameter


def _put(places: list[tuple[nn.Module, str]], tensor: Tensor, device: Any) -> None:
    """Give modules that share a Parameter or buffer a tensor of a checkpoint, as they take it."""
    module, own = places[0]
    target = _tensor_of(module, own)
    new: Tensor | None = None
    where = (device or "cpu") if target.is_meta else target.device
    values = tensor
    if isinstance(tensor, Float8Tensor):
        data, scale = tensor._data.to(where), tensor._scale.to(where)
        if all(_keeps_bytes(*place) for place in places):
            new = Float8Tensor(data, scale, target.dtype, tensor._granularity)
        else:
            values = dequantised(Operand(data, scale), tensor._granularity)
    elif _keeps_bytes(module, own):
        new = in_float8_only(values.to(where, target.dtype), module.plan.casts.weight)  # type: ignore[arg-type, union-attr]
    if new is None and not target.is_meta:
        _copy(target, values)
        return
    if new is None:
        new = values.to(where, target.dtype)
    if is_dtensor(target):
        new = _shared(new, target).clone()  # without the memory of the whole
    if isinstance(target, nn.Parameter):
        new = nn.Parameter(new, requires_grad=target.requires_grad)
    for each, name in places:
        registry: Any = each._parameters if name in each._parameters else each._buffers
        registry[name] = new


def _copy(target: Any, values: Tensor) -> None:
    """Write `values` into a tensor, of which a rank may have a part."""
    values = values.to(target.device, target.dtype)
    target.copy_(_shared(values, target) if is_dtensor(target) else values)


def _shared(whole: Tensor, like: Any) -> Any:
    """Return a tensor that each rank has read as the DTensor of which each has a part."""
    from torch.distributed.tensor import distribute_tensor  # slow to import

    # Nothing is sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
