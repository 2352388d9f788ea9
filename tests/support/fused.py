"""A Llama block that calls the fused functions."""

import torch.nn.functional as F
from torch import Tensor, nn

from float8 import rms_norm_linear, swiglu_feed_forward


class FusedBlock(nn.Module):
    """Pre-norm attention of two heads with one key and value, and SwiGLU; [batch, seq, dim]."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        widths = {"query": dim, "key": dim // 2, "value": dim // 2, "out": dim}
        for name, width in widths.items():
            setattr(self, name, nn.Linear(dim, width, bias=False))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        *heads, x = rms_norm_linear(x, self.attention_norm, layers, residual=True)
        q, k, v = (each.unflatten(-1, (-1, x.shape[-1] // 2)).transpose(1, 2) for each in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        layers = (self.gate, self.up, self.down)
        return swiglu_feed_forward(x, *layers, norm=self.feed_forward_norm, residual=True)
