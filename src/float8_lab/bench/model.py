"""Plain Llamas as users write them, whose variants are measured side by side."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from float8_lab.bench.results import size_of
from float8_lab.bench.step import Row, Step, compare
from float8_lab.bench.variants import Variant
from float8_lab.errors import ConfigError
from float8_lab.models.llama import Block, Llama, rope_table
from float8_lab.models.presets import PRESETS, ModelConfig, preset

AT_LEAST = 10.0
"""Lower bound of the SQNR in dB of every gradient against bf16's: noise of all blocks adds up."""


@dataclass(frozen=True)
class Size:
    """Blocks of a preset model, and sequences that they run on. Texts are of the options."""

    model: Annotated[str, f"Shape of the blocks: {', '.join(PRESETS)}."] = "llama3-8b"
    blocks: Annotated[int | None, "How many blocks; else all."] = 4
    seq_len: Annotated[int, "Tokens per sequence."] = 8192
    batch: Annotated[int, "Sequences."] = 1

    @property
    def config(self) -> ModelConfig:
        """The shape of the model with so many blocks."""
        config = preset(self.model).model
        return replace(config, n_layers=self.blocks or config.n_layers)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.seq_len

    def __str__(self) -> str:
        return size_of(vars(self))


@dataclass(frozen=True, kw_only=True)
class Scaled(Size):
    """The same with blocks of another width."""

    width: int

    @property
    def config(self) -> ModelConfig:
        """The shape of the model with so many blocks, of that width."""
        return super().config.scaled(self.width)


def scaled_sizes(size: Size, widths: Sequence[str]) -> list[Size]:
    """Return that size at each of the widths, or as it is; a `ConfigError` if one cannot be."""
    if wrong := [each for each in widths if not each.isdecimal()]:
        raise ConfigError(f"widths: got {wrong[0]!r}, expected whole numbers")
    scaled = [Scaled(**vars(size), width=width) for width in dict.fromkeys(map(int, widths))]
    sizes: list[Size] = [*scaled] or [size]
    for each in sizes:
        _ = each.config
    return sizes


class Stack(nn.Module):
    """Llama blocks without embedding and head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        cos, sin = rope_table(config.head_dim, seq_len, config.rope_theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [batch, seq, dim]; same shape and dtype out."""
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


class NextTokens(nn.Module):
    """The loss of the next tokens, which trainers compile by itself."""

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The mean [1], float32, for logits [batch, seq, vocab] of all tokens but the last."""
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())[None]


class Whole(nn.Module):
    """A Llama with embedding, head and loss: this project's, or that of transformers."""

    def __init__(
        self, size: Size, device: torch.device, dtype: torch.dtype, transformers: bool
    ) -> None:
        super().__init__()
        shape = size.config
        torch.manual_seed(0)
        with torch.device(device):
            if transformers:
                library = importlib.import_module("transformers")
                like = library.LlamaConfig(
                    vocab_size=shape.vocab_size,
                    hidden_size=shape.dim,
                    intermediate_size=shape.ffn_dim,
                    num_hidden_layers=shape.n_layers,
                    num_attention_heads=shape.n_heads,
                    num_key_value_heads=shape.n_kv_heads,
                    max_position_embeddings=size.seq_len,
                    tie_word_embeddings=shape.tied_head,
                    use_cache=False,
                )
                self.model = library.LlamaForCausalLM._from_config(like)
                inner, head = self.model.model, self.model.lm_head
                first = inner.embed_tokens
                for block in inner.layers:  # as this project's
                    for last in (block.self_attn.o_proj, block.mlp.down_proj):
                        last.weight.data /= (2 * shape.n_layers) ** 0.5
            else:
                inner = self.model = Llama(shape, size.seq_len)
                inner.init_weights(0)
                first, head = inner.embedding, inner.output
        if not shape.tied_head:
            # As in torchtitan. What the first blocks add would be larger than a smaller embedding;
            # the rounding noise of all blocks would then hide its gradient, that of bf16, too.
            nn.init.normal_(first.weight)
        for parameter in self.parameters():  # tables of positions stay float32
            parameter.data = parameter.data.to(dtype)
        self.layers, self.loss = inner.layers, NextTokens()
        # What is sharded apart: before and behind the blocks. A tied weight belongs to both.
        self.ends = [] if shape.tied_head else [[first], [inner.norm, head]]

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss [1] of the next tokens, for tokens [batch, seq + 1] int64."""
        logits = self.model(tokens[:, :-1])
        return self.loss(getattr(logits, "logits", logits), tokens)  # type: ignore[no-any-return]


def bf16_stack(size: Size, device: torch.device) -> Stack:
    """Return the same weights at every call, in bf16; the rotary table stays float32."""
    torch.manual_seed(0)
    with torch.device(device):
        stack = Stack(size.config, size.seq_len)
    stack.layers.to(torch.bfloat16)
    return stack


def stack_data(size: Size, device: torch.device, seed: int = 1) -> Tensor:
    """Return input and gradient of the output, [2, batch, seq, dim] bf16; always the same."""
    shape = (2, size.batch, size.seq_len, size.config.dim)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)


def model_step(
    variant: Variant, size: Size, device: torch.device, *, microbatches: int = 1
) -> Step:
    """Return a step of one variant of a stack on random data, with the sync of delayed scaling."""
    stack, data = bf16_stack(size, device), stack_data(size, device)
    return Step(variant, stack, *data, microbatches=microbatches, sync=True)


def bench_model(
    sizes: Sequence[Size],
    variants: Sequence[Variant],
    device: torch.device,
    rounds: int,
    microbatches: int,
) -> Iterator[list[Row]]:
    """Check and time every variant of each size, as `compare`; rows of a `Scaled` have its width.

    An empty list for each variant that is ready, then all rows of a size.
    """
    for size in sizes:
        torch.compiler.reset()  # what was compiled for the size before
        make = partial(model_step, size=size, device=device, microbatches=microbatches)
        width = {"width": size.width} if isinstance(size, Scaled) else {}
        groups = compare(
            "model", make, variants, device, rounds,
            at_least=AT_LEAST, tokens=size.tokens * microbatches,
        )  # fmt: skip
        for rows in groups:
            yield [width | row for row in rows]
