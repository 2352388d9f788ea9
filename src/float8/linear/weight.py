"""A weight in one call, and weights that modules hold in float8 until they are written.

`update_float8_weights` casts each weight once; all of training reads that. Data that are held have
a mark: version counter, address and strides of the Parameter that they were made of. Each use
compares; what does not match is cast again: by eager code, which holds the result, in compiled code
by the op that multiplies. The mark is an attribute of the data. All else failed to reach that op:
- a tensor on the CPU, which CUDA graphs refuse, or a number, which makes code compile anew;
- the version counter of the data: it cannot say where the weight lies;
- an attribute of the scale: Inductor may hand on a copy, as AOTAutograd does of a view.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from float8.config import CastConfig, Float8LinearConfig, Float8Weights, ScalingGranularity
from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.gemm import Gemm, grouped_matmul, matmul_of_any_size
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.private import dispatch_modes, make_fx_is_on, pre_dispatch_modes
from float8.linear.plan import LinearPlan
from float8.quantize import Cast, padded, quantize, to_col
from float8.scales import Operand
from float8.tensor import Float8Tensor, dequantise, high_precision
from float8.tensor.gather import gathered_like
from float8.tensor.wrapper import PLAIN

_DYNAMO_TELLS = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo knows export from compilation: that of torch 2.11 takes all for export."""


class Weight(NamedTuple):
    """A weight [N, K] in one call, or those of experts [E, N, K], and what there is in float8.

    there is                  kind                           handed to backward
    values                    cast at each use               values; forward's scale, if it is one
    values, row and col data  held, values: the Parameter    values, col data
    row data, not padded      gathered, or in float8 only    row data

    `save_for_backward` saves them: on a context they would live as long as a loss, and held weights
    would be there twice. Gathered row data are a view of FSDP2's buffer, filled again in backward.
    """

    values: Tensor | Any = None
    row_data: Tensor | Any = None
    row_scale: Tensor | Any = None
    col_data: Tensor | Any = None
    col_scale: Tensor | Any = None

    def row(self, cast: Cast) -> Operand:
        """Return row data: a cast made here, where there are none."""
        if self.row_data is None:
            traced = cast.state is not None  # it records outside of the cast, which may be repeated
            return quantize(self.values, cast, row=True, pad_rows=True, traced=traced).row
        row = Operand(self.row_data, self.row_scale)
        if self.values is not None:
            return row
        data, scale = padded(row, cast.how.scaling_granularity)
        of_rows = data.dim() == 3 and cast.how.scaling_granularity.width is None
        return Operand(data, scale.squeeze(-1) if of_rows else scale)  # experts': [E, N]

    def col(self, cast: Cast, after: Tensor) -> Operand:
        """Return column data: a cast made here, or row data transposed, where there are none.

        A compiler must not cast before `after`, the scale of the gradient, exists. Else it casts in
        forward and keeps the result until backward, under FSDP that of every whole weight.
        """
        if self.col_data is not None:
            return Operand(self.col_data, self.col_scale)
        if self.values is None:
            return to_col(Operand(self.row_data, self.row_scale), cast.how, after)
        if self.row_scale is not None:
            cast = Cast(cast.how, scale=self.row_scale)
        return quantize(self.values, cast, col=True, after=after).col


def times_held(
    a: Tensor,
    a_scale: Tensor,
    data: Tensor,
    scale: Tensor,
    weight: Tensor,
    offs: Tensor | None,
    stored_transposed: bool,
    M: int,
    N: int,
    col: bool,
    power_of_2: bool,
    granularity_of_a: str,
    granularity: str,
    use_fast_accum: bool,
    emulate: bool,
    powers_of_2: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply row data by data that are held of a weight, or that are cast here if it was written.

    It writes nothing, so a compiler may order calls as it likes. A CUDA graph, which is replayed
    without this code, captures the cast.

    `data` and `scale` are row data, or column data if `col`. `weight` is the Parameter: [N, K],
    [E, N, K], or [E, K, N] if `stored_transposed`. It is not a view: a compiler may rebuild a view,
    and the new one misses the version counter. The result is [M, N], for column data [M, K].
    """
    b, covers = Operand(data, scale), ScalingGranularity(granularity)
    if _is_capturing(weight) or not is_current(data, weight):
        how = CastConfig(target_dtype=data.dtype, scaling_granularity=covers, power_of_2=power_of_2)
        values = weight.transpose(1, 2) if stored_transposed else weight
        made = quantize(values, Cast(how), row=not col, col=col, pad_rows=True)
        b = made.col if col else made.row
    if offs is not None:
        both = ScalingGranularity(granularity_of_a), covers
        gemm = Gemm(use_fast_accum, emulate, powers_of_2, both)
        return grouped_matmul(Operand(a, a_scale), b, offs, gemm=gemm, out_dtype=out_dtype)
    return matmul_of_any_size(
        a, a_scale, *b, M, N, granularity_of_a, granularity, use_fast_accum, emulate,
        powers_of_2, out_dtype,
    )  # fmt: skip


register(
    "times_held",
    times_held,
    fake=lambda a, *rest: a.new_empty(rest[6:8], dtype=rest[-1]),
    flops=lambda a, *rest, **_: 2 * a[0] * a[1] * rest[7],
)

TIMES_HELD = torch.ops.float8.times_held.default


# ---------------------------------------------------------------- held until they are written


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def hold(values: Tensor, cast: Cast, parameter: Tensor | None = None) -> Weight:
    """Cast a Parameter, or its view `values`, to both layouts; the result has the Parameter."""
    parameter = values if parameter is None else parameter
    made = quantize(values, cast, row=True, col=True, pad_rows=True)
    # `.data`: no views, as experts' may be.
    row: Any = made.row.data.data
    col: Any = made.col.data.data
    # Keep the storage alive, so that no new tensor gets its address.
    row._float8_version = col._float8_version = _version_of(parameter), parameter.untyped_storage()
    return Weight(parameter, row, made.row.scale, col, made.col.scale)


def _version_of(weight: Tensor) -> tuple[Any, ...]:
    """Return what changes when ops write a weight.

    Not what fused optimizers write, nor what goes through `weight.data` or a raw pointer.
    """
    return weight._version, weight.data_ptr(), weight.stride()


def is_current(data: Tensor, weight: Tensor) -> bool:
    """Whether data with a mark, no copy of them, are of the values that a weight has now."""
    mark = getattr(data, "_float8_version", None)
    return mark is not None and mark[0] == _version_of(weight)


def can_be_held(weight: Any) -> bool:
    """Whether a weight is data in memory with a version counter."""
    return type(weight) is nn.Parameter and not weight.is_meta and not weight.is_inference()


def goes_into_graph(weight: Tensor) -> bool:
    """Whether operations go into a graph, or an exported program, which would keep float8 data."""
    exporting = torch.compiler.is_exporting()
    if torch.compiler.is_compiling():
        return exporting and (_DYNAMO_TELLS or not torch.compiler.is_dynamo_compiling())
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    tells = dispatch_modes is not None and pre_dispatch_modes is not None
    no_mode = tells and not dispatch_modes() and not pre_dispatch_modes()
    return exporting or tracing or (not no_mode and make_fx_is_on()) or _is_capturing(weight)


def _is_capturing(weight: Tensor) -> bool:
    """Whether a CUDA graph is captured, in whose replays nobody compares."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


PREFIX = "_float8_"
"""Names of ours on layers and experts begin with it: all others are their user's."""


@functools.cache
def our_names(base: type) -> frozenset[str]:
    """Return the names of attributes that are ours, in modules of class `base`."""
    every = {"_float8_config", "_float8_plan", *dir(base)}
    return frozenset(name for name in every if name.startswith(PREFIX))


class Float8Module(nn.Module):
    """The base of linear layers and experts in float8: what they have from step to step."""

    _float8_config: Float8LinearConfig
    _float8_plan: LinearPlan
    _float8_source_class: ClassVar[type[nn.Module]]
    """The class that it had, and has again after `convert_to_high_precision`."""
    _float8_held: tuple[Weight, ...] = ()
    """The weights that are kept in float8 until they are written; others are cast on the fly."""
    _float8_attached = 0
    """The number of optimizers it is attached to; if any is, no sync can be missing."""
    _float8_why_never_held: ClassVar[str | None] = None
    """The reason why its weights are cast at each use."""
    _float8_observers: tuple[Callable[..., Any], ...] = ()
    """Functions that see what is multiplied and return the output, as those of a `Watch`."""
    _float8_not_copied: ClassVar[frozenset[str]] = frozenset(
        {"_float8_held", "_float8_attached", "_float8_observers"}
    )
    """Attributes that belong to this training and this optimizer: copies do not get them."""

    def _float8_set_held(self, *held: Weight) -> None:
        self._float8_held = held

    def _float8_held_or_recast(self, parameter: Any, again: Callable[[], Weight]) -> Weight | None:
        """Return what is held of a Parameter, cast again if that was written; None: nothing is.

        In compiled code the GEMMs check whether it is current. Evaluation casts the weight as it
        is: averages are written into `weight.data`, past version counters.

        `again` casts it into new memory: a backward still to come may read the old data.
        """
        for held in self._float8_held:
            if held.values is parameter:
                break
        else:  # FSDP or `functional_call` replaced the Parameter
            return None
        if not self.training or goes_into_graph(parameter):
            return None
        if torch.compiler.is_compiling() or is_current(held.row_data, parameter):
            return held
        made = again()
        self._float8_held = tuple(made if each is held else each for each in self._float8_held)
        return made

    @property
    def _float8_keeps_no_master(self) -> bool:
        """Whether the weights are in float8 only."""
        return self._float8_config.float8_weights is Float8Weights.ONLY

    def _float8_without_masters(self) -> dict[str, Float8Tensor]:
        """Return the weights that are in float8 only, by their names."""
        if "_float8_config" not in vars(self) or not self._float8_keeps_no_master:
            return {}
        parameters: Any = self._parameters.items()
        return {name: x for name, x in parameters if isinstance(x, Float8Tensor)}

    @torch.inference_mode(False)
    def _float8_drop_state(self) -> None:
        """Dequantise weights that are in float8 only."""
        for name, weight in self._float8_without_masters().items():
            self._parameters[name] = nn.Parameter(dequantise(weight), requires_grad=False)

    @torch.inference_mode(False)
    def _float8_drop_master(self, *names: str) -> None:
        """Cast weights that are to be in float8 only, which take the place of the Parameters."""
        for name in names or ("weight",):
            weight = getattr(self, name).detach()
            made = in_float8_only(weight, self._float8_plan.casts.weight)
            self._parameters[name] = nn.Parameter(made, requires_grad=False)

    def _float8_become_high_precision(self) -> None:
        """Turn this very object back into what it was made of."""
        self._float8_drop_state()
        self.__dict__.pop("forward", None)  # that of its class, which accelerate leaves behind
        source = self._float8_source_class  # may be its own attribute
        cls: Any = type(self)
        for name in our_names(cls) & vars(self).keys():
            del self.__dict__[name]
        self.__class__ = source  # type: ignore[assignment]

    def _float8_attach(self) -> None:
        """Note that one more optimizer steps the module; the next use casts held weights again."""
        self._float8_attached += 1
        for held in self._float8_held:
            row: Any = held.row_data
            col: Any = held.col_data
            row._float8_version = col._float8_version = None

    def _float8_detach(self) -> None:
        """End one attachment, and what is held."""
        self._float8_attached, self._float8_held = max(self._float8_attached - 1, 0), ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._float8_held = ()
        # Another dtype would have them dequantised.
        alone = {name: moved(x, fn) for name, x in self._float8_without_masters().items()}
        self._parameters.update(dict.fromkeys(alone))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, weight in alone.items():
            self._parameters[name] = nn.Parameter(weight, requires_grad=False)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in [] if keep_vars else map(prefix.__add__, self._parameters):
            if key in destination:
                destination[key] = high_precision(destination[key])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        before, given = {**self._parameters}, {}
        for name, old in before.items():
            if (values := state_dict.get(prefix + name)) is not None:
                given[prefix + name] = self._float8_loadable(old, values, local_metadata)
        super()._load_from_state_dict(state_dict | given, prefix, local_metadata, *rest)
        for name, old in before.items():
            new: Any = self._parameters.get(name)
            if new is not None and new is not old:  # by assign=True
                self._parameters[name] = gathered_like(new, old)

    def _float8_loadable(self, old: Any, values: Any, local_metadata: dict[str, Any]) -> Any:
        """Return values of a checkpoint: in float8 if those of `old` are in it alone, else not."""
        if not self._float8_keeps_no_master:
            return dequantise(values) if isinstance(values, Float8Tensor) else values
        # Not a bias, nor what torch says that it does not fit.
        fits = isinstance(old, Float8Tensor) and getattr(values, "shape", None) == old.shape
        if type(values) not in PLAIN or not fits or values.dtype not in HIGH_PRECISION_DTYPES:
            return values
        if not local_metadata.get("assign_to_params_buffers", False):  # as `copy_` would round
            values = values.to(old.dtype)
        values = values if old.is_meta else values.to(old.device)
        return in_float8_only(values, self._float8_plan.casts.weight)

    def __getstate__(self) -> Any:
        theirs = getattr(super(), "__getstate__", None)  # Python 3.10 has none for all objects
        state = self.__dict__ if theirs is None else theirs()
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if name not in self._float8_not_copied}


# ---------------------------------------------------------------- in float8 only


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def in_float8_only(weight: Tensor, cast: Cast) -> Float8Tensor:
    """Return `weight`, [N, K] or [E, N, K] of experts, as a `Float8Tensor`."""
    if isinstance(weight, Float8Tensor):
        return weight
    made = quantize(weight, cast, row=True).row
    *_, N, K = weight.shape
    covers, scale, data = cast.how.scaling_granularity, made.scale, made.data[..., :N, :K]
    if weight.dim() == 3 and covers.width is None:  # experts', of which rows may be alike
        scale, covers = scale.unsqueeze(-1), ScalingGranularity.AXISWISE
    if not covers.one_scale:  # runs have scales of padded rows, squares of experts more columns
        *_, rows, columns = covers.scales(tuple(weight.shape))
        scale = scale[..., :rows, :columns].contiguous()
    if data.shape != made.data.shape:  # no part of a tensor: `load_state_dict` writes scales, too
        data = data.clone(memory_format=torch.contiguous_format)
    return Float8Tensor(data, scale, weight.dtype, covers)


def moved(weight: Float8Tensor, fn: Callable[[Tensor], Tensor]) -> Float8Tensor:
    """Apply `fn`, as `nn.Module._apply` takes it, to the bits; a new dtype is that it reports."""
    like = fn(torch.empty((), dtype=weight.dtype, device=weight.device))

    def move(x: Tensor) -> Tensor:
        bits = torch.uint8 if x.dtype in FLOAT8_MAX else torch.int32
        made = fn(x.view(bits))
        # Some change the dtype of integers, too.
        return made.view(x.dtype) if made.dtype == bits else x.to(like.device)

    data, scale = move(weight._data), move(weight._scale)
    return Float8Tensor(data, scale, like.dtype, weight._granularity)
