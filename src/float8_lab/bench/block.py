"""`float8 bench block`: a stack of Llama blocks, forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from float8_lab.bench.step import Row, Step, compare
from float8_lab.bench.variants import Variant
from float8_lab.models.llama import Block, rope_table
from float8_lab.models.presets import PRESETS, ModelConfig, preset

AT_LEAST = 10.0
"""Lower bound of the SQNR in dB of every gradient against bf16's: noise of all blocks adds up."""


@dataclass(frozen=True)
class StackSize:
    """How much is run: blocks of a preset model on microbatches of `batch` sequences.

    The texts are those of the options.
    """

    model: Annotated[str, f"Shape of the blocks: {', '.join(PRESETS)}."] = "llama3-8b"
    blocks: Annotated[int, "How many blocks."] = 4
    seq_len: Annotated[int, "Tokens per sequence."] = 8192
    batch: Annotated[int, "Sequences."] = 1
    microbatches: int = 1

    def __str__(self) -> str:
        return f"{self.blocks} {self.model} block(s), {self.batch} x {self.seq_len} tokens"


class Stack(nn.Module):
    """Llama blocks without embedding and head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: StackSize, block: Callable[[ModelConfig], nn.Module] = Block) -> None:
        super().__init__()
        config = replace(preset(size.model).model, n_layers=size.blocks)
        self.layers = nn.ModuleList(block(config) for _ in range(size.blocks))
        cos, sin = rope_table(config.head_dim, size.seq_len, config.rope_theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [batch, seq, dim]; same shape and dtype out."""
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


def bf16_stack(
    size: StackSize, device: torch.device, block: Callable[[ModelConfig], nn.Module] = Block
) -> Stack:
    """The same weights at every call, in bf16; the rotary table stays float32."""
    torch.manual_seed(0)
    with torch.device(device):
        stack = Stack(size, block)
    stack.layers.to(torch.bfloat16)
    return stack


def stack_data(size: StackSize, device: torch.device, seed: int = 1) -> Tensor:
    """Input and gradient of the output, [2, batch, seq, dim] bf16; the same at every call."""
    shape = (2, size.batch, size.seq_len, preset(size.model).model.dim)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)


def stack_step(variant: Variant, size: StackSize, device: torch.device) -> Step:
    """A step of a stack in one variant, with the sync of delayed scaling."""
    stack, data = bf16_stack(size, device), stack_data(size, device)
    return Step(variant, stack, *data, microbatches=size.microbatches, sync=True)


def bench_block(
    size: StackSize, variants: Sequence[Variant], device: torch.device, rounds: int
) -> Iterator[list[Row]]:
    """Time every variant; an empty list for each that is compiled and checked, then all rows.

    The first variant must be bf16.
    """
    steps = (stack_step(variant, size, device) for variant in variants)
    return compare("block", steps, device, rounds, at_least=AT_LEAST)
