"""Training steps of a model in several variants: built, checked, timed."""

import functools
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from float8 import activations_in_float8, save_gemm_outputs, update_float8_weights
from float8.delayed.sync import sync_float8_amax_and_scale_history
from float8_lab.bench.variants import EAGER, GRAPHED, Variant
from float8_lab.device import Clock
from float8_lab.errors import FailedError

Row = dict[str, Any]
Results = dict[str, Tensor]  # output and gradients of a step, by name

PASSES = 2  # how often the list of variants is run
WARMUP = 3  # steps that compile, and fill the histories of delayed scaling; the last captures
_CHUNK = 1 << 26  # elements taken to float64 at a time: a large result may fill half the memory
_AT = torch.ops.aten
_KINDS = "flash_attention", "cudnn_attention", "flash_attention_for_cpu"
_ATTENTION = tuple(getattr(_AT, f"_scaled_dot_product_{kind}").default for kind in _KINDS)


def _keep_gemms(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """`save_gemm_outputs`, and what it is for a model in bf16."""
    if op is _AT.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return save_gemm_outputs(ctx, op, *args, **kwargs)


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else _keep_gemms(ctx, op, *args, **kwargs)


def _per_op(found: Counter[bool], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As torchtitan: attention, amaxes, every other GEMM; of torchao it sees them in 16 bits."""
    gemm = _keep_gemms(ctx, op) is CheckpointPolicy.MUST_SAVE
    found[ctx.is_recompute] += gemm
    kept = op in (*_ATTENTION, _AT.max.default) or (gemm and found[ctx.is_recompute] % 2)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _per_op_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_per_op, Counter()))  # type: ignore[no-untyped-call]


_contexts = functools.partial(functools.partial, create_selective_checkpoint_contexts)
CHECKPOINTING: dict[str, dict[str, Any]] = {  # Dynamo takes no closures
    "full": {},
    "gemms": {"context_fn": _contexts(_keep_gemms)},
    "selective": {"context_fn": _contexts(_keep_attention)},
    "torchtitan": {"context_fn": _per_op_contexts},
}
"""How blocks are checkpointed: only inputs of blocks are kept, also outputs of GEMMs, also those of
attention; or by torchtitan's policy for each op, with which others publish their numbers."""
IN_FLOAT8 = "float8"  # beside these: nothing is computed again, but kept in float8


def check(what: str, reference: Results, results: Results, at_least: float) -> float:
    """Return the lowest signal to quantisation noise ratio of all results in dB.

    Infinite if all are equal. A `FailedError` if a result is below `at_least`, not a number,
    or of another shape. References may be on another device. Where there is a process group,
    tensors are shards and ratios those of whole ones: all ranks call it, and come to one end.
    """
    for name, expected in reference.items():
        got, wanted = tuple(results[name].shape), tuple(expected.shape)
        if got != wanted:
            message = f"{what} {name}: shape {got}, expected {wanted}; nothing was timed"
            raise FailedError(message)
    total = torch.stack([_powers(x.detach(), results[n].detach()) for n, x in reference.items()])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    signal, noise = total.unbind(1)
    found = (10 * torch.log10(signal / noise)).tolist()
    for name, quality in zip(reference, found, strict=True):
        if not quality >= at_least:  # also if it is NaN
            message = f"SQNR {quality:.1f} dB, expected at least {at_least:.0f} dB"
            raise FailedError(f"{what} {name}: {message}; nothing was timed")
    return float(min(found))


def _powers(reference: Tensor, x: Tensor) -> Tensor:
    """[2] float64: the power of the reference and that of the error."""
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    parts = 1 + x.numel() // _CHUNK
    for a, b in zip(reference.chunk(parts), x.chunk(parts), strict=True):
        a, b = a.to(x.device).double(), b.double()
        total += torch.stack([a.square().sum(), (a - b).square().sum()])
    return total


class Step:
    """Forward and backward of a model, which the variant converts, on fixed random data.

    Each of the model's children in `layers` is compiled by itself, as trainers do, and its `loss`,
    or the model as a whole if it has no layers. The sync of delayed scaling, and casts of weights
    that are held, are a part of a step; after `add_optimizer` its step is. A graphed step is
    captured as one CUDA graph, collectives and all, once two have run; on a CPU it is compiled
    only. Where ranks share a model, all of them must call each method.
    """

    at_least = 10.0  # dB of SQNR of every gradient against bf16's: noise of all blocks adds up

    def __init__(
        self, variant: Variant, model: nn.Module, x: Tensor, grad: Tensor, *, one_graph: bool = True
    ) -> None:
        self.model = variant.convert(model)
        parts: Any = getattr(self.model, "layers", [self.model])
        if (arguments := CHECKPOINTING.get(variant.checkpointing)) is not None:
            for i, part in enumerate(parts):
                parts[i] = checkpoint_wrapper(part, preserve_rng_state=False, **arguments)
        self.parts: list[Any] = list(parts)
        loss = getattr(self.model, "loss", None)
        apart = self.parts if loss is None else [*self.parts, loss]
        # By their own method, which keeps their types and names.
        for part in apart if variant.mode != EAGER else []:
            # Without graph breaks where the code is ours: they would go unnoticed in a time.
            whole = one_graph and (variant.ours or variant.is_reference)
            options = activations_in_float8() if variant.checkpointing == IN_FLOAT8 else None
            part.compile(fullgraph=whole, dynamic=False, options=options)
        self.variant, self.device, self._x, self._grad = variant, x.device, x, grad
        self._optimizer: torch.optim.Optimizer | None = None
        self._graph: Any = None
        self._calls, self._stream = 0, None
        if variant.mode == GRAPHED and x.is_cuda:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._graph = torch.cuda.CUDAGraph()
        if variant.ours and not variant.sharded:  # shards are held once there are some
            update_float8_weights(self.model)

    def update(self) -> None:
        """Do what an optimizer's step would: the sync, and casts of weights that are held."""
        if self.variant.has_state:
            sync_float8_amax_and_scale_history(self.model)
            update_float8_weights(self.model)

    def add_optimizer(self, rate: float) -> None:
        """Have a fused AdamW's step end each step; its state has the dtype of the parameters."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained, lr=rate, fused=True, capturable=bool(self._graph)
        )
        if self._graph is None or self.variant.has_state:  # no graph uses casts at its end
            self._attached = self.variant.attach(self.model, self._optimizer)

    def gradients(self, x: Tensor, grad: Tensor) -> object:
        """Forward and backward on other data, as a CUDA graph can capture them."""
        x = x.detach().requires_grad_()
        output = self.model(x)
        return output, torch.autograd.grad(output, (x, *self.model.parameters()), grad)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output and its input, a new tensor object at each call, as in training."""
        x = self._x.detach().requires_grad_(self._x.is_floating_point())
        output: Tensor = self.model(x)
        return output, x

    def forward_backward(self) -> tuple[Tensor, Tensor]:
        """Add gradients of Parameters to theirs; return the output and its input."""
        output, x = self.forward()
        torch.autograd.backward(output, self._grad)
        return output, x

    def __call__(self) -> Results:
        """One step; its output and gradients, which the next replay of a CUDA graph overwrites."""
        if self._graph is None:
            return self._run()
        self._calls += 1
        if self._calls < WARMUP:
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                results = self._run()
            torch.cuda.synchronize()
            return results
        if self._calls == WARMUP:
            capture: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(self._graph, **capture):
                self._results = self._run()
        self._graph.replay()
        return self._results

    def _run(self) -> Results:
        if self._graph is not None:  # its gathers use only casts of its own
            self.variant.cast_shards(self.model)
        output, x = self.forward_backward()
        if self._optimizer is not None:
            self._optimizer.step()
        else:
            self.update()
        results = {"output": output.detach()}
        for name, tensor in [("input", x), *self.model.named_parameters()]:
            if tensor.requires_grad:
                assert tensor.grad is not None, name
                name = name.replace("_checkpoint_wrapped_module.", "")  # the same for each variant
                results[f"gradient of {name}"], tensor.grad = tensor.grad, None
        return results

    def warm_up(self) -> None:
        """Compile, find scales, and capture CUDA graphs."""
        for _ in range(WARMUP):
            self()

    def check(self, references: dict[str, Results]) -> Row:
        """Hold results against those of the first step that was checked, in host memory."""
        self.warm_up()
        found = self()
        if not references:
            references["first"] = {name: x.cpu() for name, x in found.items()}
        name = f"{self.variant.name}:"
        return {"sqnr_db": check(name, references["first"], found, self.at_least)}

    def times(self, rounds: int) -> list[float]:
        """Milliseconds of each of `rounds` steps, from the end of one to the end of the next."""
        self.warm_up()
        clock = Clock(self.device)
        clock.mark()
        for _ in range(rounds):
            self()
            clock.mark()
        return [1e3 * each for each in clock.collect()]


def bench_steps(
    make: Callable[[Variant], Step],
    variants: Sequence[Variant],
    device: torch.device,
    rounds: int,
    *,
    passes: int = PASSES,
    tokens: Mapping[str, int] | None = None,
) -> Iterator[list[Row]]:
    """Check and time the steps that `make` gives; after each variant, all rows known by then.

    Each variant is built, checked, timed and freed before the next. The list runs twice: else
    clocks that drop would favour the first ones; the drift is how much the second times differ.
    Times and memory, the peak of a step with weights, are those of the worst rank; the memory of
    CUDA graphs is not reported. Speedups are over bf16, the first variant of each mode and kind of
    checkpointing. Rows of peers that failed say why in `left_out`. `tokens`: of a step, by column.
    """
    rows = {variant.name: dict(variant.columns) for variant in variants}
    times: dict[str, list[float]] = {name: [] for name in rows}
    references: dict[str, Results] = {}
    # With room for all variants: past the limit, code would run eagerly.
    with torch._dynamo.config.patch(recompile_limit=256):
        for number, variant in enumerate([*variants] * passes):
            row, first = rows[variant.name], number < len(variants)
            try:
                if "left_out" not in row:
                    before = _allocated(device)
                    step = make(variant)
                    row |= step.check(references) if first else {}
                    free_memory(device)  # what checks left behind
                    new = step.times(rounds)
                    new.append(_allocated(device, peak=True) - before)
                    if dist.is_available() and dist.is_initialized():  # those of the worst rank
                        worst = torch.tensor(new, dtype=torch.float64, device=device)
                        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                        new = worst.tolist()
                    *new, peak = new
                    del step
                    times[variant.name] += new
                    if peak > 0 and variant.mode != GRAPHED:
                        row.setdefault("peak_gib", peak / 2**30)
                    row["ms"] = statistics.median(times[variant.name])
                    if not first:
                        earlier, later = map(statistics.median, (times[variant.name][:rounds], new))
                        row["drift_percent"] = 100 * (later / earlier - 1)
            except Exception as error:
                if variant.ours or variant.is_reference:
                    raise
                row = rows[variant.name] = dict(variant.columns)  # nothing of the pass before
                row["left_out"] = f"{type(error).__name__}: {error}"[:500]
            free_memory(device)
            complete = [row for row in rows.values() if "ms" in row or "left_out" in row]
            bf16: dict[Any, float] = {}
            for row in complete:
                if "ms" in row:
                    like = row["mode"], row["checkpointing"]
                    row["speedup"] = bf16.setdefault(like, row["ms"]) / row["ms"]
                    row |= {name: n / row["ms"] * 1e3 for name, n in (tokens or {}).items()}
            yield complete


def _allocated(device: torch.device, *, peak: bool = False) -> int:
    """Return the bytes that tensors hold, or held at most since memory was freed; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def free_memory(device: torch.device) -> None:
    """Give back what a step held that nobody refers to any more, and forget the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
