"""A Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

Every matrix multiply of a block is an `nn.Linear` without bias under its own name, so that
`convert_to_float8_training` can swap it. The head is called `output`, to be left out by name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8_lab.models.presets import ModelConfig


class RMSNorm(nn.RMSNorm):
    """Computed in float32 and returned in the input's dtype, which it keeps under autocast, too."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]; same shape and dtype out."""
        if x.dtype == self.weight.dtype:  # one kernel, which computes in float32 itself
            return super().forward(x).to(x.dtype)
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return normed.to(x.dtype)


def rope_table(head_dim: int, seq_len: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation angles, [seq_len, head_dim / 2] float32."""
    # float64 until the end: a float32 angle of position 8191 is off by up to 5e-4 radians.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    positions = torch.arange(seq_len, dtype=torch.float64)
    angles = torch.outer(positions, theta**-exponents)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of every head of x [batch, seq, heads, head_dim].

    By the angles of its position, which `rope_table` gave; same shape and dtype out.
    """
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; query heads share key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix x [batch, seq, dim] over the sequence; same shape out."""
        # As many heads as there are on this rank.
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
        # Transposed as views only: attention reads and writes these strides as they are.
        q, k = (apply_rope(each, cos, sin).transpose(1, 2) for each in (q, k))
        q_k_v = q, k, v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*q_k_v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [batch, seq, dim]; same shape out."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention and feed-forward to x [batch, seq, dim]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The language model: token ids in, next-token logits out.

    Make it on the meta device, then call `to_empty` and `init_weights`: so nothing is initialised
    twice.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, max_seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = max_seq_len
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        empty = torch.empty(max_seq_len, config.head_dim // 2)
        self.register_buffer("cos", empty, persistent=False)
        self.register_buffer("sin", empty.clone(), persistent=False)

    def init_weights(self, seed: int) -> None:
        """Fill parameters and buffers from `seed`, tie the head; equal on every run of a device.

        Normal, cut off at three standard deviations: 1 for the embedding, 1 / sqrt(inputs) for all
        other matrices. Divided by sqrt(2 * n_layers) for those that write to the residual stream.
        """
        device = self.embedding.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                # One whole parameter at a time, no more.
                whole = torch.ones(parameter.shape, device=device)
                if parameter.dim() > 1:
                    lookup = name == "embedding.weight" and not self.config.tied_head
                    std = 1.0 if lookup else parameter.shape[1] ** -0.5
                    if name.endswith(("attention.out.weight", "feed_forward.down.weight")):
                        std /= (2 * self.config.n_layers) ** 0.5
                    nn.init.trunc_normal_(whole, 0.0, std, -3 * std, 3 * std, generator=generator)
                parameter.copy_(whole)
            cos, sin = rope_table(self.config.head_dim, self.max_seq_len, self.config.rope_theta)
            self.cos.copy_(cos)
            self.sin.copy_(sin)
        self.tie_head()

    def tie_head(self) -> None:
        """Let the head share the embedding's weight, if the config says so."""
        if self.config.tied_head:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the token after each position of tokens [batch, seq <= max_seq_len] int64.

        Logits [batch, seq, vocab_size] are in the autocast dtype if autocast is on, else float32.
        """
        x = self.embedding(tokens)
        if self.config.tied_head:
            x = x * self.config.dim**0.5  # as Gemma does: weights begin as those of a head
        device_type = tokens.device.type
        if torch.is_autocast_enabled(device_type):
            # autocast leaves embeddings alone; without this the residual stream would be float32.
            x = x.to(torch.get_autocast_dtype(device_type))
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))  # type: ignore[no-any-return]
