"""`Float8GatherWeight`: a weight in high precision that says how it is to be gathered in float8.

To everything but the gather it is the high-precision tensor it holds. What it adds are the spec of
its cast and, where somebody computed it ahead for all weights together, its scale.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from float8.config import ScalingGranularity, ScalingType
from float8.formats import HIGH_PRECISION_DTYPES
from float8.quantize.spec import CastSpec, Quantized
from float8.tensor.dtensor import dtensor_like, local_tensor
from float8.tensor.wrapper import Wrapper, as_inference_as

aten = torch.ops.aten


class Float8GatherWeight(Wrapper):
    """A high-precision tensor with the spec of the cast in which it is gathered.

    Views, copies and `empty_like`, `new_zeros` and `new_empty` of it are of its class; the results
    of all other ops are plain.

    All views, and the plain tensors that `high_precision` gives, count their writes in one version
    counter, by which a scale computed ahead is known to be that of other values.

    In its first forward FSDP2 moves shards of any class of their own that it has to pad, where the
    rows do not divide evenly: a state dict taken before does not follow the model then.

    Args:
        inner: float32, bfloat16 or float16; shared, not copied.
        spec: how it is cast.
        counted: the plain tensor over the same memory whose version counter tells of writes; None:
            `inner`.
    """

    spec: CastSpec
    param_dtype: torch.dtype | None = None
    """It is rounded to before the cast; known from the first gather on, of views and copies, too:
    FSDP2 copies shards on some ranks only, and all must know the same."""

    _inner: Tensor
    counted: Tensor
    _known: tuple[Tensor | Quantized, tuple[Any, ...]] | None = None
    """A scale or a whole cast, and the stamp of what it was made of."""

    @staticmethod
    def __new__(
        cls, inner: Tensor, spec: CastSpec, counted: Tensor | None = None
    ) -> "Float8GatherWeight":
        """See the class."""
        self: Float8GatherWeight = cls._around(inner, inner.dtype)
        self._inner, self.spec = inner, spec
        self.counted = inner if counted is None else counted
        return self

    @property
    def high_precision(self) -> Tensor:
        """Return a plain tensor that shares its memory, and its version counter."""
        if self._inner is self.counted:
            return self._inner
        # Ops on what is inside run below the version counters: a view made there has its own.
        with torch.inference_mode(self.counted.is_inference()):
            return self.counted.as_strided(self.shape, self.stride(), self.storage_offset())

    def _assign(self, new: Tensor) -> None:
        """Take `new` in the place of the tensor inside: shared, or copied if it lies otherwise.

        Raises:
            ValueError: its class, shape, dtype or device is another.
        """
        values = high_precision(new)
        got, expected = _described(values), _described(self._inner)
        if got != expected:
            raise ValueError(
                f"data: got {got}, expected {expected}; to change dtype or device, "
                f"call .to() on the module or assign it a new Parameter; FSDP1 cannot "
                f"gather in float8: convert with enable_fsdp_float8_all_gather=False for it"
            )
        values = values.detach()
        if (values.stride(), values.storage_offset()) != (self.stride(), self.storage_offset()):
            values = self._inner.new_empty_strided(self.shape, self.stride()).copy_(values)
        self._inner = self.counted = values
        self._known = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._inner}, spec={self.spec})"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_inner"], {"class": type(self), "spec": self.spec}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> "Float8GatherWeight":
        result: Float8GatherWeight = context["class"](inner["_inner"], context["spec"])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            result = func(*_plain(args), **_plain(kwargs))
            parameters = func._schema.arguments
            given = dict(zip((x.name for x in parameters), args, strict=False)) | kwargs
            leaves = tree_leaves([given.get(x.name) for x in parameters if x.is_write])
            written = [x for x in leaves if isinstance(x, Float8GatherWeight)]
            torch.autograd.graph.increment_version([x.counted for x in written])
            same = {id(x._inner): x for x in written}
            return tree_map_only(Tensor, lambda x: same.get(id(x), x), result)
        if not func.is_view and func not in _KEEP:
            return func(*_plain(args), **_plain(kwargs))
        source = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Float8GatherWeight))
        # FSDP2 shards and pads in its first forward, which may be an evaluation in inference mode;
        # the weights must do for training then.
        with as_inference_as(source):
            result = func(*_plain(args), **_plain(kwargs))
            return tree_map_only(Tensor, lambda x: source._like(func, x), result)

    def _like(self, func: Any, result: Tensor) -> Tensor:
        """Return `result` of an op on the inner tensor as a tensor of this kind."""
        if result is self._inner:
            return self
        if result.dtype not in HIGH_PRECISION_DTYPES:
            return result
        shares = func.is_view and result.dtype == self.dtype
        new = type(self)(result, self.spec, self.counted if shares else None)
        new.param_dtype = self.param_dtype
        return new


_KEEP = {
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    # Under inference mode these come as they are; they may return the tensor itself.
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
    aten.contiguous.default,
    aten.pin_memory.default,
    # Not of its values.
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
}
"""Ops besides views whose result is of the class too: what sharding and `to_empty` make use of."""


def _described(x: Any) -> str:
    if type(x) not in (Tensor, nn.Parameter):
        return type(x).__name__
    return f"shape {tuple(x.shape)}, {x.dtype} on {x.device}"


def _plain(args: Any) -> Any:
    return tree_map_only(Float8GatherWeight, lambda x: x._inner, args)


torch.serialization.add_safe_globals(
    [Float8GatherWeight, CastSpec, ScalingGranularity, ScalingType]
)


# ---------------------------------------------------------------- scales and casts that are kept


def stamp_of(*tensors: Any) -> tuple[int, ...]:
    """Return what changes when one of some tensors is written, as far as version counters tell.

    They count what ops write, and not what fused optimizers do, nor what goes through `weight.data`
    or a raw pointer. A DTensor counts the writes of ops on it and of compiled code; its shard those
    through `to_local()`, and of ops that take lists, as an optimizer's.
    """
    stamp: list[int] = []
    for x in tensors:
        stamp += x._version, x.data_ptr()
    return tuple(stamp)


def remember(weight: Any, made: Tensor | Quantized, dtype: torch.dtype) -> None:
    """Keep the scale or cast of a weight, rounded to `dtype` first, until the weight is written."""
    local: Float8GatherWeight = local_tensor(weight)
    local._known = made, _stamp_of_cast(weight, local, dtype)


def remembered(weight: Any, dtype: torch.dtype) -> Tensor | Quantized | None:
    """Return what was kept since the weight was last written, if it is of the same `dtype`."""
    local: Float8GatherWeight = local_tensor(weight)
    if local._known is None:
        return None
    made, stamp = local._known
    return made if stamp == _stamp_of_cast(weight, local, dtype) else None


def _stamp_of_cast(weight: Any, local: Float8GatherWeight, dtype: torch.dtype) -> tuple[Any, ...]:
    return dtype, weight._version, *stamp_of(local.counted, local._inner)


# ---------------------------------------------------------------- weights in and out of state dicts


# Version counters, which tell of writes, are there outside of inference mode only.
@torch.inference_mode(False)
def high_precision(x: Tensor) -> Tensor:
    """Return `x`, maybe a DTensor, without its spec; shares memory and version counters."""
    local = local_tensor(x)
    if not isinstance(local, Float8GatherWeight):
        return x
    plain = local.high_precision.detach()
    if local is x:
        return plain
    new: Any = x.detach()
    new._local_tensor = plain
    return new  # type: ignore[no-any-return]


def gathered_like(new: Any, old: Tensor | None) -> nn.Parameter:
    """Return `new` as a weight that is gathered like `old`; itself if `old` is a plain tensor."""
    model, values = local_tensor(old), local_tensor(new)
    if not isinstance(model, Float8GatherWeight) or isinstance(values, Float8GatherWeight):
        return new  # type: ignore[no-any-return]
    tensor: Any = type(model)(values.detach(), model.spec)
    tensor.param_dtype = model.param_dtype
    if values is not new:
        with torch.no_grad():
            tensor = dtensor_like(tensor, new)
    return nn.Parameter(tensor, requires_grad=new.requires_grad)
