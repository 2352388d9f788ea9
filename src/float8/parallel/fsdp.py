"""FSDP2 with float8 all-gather: which weights, the two hooks, and their scales ahead of the hooks.

Each rank casts its shard under the scale of the whole weight. What travels is a view of the bytes
as `uint8`: not every backend knows float8.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.arguments import require_module
from float8.config import CastSite, Float8LinearConfig, Float8Weights
from float8.linear import Float8Linear
from float8.linear.sharded import all_have_some
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import Cast, quantize, scales_of
from float8.quantize.spec import Operand, Quantized
from float8.tensor import (
    Float8GatherWeight,
    Float8Tensor,
    is_dtensor,
    local_tensor,
    remember,
    remembered,
)
from float8.tensor.ranks import amax_over, sharding_groups
from float8.untraced import untraced


class GatherMetadata(NamedTuple):
    """A gather as this rank knows it, besides what travels."""

    scale: Tensor | None
    """Of the whole weight, the same on all ranks; None if scales travel."""

    amax: Tensor | None
    outer_size: torch.Size
    """[N, K] of the gathered weight."""


class FSDPFloat8Weight(Float8GatherWeight):
    """A `Float8GatherWeight` with FSDP2's hooks; while not sharded a plain weight.

    Scales finer than one per tensor travel with the data, as a second tensor. Torch takes one of
    even shards only: where it pads a shard, it wants each tensor in the size of that. There, and
    where a scale would cover elements of two ranks, the weight is gathered in high precision, with
    a warning.
    """

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
        local_tensor(module.weight).param_dtype = param_dtype
        # Torch's chunks: all as long as the first but the last, behind which may be empty ones.
        # A shard of another dim than the first is never padded, nor is one of everything.
        rows, by_rows = self.shape[0], self.shape[1] == outer_size[1]
        if by_rows and rows != outer_size[0]:
            rows = -(-outer_size[0] // mesh.size())
        granularity, problem = self.spec.granularity, None
        if granularity.one_scale:
            pass
        elif not by_rows:
            problem = f"its columns are sharded, which {granularity} would cut"
        elif rows * mesh.size() != outer_size[0]:
            problem = f"shards of {rows} rows are not all of one size, for which scales travel"
        elif rows % (granularity.height or 1):
            block = f"{granularity.height} x {granularity.width}"
            problem = f"shards of {rows} rows would cut blocks of {block}"
        if problem:
            warnings.warn(
                f"float8: a weight of {tuple(outer_size)} is gathered in high precision: "
                f"{problem}; shard it evenly, or leave enable_fsdp_float8_all_gather out",
                stacklevel=2,
            )
            shard = _padded(self.high_precision.to(param_dtype), rows)
            return (shard,), GatherMetadata(None, None, outer_size)
        cast = self.cast_shard(module, param_dtype)
        data, scale = cast.row
        bytes_ = _padded(data.contiguous().view(torch.uint8), rows)
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
            data, granularity = data.view(self.spec.dtype), self.spec.granularity
            return Float8Tensor(data, scale, param_dtype, granularity, metadata.amax), ()
        old = local_tensor(out)
        old._scale, old._amax = scale, metadata.amax
        return None

    def cast_shard(self, module: Any, param_dtype: torch.dtype) -> Quantized:
        """Cast the shard [rows, K] of the weight of `module`, rounded to `param_dtype` first.

        There may be no rows. Row data come without padding. Their scale is that of the whole weight
        under `TENSORWISE`; under other granularities those of the shard. With delayed scaling the
        amax of the shard comes along for each forward in training to record; the sync makes it that
        of the whole weight. With `Float8Weights.HELD` a dynamic cast is kept until the weight is
        written.
        """
        delayed = self.spec.delayed
        known = None if delayed else remembered(module.weight, param_dtype)
        if isinstance(known, Quantized):
            return known
        made = self._cast(module, param_dtype, known)
        keep = module.config.float8_weights is Float8Weights.HELD and not delayed
        # Ranks must agree on who takes part in the all-reduce of a cast.
        if keep and _on_all_ranks(module.weight):
            remember(module.weight, made, param_dtype)
        return made

    def _cast(self, module: Any, param_dtype: torch.dtype, scale: Tensor | None) -> Quantized:
        shard, amax = self.high_precision.to(param_dtype), None
        # It may be offloaded.
        cast = Cast(self.spec, scale=None if scale is None else scale.to(shard.device))
        if self.spec.delayed:
            amax = torch.zeros((), dtype=torch.float32, device=shard.device)
        if amax is not None and module.knows_weight_scale():
            state = DelayedScale(module.get_buffer(CastSite.WEIGHT.scale).to(shard.device), amax)
            cast = cast._replace(state=state, record=True)  # the sync reduces what that records
        elif self.spec.granularity.one_scale:

            def of_all(own: Tensor) -> Tensor:
                if amax is not None:
                    amax.copy_(own)
                return amax_over(sharding_groups(module.weight))(own)

            cast = cast._replace(reduce=of_all)
        row = quantize(shard, cast, row=True).row
        data = row.data[: shard.shape[0], : shard.shape[1]]
        return Quantized(Operand(data, row.scale), amax=amax)


# FSDP2 looks at the hook's signature at every gather; found from the code, that takes as long as
# the cast.
FSDPFloat8Weight.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    FSDPFloat8Weight.fsdp_pre_all_gather
)


def shard_amax(weight: Tensor) -> Tensor | None:
    """Return the amax of this rank's shard as it would be cast, 0-dim float32; None without one."""
    local = local_tensor(weight)
    if local is weight or not isinstance(local, FSDPFloat8Weight):
        return None
    return kernels.amax(local.high_precision.to(local.param_dtype or local.dtype))


def _padded(x: Tensor, rows: int) -> Tensor:
    """Return `x` [R, C] with zeros below, [rows, C], contiguous; R may be 0."""
    missing = rows - x.shape[0]
    return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()


torch.serialization.add_safe_globals([FSDPFloat8Weight])


# ---------------------------------------------------------------- scales ahead of the hooks


@untraced
@torch.inference_mode(False)
@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Compute the scales of all weights with dynamic scaling and float8 all-gather at once.

    Call it after `optimizer.step()`, or let `attach_to_optimizer` do so: one all-reduce then
    serves all weights of a dtype (one per mesh dim that shards them). Without it, each gather does
    an all-reduce of its own, with the same result; so it remains before the first forward, and for
    weights with so few rows that some ranks hold none. Does nothing for a model without such
    weights or not sharded. All ranks must call it.

    A scale counts until the weight is written again, by an optimizer's step, an op on the Parameter
    or on a view of it, loading, or a write into a tensor of a state dict. Call it again after what
    goes unnoticed: writes through NumPy or a raw pointer, `.data` of tensors in state dicts,
    `torch._foreach_*` of DTensors in state dicts, fused optimizers and `torch.distributed` on
    either.

    Args:
        model: the converted model, sharded with `fully_shard`, compiled or not.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: a weight is gathered at the moment, so that its shard cannot be reached.
    """
    require_module(model, "model")
    alike: dict[Any, dict[Any, Tensor]] = {}
    for weight, shard in _sharded_weights(model):
        where = sharding_groups(weight), weight.device_mesh.device_type, shard.device
        of_one = alike.setdefault((*where, shard.dtype, shard.param_dtype, shard.spec), {})
        of_one[weight] = shard.high_precision
    for (groups, device_type, _, _, param_dtype, spec), shards in alike.items():
        reduce = amax_over(groups, device_type)
        scales = scales_of(list(shards.values()), spec, param_dtype, reduce)
        for weight, scale in zip(shards, scales, strict=True):
            remember(weight, scale, param_dtype)


def _sharded_weights(model: nn.Module) -> Iterator[tuple[Any, Float8GatherWeight]]:
    """Yield the weights with a scale to compute ahead, each once, and their shards."""
    names = {
        layer.weight: name
        for name, layer in model.named_modules()
        if isinstance(layer, Float8Linear)
        and layer.config.enable_fsdp_float8_all_gather
        and not layer.plan.casts.weight.spec.delayed
        and layer.plan.casts.weight.spec.granularity.one_scale
    }
    for weight, name in names.items():
        local = local_tensor(weight)
        if isinstance(local, Float8Tensor):
            raise ValueError(
                f"layer {name!r}: got a weight that is gathered at the moment, expected its "
                f"shard; call reshard() on the modules that keep their weights, before "
                f"optimizer.step()"
            )
        # Before the first gather FSDP2 may still move the shard, on some ranks only, and what it
        # will be rounded to is not known.
        if (
            isinstance(local, Float8GatherWeight)
            and local is not weight
            and local.param_dtype is not None
            and not local.counted.is_inference()
            and _on_all_ranks(weight)
        ):
            yield weight, local


def _on_all_ranks(weight: Any) -> bool:
    """Whether each rank holds rows. No load writes an empty shard, yet ranks must agree on it."""
    ranks: dict[int, int] = {}
    for mesh_dim, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            ranks[placement.dim] = ranks.get(placement.dim, 1) * weight.device_mesh.size(mesh_dim)
    return all(all_have_some(weight.shape[dim], n) for dim, n in ranks.items())


# ---------------------------------------------------------------- which weights


def check_gatherable(layer: nn.Module, fqn: str, config: Float8LinearConfig) -> None:
    """Raise a `ValueError` if `config` asks to gather a weight that is sharded or has hooks."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if not (config.enable_fsdp_float8_all_gather and isinstance(layer, nn.Linear)):
        return
    if is_dtensor(layer.weight):
        got, do = "a DTensor as weight", "convert the model first, then call fully_shard"
    elif any(getattr(layer.weight, name, None) for name in hooks):
        got = "a weight with gradient hooks, which would be lost"
        do = "register them on the weight after the conversion"
    else:
        return
    raise ValueError(
        f"layer {fqn or '(root)'!r}: got {got}, expected a plain tensor without hooks with "
        f"enable_fsdp_float8_all_gather=True; {do}"
    )


def enable_float8_all_gather(module: nn.Module) -> None:
    """Make the weights of converted layers whose configuration asks for it gather in float8.

    The Parameters become Parameters of a subclass over the same memory. They stay the same objects,
    for optimizers and ties, unless torch cannot swap them (a weak reference to one exists, or a
    graph that used it). A weight that an embedding uses, too, stays plain: bytes cannot be looked
    up in.
    """
    users: dict[nn.Parameter, list[Any]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                gathers = name == "weight" and isinstance(part, Float8Linear)
                users.setdefault(parameter, []).append(part if gathers else None)
    made: dict[Any, Tensor] = {}
    for weight, layers in users.items():
        if (
            not isinstance(local_tensor(weight), Float8GatherWeight)
            and None not in layers
            and layers[0].config.enable_fsdp_float8_all_gather
            and all(layer.config == layers[0].config for layer in layers)
        ):
            # `.data`: no view that refers to the weight.
            made[weight] = FSDPFloat8Weight(weight.data, layers[0].plan.casts.weight.spec)
    _take_places(made, users)


def disable_float8_all_gather(layers: Iterable[nn.Module]) -> None:
    """Make weights that were to be gathered in float8 ordinary Parameters again."""
    users: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        weight: Any = layer._parameters.get("weight")
        if isinstance(weight, Float8GatherWeight):
            users.setdefault(weight, []).append(layer)
    _take_places({weight: weight.high_precision for weight in users}, users)


def _take_places(made: dict[Any, Tensor], users: dict[Any, list[nn.Module]]) -> None:
    """Make each weight in `made` what it leads to there: the same object over the same memory.

    With the gradient and what users and optimizers wrote on it. Where torch cannot, because
    something refers to the weight, its users have a new one, and a warning says so.
    """
    ours, new_objects = {*Float8GatherWeight.__annotations__, "_is_param"}, 0
    for old, tensor in made.items():
        new: Any = nn.Parameter(tensor, requires_grad=old.requires_grad)
        new.grad = old.grad
        new.__dict__.update({name: x for name, x in vars(old).items() if name not in ours})
        try:
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        except RuntimeError:  # nothing has changed then
            new_objects += 1
            for layer in users[old]:
                layer._parameters["weight"] = new
    if new_objects:
        warnings.warn(
            f"float8: the weights of {new_objects} layer(s) are new Parameters, because something "
            f"refers to the old ones (a compiled forward, a graph, a weakref). An optimizer made "
            f"before does not train them: make it afterwards",
            stacklevel=4,
        )
