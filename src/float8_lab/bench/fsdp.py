"""Training steps of stacks that all ranks of a host hold together; and `float8 bench fsdp`.

Every variant is built, checked, timed and torn down before the next one, since a host may not hold
two of them. Clocks that drop while GPUs heat up would favour the first ones: so the whole list
runs twice, and medians are over the steps of both times.
"""

import abc
import gc
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import profile

from float8_lab.bench.block import AT_LEAST, StackSize, bf16_stack, stack_data
from float8_lab.bench.step import Row, Step, check
from float8_lab.bench.traffic import CountedTraffic, exposed_ms
from float8_lab.bench.variants import FLOAT8, Variant, many_compilations
from float8_lab.device import Clock
from float8_lab.models.llama import Block
from float8_lab.models.presets import ModelConfig

Results = dict[str, Tensor]  # what a rank has of output and gradients, by name

PASSES = 2  # how often the list of variants is run
_WARMUP = 2
# Too small to change what bf16 weights are like within a benchmark; the work is that of training.
_LEARNING_RATE = 1e-5


class RanksStep(Step, abc.ABC):
    """A step of a stack on all ranks; all of them must call each method."""

    def __init__(
        self,
        variant: Variant,
        size: StackSize,
        device: torch.device,
        *,
        block: Callable[[ModelConfig], nn.Module] = Block,
        sync: bool = False,
    ) -> None:
        self.size, self.device, self._gpu = size, device, device.type == "cuda"
        self._before = torch.cuda.memory_allocated(device) if self._gpu else 0
        data = self.data()
        super().__init__(variant, bf16_stack(size, device, block), *data, sync=sync)
        self.tokens = dist.get_world_size() * data[0, ..., 0].numel()  # of all ranks

    @abc.abstractmethod
    def data(self) -> Tensor:
        """Input of this rank and gradient of its output, [2, batch, seq, dim] bf16."""

    @abc.abstractmethod
    def check(self, references: dict[str, Results]) -> Row:
        """Compare the first results with those of other variants, which it finds and leaves there.

        Returns what the comparison tells, as columns.
        """

    def sent(self) -> Row:
        """What this rank sends in one step, in a steady state."""
        self()
        with CountedTraffic() as counted:
            self()
        sent = counted.traffic
        return {
            "gathered_mb": sent.gathered / 1e6,
            "reduce_scattered_mb": sent.reduce_scattered / 1e6,
            "all_reduced_kb": sent.all_reduced / 1e3,
            "all_reduces": sent.all_reduces,
            "traffic": asdict(sent),  # in bytes
        }

    def times(self, rounds: int) -> tuple[list[float], float | None]:
        """Milliseconds of each of `rounds` steps, and peak GiB on a GPU; those of the worst rank.

        Steps follow each other as in training, after some that do not count: from the end of one
        to the end of the next.
        """
        free_memory(self.device)  # what checks left behind
        for _ in range(_WARMUP):
            self()
        if self._gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        dist.barrier()
        self()  # so that the first one which counts finds the GPU at work
        clock = Clock(self.device)
        clock.mark()
        for _ in range(rounds):
            self()
            clock.mark()
        found = [1e3 * seconds for seconds in clock.collect()]
        peak = torch.cuda.max_memory_allocated(self.device) - self._before if self._gpu else 0
        worst = torch.tensor([*found, peak], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        *milliseconds, most = worst.tolist()
        return milliseconds, most / 2**30 if self._gpu else None

    def exposed_ms(self) -> float | None:
        """Time of one step in which rank 0 does nothing but communicate; None without a GPU.

        Of a step that starts with an idle GPU, so the gather of the first block is among it.
        """
        if not self._gpu:
            return None
        torch.cuda.synchronize(self.device)
        dist.barrier()
        if dist.get_rank() != 0:
            self()
            return None
        with profile() as profiled:
            self()
            torch.cuda.synchronize(self.device)
        return exposed_ms(profiled)


def bench_on_ranks(
    make: Callable[[Variant, StackSize, torch.device], RanksStep],
    variants: list[Variant],
    size: StackSize,
    device: torch.device,
    rounds: int,
) -> Iterator[list[Row]]:
    """Time every variant on the ranks that there are; an empty list after each, then all rows.

    `make` builds the step of a variant; in each mode the first one is bf16. In each of the passes
    `rounds` steps are timed. Rows of peers that failed say why in `left_out`, and nothing else.
    """
    rows: dict[str, Row] = {}
    references: dict[str, Results] = {}
    with many_compilations():
        for variant in variants * PASSES:
            row = rows.get(variant.name)
            try:
                if row is None:
                    step = make(variant, size, device)
                    row = _names(variant) | step.check(references) | step.sent()
                    row["ms"], row["peak_gib"] = step.times(rounds)
                    row["exposed_ms"], tokens = step.exposed_ms(), step.tokens
                    rows[variant.name] = row
                    del step
                elif not row["left_out"]:
                    row["ms"] += make(variant, size, device).times(rounds)[0]
            except Exception as error:
                if variant.ours or variant.is_reference:
                    raise
                rows[variant.name] = _names(variant, f"{type(error).__name__}: {error}"[:500])
            free_memory(device)
            yield []
    timed = [row for row in rows.values() if not row["left_out"]]
    bf16: dict[str, float] = {}
    for row in timed:  # the first one of each mode is bf16
        ms = row["ms"] = statistics.median(row["ms"])
        row |= {"tokens_per_s": tokens / ms * 1e3, "speedup": bf16.setdefault(row["mode"], ms) / ms}
    yield list(rows.values())


def _names(variant: Variant, left_out: str | None = None) -> Row:
    names = {"recipe": variant.recipe, "mode": variant.mode, "gather": variant.gather or None}
    return {**names, "left_out": left_out}


def free_memory(device: torch.device) -> None:
    """Give back what a step held that nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def communication_settings() -> dict[str, Any]:
    """What decides how fast GPUs talk: versions, and NCCL's own switches."""
    switches = ("NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_CUMEM_ENABLE")
    found: dict[str, Any] = {name: os.environ[name] for name in switches if name in os.environ}
    if torch.cuda.is_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, version))
    return found


class ShardedStep(RanksStep):
    """Forward, backward and optimizer step of a stack under FSDP2, on fixed random data.

    Weights and the state of a fused AdamW are bf16; no mixed precision policy. Each rank has data
    of its own. Converted, each block compiled, each block sharded, the optimizer made: a user's
    order.
    """

    one_graph = False  # FSDP2's hooks break it from torch 2.15 on

    def __init__(self, variant: Variant, size: StackSize, device: torch.device) -> None:
        super().__init__(variant, size, device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in [*self.parts, self.model]:
            fully_shard(part, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        self._handle = variant.attach(self.model, self._optimizer)

    def data(self) -> Tensor:
        """Of this rank alone."""
        return stack_data(self.size, self.device, 1 + dist.get_rank())

    def finish(self, output: Tensor, x: Tensor) -> Results:
        """The optimizer's step, with what is attached to it, goes before."""
        self._optimizer.step()
        return super().finish(output, x)

    def check(self, references: dict[str, Results]) -> Row:
        """Hold gradients against bf16's, and against those of the same recipe gathered in 16 bits.

        References are in host memory.
        """
        variant, results = self.variant, self().items()
        gradients = {name: x.to_local() for name, x in results if isinstance(x, DTensor)}
        if variant.gather != FLOAT8:
            kept = {name: gradient.cpu() for name, gradient in gradients.items()}
            references["bf16" if variant.is_reference else "16-bit gather"] = kept
        quality = check(f"fsdp {variant.name}:", references["bf16"], gradients, AT_LEAST)
        twin = variant.ours and variant.gather == FLOAT8
        same = same_bits(references.pop("16-bit gather"), gradients) if twin else None
        return {"sqnr_db": quality, "same_bits": same}


def same_bits(reference: Results, gradients: Results) -> float:
    """The share of whole gradients that are equal bit by bit; all ranks must call it."""
    pairs = [(kept.view(torch.int16), gradients[name]) for name, kept in reference.items()]
    equal = [torch.equal(kept, gradient.cpu().view(torch.int16)) for kept, gradient in pairs]
    flags = torch.tensor(equal, dtype=torch.int32, device=pairs[0][1].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return float(flags.double().mean())
