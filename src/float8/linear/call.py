"""One call of a linear layer, and its three GEMMs.

output       [M, N] = input @ weight.T          row(input),         row(weight)
grad_input   [M, K] = grad_output @ weight      row(grad_output),   col(weight)
grad_weight  [N, K] = grad_output.T @ input     col(grad_output),   col(input)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX
from float8.gemm import matmul
from float8.linear.held_matmul import product_with_held
from float8.linear.plan import Casts, LinearPlan
from float8.quantize import Cast, columns, padded, quantize
from float8.scales import Operand, Quantized
from float8.tensor import Float8Tensor
from float8.tensor.ranks import SharedTokens


class KeptWeight(NamedTuple):
    """A weight as forward saves it for `LinearCall.grad_input`, without copying anything.

    All of it goes through `save_for_backward`: what lies on a context lives as long as somebody
    keeps a loss, and held weights would be there twice.
    """

    data: Tensor | Any = None
    """The weight itself; or row data that somebody keeps anyway, as of a gathered weight. None:
    backward has no use for it."""

    scale: Tensor | Any = None
    """Of the row data that forward multiplied; None: it multiplied none."""

    col_data: Tensor | Any = None
    """Column data that are held; None: backward makes its own."""

    col_scale: Tensor | Any = None
    """Of the column data."""


class LinearCall(NamedTuple):
    """A layer in one call: all that its autograd function takes, and keeps, besides tensors."""

    plan: LinearPlan
    casts: Casts
    """With the state, and the ranks, of this call."""
    input_tokens: SharedTokens | None
    """Of an input of which each rank has its tokens, and which all multiply; else None."""
    output_tokens: SharedTokens | None
    """Of an output that is a sum over ranks, of which each keeps its tokens; else None."""
    in_features: int
    out_features: int
    weight_dtype: torch.dtype
    need_grad_input: bool
    need_grad_weight: bool

    def output(
        self, x: Operand, weight: Tensor, ready: Quantized | None, dtype: torch.dtype, M: int
    ) -> tuple[Tensor, KeptWeight]:
        """Multiply row data [M, K] by a weight: `x @ weight.T` [M, N], and the weight to save.

        `ready`: the weight in float8, if it is that already.
        """
        cast, gemm = self.casts.weight, self.plan.output
        shape = M, weight.shape[0]  # read here: torch.jit.trace follows sizes
        assert gemm is not None
        if ready is None:
            traced = cast.state is not None
            w = quantize(weight, cast, row=True, pad_rows=True, traced=traced).row
            kept = KeptWeight(weight, w.scale)
        elif ready.col is not None:
            w, kept = ready.row, KeptWeight(weight, None, *ready.col)
            if torch.compiler.is_compiling():  # the op sees if they are what the weight is now
                y = product_with_held(
                    x, weight, w, shape, cast.how, columns=False, gemm=gemm, out_dtype=dtype
                )
                return y, kept
        else:
            record(cast, ready.amax)
            w, kept = padded(ready.row, cast.how.scaling_granularity), KeptWeight(*ready.row)
        return matmul(x, w, shape, gemm=gemm, out_dtype=dtype), kept

    def grad_input(self, g: Operand, kept: KeptWeight, dtype: torch.dtype, M: int) -> Tensor:
        """Multiply row data [M, N] by a weight: `g @ weight` [M, K]."""
        gemm, cast = self.plan.grad_input, self.casts.weight
        shape = M, self.in_features
        assert gemm is not None
        # A compiler that saw no need for a gradient would transpose in forward, and keep the result
        # until backward: under FSDP that of every whole weight.
        after = g.scale
        if not self.plan.share_weight:
            w = quantize(kept.data, self.casts.weight_for_grad_input, col=True).col
        elif kept.col_data is not None:
            w = Operand(kept.col_data, kept.col_scale)
            if torch.compiler.is_compiling():
                return product_with_held(
                    g, kept.data, w, shape, cast.how, columns=True, gemm=gemm, out_dtype=dtype
                )
        elif kept.data.dtype in FLOAT8_MAX:
            w = columns(Operand(kept.data, kept.scale), cast.how, after)
        else:
            w = quantize(kept.data, cast.known(kept.scale), col=True, after=after).col
        return matmul(g, w, shape, gemm=gemm, out_dtype=dtype)

    def grad_weight(self, g: Operand, x: Operand) -> Tensor:
        """Multiply column data [N, M] by column data [K, M]: `g.T @ x` [N, K]."""
        gemm = self.plan.grad_weight
        assert gemm is not None
        shape = self.out_features, self.in_features
        return matmul(g, x, shape, gemm=gemm, out_dtype=self.weight_dtype)


def record(cast: Cast, amax: Tensor | None) -> None:
    """Let delayed scaling, if it is that, learn of a tensor that was cast elsewhere."""
    if cast.record and cast.state is not None and amax is not None:
        cast.state.record(amax)


# ---------------------------------------------------------------- operands made elsewhere


def weight_in_float8(weight: Float8Tensor, plan: LinearPlan) -> Quantized:
    """Return the operand of a weight that is float8; no bytes are copied."""
    other = None if plan.share_weight else "grad_input"
    return _operand_of("weight", weight, plan.casts.weight, other)


def input_in_float8(input: Float8Tensor, plan: LinearPlan) -> Quantized:
    """Return the operand of an input that was cast for several layers at once."""
    cast, other = plan.casts.input, None if plan.input_rows_suffice else "grad_weight"
    operand = _operand_of("input", input, cast, other)
    return operand._replace(row=padded(operand.row, cast.how.scaling_granularity, pad_rows=False))


def _operand_of(role: str, x: Float8Tensor, cast: Cast, other: str | None) -> Quantized:
    """Return the operand of `x`; `other`: a GEMM for which it is to be cast in another way."""
    spec = cast.how
    same = x._data.dtype == spec.dtype and x._granularity is spec.scaling_granularity
    if not same or x._has_column_scales or other is not None:
        expected = f"{spec.dtype} under {spec.scaling_granularity}"
        raise ValueError(
            f"Float8Linear: got {role} in {x._data.dtype} under {x._scaling}, expected one in high "
            f"precision: it is to be cast to {expected}"
            f"{'' if other is None else f', and in another way for {other}'}; call "
            f"{role}.to_original_precision(), or configure its casts alike"
        )
    return Quantized(Operand(x._data.contiguous(), x._scale), amax=x._amax)


def cast_and_gather(
    x: Tensor, cast: Cast, tokens: SharedTokens, *, row: bool, col: bool, traced: bool = False
) -> Quantized:
    """Cast the tokens of this rank, `x` [R / ranks, C], and gather the bytes of all, [R, C].

    Under one scale for all ranks, or under one for each row, which are gathered, too: see
    `LinearPlan.input_rows_suffice`.
    """
    spec, mine = cast.how, quantize(x, cast, row=True, traced=traced).row
    data = tokens.gather(mine.data[:, : x.shape[1]])
    scale = mine.scale if spec.scaling_granularity.one_scale else tokens.gather(mine.scale)
    whole = Operand(data, scale)
    return Quantized(
        padded(whole, spec.scaling_granularity, pad_rows=False) if row else None,
        columns(whole, spec) if col else None,
    )
