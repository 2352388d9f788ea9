"""Plain models as users write them, whose variants are measured side by side."""

import importlib
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from float8_lab.bench.results import size_of
from float8_lab.bench.step import Step
from float8_lab.bench.variants import Variant
from float8_lab.models.llama import Llama, rope_table
from float8_lab.models.presets import PRESETS, ModelConfig, preset

OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
    "mixtral": {},
    "olmoe": {},
    "qwen3_moe": {"head_dim": 128},
}
"""Types of models of transformers, with what their defaults lack to be Llama-3-8B, Mixtral-8x7B,
OLMoE-1B-7B with experts twice as wide, and Qwen3-30B-A3B (24 of its 48 blocks)."""


@dataclass(frozen=True)
class Size:
    """Blocks of a model, and sequences that they run on. The texts are the help of options."""

    model: Annotated[
        str, f"{', '.join(PRESETS)}; for train also {', '.join(OF_TRANSFORMERS)} of transformers."
    ] = "llama3-8b"
    blocks: Annotated[int | None, "How many blocks; else as many as the model has."] = 4
    seq_len: Annotated[int, "Tokens per sequence."] = 8192
    batch: Annotated[int, "Sequences."] = 1

    def __post_init__(self) -> None:
        if self.model not in OF_TRANSFORMERS:
            preset(self.model)  # refuses what it does not know

    def config(self) -> ModelConfig:
        """Return the shape of the preset with so many blocks; a `ConfigError` if it is none."""
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


def _of_transformers(size: Size) -> Any:
    """Return a model of transformers, whose losses fall as those of this project's."""
    library, sizes = importlib.import_module("transformers"), OF_TRANSFORMERS[size.model]
    blocks = {"num_hidden_layers": size.blocks} if size.blocks else {}
    config = library.AutoConfig.for_model(size.model, use_cache=False, **sizes, **blocks)
    model = library.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):  # the last: experts
            weight.data /= (2 * config.num_hidden_layers) ** 0.5
    nn.init.normal_(model.model.embed_tokens.weight)
    return model


class Whole(nn.Module):
    """A model with embedding, head and loss: a Llama of this project, or one of transformers."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device(device):
            if size.model in OF_TRANSFORMERS:
                self.model = _of_transformers(size)
                inner, head = self.model.model, self.model.lm_head
                first = inner.embed_tokens
            else:
                inner = self.model = Llama(size.config(), size.seq_len)
                inner.init_weights(0)
                first, head = inner.embedding, inner.output
        for parameter in self.parameters():  # tables of positions stay float32
            parameter.data = parameter.data.to(dtype)
        self.layers, self.loss, self.vocabulary = inner.layers, NextTokens(), len(first.weight)
        # What is sharded apart: before and behind the blocks. A tied weight belongs to both.
        tied = first.weight is head.weight
        self.ends = [] if tied else [[first], [inner.norm, head]]

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
