"""Training steps of stacks that all ranks of a host hold together; and `float8 bench fsdp`.

Every variant is built, checked, timed and torn down before the next one, since a host may not hold
two of them. The whole list runs twice: else clocks that drop would favour the first ones.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from float8_lab.bench import step as steps
from float8_lab.bench.model import AT_LEAST, Size, bf16_stack, stack_data
from float8_lab.bench.step import Results, Row, Step
from float8_lab.bench.traffic import CountedTraffic
from float8_lab.bench.variants import HIGH_PRECISION, Variant, many_compilations
from float8_lab.device import Clock

PASSES = 2  # how often the list of variants is run
_WARMUP = 2


class RanksStep(Step):
    """A step of a stack on all ranks; all of them must call each method.

    `data` is the input of this rank and the gradient of its output, [2, batch, seq, dim] bf16.
    """

    def __init__(
        self,
        variant: Variant,
        size: Size,
        data: Tensor,
        *,
        dtype: torch.dtype = torch.bfloat16,
        sync: bool = False,
        one_graph: bool = True,
    ) -> None:
        self.size, self.device = size, (device := data.device)
        self._before = steps.allocated(device) - data.nbytes
        stack = bf16_stack(size, device, variant.keep)
        stack.layers.to(dtype)
        super().__init__(variant, stack, *data, sync=sync, one_graph=one_graph)
        self.tokens = dist.get_world_size() * data[0, ..., 0].numel()  # of all ranks

    def sent(self) -> Row:
        """Count the bytes that this rank sends in one step, in a steady state."""
        self()
        with CountedTraffic() as counted:
            self()
        sent = counted.traffic
        row: Row = {f"{kind}_mb": sent[kind] / 1e6 for kind in ("gathered", "reduce_scattered")}
        return row | {
            "all_reduced_kb": sent["all_reduced"] / 1e3,
            "all_reduces": sent["all_reduces"],
        }

    def times(self, rounds: int) -> tuple[list[float], float | None]:
        """Milliseconds of each of `rounds` steps, and peak GiB on a GPU; those of the worst rank.

        Steps follow each other as in training: each is from the end of one to the end of the next.
        """
        steps.free_memory(self.device)  # what checks left behind
        for _ in range(_WARMUP):
            self()
        if gpu := self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        dist.barrier()
        self()  # so that the first one which counts finds the GPU at work
        clock = Clock(self.device)
        clock.mark()
        for _ in range(rounds):
            self()
            clock.mark()
        peak = torch.cuda.max_memory_allocated(self.device) - self._before if gpu else 0
        worst = torch.tensor([*clock.collect(), peak], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        *seconds, most = worst.tolist()
        return [1e3 * each for each in seconds], most / 2**30 if gpu else None


def bench_on_ranks(
    make: Callable[[Variant, Size, torch.device], Any],
    variants: list[Variant],
    size: Size,
    device: torch.device,
    rounds: int,
) -> Iterator[list[Row]]:
    """Time every variant on the ranks that there are; an empty list after each, then all rows.

    `make` builds the `RanksStep` of a variant, whose `check` compares it with results that others
    have left; in each mode the first is bf16. Rows of peers that failed say why in `left_out`.
    """
    rows = {variant.name: dict(variant.columns) for variant in variants}
    times: dict[str, list[float]] = {name: [] for name in rows}
    references: dict[str, Results] = {}
    with many_compilations():
        for number, variant in enumerate(variants * PASSES):
            row = rows[variant.name]
            try:
                if "left_out" not in row:
                    step = make(variant, size, device)
                    row |= step.check(references) | step.sent() if number < len(variants) else {}
                    new, peak = step.times(rounds)
                    times[variant.name] += new
                    row.setdefault("peak_gib", peak)
                    tokens = step.tokens
                    del step
            except Exception as error:
                steps.leave_out(row, variant, error)
            steps.free_memory(device)
            yield []
    for name, row in rows.items():
        if "left_out" not in row:
            row["ms"] = statistics.median(times[name])
    yield steps.with_speedups(list(rows.values()), tokens)


class ShardedStep(RanksStep):
    """Forward, backward and optimizer step of a stack under FSDP2, on random data of each rank.

    Weights and the state of a fused AdamW are bf16, or `masters` in float32 that are gathered in
    fewer bits. Converted, compiled and sharded block by block, the optimizer made: a user's order.
    """

    def __init__(
        self, variant: Variant, size: Size, device: torch.device, *, masters: bool = False
    ) -> None:
        dtype = torch.float32 if masters else torch.bfloat16
        data = stack_data(size, device, 1 + dist.get_rank())  # of this rank alone
        # FSDP2's hooks break graphs from torch 2.15 on.
        super().__init__(variant, size, data, dtype=dtype, one_graph=False)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        low, high = (torch.bfloat16, torch.float32) if masters else (None, None)
        policy = MixedPrecisionPolicy(low, high, cast_forward_inputs=not masters)
        for part in [*self.parts, self.model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        self.add_optimizer()

    def check(self, references: dict[str, Results]) -> Row:
        """Hold gradients against bf16's; references are in host memory."""
        found = {name: x.to_local() for name, x in self().items() if isinstance(x, DTensor)}
        if self.variant.is_reference:
            references[HIGH_PRECISION] = {name: gradient.cpu() for name, gradient in found.items()}
        what, base = f"fsdp {self.variant.name}:", references[HIGH_PRECISION]
        return {"sqnr_db": steps.check(what, base, found, AT_LEAST)}
