"""The float8 data of a weight, held beside the weight from one optimizer step to the next.

`update_float8_weights` casts each weight once, to both layouts in one read; forwards, backwards,
recomputation and microbatches of training read that. Of a weight that ranks share, each holds its
part, under the scale of the whole. What was cast carries a stamp: the version counter of the
weight, its memory and its address, and those of the scale under delayed scaling. Each use compares.
Eager code casts again what does not match, and holds that. In compiled code ops compare, which
write nothing: the one that multiplies casts for itself what does not match.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from float8.config import ScalingGranularity
from float8.gemm import Gemm, matmul
from float8.kernels.runtime.ops import register
from float8.linear.across import reduction
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import quantize, scale_of, scales_of
from float8.quantize.spec import CastSpec, Part, Quantized
from float8.tensor import local_tensor

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Weights that are data in memory and nothing else: no shards, no wrappers."""


_DYNAMO_TELLS = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo knows export from compilation: that of torch 2.11 takes all for export."""


class ToHold(NamedTuple):
    """A weight, and how it is cast."""

    weight: Tensor
    """[N, K] float32, bfloat16 or float16; or a DTensor, of which this rank's part is cast."""

    spec: CastSpec
    scale: Tensor | None
    """The buffer of delayed scaling with the scale to use, or None."""

    group: str | None
    """Of the ranks that must be asked for the amax of the whole weight, or None."""


class HeldWeight(NamedTuple):
    """What a layer holds: its weight, and that in float8."""

    weight: Tensor
    operand: Quantized


@torch.inference_mode(False)
@torch.no_grad()
def dynamic_scales(weights: Sequence[ToHold]) -> list[Tensor | None]:
    """The scales for `hold`, found in a few kernels and an all-reduce; None where it finds them."""
    alike: dict[Any, list[int]] = {}
    for index, (weight, spec, _, group) in enumerate(weights):
        if spec.granularity is ScalingGranularity.TENSORWISE and not spec.delayed:
            key = weight.device, weight.dtype, spec, group
            alike.setdefault(key, []).append(index)
    found: list[Tensor | None] = [None] * len(weights)
    for (_, dtype, spec, group), indices in alike.items():
        tensors = [local_tensor(weights[index].weight) for index in indices]
        reduce = None if group is None else reduction((group,))
        for index, scale in zip(indices, scales_of(tensors, spec, dtype, reduce), strict=True):
            found[index] = scale
    return found


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def hold(of: ToHold, found: Tensor | None = None) -> Quantized:
    """Cast a weight to both layouts in one read, and stamp the result.

    Under delayed scaling nothing is recorded yet: the operand carries its amax, for each forward to
    record that would have cast. `found`: the scale, where it is dynamic and known.
    """
    state = None if of.scale is None else DelayedScale(of.scale, torch.zeros_like(of.scale))
    made = quantize(
        local_tensor(of.weight), of.spec, row=True, col=True, pad_rows=True, state=state,
        record=True, scale=found, reduce=None if of.group is None else reduction((of.group,)),
    )  # fmt: skip
    stamp = _stamp(of.weight, of.scale)
    for part in (made.row, made.col):
        part.data.__dict__[_MADE_OF] = of.weight, stamp
    return made._replace(amax=None if state is None else state.amax)


_MADE_OF = "float8_made_of"
"""An attribute of the data: the weight, and its stamp when it was cast."""


def _stamp(weight: Tensor, scale: Tensor | None) -> tuple[Any, ...]:
    """What changes when a weight or its scale does, as far as version counters tell.

    They count what ops write, and not what fused optimizers do, nor what goes through `weight.data`
    or a raw pointer. Of a DTensor some writes count here, others at its local tensor, and those of
    ops that take lists, or into what was detached, nowhere.
    """
    # The memory, too: what is freed and allocated anew may have the same address.
    return weight._version, *(
        None if x is None else (x._version, x.data_ptr(), weakref.ref(x.untyped_storage()))
        for x in (local_tensor(weight), scale)
    )


def expire(held: HeldWeight) -> None:
    """Have the next use cast the weight again."""
    for part in (held.operand.row, held.operand.col):
        part.data.__dict__[_MADE_OF] = held.weight, None


def can_hold(weight: Any) -> bool:
    """Whether `weight`, or this rank's part of it, is data in memory with a version counter."""
    plain = isinstance(weight, nn.Parameter) and type(local_tensor(weight)) in PLAIN
    return plain and not weight.is_meta and not weight.is_inference()


def current(operand: Quantized, of: ToHold, local: Tensor) -> Quantized | None:
    """What is held, cast again if its weight was written; None if a recording must not keep it.

    Compiled code gets what is held whatever its weight is now, with the scale of now: the GEMM is
    for `product_with_held`. `local`: the weight, or this rank's part of it.
    """
    exporting = torch.compiler.is_exporting()
    if exporting and (_DYNAMO_TELLS or not torch.compiler.is_dynamo_compiling()):
        return None  # or the program would hold the data, too
    if torch.compiler.is_compiling():
        return _with_current_scale(operand, of, local)
    if _is_recording(local):
        return None
    # Not where the old one lies, which a backward still to come may read.
    return operand if _is_current(operand.row.data, of.weight, of.scale) else hold(of)


def _is_current(data: Tensor, weight: Tensor, scale: Tensor | None) -> bool:
    """Whether `data` is what the weight is in float8 now; that of copies of the data is unknown.

    `weight`, if that knows none: where compiled code has a part of it, the whole counts. Compiled
    code that writes the weight counts that before it runs, or hands over another tensor.
    """
    whole, stamp = data.__dict__.get(_MADE_OF, (weight, None))
    return bool(stamp == _stamp(whole, scale))


def _is_recording(weight: Tensor) -> bool:
    """Whether operations go into a graph, which would keep the data for ever."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to import

    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return tracing or get_proxy_mode() is not None or _is_capturing(weight)


def _is_capturing(weight: Tensor) -> bool:
    """Whether a CUDA graph is recorded, in whose replays nobody compares."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


# ---------------------------------------------------------------- in compiled code


class HeldPart(NamedTuple):
    """A weight [N, K] as one GEMM of compiled code reads it: as it is held, or itself."""

    data: Tensor
    """As that of a `Part`: read if it is current."""

    scale: Tensor
    """Of the data; under one scale per tensor, the one that the weight is cast by, too."""

    weight: Tensor
    """[N, K], this rank's part of one that ranks share: cast if the data are not current."""

    state: Tensor | None
    """The buffer of delayed scaling that the data depend on, or None."""

    spec: CastSpec
    """Of the cast."""

    is_transposed: bool
    """Whether the data are column data."""


def product_with_held(a: Part, b: HeldPart, *, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    """`matmul` of `a` and a weight, which is cast here unless what is held of it is current."""
    (of_a, of_b), spec = gemm.granularities, b.spec
    return torch.ops.float8.held_matmul.default(  # type: ignore[no-any-return]
        a.data, a.scale, b.data, b.scale, b.weight, b.state, b.is_transposed, spec.power_of_2,
        of_a.value, of_b.value, gemm.use_fast_accum, gemm.emulate, out_dtype,
    )  # fmt: skip


@torch.no_grad()
def held_matmul(
    a: Tensor,
    a_scale: Tensor,
    data: Tensor,
    scale: Tensor,
    weight: Tensor,
    state: Tensor | None,
    is_transposed: bool,
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
        a: [M, K] float8, or [M, N] if `is_transposed`.
        a_scale: of `a`.
        data: as in `HeldPart`, as is what follows.
        scale: see there.
        weight: see there.
        state: see there.
        is_transposed: see there.
        power_of_2: of the cast.
        granularity_of_a: the value of a `ScalingGranularity`, as is the next.
        granularity: of the weight.
        use_fast_accum: as in `Gemm`, as is the next.
        emulate: see there.
        out_dtype: of the result, [M, N], or [M, K] if `is_transposed`.
    """
    of_b, b = ScalingGranularity(granularity), Part(data, scale)
    if _is_capturing(weight) or not _is_current(data, weight, state):
        known = scale if of_b is ScalingGranularity.TENSORWISE else None
        made = quantize(
            weight, CastSpec(data.dtype, of_b, power_of_2=power_of_2), scale=known,
            row=not is_transposed, col=is_transposed, pad_rows=True,
        )  # fmt: skip
        b = made.col if is_transposed else made.row
    gemm = Gemm(use_fast_accum, emulate, (ScalingGranularity(granularity_of_a), of_b))
    return matmul(Part(a, a_scale), b, gemm=gemm, out_dtype=out_dtype)


def _held_matmul_fake(a: Tensor, _: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((a.shape[0], data.shape[0]), dtype=rest[-1])


def _with_current_scale(operand: Quantized, of: ToHold, local: Tensor) -> Quantized:
    """Return what is held, with the scale and the amax of now if the weight has one scale."""
    row, col, amax = operand
    spec = of.spec
    if spec.granularity is not ScalingGranularity.TENSORWISE:
        return operand
    small = [row.scale] if amax is None else [row.scale, amax]
    small = torch.ops.float8.held_scale.default(
        local.detach(), row.data, small, of.scale, of.group, spec.power_of_2
    )
    return Quantized(
        Part(row.data, small[0]), Part(col.data, small[0]), None if amax is None else small[1]
    )


@torch.no_grad()
def held_scale(
    weight: Tensor,
    data: Tensor,
    small: list[Tensor],
    state: Tensor | None,
    group: str | None,
    power_of_2: bool,
) -> list[Tensor]:
    """Return the one scale of a weight, then under delayed scaling its amax.

    Args:
        weight: as in `HeldPart`, as is what follows.
        data: see there.
        small: both as they are held.
        state: see there.
        group: as in `ToHold`.
        power_of_2: of the cast.
    """
    if not _is_capturing(weight) and _is_current(data, weight, state):
        return [x.clone() for x in small]
    spec = CastSpec(data.dtype, power_of_2=power_of_2)
    known = None if state is None else DelayedScale(state, torch.zeros_like(state))
    reduce = None if group is None else reduction((group,))
    scale = scale_of(weight, spec, known, record=True, reduce=reduce)
    return [scale] if known is None else [scale, known.amax]


def _held_scale_fake(_: Tensor, data: Tensor, small: list[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in small]


register("held_matmul", held_matmul, triton=held_matmul, fake=_held_matmul_fake)
register("held_scale", held_scale, triton=held_scale, fake=_held_scale_fake)

HELD_GEMM = torch.ops.float8.held_matmul.default
"""The GEMM of compiled code that reads what is held."""
