import dataclasses
import math

import pytest
import torch
from torch import Tensor

from float8_lab.models.llama import Llama
from float8_lab.models.presets import PRESETS, ModelConfig

SMALL = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48)


def build_llama(config: ModelConfig, max_seq_len: int, *, seed: int) -> Llama:
    with torch.device("meta"):
        model = Llama(config, max_seq_len)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model


def naive_logits(model: Llama, tokens: Tensor) -> Tensor:
    """The model again in float64, from the formulas: one head at a time, complex rotations."""
    config = model.config
    weights = dict(model.named_parameters(remove_duplicate=False))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps)

    half = config.head_dim // 2
    position = torch.arange(tokens.shape[1], dtype=torch.float64)
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones((), dtype=torch.float64), torch.outer(position, frequency))

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = weights["embedding.weight"][tokens] * (config.dim**0.5 if config.tied_head else 1.0)
    future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    for i in range(config.n_layers):
        here = f"layers.{i}."
        y = norm(x, weights[here + "attention_norm.weight"])
        roles = "query", "key", "value"
        query, key, value = (y @ weights[f"{here}attention.{role}.weight"].T for role in roles)
        heads = []
        for head in range(config.n_heads):
            shared = head // (config.n_heads // config.n_kv_heads)
            mine = slice(head * config.head_dim, (head + 1) * config.head_dim)
            theirs = slice(shared * config.head_dim, (shared + 1) * config.head_dim)
            scores = rotate(query[..., mine]) @ rotate(key[..., theirs]).transpose(1, 2)
            scores = (scores / math.sqrt(config.head_dim)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ value[..., theirs])
        x = x + torch.cat(heads, dim=-1) @ weights[here + "attention.out.weight"].T
        y = norm(x, weights[here + "feed_forward_norm.weight"])
        gate = y @ weights[here + "feed_forward.gate.weight"].T
        up = y @ weights[here + "feed_forward.up.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[here + "feed_forward.down.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


@pytest.mark.parametrize(("n_kv_heads", "tied"), [(1, False), (2, True), (4, False)])
def test_logits_and_gradients_match_a_naive_float64_model(n_kv_heads: int, tied: bool) -> None:
    config = dataclasses.replace(SMALL, n_kv_heads=n_kv_heads, tied_head=tied)
    model = build_llama(config, 24, seed=1)
    double = build_llama(config, 24, seed=1).double()
    for mine, theirs in zip(model.parameters(), double.parameters(), strict=True):
        if mine.dim() == 1:  # Norm weights of 1 would hide a forgotten multiplication.
            values = torch.rand_like(mine) + 0.5
            mine.data, theirs.data = values, values.double()
    tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(0))
    pull = torch.randn(3, 20, 256, generator=torch.Generator().manual_seed(1))

    logits = model(tokens)
    expected = naive_logits(double, tokens)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=2e-5)
    (logits * pull).sum().backward()
    (expected * pull).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), double.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        error = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-5, name


def test_initial_weights_come_from_the_seed_alone_with_the_documented_spread() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_llama(SMALL, 16, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, other = build_llama(SMALL, 16, seed=5), build_llama(SMALL, 16, seed=6)
    for mine, same, different in zip(
        first.parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(mine, same)
        assert mine.dim() == 1 or not torch.equal(mine, different)
    tied = build_llama(dataclasses.replace(SMALL, tied_head=True), 16, seed=0)
    assert tied.output.weight is tied.embedding.weight
    assert first.output.weight is not first.embedding.weight
    assert not torch.equal(first.output.weight, first.embedding.weight)
    model = build_llama(PRESETS["tiny"].model, 16, seed=0)
    attention, down = model.layers[0].attention, model.layers[1].feed_forward.down
    cut = 0.9866  # the standard deviation of a normal distribution cut off at three times its own
    residual = cut / math.sqrt(2 * model.config.n_layers)
    for weight, std in (
        (model.embedding.weight, cut),
        (model.output.weight, cut / 96**0.5),
        (attention.query.weight, cut / 96**0.5),
        (attention.out.weight, residual / 96**0.5),
        (down.weight, residual / 288**0.5),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert weight.abs().max() <= 3 * std / cut
    assert torch.equal(model.norm.weight, torch.ones(model.config.dim))


def test_presets_have_the_size_of_their_name() -> None:
    sizes = {"tiny": 270_816, "1b": 973_670_400, "llama3-8b": 8_030_261_248}
    for name, count in (sizes | {"llama3-70b": 70_553_706_496}).items():
        with torch.device("meta"):
            model = Llama(PRESETS[name].model, 16)
        model.tie_head()
        assert sum(p.numel() for p in model.parameters()) == count
        assert all(dim % 16 == 0 for p in model.parameters() for dim in p.shape)
