"""Small models and their training steps."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """A SwiGLU feed-forward network with a residual connection."""

    def __init__(self, dim: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, dim, bias=bias)
        self.w3 = nn.Linear(dim, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A pre-norm residual feed-forward block."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ffn = FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Attention(nn.Module):
    """Causal grouped-query attention, without positions."""

    def __init__(
        self, dim: int, bias: bool = False, heads: int = 6, kv: int = 2, head_dim: int = 16
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, heads * head_dim, bias)
        self.wk, self.wv = (nn.Linear(dim, kv * head_dim, bias) for _ in "kv")
        self.wo = nn.Linear(heads * head_dim, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projected)
        shared = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class LlamaBlock(nn.Module):
    """As users write it."""

    def __init__(self, dim: int, hidden: int, bias: bool = False, **heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, bias, **heads)
        self.ffn = FeedForward(dim, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Adapted(nn.Module):
    """A frozen layer, one of 32 features if none is given, and a low-rank adapter of it."""

    def __init__(self, base: nn.Module | None = None, features: int = 32) -> None:
        super().__init__()
        self.base = base or nn.Linear(32, 32, bias=False).requires_grad_(False)
        self.lora_a = nn.Linear(features, 4, bias=False)
        self.lora_b = nn.Linear(4, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + self.lora_b(self.lora_a(x)))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters that have one."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def forward_backward(
    model: nn.Module, x: Tensor, grad_output: Tensor, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """One forward and backward: `output`, and the gradients of `input` and every parameter."""
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, autocast) if autocast else nullcontext():
        output = model(x)
    output.backward(grad_output.to(output.dtype) if autocast else grad_output)
    return {"output": output.detach(), "input": x.grad, **gradients(model)}


def fp8_state(model: nn.Module) -> dict[str, Tensor]:
    """The delayed-scaling buffers of a model."""
    return {n: b for n, b in model.named_buffers() if "fp8_" in n}


def copied(model: nn.Module) -> dict[str, Tensor]:
    """The delayed-scaling buffers as they are now."""
    return {name: buffer.clone() for name, buffer in fp8_state(model).items()}


def seeded(
    seed: int, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Normally distributed values: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)
