"""One variant of the sharded stack on one rank: its training step, checked, counted and timed."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from float8.convert.measure import WrongResultError
from float8_lab.bench.block import StackSize, bf16_stack
from float8_lab.bench.fsdp_variants import ShardedVariant
from float8_lab.bench.traffic import CountedTraffic, Traffic, exposed_ms
from float8_lab.models.presets import preset

Gradients = dict[str, Tensor]
"""This rank's shards, by the names of the weights."""

# Lower bound of the SQNR in dB of every gradient against bf16's: the noise of all blocks adds up.
_AT_LEAST = 10.0
_WARMUP = 2
# Too small to change what bf16 weights are like within a benchmark; the work is that of training.
_LEARNING_RATE = 1e-5


class ShardedStep:
    """Forward, backward and optimizer step of a stack under FSDP2, on fixed random data.

    Weights and the state of a fused AdamW are bf16; no mixed precision policy. Each rank has data
    of its own. Weights are the same for every variant.
    """

    def __init__(self, variant: ShardedVariant, size: StackSize, device: torch.device) -> None:
        """Convert, compile each block, shard each block, make the optimizer: a user's order."""
        self._device, self._around = device, variant.variant.around
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.peak_gib: float | None = None
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.stack = variant.variant.convert(bf16_stack(size, device))
        layers = self.stack.get_submodule("layers").children()
        for layer in layers:
            variant.variant.compile(layer)
            fully_shard(layer, mesh=mesh)
        fully_shard(self.stack, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self.stack.parameters(), lr=_LEARNING_RATE, fused=True)
        self._handle = variant.attach(self.stack, self._optimizer)
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        shape = (size.batch, size.seq_len, preset(size.model).model.dim)
        make = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        self._x = torch.randn(shape, **make)  # type: ignore[call-overload]
        self._grad = torch.randn(shape, **make)  # type: ignore[call-overload]

    def __call__(self) -> None:
        """One training step."""
        self.backward()
        self.optimize()

    def backward(self) -> None:
        """Forward and backward."""
        x = self._x.detach().requires_grad_()
        with self._around():
            output: Tensor = self.stack(x)
        torch.autograd.backward(output, self._grad)

    def optimize(self) -> None:
        """The optimizer's step with what is attached to it."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def first_gradients(self) -> Gradients:
        """This rank's gradients of a step that has yet to be finished with `optimize`."""
        self.backward()
        return {name: _local(p.grad) for name, p in self.stack.named_parameters()}

    def traffic(self) -> Traffic:
        """What one step sends, in a steady state."""
        self()
        with CountedTraffic() as counted:
            self()
        traffic: Traffic = counted.traffic
        return traffic

    def times(self, rounds: int) -> list[float]:
        """Milliseconds of each of `rounds` steps, of the slowest rank; sets `peak_gib`.

        Steps follow each other as in training, after some that do not count. On a GPU its own
        clock counts, from the end of one step to the end of the next.
        """
        for _ in range(_WARMUP):
            self()
        gpu = self._device.type == "cuda"
        if gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        dist.barrier()
        times = self._gpu_times(rounds) if gpu else self._host_times(rounds)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        if gpu:
            peak = torch.cuda.max_memory_allocated(self._device) - self._before
            self.peak_gib = _max_over_ranks(peak, self._device) / 2**30
        milliseconds: list[float] = times.tolist()
        return milliseconds

    def exposed_ms(self) -> float | None:
        """Time of one step in which rank 0 does nothing but communicate; None without a GPU.

        Of a step that starts with an idle GPU, so the gather of the first block is among it. All
        ranks must call it.
        """
        if self._device.type != "cuda":
            return None
        torch.cuda.synchronize(self._device)
        dist.barrier()
        if dist.get_rank() != 0:
            self()
            return None
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            self()
            torch.cuda.synchronize(self._device)
        return exposed_ms(profiled)

    def _gpu_times(self, rounds: int) -> Tensor:
        self()  # so that the first one which counts finds the GPU at work
        ends = [torch.cuda.Event(enable_timing=True)]  # type: ignore[no-untyped-call]
        ends[0].record()
        for _ in range(rounds):
            self()
            ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            ends[-1].record()
        torch.cuda.synchronize(self._device)
        times = [start.elapsed_time(end) for start, end in itertools.pairwise(ends)]
        return torch.tensor(times, dtype=torch.float64, device=self._device)

    def _host_times(self, rounds: int) -> Tensor:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            self()
            times.append((time.perf_counter() - start) * 1e3)
        return torch.tensor(times, dtype=torch.float64)


class Reference:
    """Gradients of one variant, kept in host memory, for others to be held against."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = {name: gradient.cpu() for name, gradient in gradients.items()}

    def check(self, what: str, gradients: Gradients) -> float:
        """The lowest SQNR in dB of all whole gradients; all ranks must call it.

        Raises:
            WrongResultError: One of them is below the bound or not a number; on all ranks.
        """
        powers = []
        for name, kept in self._gradients.items():
            gradient = gradients[name].double()
            expected = kept.to(gradient.device).double()
            powers += [expected.square().sum(), (expected - gradient).square().sum()]
        total = torch.stack(powers)
        dist.all_reduce(total)
        signal, noise = total.view(-1, 2).unbind(1)
        found = (10 * torch.log10(signal / noise)).tolist()
        for name, quality in zip(self._gradients, found, strict=True):
            if not quality >= _AT_LEAST:  # also if it is NaN
                raise WrongResultError(
                    f"fsdp {what}: gradient of {name}: SQNR {quality:.1f} dB, expected at least "
                    f"{_AT_LEAST:.0f} dB; nothing was timed"
                )
        return float(min(found))

    def same_bits(self, gradients: Gradients) -> float:
        """The share of whole gradients that are equal bit by bit; all ranks must call it."""
        equal = [
            torch.equal(kept.view(torch.int16), gradients[name].cpu().view(torch.int16))
            for name, kept in self._gradients.items()
        ]
        device = next(iter(gradients.values())).device
        flags = torch.tensor(equal, dtype=torch.int32, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        return float(flags.double().mean())


@contextmanager
def build_and_free(
    variant: ShardedVariant, size: StackSize, device: torch.device
) -> Iterator[ShardedStep]:
    """A `ShardedStep`, whose memory is free again afterwards."""
    step = ShardedStep(variant, size, device)
    try:
        yield step
    finally:
        # The caller still holds the step itself, but nothing large hangs on it.
        step.__dict__.clear()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


def _local(gradient: Tensor | None) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


def _max_over_ranks(value: int, device: torch.device) -> int:
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())
