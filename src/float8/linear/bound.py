"""One call of a linear layer, and its three GEMMs.

output       [M, N] = input @ weight.T          row(input),         row(weight)
grad_input   [M, K] = grad_output @ weight      row(grad_output),   col(weight)
grad_weight  [N, K] = grad_output.T @ input     col(grad_output),   col(input)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX, sendable
from float8.gemm import Gemm, matmul
from float8.linear.held import WeightCast, product_with_held
from float8.linear.plan import Casts, LinearPlan
from float8.quantize.quantize import Cast, columns, padded, quantize
from float8.quantize.spec import Operand, Quantized
from float8.tensor import Float8Tensor
from float8.tensor.ranks import Tokens


class KeptWeight(NamedTuple):
    """A weight as forward saves it for `BoundLinear.grad_input`, without copying anything."""

    data: Tensor | Any = None
    """The weight itself; or row data that somebody keeps anyway, as of a gathered weight. None:
    backward has no use for it."""

    scale: Tensor | Any = None
    """Of the row data that forward multiplied; None: it multiplied none."""


class BoundLinear(NamedTuple):
    """A layer in one call: all that its autograd function takes, and keeps, besides tensors."""

    plan: LinearPlan
    casts: Casts
    """With the state, and the ranks, of this call."""
    ready: WeightCast | None
    """The weight in float8, if it is that already."""
    tokens: Tokens | None
    """Of an output that is a sum over ranks, of which each keeps its tokens; else None."""
    in_features: int
    out_features: int
    weight_dtype: torch.dtype
    need_grad_input: bool
    need_grad_weight: bool

    def for_backward(self) -> "BoundLinear":
        """Leave out what only forward reads: what is on a context lives as long as the graph."""
        ready = self.ready
        if ready is None or ready.operand.col is None:
            return self._replace(ready=None)
        return self._replace(ready=WeightCast(Quantized(col=ready.operand.col), ready.compares))

    def output(
        self, x: Operand, weight: Tensor, dtype: torch.dtype, M: int
    ) -> tuple[Tensor, KeptWeight]:
        """Multiply row data [M, K] by a weight: `x @ weight.T` [M, N], and the weight to save."""
        cast, gemm, ready = self.casts.weight, self.plan.output, self.ready
        assert gemm is not None
        if ready is None:
            traced = cast.state is not None
            w = quantize(weight, cast, row=True, pad_rows=True, traced=traced).row
            y, kept = matmul(x, w, gemm=gemm, out_dtype=dtype), KeptWeight(weight, w.scale)
        elif ready.compares:
            y = product_with_held(
                x, weight, ready, cast.spec, columns=False, gemm=gemm, out_dtype=dtype
            )
            kept = KeptWeight(weight)
        else:
            record(cast, ready.operand.amax)
            is_held, w = ready.operand.col is not None, ready.operand.row
            kept = KeptWeight(weight) if is_held else KeptWeight(*w)
            y = matmul(x, padded(w, cast.spec.granularity), gemm=gemm, out_dtype=dtype)
        return _cut(y, gemm, M, weight.shape[0]), kept

    def grad_input(self, g: Operand, kept: KeptWeight, dtype: torch.dtype, M: int) -> Tensor:
        """Multiply row data [M, N] by a weight: `g @ weight` [M, K]."""
        gemm, ready, cast = self.plan.grad_input, self.ready, self.casts.weight
        assert gemm is not None
        # A compiler that saw no need for a gradient would transpose in forward, and keep the result
        # until backward: under FSDP that of every whole weight.
        after = g.scale
        if not self.plan.share_weight:
            w = quantize(kept.data, self.casts.weight_for_grad_input, col=True).col
        elif ready is not None and ready.compares:
            x = product_with_held(
                g, kept.data, ready, cast.spec, columns=True, gemm=gemm, out_dtype=dtype
            )
            return _cut(x, gemm, M, self.in_features)
        elif ready is not None:
            w = ready.operand.col
        elif kept.data.dtype in FLOAT8_MAX:
            w = columns(Operand(*kept), cast.spec, after)
        else:
            w = quantize(kept.data, cast.known(kept.scale), col=True, after=after).col
        return _cut(matmul(g, w, gemm=gemm, out_dtype=dtype), gemm, M, self.in_features)

    def grad_weight(self, g: Operand, x: Operand) -> Tensor:
        """Multiply column data [N, M] by column data [K, M]: `g.T @ x` [N, K]."""
        gemm = self.plan.grad_weight
        assert gemm is not None
        dw = matmul(g, x, gemm=gemm, out_dtype=self.weight_dtype)
        return _cut(dw, gemm, self.out_features, self.in_features)


def _cut(x: Tensor, gemm: Gemm, rows: int, columns: int) -> Tensor:
    """Return a product [rows, columns] without what padding added."""
    if x.shape[1] != columns:  # contiguous, so that `.view()` and in-place ops work
        return x[:rows, :columns].contiguous()
    # A compiler is not asked, since it would compile again for numbers that need no padding.
    pads_rows = gemm.granularities[0].by_blocks
    if (pads_rows and torch.compiler.is_compiling()) or x.shape[0] != rows:
        return x[:rows]
    return x


def record(cast: Cast, amax: Tensor | None) -> None:
    """Let delayed scaling, if it is that, learn of a tensor that was cast elsewhere."""
    if cast.record and cast.state is not None and amax is not None:
        cast.state.record(amax)


# ---------------------------------------------------------------- operands made elsewhere


def weight_in_float8(weight: Float8Tensor, plan: LinearPlan) -> WeightCast:
    """Return the operand of a weight that is float8; no bytes are copied."""
    other = None if plan.share_weight else "grad_input"
    return WeightCast(_operand_of("weight", weight, plan.casts.weight, other))


def input_in_float8(input: Float8Tensor, plan: LinearPlan) -> Quantized:
    """Return the operand of an input that was cast for several layers at once."""
    cast, other = plan.casts.input, None if plan.casts_input_once else "grad_weight"
    operand = _operand_of("input", input, cast, other)
    return operand._replace(row=padded(operand.row, cast.spec.granularity, pad_rows=False))


def _operand_of(role: str, x: Float8Tensor, cast: Cast, other: str | None) -> Quantized:
    """Return the operand of `x`; `other`: a GEMM for which it is to be cast in another way."""
    spec = cast.spec
    same = x._data.dtype == spec.dtype and x._granularity is spec.granularity
    if not same or x._by_columns or other is not None:
        expected = f"{spec.dtype} under {spec.granularity}"
        raise ValueError(
            f"Float8Linear: got {role} in {x._data.dtype} under {x._scaling}, expected one in high "
            f"precision: it is to be cast to {expected}"
            f"{'' if other is None else f', and in another way for {other}'}; call "
            f"{role}.to_original_precision(), or configure its casts alike"
        )
    return Quantized(Operand(x._data.contiguous(), x._scale), amax=x._amax)


def cast_tokens(x: Tensor, cast: Cast, tokens: Tokens | None, *, row: bool, col: bool) -> Quantized:
    """Cast `x` [R, C]; or, of `tokens` that ranks share, [R / ranks, C] here, and gather bytes.

    Under one scale for all ranks, or under one for each row, which travel, too: see
    `LinearPlan.casts_grad_output_once`.
    """
    if tokens is None:
        return quantize(x, cast, row=row, col=col)
    spec, mine = cast.spec, quantize(x, cast, row=True).row
    data = tokens.gather(sendable(mine.data[:, : x.shape[1]])).view(spec.dtype)
    scale = mine.scale if spec.granularity.one_scale else tokens.gather(mine.scale)
    whole = Operand(data, scale)
    return Quantized(
        padded(whole, spec.granularity, pad_rows=False) if row else None,
        columns(whole, spec) if col else None,
    )
