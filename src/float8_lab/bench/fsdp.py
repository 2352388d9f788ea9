"""Training steps of models that all ranks of a host hold together: `float8 bench fsdp`, `train`.

Every variant is built, checked, timed and torn down before the next one, since a host may not hold
two of them. The whole list runs twice: else clocks that drop would favour the first ones. How much
the second times differ is in the rows, as the drift.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from float8_lab.bench import step as steps
from float8_lab.bench.model import AT_LEAST, Size, Whole, bf16_stack, stack_data
from float8_lab.bench.step import Results, Row, Step
from float8_lab.bench.traffic import CountedTraffic
from float8_lab.bench.variants import HIGH_PRECISION, Variant, many_compilations
from float8_lab.device import Clock
from float8_lab.errors import WrongResultError
from float8_lab.ranks import for_all

PASSES = 2  # how often the list of variants is run
_WARMUP = 2
_LEARNING = 9  # steps after the first one, which let a loss fall at this learning rate
_RATE = 1e-4
Built = tuple[nn.Module, Tensor, Tensor]  # a model, its input and the gradient of its output
Build = Callable[[], Built]


class RanksStep(Step):
    """A step of a model on all ranks; all of them must call each method.

    `build` makes what it runs on; only what is allocated from then on counts as its memory.
    """

    at_least = AT_LEAST  # dB of every result's SQNR

    def __init__(
        self, variant: Variant, size: Size, device: torch.device, build: Build, **how: Any
    ) -> None:
        self.size, self.device = size, device
        self._before = steps.allocated(device)
        # FSDP2's hooks break graphs from torch 2.14 on.
        super().__init__(variant, *build(), **{"one_graph": False, **how})
        # Of all ranks.
        self.tokens = {"tokens_per_s": dist.get_world_size() * self._x[..., 0].numel()}

    def check(self, references: dict[str, Results]) -> Row:
        """Hold results of the first step against bf16's; references are in host memory."""
        began = time.perf_counter()
        results = self()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        row: Row = {"first_step_s": time.perf_counter() - began}
        found = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in results.items()}
        if self.variant.is_reference:
            references[HIGH_PRECISION] = {name: x.cpu() for name, x in found.items()}
        base = references[HIGH_PRECISION]
        return row | {"sqnr_db": steps.check(f"{self.variant.name}:", base, found, self.at_least)}

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
    make: Callable[[Variant, Size, torch.device], RanksStep],
    variants: list[Variant],
    size: Size,
    device: torch.device,
    rounds: int,
) -> Iterator[list[Row]]:
    """Time every variant on the ranks that there are; after each, all rows known by then.

    `make` builds the `RanksStep` of a variant, whose `check` compares it with results that others
    have left; in each mode the first is bf16. Rows of peers that failed say why in `left_out`.
    """
    rows = {variant.name: dict(variant.columns) for variant in variants}
    times: dict[str, list[float]] = {name: [] for name in rows}
    references: dict[str, Results] = {}
    with many_compilations():
        for number, variant in enumerate(variants * PASSES):
            row, first = rows[variant.name], number < len(variants)
            try:
                if "left_out" not in row:
                    step = make(variant, size, device)
                    row |= step.check(references) | step.sent() if first else {}
                    new, peak = step.times(rounds)
                    times[variant.name] += new
                    row.setdefault("peak_gib", peak)
                    row["ms"] = statistics.median(times[variant.name])
                    if not first:
                        before, after = map(statistics.median, (times[variant.name][:rounds], new))
                        row["drift_percent"] = 100 * (after / before - 1)
                    tokens = step.tokens
                    del step
            except Exception as error:
                rows[variant.name] = row = dict(variant.columns)  # nothing of the pass before
                steps.leave_out(row, variant, error)
            steps.free_memory(device)
            known = [row for row in rows.values() if "ms" in row or "left_out" in row]
            yield steps.with_speedups(known, **tokens)


def _shard(step: RanksStep, masters: bool) -> None:
    mesh = init_device_mesh(step.device.type, (dist.get_world_size(),))
    low, high = (torch.bfloat16, torch.float32) if masters else (None, None)
    policy = MixedPrecisionPolicy(low, high, cast_forward_inputs=not masters)
    for part in [*step.parts, *getattr(step.model, "ends", []), step.model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)


class ShardedStep(RanksStep):
    """Forward, backward and optimizer step of a stack under FSDP2, on random data of each rank.

    Weights and the state of a fused AdamW are bf16, or `masters` in float32 that are gathered in
    fewer bits. Converted, compiled and sharded block by block, the optimizer made: a user's order.
    """

    def __init__(
        self, variant: Variant, size: Size, device: torch.device, *, masters: bool = False
    ) -> None:
        def build() -> Built:
            stack = bf16_stack(size, device)
            stack.layers.to(torch.float32 if masters else torch.bfloat16)
            x, grad = stack_data(size, device, 1 + dist.get_rank())  # of this rank alone
            return stack, x, grad

        super().__init__(variant, size, device, build)
        _shard(self, masters)
        self.add_optimizer()


class TrainStep(RanksStep):
    """A step of a whole model, as torchtitan trains it: the same tokens at each step.

    Masters are float32; on several ranks FSDP2 gathers them, on one autocast casts them. With
    `lora` a frozen model in bf16 has adapters of PEFT on all linear layers of its blocks.
    """

    at_least = 3.0  # of gradients through many blocks; of zeros, or of twice as much, it is 0 dB

    def __init__(
        self, variant: Variant, size: Size, device: torch.device, *, lora: bool, transformers: bool
    ) -> None:
        def build() -> Built:
            model = Whole(size, device, torch.bfloat16 if lora else torch.float32, transformers)
            generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
            shape, vocabulary = (size.batch, size.seq_len + 1), size.config.vocab_size
            tokens = torch.randint(vocabulary, shape, device=device, generator=generator)
            return model.requires_grad_(not lora), tokens, torch.ones(1, device=device)

        def convert(model: nn.Module) -> nn.Module:
            variant.convert(model.get_submodule("model"))  # where the head has its usual name
            return adapted(model) if lora else model

        super().__init__(replace(variant, convert=convert), size, device, build)
        self.tokens = {"tokens_per_s_per_gpu": size.tokens}
        if several := dist.get_world_size() > 1:
            _shard(self, masters=True)
        self.add_optimizer(_RATE)
        cast = not several and not lora
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=cast)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The loss [1], and the tokens."""
        with self._autocast:
            return super().forward()

    def check(self, references: dict[str, Results]) -> Row:
        """Also hold the loss of a later step against bf16's.

        It may be off by a tenth of what bf16's has fallen by, and a thousandth of bf16's.
        """
        row = super().check(references)
        for _ in range(_LEARNING):
            loss = self()["output"]
        losses = torch.cat([references[HIGH_PRECISION]["output"].to(loss), loss])
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        if self.variant.is_reference:
            references["loss"] = {"loss": losses}
        (first, wanted), last = references["loss"]["loss"].tolist(), losses[1].item()
        most = 0.1 * (first - wanted) + 1e-3 * wanted
        if not (abs(last - wanted) <= most and wanted < first):  # also if it is NaN
            got = f"loss {last:.4f} after {1 + _LEARNING} steps, expected {wanted:.4f} as of bf16"
            message = f"{got}, which began at {first:.4f}; nothing was timed"
            raise for_all(WrongResultError(f"{self.variant.name}: {message}"))
        return row | {"loss": last}

    def sent(self) -> Row:
        """Count nothing."""
        return {}


def adapted(model: nn.Module) -> nn.Module:
    """Give every linear layer of the blocks adapters of PEFT: always the same ones, none zero."""
    peft = importlib.import_module("peft")
    blocks = model.get_submodule("layers").named_modules()
    names = {name.split(".")[-1] for name, each in blocks if isinstance(each, nn.Linear)}
    torch.manual_seed(2)
    lora = peft.LoraConfig(r=16, target_modules=sorted(names), init_lora_weights=False)
    return peft.inject_adapter_in_model(lora, model)  # type: ignore[no-any-return]
