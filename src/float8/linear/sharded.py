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
from float8.quantize import Cast
from float8.tensor import Float8Tensor, dtensor_like
from float8.tensor.float8_tensor import to_float8
from float8.tensor.ranks import SharedTokens, all_have_some


class Shards(NamedTuple):
    """How ranks share a layer, as a style sets it; the weight, a DTensor, tells the rest."""

    gathers_input: bool = False
    """Whether ranks gather the tokens of the input of a weight Shard(0)."""

    tokens_dim: int | None = None
    """The dim along which ranks share the tokens of an output that is a sum over ranks, and gather
    those of its gradient. None: the sum is left to others."""

    def enter(self, input: Any, weight: Any, plan: LinearPlan, casts: Casts) -> "Entered":
        """Prepare the input and the casts with which this rank multiplies its part of a weight.

        Args:
            input: [..., K], a DTensor. For a weight Shard(0) of a layer that gathers its input it
                may be placed in any way. Then it is gathered, in float8 if one cast is all that the
                plan makes of it. A `Float8Tensor` inside is not cast again.
            weight: [N, K], a DTensor on a mesh of one dim: Shard(0), of which each rank has rows;
                or Shard(1), with K divisible by the number of ranks.
            plan: of the layer.
            casts: of the layer, each with the reduction over the ranks.

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
        dtensors, mesh, colwise = torch.distributed.tensor, weight.device_mesh, _is_colwise(weight)
        if input.device_mesh != mesh:
            raise ValueError(
                f"Float8Linear: got an input on {input.device_mesh} for a weight on {mesh}, "
                f"expected one mesh; parallelize both over the same"
            )
        require_parts(weight.shape, 0 if colwise else 1, mesh.size(), plan)
        input_tokens = output_tokens = None
        (placement,) = input.placements
        if colwise and self.gathers_input and not placement.is_replicate():
            dim = placement.dim if placement.is_shard() else -1
            even = 0 <= dim < input.dim() - 1 and input.shape[dim] % mesh.size() == 0
            if even and not isinstance(input._local_tensor, Float8Tensor):
                input_tokens = _shared_tokens(input.shape, dim, mesh)
            else:  # torch gathers, which knows of summands and of odd sizes
                require_input(input, weight)
                input = dtensor_in_float8(input, plan, casts.input)
                input = input.redistribute(placements=[dtensors.Replicate()])
        elif not colwise and self.tokens_dim is not None:
            dim = self._dim_of_tokens(input.shape)
            if dim < input.dim() - 1 and input.shape[dim] % mesh.size() == 0:
                output_tokens = _shared_tokens(input.shape, dim, mesh)
        expected: Any = dtensors.Replicate() if colwise else dtensors.Shard(input.dim() - 1)
        if input_tokens is None and tuple(input.placements) != (expected,):
            raise ValueError(
                f"Float8Linear: got an input placed {tuple(input.placements)} for a weight placed "
                f"{tuple(weight.placements)}, expected {expected}; redistribute it"
            )
        # What is whole here, or gathered before it is cast, has an amax that all ranks find alike.
        if colwise and (input_tokens is None or not plan.input_rows_suffice):
            casts = casts._replace(
                input=casts.input._replace(reduce=None),
                input_for_grad_weight=casts.input_for_grad_weight._replace(reduce=None),
            )
        if not colwise and (output_tokens is None or not plan.grad_output_rows_suffice):
            other = casts.grad_output_for_grad_weight._replace(reduce=None)
            casts = casts._replace(
                grad_output=casts.grad_output._replace(reduce=None),
                grad_output_for_grad_weight=other,
            )
        summed = colwise and input_tokens is None
        x = input.to_local(grad_placements=(dtensors.Partial(),) if summed else None)
        return Entered(x, casts, colwise, input_tokens, output_tokens)

    def leave(self, y: Tensor, entered: "Entered", weight: Any, bias: Any) -> Any:
        """Return the output, of which this rank has `y`: features, summands or tokens.

        `bias` [N], Replicate, is added where `y` does not have it: that of a weight Shard(1).
        """
        dtensors, mesh, tokens = torch.distributed.tensor, weight.device_mesh, entered.output_tokens
        if entered.colwise:
            # Maybe shared unevenly: torch is told the shape.
            shape, strides = torch.Size([*y.shape[:-1], weight.shape[0]]), [1]
            for size in reversed(shape[1:]):
                strides.insert(0, strides[0] * size)
            return dtensors.DTensor.from_local(
                y, mesh, (dtensors.Shard(y.dim() - 1),), run_check=False, shape=shape,
                stride=tuple(strides),
            )  # fmt: skip
        to: Any = (dtensors.Partial() if tokens is None else dtensors.Shard(tokens.dim),)
        output = dtensors.DTensor.from_local(y, mesh, to, run_check=False)
        if bias is None:
            return output
        if torch.is_grad_enabled():  # torch 2.11 refuses it in inference mode
            # What the ranks' tokens say of the bias is summed in backward.
            bias = bias.redistribute(placements=bias.placements)
        return output + bias.to(output.dtype)

    def _dim_of_tokens(self, shape: torch.Size) -> int:
        """Return `tokens_dim` of an input [..., K], counted from the front."""
        dim: Any = self.tokens_dim
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"Float8Linear: got an input of {len(shape)} dims and an output to be sharded "
                f"along dim {dim}, expected one of them; give the style another output_layouts"
            )
        return int(dim % len(shape))


class Entered(NamedTuple):
    """A call of this rank, as `apply_linear` takes it."""

    input: Tensor
    casts: Casts
    """Without the reduction over ranks for tensors of which this rank has the whole."""
    colwise: bool
    """Whether each rank has rows of the weight, as under ColwiseParallel, and not columns."""
    input_tokens: SharedTokens | None
    output_tokens: SharedTokens | None


def linear_of_shards(
    input: Any, weight: Any, bias: Any, shards: Shards, plan: LinearPlan, casts: Casts
) -> Any:
    """Compute `apply_linear` of DTensors; see `Shards.enter`.

    `bias` [N] is Shard(0) with the weight, else Replicate; or None.
    """
    entered = shards.enter(input, weight, plan, casts)
    here = bias.to_local() if bias is not None and entered.colwise else None
    y = apply_linear(
        entered.input,
        weight.to_local(),
        here,
        plan,
        entered.casts,
        input_tokens=entered.input_tokens,
        output_tokens=entered.output_tokens,
    )
    return shards.leave(y, entered, weight, bias)


def _is_colwise(weight: Any) -> bool:
    """Whether ranks share the rows of a weight, not its columns; raises as `Shards.enter`."""
    dtensors = torch.distributed.tensor  # imported: somebody made DTensors
    placements = tuple(weight.placements)
    colwise = placements == (dtensors.Shard(0),)
    if not colwise and placements != (dtensors.Shard(1),):
        raise ValueError(
            f"Float8Linear: got a weight placed {placements}, expected Shard(0) or Shard(1) on a "
            f"mesh of one dim, as tensor parallel's styles place it"
        )
    return colwise


def _shared_tokens(shape: torch.Size, dim: int, mesh: Any) -> SharedTokens:
    before = math.prod(shape[:dim])
    return SharedTokens(mesh.get_group(0).group_name, mesh.size(), dim, before)


def dtensor_in_float8(x: Any, plan: LinearPlan, cast: Cast) -> Any:
    """Cast the DTensor `x` on a mesh of one dim, if bytes and one scale are all it takes.

    Else return `x` itself, as also where it is a sum still to be made, or where ranks hold parts of
    rows that have a scale each. `cast`: of the input, with the reduction over the ranks.
    """
    local, (placement,) = x.to_local(), x.placements
    cuts_rows = placement.is_shard() and placement.dim % x.dim() == x.dim() - 1
    if (
        placement.is_partial()
        or (cuts_rows and cast.how.scaling_granularity.by_rows)
        or not plan.input_rows_suffice
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
    if size % ranks and (dim == 1 or not all_have_some(size, ranks)):
        expected = "that dim divisible by" if dim else "rows on each of"
        raise ValueError(
            f"Float8Linear: got a weight of shape {tuple(shape)}, to be sharded along dim {dim} "
            f"over {ranks} ranks, expected {expected} {ranks}"
        )
    if not plan.pad:
        what = f"a weight of shape {tuple(shape)} shared along dim {dim} by {ranks} ranks"
        require_aligned(what, (-(-size // ranks),), plan.alignment)
