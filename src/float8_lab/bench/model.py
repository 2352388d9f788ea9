"""Plain Llamas as users write them, whose variants are measured side by side."""

import functools
import importlib
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from float8 import save_gemm_outputs
from float8_lab.bench.step import Step
from float8_lab.bench.variants import Variant
from float8_lab.models.llama import Block, rope_table
from float8_lab.models.presets import PRESETS, ModelConfig, preset

AT_LEAST = 10.0
"""Lower bound of the SQNR in dB of every gradient against bf16's: noise of all blocks adds up."""

_AT = torch.ops.aten
_ATTENTION = (
    _AT._scaled_dot_product_flash_attention.default,
    _AT._scaled_dot_product_cudnn_attention.default,
    _AT._scaled_dot_product_flash_attention_for_cpu.default,
)


@dataclass(frozen=True)
class Size:
    """Blocks of a preset model, and sequences that they run on. Texts are of the options."""

    model: Annotated[str, f"Shape of the blocks: {', '.join(PRESETS)}."] = "llama3-8b"
    blocks: Annotated[int, "How many blocks."] = 4
    seq_len: Annotated[int, "Tokens per sequence."] = 8192
    batch: Annotated[int, "Sequences."] = 1

    @property
    def config(self) -> ModelConfig:
        """The shape of the model with so many blocks."""
        return replace(preset(self.model).model, n_layers=self.blocks)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.seq_len

    def __str__(self) -> str:
        return f"{self.blocks} {self.model} block(s), {self.batch} x {self.seq_len} tokens"


def _keep_gemms(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """`save_gemm_outputs`, and what it is for a model in bf16."""
    if op is _AT.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return save_gemm_outputs(ctx, op, *args, **kwargs)


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else _keep_gemms(ctx, op, *args, **kwargs)


KEPT = {"nothing": None, "gemms": _keep_gemms, "gemms+attention": _keep_attention}


class Checkpointed(Block):
    """A block that keeps of its activations what `keep`, of `KEPT`, says."""

    def __init__(self, config: ModelConfig, keep: str) -> None:
        super().__init__(config)
        self._how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if policy := KEPT[keep]:  # Dynamo takes no closures
            context = functools.partial(create_selective_checkpoint_contexts, policy)
            self._how["context_fn"] = context

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, dim] -> the same."""
        return checkpoint(super().forward, x, cos, sin, **self._how)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Llama blocks without embedding and head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seq_len: int, keep: str = "") -> None:
        super().__init__()
        make = functools.partial(Checkpointed, keep=keep) if keep else Block
        self.layers = nn.ModuleList(make(config) for _ in range(config.n_layers))
        cos, sin = rope_table(config.head_dim, seq_len, config.rope_theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [batch, seq, dim]; same shape and dtype out."""
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


class HuggingFace(nn.Module):
    """The whole Llama of transformers, with embedding, head and loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        library, config = importlib.import_module("transformers"), size.config
        like = library.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=size.seq_len,
            use_cache=False,
        )
        self.model = library.LlamaForCausalLM._from_config(like, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss [1] of the next tokens, for tokens [batch, seq] int64."""
        return self.model(input_ids=tokens, labels=tokens).loss[None]  # type: ignore[no-any-return]


def bf16_stack(size: Size, device: torch.device, keep: str = "") -> Stack:
    """Return the same weights at every call, in bf16; the rotary table stays float32."""
    torch.manual_seed(0)
    with torch.device(device):
        stack = Stack(size.config, size.seq_len, keep)
    stack.layers.to(torch.bfloat16)
    return stack


def stack_data(size: Size, device: torch.device, seed: int = 1) -> Tensor:
    """Return input and gradient of the output, [2, batch, seq, dim] bf16; always the same."""
    shape = (2, size.batch, size.seq_len, size.config.dim)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)


def model_step(
    variant: Variant,
    size: Size,
    device: torch.device,
    *,
    microbatches: int = 1,
    optimizer: bool = False,
    transformers: bool = False,
) -> Step:
    """Return a step of one variant of a stack, or of the whole model of `transformers`.

    With the sync of delayed scaling. The stack reads random activations, the model random tokens.
    """
    how: dict[str, Any] = {"microbatches": microbatches, "sync": True}
    if transformers:
        torch.manual_seed(0)
        with torch.device(device):
            model, grad = HuggingFace(size), torch.ones(1)
            tokens = torch.randint(size.config.vocab_size, (size.batch, size.seq_len))
        step = Step(variant, model, tokens, grad, **how, one_graph=False)
    else:
        stack, data = bf16_stack(size, device, variant.keep), stack_data(size, device)
        step = Step(variant, stack, *data, **how)
    if optimizer:
        step.add_optimizer()
    return step
