"""The GEMM of compiled code that reads a held weight; see `float8.tensor.held_weights`.

The op compares the stamp, and casts for itself what does not match: it writes nothing, so a
compiler may order it as it likes.
"""

from typing import Any

import torch
from torch import Tensor

from float8.config import CastConfig, ScalingGranularity
from float8.gemm import Gemm, matmul_of_any_size
from float8.kernels.runtime.ops import register
from float8.quantize import Cast, quantize
from float8.scales import Operand
from float8.tensor.held_weights import still_holds


def product_with_held(
    a: Operand,
    weight: Tensor,
    held: Operand,
    shape: tuple[int, int],
    spec: CastConfig,
    *,
    columns: bool,
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply `a` by a weight [N, K], or its columns: what is held of it, or a cast made here."""
    of_a, of_b = gemm.granularities
    return torch.ops.float8.held_matmul.default(  # type: ignore[no-any-return]
        *a, *held, weight.detach(), *shape, columns, spec.power_of_2, of_a.value, of_b.value,
        gemm.use_fast_accum, gemm.emulate, out_dtype,
    )  # fmt: skip


@torch.no_grad()
def held_matmul(
    a: Tensor,
    a_scale: Tensor,
    data: Tensor,
    scale: Tensor,
    weight: Tensor,
    rows: int,
    features: int,
    columns: bool,
    power_of_2: bool,
    granularity_of_a: str,
    granularity: str,
    use_fast_accum: bool,
    emulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply a tensor in float8 by a weight, of which float8 data may be held.

    A function of `a` and the weight, whichever is read: so a compiler may order calls as it likes.
    A CUDA graph, which is replayed without this code, records the cast.

    Args:
        a: [M, K] float8, or [M, N] for `columns`.
        a_scale: of `a`.
        data: what is held: row data, or column data.
        scale: of the data.
        weight: [N, K]; cast if the data are not of its values now.
        rows: of the product.
        features: its columns.
        columns: whether column data are multiplied.
        power_of_2: of the cast.
        granularity_of_a: the value of a `ScalingGranularity`, as is the next.
        granularity: of the weight.
        use_fast_accum: as in `Gemm`, as is the next.
        emulate: see there.
        out_dtype: of the result, [rows, features].
    """
    of_b, b = ScalingGranularity(granularity), Operand(data, scale)
    if not still_holds(data, weight):
        cast = Cast(
            CastConfig(target_dtype=data.dtype, scaling_granularity=of_b, power_of_2=power_of_2)
        )
        made = quantize(weight, cast, row=not columns, col=columns, pad_rows=True)
        b = made.col if columns else made.row
    return matmul_of_any_size(
        a, a_scale, *b, rows, features, granularity_of_a, granularity, use_fast_accum, emulate,
        out_dtype,
    )  # fmt: skip


def _held_matmul_fake(a: Tensor, *rest: Any) -> Tensor:
    return a.new_empty(rest[4:6], dtype=rest[-1])


register(
    "held_matmul",
    held_matmul,
    triton=held_matmul,
    fake=_held_matmul_fake,
    flops=lambda a, *rest, **_: 2 * rest[4] * rest[5] * a[1],
)

HELD_GEMM = torch.ops.float8.held_matmul.default
"""The GEMM of compiled code that reads what is held."""
