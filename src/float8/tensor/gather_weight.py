"""`Float8GatherWeight`: a weight in high precision that says how it is to be gathered in float8.

To everything but the gather it is the high-precision tensor it holds. What it adds are the plan
of its cast and, where somebody computed it ahead for all weights together, its scale.
"""

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from float8.formats import HIGH_PRECISION_DTYPES
from float8.tensor.dtensor import local_tensor
from float8.tensor.gather_plan import GatherPlan
from float8.tensor.gather_scale import PrecomputedScale, SharedScale
from float8.tensor.inference import as_inference_as

aten = torch.ops.aten
_tensor_data: Any = Tensor.data


class Float8GatherWeight(torch.Tensor):
    """A high-precision tensor with the plan of the cast in which it is gathered.

    Views, copies and `empty_like`, `new_zeros` and `new_empty` of it are of its class; the results
    of all other ops are plain. Ops that write forget the precomputed scale, whichever view they
    write through, or whichever plain alias that `float8.tensor.high_precision` gave, such as those
    in a state dict.

    Args:
        inner: float32, bfloat16 or float16; shared, not copied.
        plan: how it is cast.
    """

    _inner: Tensor
    _plan: GatherPlan
    _shared: SharedScale

    @staticmethod
    def __new__(
        cls, inner: Tensor, plan: GatherPlan, shared: SharedScale | None = None
    ) -> "Float8GatherWeight":
        """See the class."""
        self: Float8GatherWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            layout=inner.layout,
        )
        self._inner, self._plan = inner, plan
        self._shared = SharedScale() if shared is None else shared
        return self

    @property
    def high_precision(self) -> Tensor:
        """The plain tensor inside, to be read; it shares its memory."""
        return self._inner

    @property
    def plan(self) -> GatherPlan:
        """How it is cast."""
        return self._plan

    @property
    def shared(self) -> SharedScale:
        """What it has in common with all views of its memory."""
        return self._shared

    @property
    def precomputed(self) -> PrecomputedScale | None:
        """The scale that was set since the values last changed, if any."""
        return self._shared.precomputed

    def set_precomputed(self, precomputed: PrecomputedScale | None) -> None:
        """Set the scale of the weight as it is now; it holds until the next write."""
        if precomputed is not None and not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_forget_scales))
        self._shared.precomputed = precomputed

    @property
    def data(self) -> Tensor:
        """As of any tensor. A tensor that is assigned takes the place of the one inside.

        It must have the same shape, dtype and device; it is shared, or copied if it lies otherwise
        in its memory. The precomputed scale is forgotten.

        Raises:
            TypeError: something else than a plain tensor or one of this class is assigned.
            ValueError: its shape, dtype or device is another.
        """
        view: Tensor = _tensor_data.__get__(self)
        return view

    @data.setter
    def data(self, new: Tensor) -> None:
        values = new._inner if isinstance(new, Float8GatherWeight) else new
        if type(values) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"data: got {type(new).__name__}, expected a torch.Tensor or {type(self).__name__}"
            )
        got, expected = (
            f"shape {tuple(x.shape)}, {x.dtype} on {x.device}" for x in (values, self._inner)
        )
        if got != expected:
            raise ValueError(
                f"data: got a tensor with {got}, expected {expected}; to change dtype or device, "
                f"call .to() on the module or assign it a new Parameter; FSDP1 cannot gather in "
                f"float8: convert with enable_fsdp_float8_all_gather=False for it"
            )
        values, shared = values.detach(), SharedScale()
        if (values.stride(), values.storage_offset()) != (self.stride(), self.storage_offset()):
            values = torch.empty_strided(
                self.shape, self.stride(), dtype=self.dtype, device=self.device
            ).copy_(values)
        elif isinstance(new, Float8GatherWeight):
            shared = new._shared
            shared.precomputed = None
        self._inner, self._shared = values, shared

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._inner}, plan={self._plan})"

    # What torch.compile, saving and copying need to take the tensor apart and rebuild it.

    @property
    def _scale(self) -> Tensor:
        assert self._shared.precomputed is not None
        return self._shared.precomputed.scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        known = self._shared.precomputed
        names = ["_inner"] if known is None else ["_inner", "_scale"]
        return names, {
            "class": type(self),
            "plan": self._plan,
            "precomputed_for": None if known is None else known.param_dtype,
        }

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> "Float8GatherWeight":
        known = None
        if "_scale" in inner:
            known = PrecomputedScale(inner["_scale"], context["precomputed_for"])
        result: Float8GatherWeight = context["class"](
            inner["_inner"], context["plan"], SharedScale(known)
        )
        return result

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd puts into its cache key: all but the values, the same in any process."""
        x, plan = self._inner, self._plan
        described = (
            (x.dtype, x.device, tuple(x.shape), x.stride(), self.requires_grad),
            (plan.dtype, plan.delayed, plan.round_to_power_of_2, self.precomputed is None),
        )
        return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plan = (self._plan.dtype, self._plan.delayed, self._plan.round_to_power_of_2)
        is_parameter = isinstance(self, nn.Parameter)
        return _rebuild, (type(self), self._inner, plan, self.requires_grad, is_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Float8GatherWeight":
        if not self.is_leaf:
            raise RuntimeError(
                f"{type(self).__name__}: got a result of differentiable ops, expected a leaf for "
                f"deepcopy; detach it first"
            )
        if id(self) not in memo:
            function, (kind, inner, *rest) = self.__reduce_ex__(None)
            new = function(kind, copy.deepcopy(inner, memo), *rest)
            new.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = new
        result: Float8GatherWeight = memo[id(self)]
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return _after_write(func, args, kwargs, func(*_plain(args), **_plain(kwargs)))
        if not func.is_view and func not in _KEEP:
            return func(*_plain(args), **_plain(kwargs))
        source = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Float8GatherWeight))
        # FSDP2 shards and pads in its first forward, which may be an evaluation in inference mode;
        # the weights must do for training then.
        with as_inference_as(source):
            result = func(*_plain(args), **_plain(kwargs))
            return tree_map_only(Tensor, lambda x: source._like(func, x), result)

    def _like(self, func: Any, result: Tensor) -> Tensor:
        """`result` of an op on the inner tensor, as a tensor of this kind."""
        if result is self._inner:
            return self
        if result.dtype not in HIGH_PRECISION_DTYPES:
            return result
        shared, known = SharedScale(blank=func is aten.new_zeros.default), self._shared.precomputed
        if func.is_view and result.dtype == self.dtype:
            shared = self._shared
        elif func in _COPIES and known is not None and result.dtype == self.dtype:
            shared.precomputed = known._replace(scale=known.scale.to(result.device))
        return type(self)(result, self._plan, shared)

    # Ops are dispatched below autograd; nothing to do above it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_COPIES = {
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
}
_KEEP = _COPIES | {aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default}
"""Ops besides views whose result is of the class too: what sharding and `to_empty` make use of."""


_hooks: list[torch.utils.hooks.RemovableHandle] = []


# A compiled step writes the inner tensor, of which no dispatch tells. Before the step, as hooks of
# all optimizers run after those of one: behind it, scales may be set anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forget_scales(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            weight = local_tensor(parameter)
            if isinstance(weight, Float8GatherWeight):
                weight.set_precomputed(None)


def _plain(args: Any) -> Any:
    return tree_map_only(Float8GatherWeight, lambda x: x._inner, args)


def _after_write(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    written = list(_written(func, args, kwargs))
    source = args[1] if func is aten.copy_.default else None
    for x in written:
        # FSDP pads a shard by copying it into zeros: values and scale stay what they were.
        blank, x._shared.blank = x._shared.blank, False
        x._shared.precomputed = None
        if blank and isinstance(source, Float8GatherWeight):
            x._shared.copied_from(source._shared)
    same = {id(x._inner): x for x in written}
    return tree_map_only(Tensor, lambda x: same.get(id(x), x), result)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Float8GatherWeight]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for x in tree_leaves(value):
            if isinstance(x, Float8GatherWeight):
                yield x


def _rebuild(
    kind: type[Float8GatherWeight],
    inner: Tensor,
    plan: tuple[torch.dtype, bool, bool],
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    tensor = kind(inner, GatherPlan(*plan))
    if is_parameter:
        return nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([Float8GatherWeight, _rebuild])
