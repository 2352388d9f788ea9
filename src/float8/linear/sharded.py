"""A layer of which each rank holds a part: DTensors outside, local tensors in casts and GEMMs.

    weight Shard(0): input Replicate  -> output Shard(-1)    torch's ColwiseParallel
    weight Shard(1): input Shard(-1)  -> output Partial      torch's RowwiseParallel
                                      or output Shard(dim)   Float8RowwiseParallel

What is spread over ranks is cast under the scale of the whole. All casts and GEMMs run layer by
layer, of weights that are cast on the fly.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.linear.functional import (
    apply_linear,
    autocast_dtype,
    require_aligned,
    require_input,
)
from float8.linear.plan import Casts, LinearPlan
from float8.quantize.quantize import Cast
from float8.tensor import Float8Tensor, dtensor_like
from float8.tensor.float8_tensor import to_float8
from float8.tensor.ranks import Tokens


class Shards(NamedTuple):
    """The part of ranks in a layer, as a style sets it; the weight, a DTensor, tells the rest."""

    gathers_input: bool = False
    """Whether ranks gather the tokens of the input of a weight Shard(0)."""

    tokens_dim: int | None = None
    """The dim along which ranks share the tokens of an output that is a sum over ranks, and gather
    those of its gradient. None: the sum is left to others."""

    def enter(
        self, input: Any, weight: Any, plan: LinearPlan, casts: Casts
    ) -> tuple[Tensor, Casts, Tokens | None]:
        """Prepare the input and the casts with which this rank multiplies its part of a weight.

        Args:
            input: [..., K], a DTensor. For a weight Shard(0) of a layer that gathers its input one
                that is placed otherwise is gathered here, in float8 if one cast is all that the
                plan makes of it. A `Float8Tensor` inside is not cast again.
            weight: [N, K], a DTensor on a mesh of one dim: Shard(0), of which each rank has rows;
                or Shard(1), with K divisible by the number of ranks.
            plan: of the layer.
            casts: of the layer, each with the reduction over the ranks.

        Returns:
            The input of this rank; the casts of its tensors, without the reduction where a rank has
            the whole; and the tokens of the output, if `tokens_dim` says that ranks share them.

        Raises:
            TypeError: `input` is no DTensor.
            ValueError: a placement is another one, or ranks cannot share a dim so.
        """
        if not hasattr(input, "placements"):
            raise TypeError(
                f"Float8Linear: got an input of type {type(input).__name__} for a weight that is a "
                f"DTensor, expected a DTensor; use a style that prepares it, as "
                f"Float8ColwiseParallel"
            )
        dtensors, by_rows = torch.distributed.tensor, shared_by_rows(weight)
        mesh = weight.device_mesh
        if input.device_mesh != mesh:
            raise ValueError(
                f"Float8Linear: got an input on {input.device_mesh} for a weight on {mesh}, "
                f"expected one mesh; parallelize both over the same"
            )
        require_input(input, weight)
        require_parts(weight.shape, 0 if by_rows else 1, mesh.size(), plan)
        if by_rows and self.gathers_input and not input.placements[0].is_replicate():
            input = dtensor_in_float8(input, plan, casts.input)
            input = input.redistribute(placements=[dtensors.Replicate()])
        expected: Any = dtensors.Replicate() if by_rows else dtensors.Shard(input.dim() - 1)
        if tuple(input.placements) != (expected,):
            raise ValueError(
                f"Float8Linear: got an input placed {tuple(input.placements)} for a weight placed "
                f"{tuple(weight.placements)}, expected {expected}; redistribute it"
            )
        tokens = None if by_rows else self._tokens(input.shape, mesh)
        whole = ["input", "input_for_grad_weight"] if by_rows else []
        if not by_rows and tokens is None:
            whole = ["grad_output", "grad_output_for_grad_weight"]
        here = {name: getattr(casts, name)._replace(reduce=None) for name in whole}
        x = input.to_local(grad_placements=(dtensors.Partial(),) if by_rows else None)
        return x, casts._replace(**here), tokens

    def leave(self, y: Tensor, weight: Any, bias: Any, tokens: Tokens | None) -> Any:
        """Return the output, of which this rank has `y`: features, summands or tokens.

        `bias` [N], Replicate, is added where `y` does not have it: that of a weight Shard(1).
        """
        dtensors, mesh = torch.distributed.tensor, weight.device_mesh
        if shared_by_rows(weight):  # maybe not evenly
            shape = torch.Size([*y.shape[:-1], weight.shape[0]])
            stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            to: Any = (dtensors.Shard(y.dim() - 1),)
            return dtensors.DTensor.from_local(
                y, mesh, to, run_check=False, shape=shape, stride=stride
            )
        to = (dtensors.Partial() if tokens is None else dtensors.Shard(tokens.dim),)
        output = dtensors.DTensor.from_local(y, mesh, to, run_check=False)
        if bias is None:
            return output
        if torch.is_grad_enabled():  # torch 2.11 refuses it in inference mode
            # What the ranks' tokens say of the bias is summed in backward.
            bias = bias.redistribute(placements=bias.placements)
        return output + bias.to(output.dtype)

    def _tokens(self, shape: torch.Size, mesh: Any) -> Tokens | None:
        """Return those of an input [..., K], of which only the leading dims count."""
        dim, ranks = self.tokens_dim, mesh.size()
        if dim is None:
            return None
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"Float8Linear: got an input of {len(shape)} dims and an output to be sharded "
                f"along dim {dim}, expected one of them; give the style another output_layouts"
            )
        dim %= len(shape)
        if dim == len(shape) - 1:
            return None
        if shape[dim] % ranks:
            raise ValueError(
                f"Float8Linear: got an input of shape {tuple(shape)} and an output to be sharded "
                f"along dim {dim} over {ranks} ranks, expected that dim divisible by {ranks}; pad "
                f"it"
            )
        return Tokens(mesh.get_group(0).group_name, ranks, dim, math.prod(shape[:dim]))


def linear_of_shards(
    input: Any, weight: Any, bias: Any, shards: Shards, plan: LinearPlan, casts: Casts
) -> Any:
    """Compute `apply_linear` of DTensors; see `Shards.enter`.

    `bias` [N] is Shard(0) with the weight, else Replicate; or None.
    """
    x, casts, tokens = shards.enter(input, weight, plan, casts)
    here = bias.to_local() if bias is not None and shared_by_rows(weight) else None
    y = apply_linear(x, weight.to_local(), here, plan, casts, None, tokens)
    return shards.leave(y, weight, bias, tokens)


def shared_by_rows(weight: Any) -> bool:
    """Whether ranks share the rows of a weight, not its columns; raises as `Shards.enter`."""
    dtensors = torch.distributed.tensor  # imported: somebody made DTensors
    placements = tuple(weight.placements)
    by_rows = placements == (dtensors.Shard(0),)
    if not by_rows and placements != (dtensors.Shard(1),):
        raise ValueError(
            f"Float8Linear: got a weight placed {placements}, expected Shard(0) or Shard(1) on a "
            f"mesh of one dim, as tensor parallel's styles place it"
        )
    return by_rows


def dtensor_in_float8(x: Any, plan: LinearPlan, cast: Cast) -> Any:
    """Cast the DTensor `x` on a mesh of one dim, if bytes and one scale are all it takes.

    Else return `x` itself, as also where it is a sum still to be made, or where ranks hold parts of
    rows that have a scale each. `cast`: of the input, with the reduction over the ranks.
    """
    local, (placement,) = x.to_local(), x.placements
    cuts_rows = placement.is_shard() and placement.dim % x.dim() == x.dim() - 1
    if (
        placement.is_partial()
        or (cuts_rows and cast.spec.granularity.by_rows)
        or not plan.casts_input_once
        or isinstance(local, Float8Tensor)
    ):
        return x
    if dtype := autocast_dtype(local.device):
        local = local.to(dtype)
    if placement.is_replicate():
        cast = cast._replace(reduce=None)
    return dtensor_like(to_float8(local, cast), x)


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
