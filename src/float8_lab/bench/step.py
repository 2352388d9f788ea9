"""Forward and backward of a model in several variants: checked, then timed in turn."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8.config import Float8LinearConfig, Float8Weights
from float8.convert.measure import WrongResultError
from float8.sync import sync_float8_amax_and_scale_history, update_float8_weights
from float8_lab.bench.timing import Sampler, steady_sampler, take_turns
from float8_lab.bench.variants import COMPILED, HIGH_PRECISION, Variant, many_compilations
from float8_lab.errors import for_all

Row = dict[str, Any]

WARMUP = 3  # steps that compile, and fill the histories of delayed scaling
_CHUNK = 1 << 26  # elements taken to float64 at a time: a large result may fill half the memory


def check(
    what: str, reference: Mapping[str, Tensor], results: Mapping[str, Tensor], at_least: float
) -> float:
    """The lowest signal to quantisation noise ratio of all results in dB; infinite if all equal.

    References have at least one dim, on any device; results have the same names and shapes. Where
    there is a process group, tensors are shards and ratios those of whole ones: all ranks must
    call it, and all come to the same end. A `WrongResultError` if a result is below `at_least`, or
    not a number.
    """
    powers = []
    for name, expected in reference.items():
        if expected.shape != results[name].shape:
            raise WrongResultError(
                f"{what} {name}: shape {tuple(results[name].shape)}, expected "
                f"{tuple(expected.shape)}; nothing was timed"
            )
        powers.append(_powers(expected.detach(), results[name].detach()))
    total = torch.stack(powers)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    signal, noise = total.unbind(1)
    found = (10 * torch.log10(signal / noise)).tolist()
    for name, quality in zip(reference, found, strict=True):
        if not quality >= at_least:  # also if it is NaN
            message = f"SQNR {quality:.1f} dB, expected at least {at_least:.0f} dB"
            raise for_all(WrongResultError(f"{what} {name}: {message}; nothing was timed"))
    return float(min(found))


def _powers(reference: Tensor, x: Tensor) -> Tensor:
    """[2] float64: the power of the reference and that of the error."""
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    parts = 1 + x.numel() // _CHUNK
    for a, b in zip(reference.chunk(parts), x.chunk(parts), strict=True):
        a, b = a.to(x.device).double(), b.double()
        total += torch.stack([a.square().sum(), (a - b).square().sum()])
    return total


def _has_state(config: Float8LinearConfig | None) -> bool:
    """Whether something is due after an optimizer's step; under dynamic scaling nothing is."""
    if config is None:
        return False
    return bool(config.delayed_sites) or config.float8_weights is Float8Weights.HELD


class Step:
    """Forward and backward of a bf16 model, which the variant converts, on fixed random data.

    Each of the model's children in `layers` is compiled by itself, as trainers do, or the model as
    a whole if it has none. Gradients of `microbatches` accumulate; with `sync` that of delayed
    scaling, and the casts of weights that are held, are a part of a step where there are such.
    """

    one_graph = True  # whether a part is compiled without breaks

    def __init__(
        self,
        variant: Variant,
        model: nn.Module,
        x: Tensor,
        grad: Tensor,
        *,
        microbatches: int = 1,
        sync: bool = False,
    ) -> None:
        self.model = variant.convert(model)
        self.parts: list[nn.Module] = list(getattr(self.model, "layers", [self.model]))
        if variant.mode == COMPILED:
            for part in self.parts:  # by their own method, which keeps their types and names
                # Without graph breaks where the code is ours: they would go unnoticed in a time.
                whole = self.one_graph and (variant.ours or variant.is_reference)
                part.compile(fullgraph=whole, dynamic=False)
        if variant.ours:
            update_float8_weights(self.model)  # those that are held, as an optimizer's step would
        self.variant, self._x, self._grad = variant, x, grad
        self._microbatches, self._sync = microbatches, sync and _has_state(variant.config)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output and the input that it was computed from.

        The input is a new tensor object at each call, as in training: layers that read the same
        object in eager mode share one cast of it, which a second call would find done.
        """
        x = self._x.detach().requires_grad_()
        with self.variant.around():
            output: Tensor = self.model(x)
        return output, x

    def backward(self, output: Tensor) -> None:
        """Adds to the gradients of weights and input."""
        torch.autograd.backward(output, self._grad)

    def finish(self, output: Tensor, x: Tensor) -> dict[str, Tensor]:
        """Output and gradients by name, taken from the model; and what follows a step."""
        if self._sync:
            sync_float8_amax_and_scale_history(self.model)
            update_float8_weights(self.model)
        results = {"output": output.detach()}
        for name, tensor in [("input", x), *self.model.named_parameters()]:
            assert tensor.grad is not None
            results[f"gradient of {name}"], tensor.grad = tensor.grad, None
        return results

    def warm_up(self) -> None:
        """Compile, and let delayed scaling find its scales, which takes two syncs."""
        for _ in range(WARMUP):
            self()
            if self.variant.ours:
                sync_float8_amax_and_scale_history(self.model)

    def __call__(self) -> dict[str, Tensor]:
        """One step; the sums of all weights' gradients, the last output and gradient of input."""
        for _ in range(self._microbatches):
            output, x = self.forward()
            self.backward(output)
        return self.finish(output, x)


def compare(
    what: str,
    steps: Iterable[Step],
    device: torch.device,
    rounds: int,
    *,
    at_least: float,
    measure: Callable[[Step], Row] = lambda step: {},
    beside: Mapping[str, Sampler] | None = None,
) -> Iterator[list[Row]]:
    """Check and time every variant; an empty list for each that is ready, then all rows.

    Args:
        what: Named by errors.
        steps: The first must be bf16, which the others are checked against; one in each mode.
        device: Where.
        rounds: Samples of each.
        at_least: Lower bound in dB of the SQNR of output and gradients: a `WrongResultError`.
        measure: Further columns, of a step that was checked.
        beside: Further samplers; their medians in ms become columns.
    """
    rows: dict[str, Row] = {}
    samplers = dict(beside or {})
    reference: dict[str, Tensor] = {}
    with many_compilations():
        for step in steps:
            variant = step.variant
            step.warm_up()
            results = step()
            reference = reference or results
            quality = check(f"{what} {variant.name}:", reference, results, at_least)
            del results
            peak = peak_bytes(step, device)
            row = {"recipe": variant.recipe, "mode": variant.mode, **measure(step)}
            row |= {"peak_gib": None if peak is None else peak / 2**30, "sqnr_db": quality}
            rows[variant.name] = row
            samplers[variant.name] = steady_sampler(step, device)
            yield []
        reference.clear()
        times = take_turns(samplers, rounds)
    for name, row in rows.items():
        row |= {"ms": times[name], **{column: times[column] for column in beside or {}}}
        row["speedup"] = times[Variant(HIGH_PRECISION, row["mode"]).name] / row["ms"]
    yield list(rows.values())


def saved_bytes(forward: Callable[[], object], known: Iterable[Tensor]) -> int:
    """Bytes that `forward`, which returns its result, keeps for backward, each storage once.

    Not counted are those of tensors `known` to be there anyway, such as parameters.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result  # until here it kept what was saved, so that no address was used twice
    return sum(saved.values())


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Most memory in use during `step` over what was in use before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    resting = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - resting
