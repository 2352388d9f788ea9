"""`float8 bench block`: a stack of Llama blocks, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from float8.sync import sync_float8_amax_and_scale_history
from float8_lab.bench.memory import peak_bytes
from float8_lab.bench.quality import check
from float8_lab.bench.timing import call_sampler, take_turns
from float8_lab.bench.variants import Variant, many_compilations
from float8_lab.models.llama import Block, rope_table
from float8_lab.models.presets import preset

Row = dict[str, Any]

# Lower bound of the SQNR in dB of every gradient against bf16's: the noise of all blocks adds up.
_AT_LEAST = 10.0
_WARMUP = 3


@dataclass(frozen=True)
class StackSize:
    """How much is run: blocks of a preset model on microbatches of `batch` sequences."""

    model: str
    blocks: int
    seq_len: int
    batch: int = 1
    microbatches: int = 1


class Stack(nn.Module):
    """Llama blocks without embedding and head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: StackSize) -> None:
        super().__init__()
        config = replace(preset(size.model).model, n_layers=size.blocks)
        self.layers = nn.ModuleList(Block(config) for _ in range(size.blocks))
        cos, sin = rope_table(config.head_dim, size.seq_len, config.rope_theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [batch, seq, dim]; same shape and dtype out."""
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


class StackStep:
    """Forward and backward of a stack in one variant, on fixed random data.

    A step is as many of them as there are microbatches, with gradients accumulated.
    """

    def __init__(self, variant: Variant, size: StackSize, device: torch.device) -> None:
        self._variant, self._microbatches = variant, size.microbatches
        stack = bf16_stack(size, device)
        self.stack = variant.convert(stack)
        for layer in stack.layers:
            variant.compile(layer)
        generator = torch.Generator(device).manual_seed(1)
        shape = (size.batch, size.seq_len, preset(size.model).model.dim)
        make = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        self._x = torch.randn(shape, **make)  # type: ignore[call-overload]
        self._grad = torch.randn(shape, **make)  # type: ignore[call-overload]

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output of the last block and the input of the first, both [batch, seq, dim].

        The input is a new tensor object at each call, as in training: what a library keeps of a
        tensor it saw before must not help.
        """
        x = self._x.detach().requires_grad_()
        with self._variant.around():
            output: Tensor = self.stack(x)
        return output, x

    def backward(self, output: Tensor, x: Tensor) -> dict[str, Tensor]:
        """All gradients by name; and the sync of delayed scaling, as in a training step."""
        torch.autograd.backward(output, self._grad)
        return self._finish(x)

    def __call__(self) -> dict[str, Tensor]:
        """One step; returns the sums of all weights' gradients and the last one of the input."""
        with self._variant.caching(self.stack):
            for _ in range(self._microbatches):
                output, x = self.forward()
                torch.autograd.backward(output, self._grad)
        return self._finish(x)

    def _finish(self, x: Tensor) -> dict[str, Tensor]:
        if self._variant.ours:
            sync_float8_amax_and_scale_history(self.stack)
        gradients = {"input": self._taken(x)}
        for name, parameter in self.stack.named_parameters():
            gradients[name] = self._taken(parameter)
        return gradients

    @staticmethod
    def _taken(tensor: Tensor) -> Tensor:
        gradient = tensor.grad
        assert gradient is not None
        tensor.grad = None
        return gradient


def bench_block(
    size: StackSize, variants: Sequence[Variant], device: torch.device, rounds: int
) -> Iterator[list[Row]]:
    """Time every variant; yields nothing while they are compiled and checked, then all rows.

    An empty list is yielded for each variant that is ready, so that a progress bar can move. The
    first variant must be bf16.

    Raises:
        WrongResultError: A gradient is wrong; says which.
    """
    steps: dict[str, StackStep] = {}
    rows: list[Row] = []
    reference: dict[str, Tensor] | None = None
    with many_compilations():
        for variant in variants:
            step = StackStep(variant, size, device)
            for _ in range(_WARMUP):  # compiles, and fills the histories of delayed scaling
                gradients = step()
            quality = float("inf")
            if reference is None:
                reference = gradients
            else:
                quality = _check(variant.name, reference, gradients)
            del gradients
            peak = peak_bytes(step, device)
            rows.append(
                {
                    "recipe": variant.recipe,
                    "mode": variant.mode,
                    "peak_gib": None if peak is None else peak / 2**30,
                    "sqnr_db": quality,
                }
            )
            steps[variant.name] = step
            yield []
        del reference
        samplers = {
            name: call_sampler([step], device, lead_in=step) for name, step in steps.items()
        }
        times = take_turns(samplers, rounds)
    bf16 = {v.mode: times[v.name] for v in variants if v.is_reference}
    for row, variant in zip(rows, variants, strict=True):
        row["ms"] = times[variant.name]
        row["speedup"] = bf16[variant.mode] / row["ms"]
    yield rows


def bf16_stack(size: StackSize, device: torch.device) -> Stack:
    """The same weights at every call, in bf16; the rotary table stays float32."""
    torch.manual_seed(0)
    with torch.device(device):
        stack = Stack(size)
    cos, sin = stack.cos, stack.sin
    stack = stack.to(torch.bfloat16)
    stack.cos, stack.sin = cos, sin
    return stack


def _check(what: str, reference: dict[str, Tensor], gradients: dict[str, Tensor]) -> float:
    """The lowest SQNR in dB of all gradients. Peers may order theirs differently, not rename."""
    return min(
        check(f"block {what}: gradient of {name}", expected, gradients[name], _AT_LEAST)
        for name, expected in reference.items()
    )
