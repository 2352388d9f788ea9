"""A layer of which each rank holds a part: DTensors outside, local tensors in casts and GEMMs.

    weight Shard(0): input Replicate  -> output Shard(-1)    torch's ColwiseParallel
    weight Shard(1): input Shard(-1)  -> output Partial      torch's RowwiseParallel
                                      or output Shard(dim)   Float8RowwiseParallel

What is spread over ranks is cast under the scale of the whole.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from float8 import kernels
from float8.config import ScalingGranularity
from float8.linear.across import Across, Tokens, reduction
from float8.linear.functional import (
    DelayedScales,
    apply_linear,
    autocast_dtype,
    require_aligned,
    require_input,
)
from float8.linear.plan import LinearPlan
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec
from float8.tensor import Float8Tensor, dtensor_like
from float8.tensor.float8_tensor import to_float8


def forward_hooks(module: torch.nn.Module) -> tuple[int, int]:
    """How many hooks run before its forward, and how many after it."""
    return len(module._forward_pre_hooks), len(module._forward_hooks)


class ParallelStyle(NamedTuple):
    """What hooks of a style of this library do to the input and the output of a module."""

    input: Any
    """The placement of an input that is no DTensor yet."""

    output: Any
    """The placement of what the module returns."""

    hooks: tuple[int, int]
    """How many they are, before forward and after it; see `forward_hooks`.

    Their keys differ from module to module: code compiled for one would not fit the next.
    """

    @staticmethod
    def of(module: torch.nn.Module | None) -> "ParallelStyle | None":
        """That of a module, which its style noted there."""
        noted = None if module is None else module.__dict__.get("parallel_style")
        return noted if isinstance(noted, ParallelStyle) else None


# In what follows `layer` is a `Float8Layer`, which stands above this module.


def linear_of_shards(
    layer: Any, input: Any, weight: Any, bias: Any, scales: DelayedScales, keep_input: bool
) -> Any:
    """`apply_linear` of DTensors on a mesh of one dim.

    Args:
        layer: says how. With Shard(0), if it is to have the input gathered, one that is placed
            otherwise is: in float8 if one cast is all that its plan makes of it. With Shard(1) its
            `tokens_dim` is the dim of Shard that the output gets, which ranks sum up here; the
            gradient is gathered in float8 likewise.
        input: [..., K], placed as above; a `Float8Tensor` inside is not cast again.
        weight: [N, K]; Shard(0), of which each rank has rows; or Shard(1), with K divisible by the
            number of ranks.
        bias: [N], Shard(0) with the weight, else Replicate; or None.
        scales: as for `apply_linear`.
        keep_input: likewise.

    Raises:
        TypeError: `input` is no DTensor.
        ValueError: a placement is another one, or ranks cannot share a dim so.
    """
    by_rows = shared_by_rows(weight)
    x = local_input(layer, input, weight, scales)
    across = across_of(layer, weight, input.shape)
    here = bias.to_local() if by_rows and bias is not None else None
    local = weight.to_local()
    ready = None if layer.held is None else layer.ready_weight(weight, local)
    y = apply_linear(x, local, here, layer.plan, scales, ready, keep_input, across)
    output = of_all_ranks(y, weight, across)
    if bias is None or by_rows:
        return output
    if torch.is_grad_enabled():  # torch 2.11 refuses it in inference mode
        # What the ranks' tokens say of the bias is summed in backward.
        bias = bias.redistribute(placements=bias.placements)
    return output + bias


def shared_by_rows(weight: Any) -> bool:
    """Whether ranks share the rows of a weight, not its columns; raises as `linear_of_shards`."""
    dtensors = torch.distributed.tensor  # imported: somebody made DTensors
    placements = tuple(weight.placements)
    by_rows = placements == (dtensors.Shard(0),)
    if not by_rows and placements != (dtensors.Shard(1),):
        raise ValueError(
            f"Float8Linear: got a weight placed {placements}, expected Shard(0) or Shard(1) on a "
            f"mesh of one dim, as tensor parallel's styles place it"
        )
    return by_rows


def local_input(layer: Any, input: Any, weight: Any, scales: DelayedScales) -> Any:
    """What this rank multiplies its part of `weight` with; see `linear_of_shards`."""
    if not hasattr(input, "placements"):
        raise TypeError(
            f"Float8Linear: got an input of type {type(input).__name__} for a weight that is a "
            f"DTensor, expected a DTensor; use a style that prepares it, as Float8ColwiseParallel"
        )
    dtensors, by_rows = torch.distributed.tensor, shared_by_rows(weight)
    if input.device_mesh != weight.device_mesh:
        raise ValueError(
            f"Float8Linear: got an input on {input.device_mesh} for a weight on "
            f"{weight.device_mesh}, expected one mesh; parallelize both over the same"
        )
    require_input(input, weight)
    require_parts(weight.shape, 0 if by_rows else 1, weight.device_mesh.size(), layer.plan)
    if by_rows and layer.gathered == "input" and not input.placements[0].is_replicate():
        input = dtensor_in_float8(layer, input, scales)
        input = input.redistribute(placements=[dtensors.Replicate()])
    expected: Any = dtensors.Replicate() if by_rows else dtensors.Shard(input.dim() - 1)
    if tuple(input.placements) != (expected,):
        raise ValueError(
            f"Float8Linear: got an input placed {tuple(input.placements)} for a weight placed "
            f"{tuple(weight.placements)}, expected {expected}; redistribute it"
        )
    return input.to_local(grad_placements=(dtensors.Partial(),) if by_rows else None)


def across_of(layer: Any, weight: Any, shape: torch.Size) -> Across:
    """How the tensors of one layer become those of all ranks; see `linear_of_shards`.

    `shape` is that of the whole input, of which only the leading dims count.
    """
    mesh = weight.device_mesh
    group, ranks = mesh.get_group(0).group_name, mesh.size()
    reduce = reduction((group,))
    of_input, of_weight, of_grad_output = [
        None if layer.knows_scales(role) else reduce for role in ("input", "weight", "grad_output")
    ]
    if shared_by_rows(weight):
        return Across(None, of_weight, of_grad_output, weight_scale=layer.weight_scale)
    tokens, tokens_dim = None, layer.tokens_dim
    if tokens_dim is not None and not -len(shape) <= tokens_dim < len(shape):
        raise ValueError(
            f"Float8Linear: got an input of {len(shape)} dims and an output to be sharded along "
            f"dim {tokens_dim}, expected one of them; give the style another output_layouts"
        )
    if tokens_dim is not None and tokens_dim % len(shape) != len(shape) - 1:
        tokens = tokens_along(tokens_dim % len(shape), shape, group, ranks)
        if shape[tokens.dim] % ranks:
            raise ValueError(
                f"Float8Linear: got an input of shape {tuple(shape)} and an output to be "
                f"sharded along dim {tokens.dim} over {ranks} ranks, expected that dim divisible "
                f"by {ranks}; pad it"
            )
    if tokens is None:
        of_grad_output = None
    return Across(of_input, of_weight, of_grad_output, tokens, layer.weight_scale)


def tokens_along(dim: int, shape: torch.Size, group: str, ranks: int) -> Tokens:
    """The tokens of a whole tensor of `shape`, which ranks share along `dim`."""
    return Tokens(group, ranks, dim, math.prod(shape[:dim]))


def of_all_ranks(y: torch.Tensor, weight: Any, across: Across) -> Any:
    """The output as a DTensor, of which this rank has `y`: features, summands or tokens."""
    dtensors, mesh = torch.distributed.tensor, weight.device_mesh
    if not shared_by_rows(weight):
        to = dtensors.Partial() if across.output is None else dtensors.Shard(across.output.dim)
        return dtensors.DTensor.from_local(y, mesh, (to,), run_check=False)
    # Maybe not evenly.
    shape = torch.Size([*y.shape[:-1], weight.shape[0]])
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    last = (dtensors.Shard(y.dim() - 1),)
    return dtensors.DTensor.from_local(y, mesh, last, run_check=False, shape=shape, stride=stride)


def dtensor_in_float8(layer: Any, x: Any, scales: DelayedScales) -> Any:
    """The DTensor `x` in float8 as `layer` casts it, if bytes and one scale are all it takes.

    On a mesh of one dim; else `x` itself, as also where it is a sum still to be made, or where
    ranks hold parts of rows that have a scale each.
    """
    local, (placement,), plan = x.to_local(), x.placements, layer.plan
    by_rows = plan.input.granularity is not ScalingGranularity.TENSORWISE
    if (
        placement.is_partial()
        or (by_rows and placement.is_shard() and placement.dim % x.dim() == x.dim() - 1)
        or not plan.casts_input_once()
        or isinstance(local, Float8Tensor)
    ):
        return x
    if dtype := autocast_dtype(local.device):
        local = local.to(dtype)
    whole_here = layer.knows_scales("input") or placement.is_replicate()
    reduce = None if whole_here else reduction((x.device_mesh.get_group(0).group_name,))
    return dtensor_like(to_float8(local, plan.input, state=scales.input, reduce=reduce), x)


def weight_scales(weights: Sequence[Any], spec: CastSpec) -> tuple[torch.Tensor, ...]:
    """Those of whole weights, which ranks of one group hold parts of, through one all-reduce.

    Code that compilers follow: see `scales_of` for fewer kernels in eager mode.

    For weights that are cast by `spec`, under one dynamic scale each.
    """
    group = weights[0].device_mesh.get_group(0).group_name
    amaxes = torch.stack([kernels.amax(weight.to_local().detach()) for weight in weights])
    # One by one: Inductor (torch 2.11) takes no view of a larger tensor for a scale, and cuBLASLt
    # only what lies at a multiple of 16 bytes.
    each = reduction((group,))(amaxes).unbind()
    return tuple(amax_to_scale(amax, spec.dtype, spec.power_of_2) for amax in each)


def require_parts(shape: torch.Size, dim: int, ranks: int, plan: LinearPlan) -> None:
    """Raise a `ValueError` for a weight that ranks cannot share along `dim`.

    Rows may be shared unevenly, as torch does; none of the ranks may be left without one. Without
    padding what each has must be as the plan wants it.
    """
    size = shape[dim]
    fits = all_have_some(size, ranks) if dim == 0 else size % ranks == 0
    if not fits:
        expected = "that dim divisible by" if dim else "rows on each of"
        raise ValueError(
            f"Float8Linear: got a weight of shape {tuple(shape)}, to be sharded along dim {dim} "
            f"over {ranks} ranks, expected {expected} {ranks}"
        )
    if not plan.pad:
        what = f"a weight of shape {tuple(shape)} shared along dim {dim} by {ranks} ranks"
        require_aligned(what, (-(-size // ranks),), plan.alignment)


def all_have_some(size: int, ranks: int) -> bool:
    """Whether each rank has some of a dim in torch's chunks: all but the last as long as the first.

    Behind the last there may be empty ones.
    """
    return -(-size // ranks) * (ranks - 1) < size
