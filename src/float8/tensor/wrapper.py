"""A base of tensor subclasses around plain tensors."""

import copy
import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from float8.formats import FLOAT8_MAX

_tensor_data: Any = Tensor.data


class Wrapper(torch.Tensor):
    """A tensor subclass that holds plain tensors; `__tensor_flatten__` says which.

    Subclasses say with `_assign(new)` what `tensor.data = new` does.
    """

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
            layout=inner.layout,
        )

    @property
    def data(self) -> Tensor:
        """Return a detached view, as of any tensor; setting it is up to `_assign`."""
        view: Tensor = _tensor_data.__get__(self)
        return view

    @data.setter
    def data(self, new: Tensor) -> None:
        self._assign(new)  # type: ignore[attr-defined]

    def share_memory_(self) -> "Wrapper":
        """Move what is inside to shared memory."""
        for name in self.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all of it is in shared memory."""
        names = self.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return all(getattr(self, name).is_shared() for name in names)

    def __reduce_ex__(self, protocol: Any) -> Any:
        names, context = self.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {}
        for name in names:
            x: Tensor = getattr(self, name)
            # Plain pickle cannot take float8 storages.
            inner[name] = x.view(torch.uint8) if x.dtype in FLOAT8_MAX else x, x.dtype
        is_parameter = isinstance(self, nn.Parameter)
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
            new = function(*copy.deepcopy(args, memo))
            new.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = new
        return memo[id(self)]

    def _stable_hash_for_caching(self) -> str:
        """Hash all but the values for the cache of AOTAutograd, the same in any process."""
        names, context = self.__tensor_flatten__()  # type: ignore[attr-defined]
        described = [
            (name, x.dtype, x.device, tuple(x.shape), x.stride(), x.requires_grad)
            for name, x in ((name, getattr(self, name)) for name in names)
        ]
        key = repr((described, context, self.requires_grad))
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    # Ops are dispatched below autograd; nothing to do above it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _rebuild(
    kind: Any,
    inner: dict[str, tuple[Tensor, torch.dtype]],
    context: dict[str, Any],
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    fields = {name: x.view(dtype) for name, (x, dtype) in inner.items()}
    tensor: Tensor = kind.__tensor_unflatten__(fields, context, None, None)
    if is_parameter:
        return nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild])


def as_inference_as(source: Tensor) -> AbstractContextManager[object]:
    """Return a context in which tensors derived from `source` are inference tensors if it is one.

    Torch's own views of normal tensors are normal in inference mode, too; of a subclass they must
    be, or they raise ("Cannot set version_counter for inference tensor").
    """
    if not torch.is_inference_mode_enabled() or source.is_inference():
        return nullcontext()
    return torch.inference_mode(False)
