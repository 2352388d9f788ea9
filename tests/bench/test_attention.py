"""Attention is found by what modules are and do, whatever their layers are called."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8 import Float8LinearConfig
from float8_lab.bench.attention import find_attention
from float8_lab.bench.whole import Setup, Step

D = 256


class Layers(nn.Module):
    """Linear layers of some sizes [K, N]; lists of one stand for `to_out` of others' models."""

    def __init__(self, attributes: dict[str, int], *sizes: Any) -> None:
        super().__init__()
        self.__dict__.update(attributes)
        for i, size in enumerate(sizes):
            layer = nn.Linear(*size[:2], bias=False)
            self.add_module(f"x{i}", nn.Sequential(layer, nn.Dropout()) if size[2:] else layer)


class Fused(Layers):
    def forward(self, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x)


class WrittenOut(Layers):
    def forward(self, x: Any) -> Any:
        return (x @ x.mT).softmax(-1) @ x


class SelfAttention(Layers):
    def forward(self, x: Any) -> Any:
        return self.core(x)


class Block(Layers):
    """As a block whose attention is a module of its own, or whose layers gain nothing by it."""

    def forward(self, x: Any) -> Any:
        return self.mlp(self.attention(x))


class Other(Layers):
    def forward(self, x: Any) -> Any:
        return self.x0(x)


class Mamba2Mixer(Layers):
    pass


QKV, OUT, UP, DOWN = (D, 3 * D), (D, D), (D, 4 * D), (4 * D, D)
FOUND: list[tuple[Any, float, float]] = [
    (Fused({}, QKV, OUT), D, 128),
    (Fused({"n_head": 4}, QKV, OUT, UP, DOWN), D, 64),  # all layers of a block in one module
    (Fused({}, (D, D), (D, 64), (D, 64), (*OUT, "list")), D, 128),  # heads share keys
    (Fused({}, (D, 512), (D, 128), (D, 128), (512, D)), 512, 128),  # wider than the model
    (Fused({"heads": 4}, (D, D), (768, D), (768, D), OUT), D, 64),  # of other tokens
    (Fused({}, (D, D), (64, D), (64, D), OUT), D, 128),
    (WrittenOut({}, QKV, OUT), D, 128),
    (SelfAttention({}, QKV), D, 128),  # the output is projected elsewhere
    (SelfAttention({"num_attention_heads": 8}, (D, D), (D, D), (D, D)), D, 32),
    (SelfAttention({}, OUT, (D, D + 64)), D, 128),  # out first, as Phi-3
    (Other({"heads": 4}, (D, D), (D, 128), OUT), D, 64),  # one layer for keys and values
    (nn.MultiheadAttention(D, 4), D, 64),
    (nn.MultiheadAttention(D, 2, kdim=64, vdim=32), D, 128),
    # Latent attention: of low rank, with wider queries and keys.
    (
        SelfAttention(
            {"num_heads": 4, "qk_head_dim": 192, "v_head_dim": 128},
            *((D, 96), (96, 768), (D, 72), (64, 1024), (512, D)),
        ),
        640,
        128,
    ),
]
NOT: list[nn.Module] = [
    Other({}, UP, DOWN),
    Other({}, (D, 8 * D), DOWN),  # gate and up in one
    Block({}, UP, DOWN),
    Block({}, UP, UP, DOWN),
    WrittenOut({}, (D, 8)),  # a router
    WrittenOut({}, UP, (4 * D, 10)),  # a classifier
    Mamba2Mixer({"num_heads": 8, "head_dim": 64}, (D, 4 * D + 136), (2 * D, D)),
    nn.Sequential(*(nn.Linear(D, D) for _ in range(6))),
]


@pytest.mark.parametrize("case", range(len(FOUND)))
def test_it_is_found_in_any_shape_once(case: int) -> None:
    module, width, head = FOUND[case]
    block = Block({}, UP, DOWN)
    block.attention = module
    whole = nn.ModuleList([block, nn.LazyLinear(4)])
    assert find_attention(whole) == [(module, width, head)]
    assert find_attention(module) == [(module, width, head)]


@pytest.mark.parametrize("case", range(len(NOT)))
def test_other_modules_do_not_attend(case: int) -> None:
    assert find_attention(nn.ModuleList([NOT[case]])) == []


def test_its_turned_weights_adapters_and_parameters_are_known() -> None:
    for shape in ((3 * D, D), (D, 3 * D)):
        own = SelfAttention({})
        own.w = nn.Parameter(torch.empty(shape))
        own.o = nn.Parameter(torch.empty(D, D))
        assert [width for _, width, _ in find_attention(own)] == [D]


def test_a_step_costs_as_much_whatever_layers_are_called() -> None:
    """Half of it where tokens see earlier ones alone, as the module says or texts do."""
    ms = []
    for name, causal in (("query", None), ("w_q", None), ("c_attn", False), ("to_q", True)):
        own = Fused({} if causal is None else {"is_causal": causal})
        for each in (name, "k", "v", "o"):
            own.add_module(each, nn.Linear(D, D, device="meta"))
        step = Step(own, "H100", Float8LinearConfig(), Setup(8192, 4096))
        ms.append(step.ms["attention"][0])
    flop = 14 * 4096 * 8192 * D
    assert ms == pytest.approx([flop / 470e9, flop / 470e9, flop / 470e9, flop / 940e9])
