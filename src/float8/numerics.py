"""Watch a training: what casts do to the values of layers, every so many steps."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8.autograd import new_alias
from float8.checkpoints.names import plain_name, unwrapped
from float8.config import require_module
from float8.experts import Float8Experts, weights_of
from float8.formats import FLOAT8_MAX
from float8.kernels.count import COUNT, TALLY
from float8.kernels.runtime.private import past_compiled_code
from float8.linear import Float8Linear
from float8.linear.functional import autocast_dtype
from float8.linear.plan import Casts
from float8.parallel.groups import mesh_device_type, unlike
from float8.quantize import Cast, quantize
from float8.tensor import Float8Tensor, high_precision, is_dtensor, local_tensor
from float8.tensor.ranks import amax_over, sharding_groups

ROLES = "input", "weight", "grad_output"


def of_this_rank(x: Any, cast: Cast | None) -> tuple[Tensor, Cast | None]:
    """Return the part of a DTensor, in high precision, and the cast with the scale of all parts."""
    if is_dtensor(x):
        cast = cast and cast._replace(reduce=amax_over(sharding_groups(x)))
        x = x.full_tensor() if any(each.is_partial() for each in x.placements) else x
    x = local_tensor(high_precision(x))
    return x.to_original_precision() if isinstance(x, Float8Tensor) else x, cast


def as_multiplied(x: Any, weight: Any) -> Any:
    """Return the input of a layer in the dtype in which it is cast."""
    if isinstance(local_tensor(x), Float8Tensor):
        return x
    return x.to(autocast_dtype(x.device) or getattr(weight, "dtype", x.dtype))


def parameter_name(experts: nn.Module, weight: Any) -> str:
    """Return the name of the Parameter that `weight` lies in; "": a copy. Not in compiled code."""
    named = experts.named_parameters(recurse=False)
    return next((name for name, p in named if _address(p) == _address(weight)), "")


def _address(x: Any) -> Any:
    return getattr(local_tensor(x), "_data", local_tensor(x)).data_ptr()


@torch.no_grad()
def measure(x: Any, cast: Cast | None, col: bool = False, offs: Tensor | None = None) -> Tensor:
    """Count what a cast does to x [..., C], to its columns if `col`, or to weights [E, N, K].

    `offs`: x has groups of rows. Of x in float8 all zeros count as values that became zero. Without
    a cast only values that are not finite are counted.

    Returns [6] float64, see `kernels.count`.
    """
    in_float8 = isinstance(local_tensor(x), Float8Tensor)
    x, cast = of_this_rank(x, cast)
    inside = None
    if offs is None:
        x = x.reshape(-1, x.shape[-1])
    elif x.dim() == 2:  # rows behind the last group are nobody's
        inside = torch.arange(x.shape[0], device=x.device)[:, None] < offs[-1]
        x = x.where(inside, 0)
    if cast is None:
        bad = x.isfinite().logical_not().sum().double()
        return torch.nn.functional.pad(bad[None], (5, 0))
    if offs is not None:  # each group, and expert, has scales of its own
        cast = cast._replace(reduce=None)
    if cast.state is not None:  # the layer itself records
        cast = cast._replace(state=cast.state.apart())
    made = quantize(x, cast, row=not col, col=col, offs=offs if x.dim() == 2 else None)
    (data, scale), x = (made.col, x.mT) if col else (made.row, x)
    bound = scale.new_full((1,), torch.inf)  # most scales are those of the largest value
    if cast.state is not None:
        bound = scale * FLOAT8_MAX[cast.how.dtype] * (1 + 2.0**-20)  # scales are rounded
    data = data[..., : x.shape[-2], : x.shape[-1]]
    numbers: Tensor = COUNT(x, data, bound, in_float8)
    if inside is not None:
        numbers[1] = inside.sum() * x.shape[-1]
    return numbers


def over_ranks(rows: Tensor, keys: Sequence[Any], largest: int, group: Any) -> list[list[float]]:
    """Reduce `rows` [keys, numbers] over the ranks of a group, None: of all.

    The first `largest` numbers become the largest of all ranks, the others sums. Raises a
    `ValueError` if ranks have other keys.
    """
    if dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD if group is None else group
        if (differ := unlike([str(key) for key in keys], [group], rows.device)) is not None:
            got = f"model: got other layers than on other ranks, {differ[:4]}, expected the same"
            raise ValueError(f"{got}; give a group= of ranks that train the same layers")
        first, sums = rows[:, :largest].float().contiguous(), rows[:, largest:].contiguous()
        dist.all_reduce(sums, group=group)
        rows = torch.cat([amax_over([group])(first).double(), sums], 1)
    return rows.tolist()


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which ranks that share the model reduce, or that of its Parameters."""
    parameters = [*model.parameters()]
    there = mesh_device_type(parameters)
    return torch.device(there) if there else parameters[0].device


class _Totals(NamedTuple):
    """What is counted of one tensor of a layer in a watched step."""

    numbers: Tensor  # [8] float64, see `kernels.count.tally_reference`
    calls: Tensor  # 0-dim int64, on the CPU: those of all layers so far, in this direction

    def add(self, x: Any, cast: Cast | None, offs: Tensor | None, counted: bool = True) -> None:
        TALLY(measure(x, cast, offs=offs), *self, counted)


class _Observer:
    """Counts what the casts of a layer do in one watched step.

    In tensors, since compiled code, too, runs it, and is compiled anew for each value of a number.
    """

    def __init__(self, layer: Any, forwards: Tensor, backwards: Tensor) -> None:
        device = next((p.device for p in layer.parameters(False) if not p.is_meta), "cpu")
        self.weights = set[str]()  # those that were counted
        self.totals = dict[tuple[str, str], _Totals]()
        for own in ("", *(weight.name for weight in weights_of(layer))):
            for role, calls in zip(ROLES, (forwards, forwards, backwards), strict=True):
                numbers = torch.zeros(8, dtype=torch.float64, device=device)
                self.totals[own, role] = _Totals(numbers, calls)

    def __call__(
        self, layer: Any, casts: Casts, x: Any, weight: Any, y: Any, offs: Any = None, own: str = ""
    ) -> Any:
        """See what a call multiplies, and return its output `y`, or what stands for it."""
        compiling, grad = torch.compiler.is_compiling(), torch.is_grad_enabled()
        if offs is not None and not compiling:
            own = own or parameter_name(layer, weight)
        cast = casts.input if grad and casts.input.how.is_float8 else None
        self.totals[own, "input"].add(as_multiplied(x, weight), cast, offs, grad)
        if grad and casts.weight.how.is_float8 and (compiling or own not in self.weights):
            self.totals[own, "weight"].add(weight, casts.weight, offs)
            if not compiling:
                self.weights.add(own)
        if y.requires_grad and casts.grad_output.how.is_float8:
            seen: Any = _SeenInBackward
            y = seen.apply(y, casts.grad_output, offs, *self.totals[own, "grad_output"])
        return y


class _SeenInBackward(torch.autograd.Function):
    """Return `y` as it is, and count its gradient. Dynamo follows no hooks of tensors."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, cast: Cast, offs: Any, numbers: Tensor, calls: Tensor
    ) -> Tensor:
        ctx.cast, ctx.offs, ctx.totals = cast, offs, _Totals(numbers, calls)
        return new_alias(y)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ctx.totals.add(grad_output, ctx.cast, ctx.offs)
        return grad_output, None, None, None, None


def _remove(layer: Any, observer: _Observer) -> None:
    others = tuple(x for x in vars(layer).pop("_float8_observers", ()) if x is not observer)
    if others:
        layer._float8_observers = others


class Watch(contextlib.ExitStack):
    """A watch over the casts of a converted model, in every so many steps of its training.

    Call `step()` once per optimizer step. A watched step takes longer, others cost nothing: a model
    that is compiled, or has modules that are, runs eagerly in it. Compiled functions that call the
    model, or an `OptimizedModule` made of it, stay compiled: once more, for all watched steps.
    `close()`, the end of a `with`, or of the last reference to it, ends a watch. A model may have
    several. Copies of the model are not watched. See docs/nan_or_drift.md.

    Args:
        model: it may be compiled, under FSDP2, tensor parallel or DDP.
        every: 100 watches the steps 100, 200, ...; 1 all.
        group: the `ProcessGroup` of ranks with these layers, as of a pipeline's stage; None: all.

    Raises a `TypeError` if `model` is no `nn.Module`, or `every` no int >= 1.
    """

    def __init__(self, model: nn.Module, every: int = 100, *, group: Any = None) -> None:
        super().__init__()
        require_module(model, "model")
        if not isinstance(every, int) or every < 1:
            raise TypeError(f"every: got {every!r}, expected a number of steps >= 1")
        self._model, self._every, self._group, self._steps = model, every, group, 0
        self._begin()

    def step(self) -> dict[str, float]:
        """Say that the last backward of a step is over, and return what was seen, on all ranks.

        `{}` if nothing was, else four numbers of each layer or weight of experts, and role: of
        `input` and `weight` as the GEMM `output` reads them, of `grad_output` as `grad_input` does.
        Of what arrives in float8, as weights that were gathered so, zeros count as underflow.

        - `"layers.0.attention.query/input/amax"`: the largest absolute value, NaN if one is NaN.
        - `.../underflow`: the share of values other than 0 that the cast makes 0.
        - `.../saturation`: the share that it cuts to its largest value: with delayed scaling only.
        - `.../nonfinite`: the share of all values that are NaN or Inf.

        The dict is in the order of execution: `input` and `weight` of each layer as forward runs,
        then each `grad_output` as backward does. A layer that is called several times stands where
        its first call does, or the first call with a NaN or Inf.

        Raises a `ValueError` if ranks have different layers, and no `group` tells them apart.
        """
        self._steps += 1
        self.close()
        numbers: dict[str, float] = {}
        if self._steps % self._every == 0:
            totals = {
                (".".join(filter(None, (name, own))), role): each.numbers
                for name, observer in self._observers.items()
                for (own, role), each in observer.totals.items()
            }
            none = torch.zeros(8, dtype=torch.float64, device=device_of(self._model))
            rows = torch.stack([none, *(x.to(none.device) for x in totals.values())])
            reduced = over_ranks(rows, ["", *totals], 3, self._group)
            table = dict(zip(totals, reduced[1:], strict=True))

            def place(key: tuple[str, str]) -> tuple[bool, float]:
                backward = key[1] == ROLES[2]
                first, first_bad, *_ = table[key if backward else (key[0], ROLES[0])]
                return backward, -(first_bad or first)

            for name, role in sorted(table, key=place):
                _, _, amax, elements, nonzero, lost, cut, bad = table[name, role]
                if elements:
                    key = f"{name}/{role}"
                    numbers[f"{key}/amax"] = amax
                    numbers[f"{key}/underflow"] = lost / max(nonzero, 1)
                    numbers[f"{key}/saturation"] = cut / max(nonzero, 1)
                    numbers[f"{key}/nonfinite"] = bad / elements
        self._begin()
        return numbers

    def _begin(self) -> None:
        """Have the next step seen, if it is its turn."""
        if (self._steps + 1) % self._every:
            return
        self._observers = dict[str, _Observer]()
        forwards, backwards = (torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2))
        for fqn, layer in unwrapped(self._model).named_modules():
            if isinstance(layer, Float8Linear | Float8Experts):
                observer = _Observer(layer, forwards, backwards)
                layer._float8_observers += (observer,)
                self.callback(_remove, layer, observer)
                self._observers[plain_name(fqn) or "(root)"] = observer
        self.enter_context(past_compiled_code(self._model))

    def __del__(self) -> None:
        self.close()
