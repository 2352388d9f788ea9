"""Compute tensor-parallel layers on DTensors; casts and GEMMs run on local tensors.

One scale per tensor comes from the amax over all ranks; finer scales come from the local tensor.
High-precision weights are cast in each forward and backward: `Float8Weights.HELD` keeps no casts.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.gemm import matmul
from float8.linear.functional import apply_linear, in_compute_dtype
from float8.linear.plan import Casts, LinearPlan
from float8.products import Dense, Shape
from float8.quantize import Cast, to_col
from float8.scales import Operand, Quantized
from float8.tensor import Float8Tensor
from float8.tensor.float8_tensor import to_float8
from float8.tensor.ranks import (
    SharedTokens,
    amax_over,
    dtensor_like,
    every_rank_gets_some,
    finished,
)


class Shards(NamedTuple):
    """Computes layers with DTensor weights; fields: whether to gather input, scatter output."""

    gathers_input: bool = False  # all-gather the input's tokens; ignored if the weight is Shard(1)
    tokens_dim: int | None = None  # reduce-scatter the output along it if the weight is Shard(1)

    def linear(self, input: Any, weight: Any, bias: Any, plan: LinearPlan, casts: Casts) -> Any:
        """Return `input @ weight.T + bias` of DTensors on a 1-D mesh, by the GEMMs of `plan`.

            weight Shard(0), bias Shard(0): input Replicate -> output Shard(-1)
            weight Shard(1), bias Replicate: input Shard(-1) -> output Partial
                or, if `self.tokens_dim` is not None, output Shard(self.tokens_dim)

        With `self.gathers_input`, the input for a weight Shard(0) may have any placement. It is
        gathered in float8 if `plan.input_rows_suffice`, it is not Partial, and no row with its own
        scale is cut. An input in float8 is not cast again. `casts`, from `self.casts`, are those of
        `plan`, but reduce amaxes. Plain inputs raise `TypeError`, other placements `ValueError`.
        """
        if not hasattr(input, "placements"):
            got = f"got an input of type {type(input).__name__} for a weight that is a DTensor"
            do = "use a style that prepares it, as Float8ColwiseParallel"
            raise TypeError(f"Float8Linear: {got}, expected a DTensor; {do}")
        dtensors, mesh, placements = torch.distributed.tensor, weight.device_mesh, weight.placements
        if input.device_mesh != mesh:
            got = f"got an input on {input.device_mesh} for a weight on {mesh}, expected one mesh"
            raise ValueError(f"Float8Linear: {got}; parallelize both over the same")
        column_parallel = tuple(placements) == (dtensors.Shard(0),)
        if not column_parallel and tuple(placements) != (dtensors.Shard(1),):
            got = f"got a weight placed {placements}, expected Shard(0) or Shard(1) on a mesh of"
            raise ValueError(f"Float8Linear: {got} one dim, as tensor parallel's styles place it")
        require_parts(weight.shape, 0 if column_parallel else 1, mesh.size())
        if column_parallel:
            return _column_parallel(input, weight, bias, self.gathers_input, plan, casts)
        return _row_parallel(input, weight, bias, self.tokens_dim, plan, casts)

    def casts(self, layer: Any, mesh: Any) -> Casts:
        """Return casts for a call of `layer`; those with one scale reduce amaxes over `mesh`."""
        casts: Casts = layer._float8_plan.casts
        if mesh.size() > 1:
            reduce, reduced = amax_over([mesh.get_group(0)]), {}
            for site in casts._fields:
                reduced[site] = getattr(casts, site)._replace(reduce=reduce)
            casts = casts._replace(**reduced)
        return layer._float8_with_state(casts) if layer._float8_stateful else casts

    def words(self, layer: Any) -> list[str]:
        """Return phrases for `extra_repr` of `layer`, as ["input gathered in float8"], or []."""
        if self.tokens_dim is not None:
            gathered, in_float8 = "grad_output", layer._float8_plan.grad_output_rows_suffice
        elif self.gathers_input and not sums_over_ranks(layer.weight):
            gathered, in_float8 = "input", layer._float8_plan.input_rows_suffice
        else:
            return []
        return [f"{gathered} gathered in {'float8' if in_float8 else 'high precision'}"]


def sums_over_ranks(weight: Any) -> bool:
    """Return whether DTensor `weight` [N, K] shards K over its last mesh dim; False if plain."""
    placements: Any = getattr(weight, "placements", None)
    return placements is not None and placements[-1].is_shard(1)


@dataclass(frozen=True)
class GathersInput(Dense):
    """Casts and GEMMs of a layer that all-gathers the rows of its input in float8."""

    tokens: SharedTokens

    keeps_row_data = True
    finished = staticmethod(finished)

    def quantize_rows(
        self, x: Tensor, cast: Cast, *, row: bool, col: bool, traced: bool
    ) -> Quantized:
        """Quantize `x` [M / ranks, K]; return row data [M, K] of all ranks, K padded for GEMMs.

        `row`, `col` are not used. `traced`: let a compiler fuse at least the amax with earlier ops.
        """
        return Quantized(self.tokens.gathered(x, cast, traced))

    def output(self, a: Operand, b: Operand, rank_shape: Shape, **options: Any) -> Tensor:
        """Return `a @ b.T` [M, N] by `matmul` with `options`; `rank_shape` is (M / ranks, N)."""
        return matmul(a, b, (rank_shape[0] * self.tokens.ranks, rank_shape[1]), **options)

    def start(self, dx: Tensor) -> Tensor:
        """Start to reduce-scatter grad_input `dx` [M, K]; `finished` waits for [M / ranks, K]."""
        return self.tokens.start_reduce_scatter(dx)


@dataclass(frozen=True)
class ScattersOutput(Dense):
    """Has casts and GEMMs of a layer, as `Dense` does; `tokens` reduce-scatters its output."""

    tokens: SharedTokens

    def quantize_grad(self, g: Tensor, cast: Cast, *, row: bool, col: bool) -> Quantized:
        """Quantize `g`; return row data [M, N] of all ranks and, if `col`, column data [N, M]."""
        row_data = self.tokens.gathered(g, cast)
        return Quantized(row_data, to_col(row_data, cast.config) if col else None)

    def scatter(self, y: Tensor) -> Tensor:
        """Reduce-scatter `y` [M, N], this rank's partial sum of the output, to [M / ranks, N]."""
        return finished(self.tokens.start_reduce_scatter(y))

    def grad_input(self, a: Operand, b: Operand, rank_shape: Shape, **options: Any) -> Tensor:
        """Return `a @ b.T` [M, K] by `matmul` with `options`; `rank_shape` is (M / ranks, K)."""
        return matmul(a, b, (rank_shape[0] * self.tokens.ranks, rank_shape[1]), **options)


def _column_parallel(
    input: Any, weight: Any, bias: Any, gathers_input: bool, plan: LinearPlan, casts: Casts
) -> Any:
    """Return `input @ weight.T + bias`, placed Shard(-1), for DTensors with `weight` Shard(0).

    `input` is Replicate or, if `gathers_input`, of any placement and all-gathered. `plan` has
    casts and GEMMs; `casts` are these casts with amaxes reduced over ranks.
    """
    dtensors, (placement,) = torch.distributed.tensor, input.placements
    local_weight = weight.to_local()  # before `input.to_local`, so that backward runs it last
    tokens = None  # or `SharedTokens`, with which the layer communicates instead of DTensor
    if gathers_input and not placement.is_replicate():
        in_float8 = isinstance(input._local_tensor, Float8Tensor)  # cast before, for several layers
        if placement.is_shard() and plan.input_rows_suffice and not in_float8:
            tokens = _shared_tokens(input, placement.dim)  # float8 rows serve both GEMMs
        if tokens is None:  # DTensor also gathers Partial inputs and uneven sizes
            input = in_compute_dtype(input, weight)
            input = dtensor_in_float8(input, weight, plan, casts.input)
            input = input.redistribute(placements=[dtensors.Replicate()])
    if tokens is None:  # the input is replicated, so all ranks compute the same amax
        _require_placed(input, weight, dtensors.Replicate())
        casts = _without_reduce(casts, "input", "input_for_grad_weight")
    # Each rank computes a partial gradient of the input; `GathersInput.start` reduce-scatters it.
    x = input.to_local(grad_placements=(dtensors.Partial(),) if tokens is None else None)
    bias = None if bias is None else bias.to_local()
    y = apply_linear(x, local_weight, bias, plan, casts, products=tokens and GathersInput(tokens))
    if tokens is not None and x.dim() != 2:  # `apply_linear` returned [M, N]
        shape = [*x.shape[:-1], y.shape[-1]]
        shape[tokens.dim] *= tokens.ranks
        y = torch.ops.aten._unsafe_view.default(y, shape)
    placements = (dtensors.Shard(y.dim() - 1),)
    whole = torch.empty([*y.shape[:-1], weight.shape[0]], device="meta")  # N may be uneven
    return dtensors.DTensor.from_local(
        y, weight.device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _row_parallel(
    input: Any, weight: Any, bias: Any, tokens_dim: int | None, plan: LinearPlan, casts: Casts
) -> Any:
    """Return `input @ weight.T + bias` for DTensors `input` Shard(-1), `weight` Shard(1).

    The output is Shard(`tokens_dim`), or Partial if that is None. `plan` has casts and GEMMs;
    `casts` are these casts with amaxes reduced over ranks.
    """
    dtensors: Any = torch.distributed.tensor
    dims, tokens_placement, tokens = input.dim(), None, None  # `tokens`: see `_column_parallel`
    if tokens_dim is not None:
        if not -dims <= tokens_dim < dims:
            got = f"got an input of {dims} dims and an output to be sharded along dim {tokens_dim}"
            do = "give the style another output_layouts"
            raise ValueError(f"Float8Linear: {got}, expected one of them; {do}")
        tokens_placement = dtensors.Shard(tokens_dim % dims)
        if plan.grad_output_rows_suffice:  # float8 rows serve both GEMMs of backward
            tokens = _shared_tokens(input, tokens_placement.dim)
    _require_placed(input, weight, dtensors.Shard(dims - 1))
    if tokens is None:  # grad_output is replicated, so all ranks compute the same amax
        casts = _without_reduce(casts, "grad_output", "grad_output_for_grad_weight")
    products, x = None if tokens is None else ScattersOutput(tokens), input.to_local()
    y = apply_linear(x, weight.to_local(), None, plan, casts, products=products)  # bias added below
    if tokens is not None and x.dim() != 2:  # `apply_linear` returned [M / ranks, N]
        shape = [*x.shape[:-1], y.shape[-1]]
        shape[tokens.dim] //= tokens.ranks
        y = torch.ops.aten._unsafe_view.default(y, shape)
    placements = (dtensors.Partial() if tokens is None else tokens_placement,)
    output = dtensors.DTensor.from_local(y, weight.device_mesh, placements, run_check=False)
    if tokens_placement is not None and tokens is None:  # DTensor reduce-scatters the output
        output = output.redistribute(placements=(tokens_placement,))
    if bias is None:
        return output
    if torch.is_grad_enabled():  # torch 2.11 raises in inference mode
        # A no-op in forward; its backward sums up the gradients of the ranks' tokens.
        bias = bias.redistribute(placements=bias.placements)
    return output + bias.to(output.dtype)


def _require_placed(input: Any, weight: Any, placement: Any) -> None:
    got, of_weight = tuple(input.placements), tuple(weight.placements)
    if got != (placement,):
        got_both = f"got an input placed {got} for a weight placed {of_weight}"
        raise ValueError(f"Float8Linear: {got_both}, expected {placement}; redistribute it")


def _without_reduce(casts: Casts, *sites: str) -> Casts:
    return casts._replace(**{site: getattr(casts, site)._replace(reduce=None) for site in sites})


def _shared_tokens(x: Any, dim: int) -> SharedTokens | None:
    """Return an object that gathers and scatters tensors along `dim`, over the DTensor `x`'s ranks.

    Their dims before the last are those of `x`. Returns None, so that DTensor must communicate, if
    `dim` is the last, `x` is empty, or the number of ranks does not divide `x.shape[dim]`.
    """
    mesh = x.device_mesh
    if dim == x.dim() - 1 or x.shape[dim] % mesh.size() or 0 in x.shape:
        return None
    return SharedTokens(mesh.get_group(0).group_name, mesh.size(), dim, math.prod(x.shape[:dim]))


def dtensor_in_float8(x: Any, weight: Any, plan: LinearPlan, cast: Cast) -> Any:
    """Return the DTensor `x` on a 1-D mesh, an input for `weight`, quantized as `cast` says.

    Returns `x` itself if it is Partial or in float8; if it is sharded along its last dim, and
    `cast` has a scale per row; or if the output's or grad_weight's GEMM by `plan` cannot use float8
    rows. Raises `TypeError` or `ValueError` if its dtype or last dim does not match `weight`.
    """
    (placement,) = x.placements
    cuts_rows = placement.is_shard() and placement.dim % x.dim() == x.dim() - 1
    if (
        placement.is_partial()  # local values are not summed yet
        or (cuts_rows and cast.config.scaling_granularity.by_rows)  # no rank has a whole row
        or not plan.input_rows_suffice  # a GEMM needs more than float8 rows
        or isinstance(x._local_tensor, Float8Tensor)
    ):
        return x
    x = in_compute_dtype(x, weight)
    if placement.is_replicate():  # all ranks compute the same amax
        cast = cast._replace(reduce=None)
    return dtensor_like(to_float8(x.to_local(), cast), x)


def require_parts(shape: torch.Size, dim: int, ranks: int) -> None:
    """Raise `ValueError` unless each rank gets rows of a weight (`dim` 0), or equal columns (1)."""
    if shape[dim] % ranks and (dim == 1 or not every_rank_gets_some(shape[dim], ranks)):
        expected = "that dim divisible by" if dim else "rows on each of"
        got = f"got a weight of shape {tuple(shape)}, to be sharded along dim {dim} over {ranks}"
        raise ValueError(f"Float8Linear: {got} ranks, expected {expected} {ranks}")
