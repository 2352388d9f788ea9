"""Weights that modules keep in float8 beside the Parameter, until the Parameter is written.

`update_float8_weights` casts each weight once; GEMMs in training read the result. Held data have a
mark: version counter, address, strides of the Parameter at the cast. Each use compares the mark
and, after a write, casts again: eager code holds the result, compiled code casts in the op that
multiplies. The mark is an attribute of the data. It cannot be a tensor on the CPU (for
CUDA graphs), a number (causes recompilation), the version counter of the data (has no place for an
address) or an attribute of the scale (Inductor may pass a copy, which lacks the attribute).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from float8.config import CastConfig, Float8Weights, ScalingType
from float8.gemm import GEMM_OPS, Gemm, matmul_of_any_size
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.private import dispatch_modes, make_fx_is_on, pre_dispatch_modes
from float8.products import PRODUCTS, Shape
from float8.quantize import Cast
from float8.scales import Operand
from float8.tensor.ranks import local_tensor

if TYPE_CHECKING:
    from float8.linear.functional import Call
    from float8.linear.plan import LinearPlan
    from float8.linear.weight import Fields

_DYNAMO_KNOWS_EXPORT = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo distinguishes export from compilation; in torch 2.11 it always says export."""


class Held(NamedTuple):
    """A Parameter and its kept casts: row data, None in backward, and column data (transposed)."""

    values: Tensor | Any = None  # the Parameter
    row_data: Tensor | Any = None
    row_scale: Tensor | Any = None
    col_data: Tensor | Any = None
    col_scale: Tensor | Any = None

    def output(
        self, a: Operand, shape: Shape, group_ends: Any, settings: "Call", out_dtype: torch.dtype
    ) -> tuple[Tensor, "Fields"]:
        """Return `a @ weight.T` by row data, kept (compiled: or new), and fields for backward."""
        b, gemm = Operand(self.row_data, self.row_scale), settings.plan.output
        if torch.compiler.is_compiling():
            y = self._times_held(a, b, shape, group_ends, settings, False, gemm, out_dtype)
        else:
            products = settings.products
            y = products.output(a, b, shape, *group_ends, gemm=gemm, out_dtype=out_dtype)
        return y, (self.values, None, None, self.col_data, self.col_scale)

    def grad_input(
        self, g: Operand, shape: Shape, group_ends: Any, settings: "Call", out_dtype: torch.dtype
    ) -> Any:
        """Return `g @ weight` by column data, kept (compiled: or new); `g` is grad_output."""
        b, gemm = Operand(self.col_data, self.col_scale), settings.plan.grad_input
        if torch.compiler.is_compiling():
            return self._times_held(g, b, shape, group_ends, settings, True, gemm, out_dtype)
        products = settings.products
        return products.grad_input(g, b, shape, *group_ends, gemm=gemm, out_dtype=out_dtype)

    def _times_held(self, a: Operand, b: Operand, shape: Shape, group_ends: Any, settings: "Call",
        col: bool, gemm: Any, out_dtype: torch.dtype) -> Any:  # fmt: skip
        return TIMES_HELD(
            *a, *b, self.values.detach(), group_ends[0] if group_ends else None,
            settings.products.stored_transposed, *shape, col,
            settings.casts.weight.config.power_of_2, gemm.packed(), out_dtype,
        )  # fmt: skip


def times_held(
    a: Tensor,  # float8 row data of the input or, if `col`, of grad_output
    a_scale: Tensor,
    b: Tensor,  # the kept cast of `weight`: row data or, if `col`, column data (transposed)
    b_scale: Tensor,
    weight: Tensor,  # the Parameter, no view: compilers rebuild views without version counters
    offs: Tensor | None,  # the ends of experts' groups of rows; None: `weight` is [N, K]
    stored_transposed: bool,  # whether experts' `weight` is [E, K, N], not [E, N, K]
    M: int,  # rows of the result
    N: int,  # columns of the result: K of the weight if `col`
    col: bool,  # compute grad_input, not the output
    power_of_2: bool,  # round the scales of a new cast up to powers of two
    gemm: str,  # settings, as `Gemm.packed` writes them
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply `a` by `b`, a kept cast of `weight`, or by a new cast if `weight` was written since.

    A new cast serves this call only: the op writes nothing, so a compiler may reorder calls. While
    a CUDA graph is captured, `weight` is always cast, as replays would not check for writes.
    """
    operand, products, unpacked = Operand(b, b_scale), PRODUCTS[weight.dim()], Gemm.unpacked(gemm)
    if _is_capturing(weight) or not is_current(b, weight):
        granularity: Any = unpacked.granularities[1]  # of operand `b`, the weight
        cast = Cast(CastConfig(ScalingType.DYNAMIC, granularity, b.dtype, power_of_2=power_of_2))
        values = weight.transpose(1, 2) if stored_transposed else weight
        quantized = products.quantize_weight(values, cast, row=not col, col=col, pad_rows=True)
        operand = quantized.col if col else quantized.row
    if offs is None:  # a linear layer, whose `a` may be empty
        return matmul_of_any_size(a, a_scale, *operand, M, N, gemm, out_dtype)
    return products.output(  # type: ignore[no-any-return]
        Operand(a, a_scale), operand, (M, N), offs, gemm=unpacked, out_dtype=out_dtype
    )


register(
    "times_held",
    times_held,
    fake=lambda a, *rest: a.new_empty(rest[6:8], dtype=rest[-1]),  # [M, N]
    flops=lambda a, *rest, **_: 2 * a[0] * a[1] * rest[7],  # `a` is its shape; N is rest[7]
)

TIMES_HELD = torch.ops.float8.times_held.default
GEMM_OPS.add(TIMES_HELD)


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def hold(parameter: Tensor, cast: Cast, values: Tensor | None = None) -> Held:
    """Return `parameter` with its casts to row data and column data (transposed), for a layer.

    `values`: a view of `parameter` to cast instead, such as of experts stored transposed. The data
    get a mark, by which `is_current` tells later whether `parameter` was written.
    """
    values, products = parameter if values is None else values, PRODUCTS[parameter.dim()]
    quantized = products.quantize_weight(values, cast, row=True, col=True, pad_rows=True)
    # `.data` is no view, as data of experts may be: AOTAutograd copies views, without the mark.
    row: Any = quantized.row.data.data
    col: Any = quantized.col.data.data
    # The mark keeps the storage alive, so that no new tensor gets its address.
    row._float8_version = col._float8_version = _version_of(parameter), parameter.untyped_storage()
    return Held(parameter, row, quantized.row.scale, col, quantized.col.scale)


def _version_of(weight: Tensor) -> tuple[Any, ...]:
    """Return a mark that changes when ops write `weight`: version counter, address and strides.

    It misses writes by fused optimizers, into `weight.data`, and by a raw pointer.
    """
    return weight._version, weight.data_ptr(), weight.stride()


def is_current(data: Tensor, weight: Tensor) -> bool:
    """Return whether `weight` has the `_version_of` marked on cast `data`; False if unmarked."""
    mark = getattr(data, "_float8_version", None)
    return mark is not None and mark[0] == _version_of(weight)


def can_be_held(weight: Any) -> bool:
    """Return whether `weight` is a plain Parameter, with storage and a counter of writes to it."""
    return type(weight) is nn.Parameter and not weight.is_meta and not weight.is_inference()


def goes_into_graph(weight: Tensor) -> bool:
    """Return whether a graph is being recorded that would keep casts of `weight` as constants.

    True under `torch.jit.trace`, `make_fx`, CUDA graph capture, export (by Dynamo: torch >= 2.13).
    """
    exporting = torch.compiler.is_exporting()
    if torch.compiler.is_compiling():
        return exporting and (_DYNAMO_KNOWS_EXPORT or not torch.compiler.is_dynamo_compiling())
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    can_count = dispatch_modes is not None and pre_dispatch_modes is not None
    no_mode = can_count and not dispatch_modes() and not pre_dispatch_modes()  # hence no make_fx
    return exporting or tracing or (not no_mode and make_fx_is_on()) or _is_capturing(weight)


def _is_capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


class HoldsWeights(nn.Module):
    """Mixin of float8 modules that keeps casts of weights until a write (`Float8Weights.HELD`)."""

    _float8_plan: "LinearPlan"
    _float8_not_copied: ClassVar[frozenset[str]] = frozenset({"_float8_held"})
    _float8_noun: str
    _float8_held: tuple[Held, ...] = ()  # weights not in it are cast at each use
    _float8_why_never_held: ClassVar[str | None] = None  # why a subclass always does that

    def _float8_start_state(self) -> None:
        super()._float8_start_state()  # type: ignore[misc]
        self._float8_held = ()

    def _float8_hold(self) -> dict[str, str]:
        """Cast weights not on meta, keep the casts; return {name: reason} of those never kept."""
        self._float8_held = ()  # frees the old data before casting
        held_weights, reasons = [], {}
        for name in self._float8_names():  # type: ignore[operator]
            parameter: Any = self._parameters[name]
            reason = self._float8_why_never_held
            if reason or not (parameter.is_meta or can_be_held(parameter)):
                reasons[name] = reason or f"a {type(parameter).__name__}"
            elif not parameter.is_meta:  # on meta it is neither held nor named
                values: Any = self._float8_weight(name)  # type: ignore[operator]
                held_weights.append(hold(parameter, self._float8_plan.casts.weight, values))
        self._float8_held = tuple(held_weights)
        return reasons

    def _float8_held_of(self, parameter: Any, values: Tensor | None = None) -> Held | None:
        """Return the kept casts of `parameter`, made again if it was written; or None.

        None, with which the caller must cast: if none are kept, if `goes_into_graph(parameter)`, or
        in evaluation, as version counters miss averaged weights that are written to `.data`. In
        compiled code the GEMMs check for writes. `values`: a view of `parameter` to cast instead.
        """
        for held in self._float8_held:
            if held.values is parameter:
                break
        else:  # none: FSDP or `functional_call` replaced the Parameter
            return None
        if not self.training or goes_into_graph(parameter):
            return None
        if torch.compiler.is_compiling() or is_current(held.row_data, parameter):
            return held
        # Into new memory: a backward still to come may read the old data.
        fresh = hold(parameter, self._float8_plan.casts.weight, values)
        self._float8_held = tuple(fresh if x is held else x for x in self._float8_held)
        return fresh

    def _float8_attach(self) -> None:
        """Count one more optimizer; mark kept casts as outdated, so that their uses cast again."""
        super()._float8_attach()  # type: ignore[misc]
        for held in self._float8_held:
            for data in (held.row_data, held.col_data):
                data._float8_version = None  # type: ignore[union-attr]

    def _float8_detach(self) -> None:
        """Count one optimizer less; free kept casts, which another one's next step makes again."""
        super()._float8_detach()  # type: ignore[misc]
        self._float8_held = ()

    def _float8_words(self) -> list[str]:
        words: list[str] = super()._float8_words()  # type: ignore[misc]
        if not self._float8_held:
            return words
        return [f"{self._float8_noun} {Float8Weights.HELD.value} in float8", *words]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a Parameter; free all kept casts of weights, since it may replace a weight."""
        super().register_parameter(name, param)
        self._float8_held = ()

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load values, then free the float8 casts that FSDP2 shards keep for their next gathers.

        If kept, only ranks whose shards FSDP2 pads would cast anew, and wait for others' amaxes.
        """
        super()._load_from_state_dict(*args)
        for shard in map(local_tensor, self._parameters.values()):
            if hasattr(shard, "forget_cast"):
                shard.forget_cast()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._float8_held = ()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
