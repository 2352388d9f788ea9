"""Weight transfer of vLLM: its own base class, or a stand-in where vLLM is not installed.

The stand-in is written from vLLM's documentation of `WeightSource` ("Base classes and custom
engines", "NCCL engine"), of 0.33 and of 0.26 to 0.32. It is none of its code, and sends nothing.
"""

import abc
import functools
import hashlib
import importlib
import math
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

BASE = "vllm.distributed.weight_transfer.base"
VERSIONS = ("0.33", "0.26")


class ParamMeta(NamedTuple):
    """What is told of a tensor before any is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stand_in(version: str) -> ModuleType:
    """Return a module with what the documentation asks of the sources of this version."""

    class OfMethods(abc.ABC):
        @abc.abstractmethod
        def metadata(self) -> list[ParamMeta]: ...

        @abc.abstractmethod
        def __iter__(self) -> Any: ...

    class OfProperty(abc.ABC):
        def __init_subclass__(cls) -> None:
            # Engines read it repeatedly, and it must not change.
            assert isinstance(vars(cls)["metadata"], functools.cached_property)

        @property
        @abc.abstractmethod
        def metadata(self) -> list[ParamMeta]: ...

        def iter_full(self) -> Any:
            raise NotImplementedError

    module = ModuleType(BASE)
    vars(module).update(
        ParamMeta=ParamMeta, WeightSource=OfProperty if version == "0.33" else OfMethods
    )
    return module


@functools.cache
def source_class(version: str = VERSIONS[0]) -> Any:
    """Return `Float8WeightSource` above vLLM's base class, or the stand-in of a version."""
    if find_spec("vllm"):
        return importlib.import_module("float8.integrations.vllm").Float8WeightSource
    ours, parts = "float8.integrations.vllm", BASE.split(".")
    modules = {".".join(parts[:end]): ModuleType("") for end in (1, 2, 3)}
    modules[BASE] = stand_in(version)
    sys.modules |= modules
    try:
        return importlib.import_module(ours).Float8WeightSource
    finally:
        for name in (*modules, ours):
            sys.modules.pop(name, None)


def told(source: Any) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    found = source.metadata() if callable(source.metadata) else source.metadata
    return [(x.name, x.dtype, tuple(x.shape)) for x in found]


def received(source: Any) -> dict[str, Tensor]:
    """Return what a server has at the end of a round.

    As the NCCL engine does it: what is told comes first, and each tensor is compared with it; all
    are sent as one run of bytes, which the server cuts by what it was told.
    """
    expected, sent = told(source), []
    passes = source.iter_full() if hasattr(source, "iter_full") else source
    for meta, (name, x) in zip(expected, passes, strict=True):
        assert type(x) in (Tensor, torch.nn.Parameter)
        assert (name, x.dtype, tuple(x.shape)) == meta
        assert not x.requires_grad
        sent.append(x.contiguous().view(torch.uint8).view(-1).clone())
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in expected]
    pieces = torch.cat(sent).split(sizes)
    rows = zip(expected, pieces, strict=True)
    return {name: piece.clone().view(dtype).view(shape) for (name, dtype, shape), piece in rows}


def hashes(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[Any, ...]]:
    """Return name, dtype, shape and SHA-256 of the bytes of each, in order."""
    flat = ((n, x, x.detach().cpu().contiguous().view(-1)) for n, x in tensors)
    return [
        (n, x.dtype, (*x.shape,), hashlib.sha256(y.view(torch.uint8).numpy().tobytes()).hexdigest())
        for n, x, y in flat
    ]
