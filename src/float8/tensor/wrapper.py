"""`Wrapper`, the base class of tensor subclasses that hold plain tensors."""

import copy
import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8.formats import FLOAT8_MAX

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Types of plain tensors, which are neither DTensors nor other tensor subclasses."""

_tensor_data: Any = Tensor.data  # the property that `Wrapper` overrides


class Wrapper(torch.Tensor):
    """A tensor subclass that holds plain tensors and other fields.

    A subclass names inner tensors in `_tensor_names`, other fields in `_context`. Pickles, deep
    copies (with `grad`) and compilers keep these and `requires_grad` only; the constructor takes
    them by name without `_`. The first tensor has the wrapper's shape; others may be None.
    """

    _tensor_names: ClassVar[tuple[str, ...]]
    _context: ClassVar[tuple[str, ...]]

    @classmethod
    def _wrap(cls, inner: Tensor, dtype: torch.dtype) -> Any:
        """Return a new `cls` of `dtype` with shape, strides, device of `inner`; set no fields."""
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=dtype, device=inner.device,
        )  # fmt: skip

    def _tensors(self) -> dict[str, Tensor]:
        return {name: x for name in self._tensor_names if (x := getattr(self, name)) is not None}

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return [*self._tensors()], {name.lstrip("_"): getattr(self, name) for name in self._context}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> Any:
        return cls(**{name.lstrip("_"): x for name, x in inner.items()}, **context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        fields = {**self._tensors(), **self.__tensor_flatten__()[1]}
        shown = ", ".join(f"{name.lstrip('_')}={value!r}" for name, value in fields.items())
        return f"{type(self).__name__}({shown})"

    @property
    def data(self) -> Tensor:
        """Detached alias of the tensor; setting `data` raises a `RuntimeError`."""
        return _tensor_data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, new: Tensor) -> None:
        raise RuntimeError(
            f"data: got a tensor of {new.dtype} to take the place of what a {type(self).__name__} "
            f"of {self.dtype} holds, expected none; write by weight.data.copy_(), or give its "
            f"module a new Parameter; for FSDP1 convert with enable_fsdp_float8_all_gather=False"
        )

    def share_memory_(self) -> "Wrapper":
        """Move the inner tensors to shared memory, in place, and return `self`."""
        for x in self._tensors().values():
            x.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Return whether all inner tensors are in shared memory."""
        return all(x.is_shared() for x in self._tensors().values())  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        inner = {  # pickle cannot store float8
            name: (x.view(torch.uint8) if x.dtype in FLOAT8_MAX else x, x.dtype)
            for name, x in self._tensors().items()
        }
        context, is_parameter = self.__tensor_flatten__()[1], isinstance(self, nn.Parameter)
        return _rebuild, (type(self), inner, context, self.requires_grad, is_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch's own fails on views: it copies the storage, which a wrapper subclass does not have.
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
        """Return a hash of the metadata, equal in all processes, for AOTAutograd's cache keys."""
        described = [
            (name, x.dtype, x.device, tuple(x.shape), x.stride(), x.requires_grad)
            for name, x in self._tensors().items()
        ]
        key = repr((described, self.__tensor_flatten__()[1], self.requires_grad))
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    # Disabled, as for a Parameter: ops are handled in `__torch_dispatch__`.
    __torch_function__ = nn.Parameter.__torch_function__


def _rebuild(
    cls: Any, inner: dict[str, Any], context: Any, requires_grad: bool, is_parameter: bool
) -> Tensor:
    fields = {name: x.view(dtype) for name, (x, dtype) in inner.items()}
    x: Tensor = cls.__tensor_unflatten__(fields, context, None, None)
    return nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild])


def as_inference_as(source: Tensor) -> AbstractContextManager[object]:
    """Return a context that turns inference mode off, unless `source` is an inference tensor.

    In inference mode torch raises an error if `__torch_dispatch__` makes a view of a normal tensor.
    """
    leaves = torch.is_inference_mode_enabled() and not source.is_inference()
    return torch.inference_mode(False) if leaves else nullcontext()
