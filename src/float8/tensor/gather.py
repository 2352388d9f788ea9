"""`Float8GatherWeight`: a weight in high precision that FSDP2 gathers in float8.

To everything but the gather it is the high-precision tensor it holds. What it adds are the spec of
its cast and, where somebody computed it ahead for all weights together, its scale. Each rank casts
its shard under the scale of the whole weight. What is sent is a view of the bytes as `uint8`: not
every backend knows float8.
"""

import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from float8.config import CastConfig, CastSite, Float8Weights, ScalingGranularity, ScalingType
from float8.formats import HIGH_PRECISION_DTYPES
from float8.quantize import Cast, quantize
from float8.scales import DelayedScale, Operand, Quantized
from float8.tensor.dtensor import all_have_some, dtensor_like, local_tensor
from float8.tensor.float8_tensor import Float8Tensor
from float8.tensor.ranks import amax_over, ranks_of_dims, sharding_groups
from float8.tensor.wrapper import Wrapper, as_inference_as

aten = torch.ops.aten


class GatherMetadata(NamedTuple):
    """A gather as this rank knows it, besides what is sent."""

    scale: Tensor | None
    """Of the whole weight, the same on all ranks; None if scales are sent."""

    amax: Tensor | None
    outer_size: torch.Size
    """[N, K] of the gathered weight."""


class Float8GatherWeight(Wrapper):
    """A high-precision tensor with the spec of the cast in which it is gathered.

    Views, copies and `empty_like`, `new_zeros` and `new_empty` of it are of its class; the results
    of all other ops are plain.

    All views, and the plain tensors that `high_precision` gives, count their writes in one version
    counter, by which a scale computed ahead is known to be that of other values.

    In its first forward FSDP2 moves shards of any class of their own that it has to pad, where the
    rows do not divide evenly: a state dict taken before does not follow the model then.

    Scales finer than one per tensor are sent with the data, as a second tensor. Torch takes one of
    even shards only: where it pads a shard, it wants each tensor in the size of that. There, and
    where a scale would cover elements of two ranks, the weight is gathered in high precision, with
    a warning.

    Args:
        inner: float32, bfloat16 or float16; shared, not copied.
        spec: how it is cast.
        counted: the plain tensor over the same memory whose version counter tells of writes; None:
            `inner`.
    """

    spec: CastConfig
    param_dtype: torch.dtype | None = None
    """It is rounded to before the cast; known from the first gather on, of views and copies, too:
    FSDP2 copies shards on some ranks only, and all must know the same."""

    _inner: Tensor
    counted: Tensor
    _known: tuple[Any, Cast | Operand] | None = None
    """A cast whose scale was computed ahead, or what a cast made, and of which version."""

    @staticmethod
    def __new__(
        cls, inner: Tensor, spec: CastConfig, counted: Tensor | None = None
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
        return ["_inner"], {"spec": self.spec}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> "Float8GatherWeight":
        return cls(inner["_inner"], **context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            result = func(*_plain(args), **_plain(kwargs))
            given: list[Any] = []
            for place, parameter in enumerate(func._schema.arguments):
                if parameter.is_write:
                    given += args[place : place + 1] or [kwargs.get(parameter.name)]
            written = [x for x in tree_leaves(given) if isinstance(x, Float8GatherWeight)]
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

    # ---------------------------------------------------------------- what the next gather knows

    def gather_in(self, dtype: torch.dtype) -> None:
        """Note to which dtype it is rounded; a scale or a cast of another is forgotten."""
        if self.param_dtype is not dtype:
            self.param_dtype, self._known = dtype, None

    def keep(self, made: Cast | Operand, weight: Any) -> None:
        """Keep what is known until `weight`, this one or the DTensor around it, is written."""
        self._known = self._version_with(weight), made

    def known(self, weight: Any) -> Cast | Operand | None:
        """Return what was kept since `weight`, this or the DTensor around it, was last written."""
        version, made = self._known or (None, None)
        return made if version == self._version_with(weight) else None

    def _version_with(self, weight: Any) -> tuple[Any, ...]:
        """Return what changes when `weight`, this or the DTensor around it, is written.

        A DTensor counts the writes of ops on it and of compiled code; its shard those through
        `to_local()`, and of ops that take lists, as an optimizer's.
        """
        inner = ((x._version, x.data_ptr(), x.stride()) for x in (self.counted, self._inner))
        return weight._version, *inner

    # ---------------------------------------------------------------- the hooks of FSDP2

    # Grad mode is off already, says FSDP2. What is made here outlives an evaluation in inference
    # mode if the weights stay gathered, and must then do for training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], GatherMetadata]:
        """Cast the shard to the `uint8` to gather, with zeros below up to the rows of the largest.

        `mesh` is that of this gather, to which tensor parallel adds another. An offloaded weight
        comes as a copy of that of `module`.
        """
        param_dtype = mp_policy.param_dtype or self.dtype
        owner = local_tensor(module.weight)
        owner.gather_in(param_dtype)
        # Torch's chunks: all as long as the first but the last, behind which may be empty ones.
        # A shard of another dim than the first is never padded, nor is one of everything.
        rows, whole_rows = self.shape[0], self.shape[1] == outer_size[1]
        if whole_rows and rows != outer_size[0]:
            rows = -(-outer_size[0] // mesh.size())
        granularity, problem = self.spec.scaling_granularity, None
        if granularity.one_scale:
            pass
        elif not whole_rows:
            problem = f"its columns are sharded, which {granularity} would cut"
        elif rows * mesh.size() != outer_size[0]:
            problem = f"shards of {rows} rows are not all of one size, for which scales are sent"
        elif rows % (granularity.height or 1):
            block = f"{granularity.height} x {granularity.width}"
            problem = f"shards of {rows} rows would cut blocks of {block}"
        if problem:
            warnings.warn(
                f"float8: a weight of {tuple(outer_size)} is gathered in high precision: "
                f"{problem}; shard it evenly, or leave enable_fsdp_float8_all_gather out",
                stacklevel=2,
            )
            shard = padded_shard(self.high_precision.to(param_dtype), rows)
            return (shard,), GatherMetadata(None, None, outer_size)
        cast = self._cast(module, owner)
        data, scale = cast.row
        bytes_ = padded_shard(data.contiguous().view(torch.uint8), rows)
        if granularity.one_scale or mesh.size() == 1:  # FSDP2 takes one tensor of one rank
            return (bytes_,), GatherMetadata(scale, cast.amax, outer_size)
        sent = bytes_, scale.contiguous().view(torch.uint8)
        return sent, GatherMetadata(None, None, outer_size)

    @torch.inference_mode(False)
    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: GatherMetadata,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight, a `Float8Tensor` [N, K] over the gathered bytes.

        `out` is the result of the first call, over the same memory, which was filled anew.
        """
        # Made on the stream of the gather, read on this one.
        for made in (metadata.scale, metadata.amax):
            if made is not None and made.is_cuda:
                made.record_stream(torch.cuda.current_stream(made.device))
        size, scale = metadata.outer_size, metadata.scale
        received = all_gather_outputs[0]
        data = received.view(-1)[: size.numel()].view(size)
        if received.dtype != torch.uint8:
            return None if out is not None else (data, ())
        if scale is None:
            scale = all_gather_outputs[1].view(torch.float32)
        if out is None:
            data = data.view(self.spec.dtype)
            return self._gathered(data, scale, param_dtype, metadata.amax), ()
        old = local_tensor(out)
        old._scale, old._amax = scale, metadata.amax
        return None

    def _gathered(
        self, data: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None
    ) -> Float8Tensor:
        return Float8Tensor(data, scale, dtype, self.spec.scaling_granularity, amax)

    def _cast(self, module: Any, owner: "Float8GatherWeight") -> Quantized:
        """Cast the shard [rows, K] of the weight of `module`, rounded to `param_dtype` first.

        There may be no rows. Row data come without padding. Their scale is that of the whole weight
        under `TENSORWISE`; under other granularities those of the shard. With delayed scaling the
        amax of the shard comes along for each forward in training to record; the sync makes it that
        of the whole weight. With `Float8Weights.HELD` a dynamic cast is kept by `owner`, which is
        inside of that weight, until it is written.
        """
        weight, cast, amax = module.weight, Cast(self.spec), None
        delayed = self.spec.delayed
        known: Any = None if delayed else owner.known(weight)
        if isinstance(known, Operand):
            return Quantized(known)
        shard = self.high_precision
        if delayed:
            amax = torch.zeros((), dtype=torch.float32, device=shard.device)
        if known is not None:  # it may be offloaded
            cast = cast._replace(scale=known.scale.to(shard.device))
        elif amax is not None and module._float8_knows_weight_scale():
            state = DelayedScale(module.get_buffer(CastSite.WEIGHT.scale).to(shard.device), amax)
            cast = cast._replace(state=state, record=True)  # the sync reduces what that records
        elif self.spec.scaling_granularity.one_scale:

            def of_all(own: Tensor) -> Tensor:
                if amax is not None:
                    amax.copy_(own)
                return amax_over(sharding_groups(weight))(own)

            cast = cast._replace(reduce=of_all)
        row = quantize(shard, cast, row=True, via=owner.param_dtype).row
        made = Operand(row.data[: shard.shape[0], : shard.shape[1]], row.scale)
        keep = module._float8_config.float8_weights is Float8Weights.HELD and not delayed
        # Ranks must agree on who takes part in the all-reduce of a cast.
        if keep and on_all_ranks(weight):
            owner.keep(made, weight)
        return Quantized(made, amax=amax)


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
    [Float8GatherWeight, CastConfig, ScalingGranularity, ScalingType]
)


def on_all_ranks(weight: Any) -> bool:
    """Whether each rank holds rows. No load writes an empty shard, yet ranks must agree on it."""
    dims = ranks_of_dims(weight).items()
    return all(all_have_some(weight.shape[dim], ranks) for dim, ranks in dims)


def padded_shard(x: Tensor, rows: int) -> Tensor:
    """Return `x` [R, ...] with zeros behind, [rows, ...], contiguous; R may be 0."""
    missing = rows - x.shape[0]
    behind = (0, 0) * (x.dim() - 1) + (0, missing)
    return nn.functional.pad(x, behind) if missing else x.contiguous()


# FSDP2 looks at the hook's signature at every gather; found from the code, that takes as long as
# the cast.
Float8GatherWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    Float8GatherWeight.fsdp_pre_all_gather
)


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
