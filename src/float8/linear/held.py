"""The float8 data of a weight, held beside the weight from one optimizer step to the next.

`update_float8_weights` casts each weight once, to both layouts in one read; forwards, backwards,
recomputation and microbatches of training read that. A stamp says of which values it is: the
version counter of the weight and the address of its memory. Each use compares. Eager code casts
again what does not match, and holds that. In compiled code the op that multiplies compares, and
casts for itself what does not match: it writes nothing, so a compiler may order it as it likes. It
finds the stamp on the data, the only Python object that reaches it. (As a tensor on the CPU, which
forward hands on to backward, CUDA graphs refuse it; as a number it makes code compile anew.)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from float8.config import ScalingGranularity
from float8.gemm import Gemm, matmul
from float8.kernels.runtime.ops import register
from float8.quantize.quantize import Cast, quantize
from float8.quantize.spec import CastSpec, Operand, Quantized
from float8.tensor import stamp_of

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Weights that are data in memory and nothing else: no shards, no wrappers."""

_DYNAMO_TELLS = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo knows export from compilation: that of torch 2.11 takes all for export."""


class WeightCast(NamedTuple):
    """A weight in float8, as the GEMMs of one call read it instead of casting it."""

    operand: Quantized

    compares: bool = False
    """Whether it is for the GEMMs to see if the operand is what the weight is now, as in compiled
    code."""


class HeldWeight(NamedTuple):
    """A weight of a layer, and its cast that is held."""

    weight: Tensor
    """The Parameter [N, K]."""

    operand: Quantized

    memory: Any
    """The storage of the weight: as long as it is kept no other has its address."""


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def hold(weight: Tensor, cast: Cast) -> HeldWeight:
    """Cast a weight [N, K] to both layouts in one read, and stamp them."""
    made = quantize(weight, cast, row=True, col=True, pad_rows=True)
    _stamp(made, stamp_of(weight))
    return HeldWeight(weight, made, weight.untyped_storage())


def expire(held: HeldWeight) -> None:
    """Have the next use cast the weight again."""
    _stamp(held.operand, None)


def _stamp(operand: Quantized, stamp: tuple[int, ...] | None) -> None:
    for part in (operand.row, operand.col):
        data: Any = part.data
        data.float8_stamp = stamp


def is_current(data: Tensor, weight: Tensor) -> bool:
    """Whether held data are what `weight` is in float8, as far as stamps tell; copies have none."""
    return bool(getattr(data, "float8_stamp", None) == stamp_of(weight))


def can_hold(weight: Any) -> bool:
    """Whether `weight` is data in memory with a version counter."""
    return type(weight) is nn.Parameter and not weight.is_meta and not weight.is_inference()


def is_recording(weight: Tensor) -> bool:
    """Whether operations go into a graph, or an exported program, which would keep float8 data."""
    exporting = torch.compiler.is_exporting()
    if torch.compiler.is_compiling():
        return exporting and (_DYNAMO_TELLS or not torch.compiler.is_dynamo_compiling())
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to import

    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return exporting or tracing or get_proxy_mode() is not None or _is_capturing(weight)


def _is_capturing(weight: Tensor) -> bool:
    """Whether a CUDA graph is recorded, in whose replays nobody compares."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


# ---------------------------------------------------------------- in compiled code


def product_with_held(
    a: Operand,
    weight: Tensor,
    cast: WeightCast,
    spec: CastSpec,
    *,
    columns: bool,
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply `a` by a weight [N, K], or its columns: what is held of it, or a cast made here."""
    (of_a, of_b), b = gemm.granularities, cast.operand.col if columns else cast.operand.row
    return torch.ops.float8.held_matmul.default(  # type: ignore[no-any-return]
        *a, *b, weight.detach(), columns, spec.power_of_2, of_a.value, of_b.value,
        gemm.use_fast_accum, gemm.emulate, out_dtype,
    )  # fmt: skip


@torch.no_grad()
def held_matmul(
    a: Tensor,
    a_scale: Tensor,
    data: Tensor,
    scale: Tensor,
    weight: Tensor,
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
        columns: whether column data are multiplied.
        power_of_2: of the cast.
        granularity_of_a: the value of a `ScalingGranularity`, as is the next.
        granularity: of the weight.
        use_fast_accum: as in `Gemm`, as is the next.
        emulate: see there.
        out_dtype: of the result, [M, N], or [M, K] for `columns`.
    """
    of_b, b = ScalingGranularity(granularity), Operand(data, scale)
    if _is_capturing(weight) or not is_current(data, weight):
        cast = Cast(CastSpec(data.dtype, of_b, power_of_2=power_of_2))
        made = quantize(weight, cast, row=not columns, col=columns, pad_rows=True)
        b = made.col if columns else made.row
    gemm = Gemm(use_fast_accum, emulate, (ScalingGranularity(granularity_of_a), of_b))
    return matmul(Operand(a, a_scale), b, gemm=gemm, out_dtype=out_dtype)


def _held_matmul_fake(a: Tensor, _: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((a.shape[0], data.shape[0]), dtype=rest[-1])


register("held_matmul", held_matmul, triton=held_matmul, fake=_held_matmul_fake)

HELD_GEMM = torch.ops.float8.held_matmul.default
"""The GEMM of compiled code that reads what is held."""
