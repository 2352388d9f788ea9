"""Plain Llamas as users write them, whose variants are measured side by side."""

import importlib
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from float8_lab.bench.results import size_of
from float8_lab.bench.step import Step
from float8_lab.bench.variants import Variant
from float8_lab.models.llama import Llama, rope_table
from float8_lab.models.presets import PRESETS, ModelConfig, preset


@dataclass(frozen=True)
class Size:
    """Blocks of a preset model, and sequences that they run on. Texts are of the options."""

    model: Annotated[str, f"Shape of the blocks: {', '.join(PRESETS)}."] = "llama3-8b"
    blocks: Annotated[int | None, "How many blocks; else all."] = 4
    seq_len: Annotated[int, "Tokens per sequence."] = 8192
    batch: Annotated[int, "Sequences."] = 1

    def __post_init__(self) -> None:
        preset(self.model)  # refuses what it does not know

    def config(self) -> ModelConfig:
        """Return the shape of the model with so many blocks."""
        shape = preset(self.model).model
        return replace(shape, n_layers=self.blocks or shape.n_layers)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.seq_len

    def __str__(self) -> str:
        return size_of(vars(self))


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
        shape = size.config()
        torch.manual_seed(0)
        with torch.device(device):
            if transformers:
                library = importlib.import_module("transformers")
                sizes = {"vocab_size": shape.vocab_size, "hidden_size": shape.dim}
                sizes |= {"intermediate_size": shape.ffn_dim, "num_hidden_layers": shape.n_layers}
                sizes |= {"num_attention_heads": shape.n_heads, "use_cache": False}
                sizes |= {"num_key_value_heads": shape.n_kv_heads}
                sizes |= {"max_position_embeddings": size.seq_len}
                like = library.LlamaConfig(tie_word_embeddings=shape.tied_head, **sizes)
                self.model = library.LlamaForCausalLM._from_config(like)
                inner, head = self.model.model, self.model.lm_head
                first = inner.embed_tokens
                for block in inner.layers:  # as this project's
                    for last in (block.self_attn.o_proj, block.mlp.down_proj):
                        last.weight.data /= (2 * shape.n_layers) ** 0.5
                if not shape.tied_head:
                    nn.init.normal_(first.weight)
            else:
                inner = self.model = Llama(shape, size.seq_len)
                inner.init_weights(0)
                first, head = inner.embedding, inner.output
        for parameter in self.parameters():  # tables of positions stay float32
            parameter.data = parameter.data.to(dtype)
        self.layers, self.loss = inner.layers, NextTokens()
        # What is sharded apart: before and behind the blocks. A tied weight belongs to both.
        self.ends = [] if shape.tied_head else [[first], [inner.norm, head]]

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss [1] of the next tokens, for tokens [batch, seq + 1] int64."""
        logits = self.model(tokens[:, :-1])
        return self.loss(getattr(logits, "logits", logits), tokens)  # type: ignore[no-any-return]


def stack_and_data(size: Size, device: torch.device) -> tuple[Llama, Tensor]:
    """Return blocks in bf16 without embedding and head, and data, the same at every call.

    Data are the input of the blocks and the gradient of their output, [2, batch, seq, dim] bf16.
    """
    config = size.config()
    torch.manual_seed(0)
    with torch.device(device):
        stack = Llama(replace(config, vocab_size=1), size.seq_len)
        data = torch.randn(2, size.batch, size.seq_len, config.dim, dtype=torch.bfloat16)
    for name in ("embedding", "norm", "output"):
        setattr(stack, name, nn.Identity())
    table = rope_table(config.head_dim, size.seq_len, config.rope_theta)
    stack.cos, stack.sin = (each.to(device) for each in table)
    stack.layers.to(torch.bfloat16)
    return stack, data


def model_step(variant: Variant, size: Size, device: torch.device, kind: type[Step] = Step) -> Step:
    """Return a step of one variant of a stack on random data."""
    stack, data = stack_and_data(size, device)
    return kind(variant, stack, *data)
