"""Training from weights that begin tiny."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import attach_to_optimizer, convert_to_float8_training

DIM, WORDS, TOKENS, BATCH, STEPS = 64, 32, 32, 8, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Of two blocks, whose output projections begin tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, DIM), nn.Parameter(torch.zeros(TOKENS, DIM))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS)
        for block in self.blocks:
            for layer in (block.qkv, block.up, block.out, block.down):
                last = layer in (block.out, block.down)
                nn.init.normal_(layer.weight, std=1e-5 if last else 0.02)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(words) + self.position)))


def text() -> Tensor:
    """Words that tell of those one and two places further on."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(WORDS, WORDS, generator=generator) * x for x in (3, 2))
    words = torch.randint(WORDS, (STEPS * BATCH, TOKENS + 1), generator=generator)
    for i in range(2, TOKENS + 1):
        odds = (one[words[:, i - 1]] + two[words[:, i - 2]]).softmax(-1)
        words[:, i] = torch.multinomial(odds, 1, generator=generator)[:, 0]
    return words.unflatten(0, (STEPS, BATCH))


def losses(recipe: str | None) -> Tensor:
    """Of each step."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    if recipe is not None:
        convert_to_float8_training(model.blocks, config=recipe)
        attach_to_optimizer(model, optimizer)
    seen = []
    for words in text():
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return torch.tensor(seen)


def test_delayed_scaling_learns_as_fast_as_high_precision() -> None:
    gap = losses("delayed") - losses(None)
    assert gap[:10].mean() <= 0.003
    assert gap[10:].mean() <= 0.003
