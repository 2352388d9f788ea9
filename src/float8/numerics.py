"""Watch a training: what casts do to the values of layers, every so many steps."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8.checkpoints.names import plain_name, unwrapped
from float8.config import require_module
from float8.experts import Float8Experts, weights_of
from float8.formats import FLOAT8_MAX
from float8.kernels.count import COUNT
from float8.linear import Float8Linear
from float8.linear.functional import autocast_dtype
from float8.parallel.groups import mesh_device_type, unlike
from float8.quantize import Cast, quantize
from float8.tensor import Float8Tensor, high_precision, is_dtensor, local_tensor
from float8.tensor.ranks import amax_over, sharding_groups


def of_this_rank(x: Any, cast: Cast) -> tuple[Tensor, Cast]:
    """Return the part of a DTensor, in high precision, and the cast with the scale of all parts."""
    if is_dtensor(x):
        cast = cast._replace(reduce=amax_over(sharding_groups(x)))
        x = x.full_tensor() if any(each.is_partial() for each in x.placements) else x
    x = local_tensor(high_precision(x))
    return x.to_original_precision() if isinstance(x, Float8Tensor) else x, cast


@torch.no_grad()
def measure(x: Any, cast: Cast, col: bool = False, offs: Tensor | None = None) -> Tensor:
    """Count what a cast does to x [..., C], to its columns if `col`, or to weights [E, N, K].

    `offs`: x has groups of rows. Of x in float8 all zeros count as values that became zero.

    Returns [6] float64, see `kernels.count`.
    """
    in_float8 = isinstance(local_tensor(x), Float8Tensor)
    x, cast = of_this_rank(x, cast._replace(record=False))
    if offs is None:
        x = x.reshape(-1, x.shape[-1])
    else:  # each group, and expert, has scales of its own; rows behind are nobody's
        x, cast = x if x.dim() == 3 else x[: offs[-1]].contiguous(), cast._replace(reduce=None)
    made = quantize(x, cast, row=not col, col=col, offs=offs if x.dim() == 2 else None)
    (data, scale), x = (made.col, x.mT) if col else (made.row, x)
    bound = scale.new_full((1,), torch.inf)  # most scales are those of the largest value
    if cast.state is not None:
        bound = scale * FLOAT8_MAX[cast.how.dtype] * (1 + 2.0**-20)  # scales are rounded
    data = data[..., : x.shape[-2], : x.shape[-1]]
    return COUNT(x, data, bound, in_float8)  # type: ignore[no-any-return]


def over_ranks(
    found: Mapping[Any, list[Tensor]], keys: list[Any], width: int, model: nn.Module, group: Any
) -> list[list[float]]:
    """Return for each key the largest first of its numbers [width], and the sums of the others.

    Of all ranks of a group, None: of all. A `ValueError` says if some have other keys.
    """
    parameters = [*model.parameters()]
    there = mesh_device_type(parameters)
    device = torch.device(there) if there else parameters[0].device
    none = torch.zeros(1, width, dtype=torch.float64, device=device)
    rows = [torch.cat([none, *(x[None].to(device) for x in found.get(key, ()))]) for key in keys]
    amaxes = torch.stack([none[0, 0], *(x[:, 0].amax() for x in rows)]).float()
    sums = torch.stack([none[0, 1:], *(x[:, 1:].sum(0) for x in rows)])
    if dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD if group is None else group
        if (differ := unlike([str(key) for key in keys], [group], device)) is not None:
            got = f"model: got other layers than on other ranks, {differ[:4]}, expected the same"
            raise ValueError(f"{got}; give a group= of ranks that train the same layers")
        amaxes = amax_over([group])(amaxes)
        dist.all_reduce(sums, group=group)
    return torch.cat([amaxes[:, None].double(), sums], 1)[1:].tolist()


def show(
    layers: Mapping[str, nn.Module],
    see: Callable[..., None],
    stack: contextlib.ExitStack,
    probe: Tensor | None = None,
) -> None:
    """Show what `layers` read until `stack` is closed; all code runs eagerly meanwhile.

    `see(name, layer, gemms, offs, role, x)` gets the input, the weight, and in backward the
    grad_output; `gemms` are those that are needed. Of experts it gets weights [E, N, K] by the
    names of their Parameters, and rows in groups by `offs`. Forwards without gradients are shown
    only with a `probe`, a zero that is added to outputs.
    """

    def follow(name: str, layer: Any, x: Any, weight: Any, y: Any, offs: Any = None) -> Any:
        if probe is None and not torch.is_grad_enabled():
            return y
        needs = {"grad_input": x.requires_grad, "grad_weight": getattr(weight, "requires_grad", 1)}
        gemms = {"output"} | {gemm for gemm in needs if needs[gemm] and y.requires_grad}
        tell = functools.partial(see, name, layer, gemms, offs)
        dtype = autocast_dtype(x.device) or getattr(weight, "dtype", x.dtype)
        tell("input", x if isinstance(local_tensor(x), Float8Tensor) else x.to(dtype))
        tell("weight", weight)
        if y.requires_grad:
            y = y if probe is None else y + probe
            y.register_hook(functools.partial(tell, "grad_output"))
        return y

    def after(name: str, layer: Any, args: Any, kwargs: Any, y: Any) -> Any:
        weight = layer._parameters.get("weight", vars(layer).get("weight"))  # computes nothing
        return follow(name, layer, args[0] if args else kwargs["input"], weight, y)

    def product(name: str, experts: Any, x: Any, weight: Any, offs: Any, own: str = "") -> Any:
        y = type(experts)._float8_product(experts, x, weight, offs, own)
        named = experts.named_parameters()
        own = own or next((n for n, p in named if _address(p) == _address(weight)), "")
        return follow(f"{name}.{own}".strip("."), experts, x, weight, y, offs)

    stack.enter_context(torch.compiler.set_stance("force_eager"))
    for name, layer in layers.items():
        if isinstance(layer, Float8Experts):
            layer.__dict__["_float8_product"] = functools.partial(product, name, layer)
            stack.callback(layer.__dict__.pop, "_float8_product", None)
            continue
        # First of all hooks: before FSDP2 lets go of weights, and styles move outputs.
        how: Any = {"prepend": True, "with_kwargs": True}
        handle = layer.register_forward_hook(functools.partial(after, name), **how)
        stack.callback(handle.remove)


def _address(x: Any) -> Any:
    return getattr(local_tensor(x), "_data", local_tensor(x)).data_ptr()


class Watch(contextlib.ExitStack):
    """A watch over the casts of a converted model, in every so many steps of its training.

    Call `step()` once per optimizer step. A watched step runs eagerly, also of compiled models, and
    takes longer; others cost nothing. `close()`, or the end of a `with`, takes off the hooks that
    an error may leave. See docs/nan_or_drift.md.

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

        Raises a `ValueError` if ranks have different layers, and no `group` tells them apart.
        """
        self._steps += 1
        self.close()
        numbers: dict[str, float] = {}
        if self._steps % self._every == 0:
            table = over_ranks(self._found, self._keys, 6, self._model, self._group)
            for key, row in zip(self._keys, table, strict=True):
                amax, elements, nonzero, lost, cut, bad = row
                if elements:
                    numbers[f"{key}/amax"] = amax
                    numbers[f"{key}/underflow"] = lost / max(nonzero, 1)
                    numbers[f"{key}/saturation"] = cut / max(nonzero, 1)
                    numbers[f"{key}/nonfinite"] = bad / elements
        self._begin()
        return numbers

    def _begin(self) -> None:
        """Have the next step shown, if it is its turn."""
        if (self._steps + 1) % self._every:
            return
        layers, names = {}, []
        for fqn, layer in unwrapped(self._model).named_modules():
            if isinstance(layer, Float8Linear | Float8Experts):
                layers[name := plain_name(fqn) or "(root)"] = layer
                names += [name, *(f"{name}.{each.name}" for each in weights_of(layer))]
        self._keys = [f"{x}/{role}" for x in names for role in ("input", "weight", "grad_output")]
        self._found: dict[str, list[Tensor]] = {}
        show(layers, self._see, self)

    def _see(self, name: str, layer: Any, _: Any, offs: Any, role: str, x: Any) -> None:
        key, plan = f"{name}/{role}", getattr(layer, "_float8_plan", None)
        if plan is None or (role == "weight" and (x is None or key in self._found)):
            return  # turned back by now; or a weight that is computed, or was seen
        with torch.enable_grad():  # as its forward ran
            casts = layer._float8_casts() if isinstance(layer, Float8Linear) else plan.casts
        if (cast := getattr(casts, role)).how.is_float8:
            self._found.setdefault(key, []).append(measure(x, cast, offs=offs))
