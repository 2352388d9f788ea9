"""A base of tensor subclasses around plain tensors."""

import copy
import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8.formats import FLOAT8_MAX

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Tensors that are data in memory and nothing else: no shards, no wrappers."""

_tensor_data: Any = Tensor.data


class Wrapper(torch.Tensor):
    """A tensor subclass around plain tensors, and values that say what they mean.

    Subclasses list the attributes of both kinds: these are all that copies, pickles and compilers
    carry over. Their names without leading underscores are arguments of the constructor. The first
    tensor has the shape of the whole, others may be None.
    """

    _tensors_inside: ClassVar[tuple[str, ...]]
    _context: ClassVar[tuple[str, ...]]

    @classmethod
    def _around(cls, inner: Tensor, dtype: torch.dtype) -> Any:
        """Return a new one with the shape, strides and device of `inner`, which reports `dtype`."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=dtype,
            device=inner.device,
        )

    def _inside(self) -> dict[str, Tensor]:
        """Return the tensors inside by their names."""
        return {name: x for name in self._tensors_inside if (x := getattr(self, name)) is not None}

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return [*self._inside()], {name.lstrip("_"): getattr(self, name) for name in self._context}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> Any:
        return cls(**{name.lstrip("_"): x for name, x in inner.items()}, **context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        fields = {**self._inside(), **self.__tensor_flatten__()[1]}
        shown = ", ".join(f"{name.lstrip('_')}={value!r}" for name, value in fields.items())
        return f"{type(self).__name__}({shown})"

    @property
    def data(self) -> Tensor:
        """Return a detached view, as of any tensor."""
        return _tensor_data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, new: Tensor) -> None:
        raise RuntimeError(
            f"data: got a tensor of {new.dtype} to take the place of what a {type(self).__name__} "
            f"of {self.dtype} holds, expected none; write by weight.data.copy_(), or give its "
            f"module a new Parameter; for FSDP1 convert with enable_fsdp_float8_all_gather=False"
        )

    def share_memory_(self) -> "Wrapper":
        """Move what is inside to shared memory."""
        for x in self._inside().values():
            x.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Whether all of it is in shared memory."""
        return all(x.is_shared() for x in self._inside().values())  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        inner = {  # plain pickle cannot take float8 storages
            name: (x.view(torch.uint8) if x.dtype in FLOAT8_MAX else x, x.dtype)
            for name, x in self._inside().items()
        }
        context, is_parameter = self.__tensor_flatten__()[1], isinstance(self, nn.Parameter)
        return _rebuild, (type(self), inner, context, self.requires_grad, is_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch's own cannot copy a view: it takes a wrapper's storage for a real one.
        if not self.is_leaf:
            raise RuntimeError(
                f"{type(self).__name__}: got a result of differentiable ops, expected a leaf for "
                f"deepcopy; detach it first"
            )
        if id(self) not in memo:
            function, args = self.__reduce_ex__(4)
            new = memo[id(self)] = function(*copy.deepcopy(args, memo))
            new.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def _stable_hash_for_caching(self) -> str:
        """Hash all but the values for the cache of AOTAutograd, the same in any process."""
        described = [
            (name, x.dtype, x.device, tuple(x.shape), x.stride(), x.requires_grad)
            for name, x in self._inside().items()
        ]
        key = repr((described, self.__tensor_flatten__()[1], self.requires_grad))
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    # Ops are dispatched below autograd; nothing to do above it, as for a Parameter.
    __torch_function__ = nn.Parameter.__torch_function__


def _rebuild(
    kind: Any, inner: dict[str, Any], context: Any, requires_grad: bool, is_parameter: bool
) -> Tensor:
    fields = {name: x.view(dtype) for name, (x, dtype) in inner.items()}
    tensor: Tensor = kind.__tensor_unflatten__(fields, context, None, None)
    if is_parameter:
        return nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild])


def as_inference_as(source: Tensor) -> AbstractContextManager[object]:
    """Return a context in which tensors derived from `source` are inference tensors if it is one.

    Views of a subclass must be, or torch raises: Cannot set version_counter for inference tensor.
    """
    if not torch.is_inference_mode_enabled() or source.is_inference():
        return nullcontext()
    return torch.inference_mode(False)
