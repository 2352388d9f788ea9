"""Training steps of a model in several variants: checked, then timed in turn."""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from float8 import save_gemm_outputs
from float8.step import sync_float8_amax_and_scale_history, update_float8_weights
from float8_lab.bench.timing import Sampler, steady_sampler, take_turns
from float8_lab.bench.variants import EAGER, GRAPHED, Variant, many_compilations
from float8_lab.device import skipped_graphs
from float8_lab.errors import FailedError, WrongResultError
from float8_lab.ranks import for_all

Row = dict[str, Any]
Results = dict[str, Tensor]  # output and gradients of a step, by name

WARMUP = 3  # steps that compile, and fill the histories of delayed scaling
_CHUNK = 1 << 26  # elements taken to float64 at a time: a large result may fill half the memory
_AT = torch.ops.aten
_ATTENTION = (
    _AT._scaled_dot_product_flash_attention.default,
    _AT._scaled_dot_product_cudnn_attention.default,
    _AT._scaled_dot_product_flash_attention_for_cpu.default,
)


def _keep_gemms(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """`save_gemm_outputs`, and what it is for a model in bf16."""
    if op is _AT.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return save_gemm_outputs(ctx, op, *args, **kwargs)


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else _keep_gemms(ctx, op, *args, **kwargs)


_contexts = functools.partial(functools.partial, create_selective_checkpoint_contexts)
CHECKPOINTING: dict[str, dict[str, Any]] = {  # Dynamo takes no closures
    "full": {},
    "gemms": {"context_fn": _contexts(_keep_gemms)},
    "selective": {"context_fn": _contexts(_keep_attention)},
}
"""How blocks are checkpointed: only inputs of blocks are kept, also outputs of GEMMs, also those of
attention."""


def check(what: str, reference: Results, results: Results, at_least: float) -> float:
    """Return the lowest signal to quantisation noise ratio of all results in dB.

    Infinite if all are equal. A `WrongResultError` if a result is below `at_least`, not a number,
    or of another shape. References may be on another device. Where there is a process group,
    tensors are shards and ratios those of whole ones: all ranks call it, and come to one end.
    """
    for name, expected in reference.items():
        got, wanted = tuple(results[name].shape), tuple(expected.shape)
        if got != wanted:
            message = f"{what} {name}: shape {got}, expected {wanted}; nothing was timed"
            raise WrongResultError(message)
    total = torch.stack([_powers(x.detach(), results[n].detach()) for n, x in reference.items()])
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


class Step:
    """Forward and backward of a model, which the variant converts, on fixed random data.

    Each of the model's children in `layers` is compiled by itself, as trainers do, and its `loss`,
    or the model as a whole if it has no layers. For CUDA graphs it is compiled as a whole, too: so
    there is one to replay for forward, and one for backward. The sync of delayed scaling, and casts
    of weights that are held, are a part of a step; after `add_optimizer` its step is.
    """

    def __init__(
        self, variant: Variant, model: nn.Module, x: Tensor, grad: Tensor, *, one_graph: bool = True
    ) -> None:
        self.model = variant.convert(model)
        parts: Any = getattr(self.model, "layers", [self.model])
        for i, part in enumerate(parts if variant.checkpointing else []):
            how = CHECKPOINTING[variant.checkpointing]
            parts[i] = checkpoint_wrapper(part, preserve_rng_state=False, **how)
        self.parts: list[Any] = list(parts)
        loss = getattr(self.model, "loss", None)
        apart = self.parts if loss is None else [*self.parts, loss]
        graphed = variant.mode == GRAPHED
        # By their own method, which keeps their types and names.
        for part in [self.model] if graphed else apart if variant.mode != EAGER else []:
            # Without graph breaks where the code is ours: they would go unnoticed in a time.
            whole = one_graph and (variant.ours or variant.is_reference)
            mode = "reduce-overhead" if graphed else None
            part.compile(fullgraph=whole, dynamic=False, mode=mode)
        self.variant, self._x, self._grad = variant, x, grad
        self._optimizer: torch.optim.Optimizer | None = None
        if variant.ours and not variant.gather:  # shards are held once there are some
            update_float8_weights(self.model)

    def update(self) -> None:
        """Do what an optimizer's step would: the sync, and casts of weights that are held."""
        if self.variant.has_state:
            sync_float8_amax_and_scale_history(self.model)
            update_float8_weights(self.model)

    def add_optimizer(self, rate: float) -> None:
        """Have a fused AdamW's step end each step; its state has the dtype of the parameters."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)
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

    def __call__(self) -> Results:
        """One step; its output and gradients.

        Results of CUDA graphs are overwritten by the next step of any variant.
        """
        if self.variant.mode == GRAPHED:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        output, x = self.forward()
        torch.autograd.backward(output, self._grad)
        if self._optimizer is not None:
            self._optimizer.step()
        else:
            self.update()
        results = {"output": output.detach()}
        for name, tensor in [("input", x), *self.model.named_parameters()]:
            if tensor.requires_grad:
                assert tensor.grad is not None, name
                results[f"gradient of {name}"], tensor.grad = tensor.grad, None
        return results

    def warm_up(self) -> None:
        """Compile, and let delayed scaling find its scales, which takes two syncs.

        A `FailedError` if what was to be replayed as CUDA graphs is not.
        """
        before = skipped_graphs()
        for _ in range(WARMUP):
            self()
        skipped = skipped_graphs() - before
        if self.variant.mode == GRAPHED and self._x.is_cuda and skipped:
            raise FailedError(
                f"{self.variant.name}: {skipped} CUDA graph(s) were skipped, expected none; "
                f"nothing was timed; TORCH_LOGS=cudagraphs says why"
            )


def compare(
    what: str,
    make: Callable[[Variant], Step],
    variants: Sequence[Variant],
    device: torch.device,
    rounds: int,
    *,
    at_least: float,
    tokens: int | None = None,
    sample: Callable[[Step, torch.device], Sampler] = steady_sampler,
) -> Iterator[list[Row]]:
    """Check and time every variant; an empty list for each that is ready, then all rows.

    All are held at once and timed in turns. In each mode the first variant must be bf16; all are
    checked against the very first, errors name `what`, and rows of peers that failed say why in
    `left_out`. Memory is what a variant holds between steps, and the peak of a step over it; of
    CUDA graphs, whose memory is in a pool of all variants, there is none. `at_least` is in dB of
    SQNR, as for `check`; a step sees so many `tokens`; `sample` makes the sampler of a step.
    """
    rows: dict[str, Row] = {}
    samplers: dict[str, Sampler] = {}
    reference: Results = {}
    with many_compilations():
        for variant in variants:
            row = rows[variant.name] = dict(variant.columns)
            try:
                free_memory(device)
                before = allocated(device)
                step = make(variant)
                step.warm_up()
                held = allocated(device) - before
                results = step()
                graphed = variant.mode == GRAPHED
                if not reference:
                    reference = {n: x.clone() if graphed else x for n, x in results.items()}
                row["sqnr_db"] = check(f"{what} {variant.name}:", reference, results, at_least)
                del results
                if device.type == "cuda" and not graphed:
                    row["peak_gib"] = (held + _peak_bytes(step, device)) / 2**30
                samplers[variant.name] = sample(step, device)
            except Exception as error:
                leave_out(row, variant, error)
            yield []
        reference.clear()
        times = take_turns(samplers, rounds)
    for name, ms in times.items():
        rows[name]["ms"] = ms
    yield with_speedups([*rows.values()], **({"tokens_per_s": tokens} if tokens else {}))


def leave_out(row: Row, variant: Variant, error: Exception) -> None:
    """Say in the row why there are no numbers of a peer; other errors are raised again."""
    if variant.ours or variant.is_reference:
        raise error
    row["left_out"] = f"{type(error).__name__}: {error}"[:500]


def with_speedups(rows: Sequence[Row], **tokens: int) -> list[Row]:
    """Add speedups over the first row of their mode, which is bf16; and columns of tokens/s."""
    bf16: dict[str, float] = {}
    for row in rows:
        if "ms" in row:
            row["speedup"] = bf16.setdefault(row["mode"], row["ms"]) / row["ms"]
            row |= {column: number / row["ms"] * 1e3 for column, number in tokens.items()}
    return list(rows)


def allocated(device: torch.device) -> int:
    """Return the bytes that tensors hold; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> None:
    """Give back what a step held that nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _peak_bytes(step: Step, device: torch.device) -> int:
    """Return the most memory in use during a step over what was before."""
    torch.cuda.synchronize(device)
    resting = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - resting
