"""`Watch`: statistics of the casts of a model, such as underflow, in every n-th training step."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8.autograd import new_alias
from float8.config import require_module
from float8.formats import FLOAT8_MAX
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.private import in_eager_mode
from float8.linear import Float8Module
from float8.linear.functional import autocast_dtype
from float8.linear.plan import Casts
from float8.names import plain_name, unwrapped
from float8.products import PRODUCTS
from float8.quantize import Cast
from float8.ranks import mesh_device_type, unlike
from float8.tensor import Float8Tensor, high_precision, is_dtensor, local_tensor
from float8.tensor.ranks import amax_over, sharding_groups

ROLES = "input", "weight", "grad_output"


def of_this_rank(x: Any, cast: Cast | None) -> tuple[Tensor, Cast | None]:
    """Return this rank's part of `x` in high precision, and `cast`, by which to quantize it.

    If `x` is a DTensor, the returned `cast` (unless None) all-reduces amaxes over mesh dims
    that do not replicate `x`. With a partial placement, the part is all of `x`, summed over ranks.
    """
    if is_dtensor(x):
        cast = cast and cast._replace(reduce=amax_over(sharding_groups(x)))
        if any(placement.is_partial() for placement in x.placements):
            x = x.full_tensor()  # local values are not summed yet
    x = local_tensor(high_precision(x))
    return x.to_original_precision() if isinstance(x, Float8Tensor) else x, cast


def as_multiplied(x: Any, weight: Any) -> Any:
    """Return input `x` in autocast's dtype (if off, that of `weight`); unchanged if in float8."""
    if isinstance(local_tensor(x), Float8Tensor):
        return x
    return x.to(autocast_dtype(x.device) or getattr(weight, "dtype", x.dtype))


def parameter_name(experts: nn.Module, weight: Any) -> str:
    """Return the name of the Parameter of `experts` at the address of `weight`; "" if none is."""
    address, named = local_tensor(weight).data_ptr(), experts.named_parameters(recurse=False)
    return next((name for name, p in named if local_tensor(p).data_ptr() == address), "")


def count(x: Tensor, data: Tensor, bound: Tensor | None, all_count: bool) -> Tensor:
    """Count elements of `x` that are 0 in `data` (`x` cast to float8), saturate or are not finite.

    `data` has the shape of `x`. Absolute values above `bound` ([1] or []) saturate; with None, no
    value does. If `all_count`, zeros of `x` count as nonzero: for `x` that was in float8 before.
    Returns [6] float64: the amax, then the numbers of elements, of nonzero values, of nonzero
    values that are 0 in `data`, of finite values that saturate, and of non-finite values.
    """
    magnitude, cast_to_0 = x.abs(), data.view(torch.uint8) & 127 == 0  # the sign bit may be set
    nonzero, finite = (x != 0) | all_count, magnitude < torch.inf
    amax = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    elements = torch.full_like(amax, x.numel(), dtype=torch.float64)
    # `finite[:0]` sums to 0. `reshape(1)`: a 0-dim bound would be rounded to the dtype of `x`.
    saturated = finite[:0] if bound is None else finite & (magnitude > bound.reshape(1))
    counts = nonzero.sum(), (nonzero & cast_to_0).sum(), saturated.sum(), elements - finite.sum()
    return torch.stack([number.double() for number in (amax, elements, *counts)])


def tally(numbers: Tensor, totals: Tensor, calls: Tensor, counted: bool) -> None:
    """Add `numbers`, a result of `measure`, to `totals` in place, and increment `calls` in place.

    `calls`, 0-dim int64 on the CPU, counts calls for all layers, in forward or in backward: n, its
    new value, numbers this call. `totals` [8] float64 holds, over calls with it: the largest 1 / n,
    which is the first call's; that of calls with a non-finite value, or 0; the largest amax; and
    sums of the five counts in `numbers`. If `counted` is False, only the first two may change.
    """
    calls += 1
    numbers = numbers.to(totals.device)
    inverse_calls = totals.new_full((2,), 1 / int(calls))
    inverse_calls[1] *= numbers[5] > 0  # the count of non-finite values
    row = torch.cat([inverse_calls, numbers if counted else torch.zeros_like(numbers)])
    torch.maximum(totals[:3], row[:3], out=totals[:3])
    totals[3:] += row[3:]


# Custom ops, which Dynamo does not trace: their Python `int`s would add guards to compiled code.
register("count", count, fake=lambda x, *_: x.new_empty((6,), dtype=torch.float64))
register("tally", tally, fake=lambda *_: None, writes=("totals", "calls"))
COUNT, TALLY = torch.ops.float8.count.default, torch.ops.float8.tally.default


@torch.no_grad()
def measure(x: Any, cast: Cast | None, col: bool = False, offs: Tensor | None = None) -> Tensor:
    """Quantize this rank's part of `x` by `cast`; count values that underflow or saturate.

    `x` is [..., C]; with `offs`, the group offsets, weights [E, N, K] or tokens [R, C] of experts;
    rows after the last group do not count. `col`: quantize the transposed copy. If `x` is in float8
    already, its zeros count as underflow. If `cast` is None, all but the last number are 0.
    Returns [6] float64: the amax, then the numbers of elements, of nonzero values, of nonzero
    values that become 0, of finite values that saturate, and of values that are not finite.
    """
    in_float8 = isinstance(local_tensor(x), Float8Tensor)
    x, cast = of_this_rank(x, cast)
    in_group = None  # or [R, 1] bool: rows after the last group belong to no expert
    if offs is None:
        x = x.reshape(-1, x.shape[-1])
    elif x.dim() == 2:
        in_group = torch.arange(x.shape[0], device=x.device)[:, None] < offs[-1]
        x = x.where(in_group, 0)
    if cast is None:
        nonfinite = x.isfinite().logical_not().sum().double()
        return torch.nn.functional.pad(nonfinite[None], (5, 0))  # the last number of `count`
    if offs is not None:  # each group and each expert has its own scales
        cast = cast._replace(reduce=None)
    if cast.source is not None:  # delayed scaling: the amax is recorded by the layer's own cast
        cast = cast._replace(source=cast.source.with_new_amax())
    if x.dim() == 2 and offs is not None:
        quantized = PRODUCTS[3].quantize_rows(x, cast, offs, row=not col, col=col)
    else:  # `PRODUCTS[3]` quantizes for experts, `PRODUCTS[2]` for linear layers
        quantized = PRODUCTS[x.dim()].quantize_weight(x, cast, row=not col, col=col)
    data, scale, *_ = quantized.col if col else quantized.row
    x = x.mT if col else x  # in the order of `data`, which may be padded
    bound = None  # dynamic scaling saturates no value
    if cast.source is not None:
        bound = scale * FLOAT8_MAX[cast.config.dtype] * (1 + 2.0**-20)  # scales are rounded
    numbers: Tensor = COUNT(x, data[..., : x.shape[-2], : x.shape[-1]], bound, in_float8)
    if in_group is not None:
        numbers[1] = in_group.sum() * x.shape[-1]  # the number of elements
    return numbers


def over_ranks(rows: Tensor, keys: Sequence[Any], maxima: int, group: Any) -> list[list[float]]:
    """All-reduce `rows` [len(keys), n] over `group` (None: all ranks); return its rows as lists.

    The first `maxima` columns, >= 0, are reduced by max in float32, others by sum. `keys` name the
    rows; raises `ValueError` if ranks have others. No reduction without a default process group.
    """
    if dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD if group is None else group
        if (differing := unlike([str(key) for key in keys], [group], rows.device)) is not None:
            got = f"model: got other layers than on other ranks, {differing[:4]}, expected the same"
            raise ValueError(f"{got}; give a group= of ranks that train the same layers")
        largest, sums = rows[:, :maxima].float().contiguous(), rows[:, maxima:].contiguous()
        dist.all_reduce(sums, group=group)
        rows = torch.cat([amax_over([group])(largest).double(), sums], 1)  # keeps a NaN of any rank
    return rows.tolist()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the mesh, else of the first Parameter, else raise a `ValueError`."""
    device_type, first = mesh_device_type(model.parameters()), next(model.parameters(), None)
    if first is None:
        raise ValueError(f"model: got a {type(model).__name__} without Parameters, expected some")
    return torch.device(device_type) if device_type else first.device


class _Observer:
    """Callable that a layer runs in each forward of a watched step, to add up statistics."""

    def __init__(self, layer: Any, fwd_calls: Tensor, bwd_calls: Tensor) -> None:
        device = next((p.device for p in layer.parameters(False) if not p.is_meta), "cpu")
        self.weights = set[str]()  # names of weights that were measured, each once in a step
        # Totals and calls, see `tally`: tensors, as compiled code recompiles for each new number.
        self.totals = dict[tuple[str, str], tuple[Tensor, Tensor]]()
        for name in ("", *layer._float8_names()):  # "" of a linear layer
            for role, calls in zip(ROLES, (fwd_calls, fwd_calls, bwd_calls), strict=True):
                self.totals[name, role] = torch.zeros(8, dtype=torch.float64, device=device), calls

    def __call__(self, layer: Any, casts: Casts, x: Any, weight: Any, y: Any, offs: Any = None,
        name: str = "") -> Any:  # fmt: skip
        """In grad mode, measure casts of `x`, `weight` and, in backward, of the gradient of `y`.

        Called by `layer` with its output `y`. Returns `y`, or an alias whose backward measures. For
        experts, `offs` are the group offsets, and `name` is the weight's attribute ("": find it).
        """
        # Without grad (evaluation, reentrant checkpoints' first forward), only the order counts.
        compiling, counted = torch.compiler.is_compiling(), torch.is_grad_enabled()
        if offs is not None and not compiling:  # experts; `name` may be empty
            name = name or parameter_name(layer, weight)
        input_cast = casts.input if counted and casts.input.config.is_float8 else None
        x = as_multiplied(x, weight)
        TALLY(measure(x, input_cast, offs=offs), *self.totals[name, "input"], counted)
        if counted and casts.weight.config.is_float8 and (compiling or name not in self.weights):
            TALLY(measure(weight, casts.weight, offs=offs), *self.totals[name, "weight"], counted)
            if not compiling:  # compiled code would guard on the set, so it measures in each call
                self.weights.add(name)
        if y.requires_grad and casts.grad_output.config.is_float8:
            function: Any = _MeasureGradient
            y = function.apply(y, casts.grad_output, offs, *self.totals[name, "grad_output"])
        return y


class _MeasureGradient(torch.autograd.Function):
    """Identity whose backward measures grad_output; a hook on `y` could break compiled graphs."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, cast: Cast, offs: Any, totals: Tensor, calls: Tensor) -> Any:
        ctx.arguments = cast, offs, totals, calls
        return new_alias(y)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        cast, offs, totals, calls = ctx.arguments
        TALLY(measure(grad_output, cast, offs=offs), totals, calls, True)
        return grad_output, None, None, None, None


def _remove(layer: Any, observer: _Observer) -> None:
    others = tuple(x for x in vars(layer).pop("_float8_observers", ()) if x is not observer)
    if others:
        layer._float8_observers = others


class Watch(contextlib.ExitStack):
    """Measure underflow, saturation, amax, and NaN or Inf of a model's casts in every n-th step.

    Call `step()` once per optimizer step, after the last backward: it returns the statistics of a
    watched step. Only watched steps take longer: in these, `model` and its modules run in eager
    mode even if compiled. Compiled functions that call `model`, and an `OptimizedModule` around
    `model`, are compiled once more. A watch ends by `close()`, at the end of a `with` block, or by
    garbage collection. A model may have several; its copies have none. See docs/nan_or_drift.md.

    Args:
        model: the converted model to watch; may be compiled, under FSDP2, tensor parallel or DDP.
        every: the interval in steps; 100 watches the steps 100, 200, ..., 1 watches every step.
        group: `ProcessGroup` of the ranks with the same layers (a pipeline stage); None: all ranks.

    Raises a `TypeError` if `model` is not an `nn.Module`, or `every` not an int >= 1.
    """

    def __init__(self, model: nn.Module, every: int = 100, *, group: Any = None) -> None:
        super().__init__()
        require_module(model, "model")
        if not isinstance(every, int) or every < 1:
            raise TypeError(f"every: got {every!r}, expected a number of steps >= 1")
        self._model, self._every, self._group, self._steps = model, every, group, 0
        self._begin()

    def step(self) -> dict[str, float]:
        """End a training step, after its last backward; return statistics over ranks of `group`.

        Returns `{}` if the step was not watched, else four numbers for each layer (or weight of
        experts) and role that casts in training: `input` and `weight` as cast for GEMM `output`,
        `grad_output` for `grad_input`. All zeros of tensors that come in float8 are underflow.

        - `"layers.0.attention.query/input/amax"`: the largest absolute value, NaN if one is NaN.
        - `.../underflow`: the share of nonzero values that become 0.
        - `.../saturation`: the share of nonzero values that saturate; 0 unless scaling is delayed.
        - `.../nonfinite`: the share of all values that are NaN or Inf.

        First are `input` and `weight` of layers in the order of forward, then `grad_output` in that
        of backward. A layer's first `input` (`grad_output`) with NaN or Inf counts, or its first.

        Raises a `ValueError` if ranks of `group` have different layers, or `model` no Parameters.
        """
        self._steps += 1
        self.close()
        numbers: dict[str, float] = {}
        if self._steps % self._every == 0:
            totals_by_key = {  # (name, role) -> totals; may be empty, so `rows` start with zeros
                (f"{name}.{weight_name}" if weight_name else name, role): totals
                for name, observer in self._observers.items()
                for (weight_name, role), (totals, _) in observer.totals.items()
            }
            zeros = torch.zeros(8, dtype=torch.float64, device=device_of(self._model))
            rows = torch.stack([zeros, *(x.to(zeros.device) for x in totals_by_key.values())])
            reduced = over_ranks(rows, ["", *totals_by_key], maxima=3, group=self._group)
            table = dict(zip(totals_by_key, reduced[1:], strict=True))

            def order(key: tuple[str, str]) -> tuple[bool, float]:
                in_backward = key[1] == "grad_output"
                first, first_bad, *_ = table[key if in_backward else (key[0], "input")]
                return in_backward, -(first_bad or first)  # inverse numbers of calls, see `tally`

            for name, role in sorted(table, key=order):
                _, _, amax, elements, nonzero, underflow, saturated, nonfinite = table[name, role]
                if elements:  # else no such tensor was cast in training
                    key = f"{name}/{role}"
                    numbers[f"{key}/amax"] = amax
                    numbers[f"{key}/underflow"] = underflow / max(nonzero, 1)
                    numbers[f"{key}/saturation"] = saturated / max(nonzero, 1)
                    numbers[f"{key}/nonfinite"] = nonfinite / elements
        self._begin()
        return numbers

    def _begin(self) -> None:
        """If the next step is to be watched, add observers to layers; let `model` run eagerly."""
        if (self._steps + 1) % self._every:
            return
        self._observers = dict[str, _Observer]()
        fwd_calls, bwd_calls = (torch.tensor(0, device="cpu") for _ in range(2))
        for fqn, layer in unwrapped(self._model).named_modules():
            if isinstance(layer, Float8Module):
                observer = _Observer(layer, fwd_calls, bwd_calls)
                layer._float8_observers += (observer,)
                self.callback(_remove, layer, observer)
                self._observers[plain_name(fqn) or "(root)"] = observer
        self.enter_context(in_eager_mode(self._model))

    def __del__(self) -> None:
        self.close()
