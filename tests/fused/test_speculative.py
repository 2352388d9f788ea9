"""Fused functions under speculative scaling, when everything grows at once."""

import copy

import pytest
import torch
from torch import Tensor, nn

from float8 import all_linears, convert_to_float8_training, sync_float8_amax_and_scale_history
from float8.fused import rms_norm_linear, swiglu_feed_forward
from sqnr import same_bits
from support.configs import delayed, speculative, tensorwise
from support.models import forward_backward, fp8_state, seeded


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.RMSNorm(32), nn.RMSNorm(48)
        self.first = nn.Linear(32, 48, bias=False)
        self.gate, self.up = (nn.Linear(48, 40, bias=False) for _ in range(2))
        self.down = nn.Linear(40, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = rms_norm_linear(x, self.norm, [self.first])
        return swiglu_feed_forward(y, self.gate, self.up, self.down, norm=self.inner_norm)


def steps(model: nn.Module, factors: tuple[float, ...]) -> list[dict[str, Tensor]]:
    """Results and state of steps on gradients and with norms times the factors."""
    done = []
    for factor in factors:
        with torch.no_grad():
            for norm in (model.norm, model.inner_norm):
                norm.weight.fill_(factor)
        x, g = seeded(0, 32, 32), seeded(1, 32, 48) * factor
        results = forward_backward(model, x, g)
        sync_float8_amax_and_scale_history(model)
        done.append(results | {name: buffer.clone() for name, buffer in fp8_state(model).items()})
    return done


@pytest.fixture
def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    plain = Model()
    return {
        name: convert_to_float8_training(
            copy.deepcopy(plain), config=config, module_filter_fn=all_linears
        )
        for name, config in (
            ("tensorwise", tensorwise()),
            ("delayed", delayed()),
            ("speculative", speculative()),
        )
    }


def test_growing_it_is_dynamic_scaling(models: dict[str, nn.Module]) -> None:
    factors = (1.0, 4.0, 400.0)
    ours, theirs = steps(models["speculative"], factors), steps(models["tensorwise"], factors)
    other = steps(models["delayed"], factors)
    for got, want, late in zip(ours, theirs, other, strict=True):
        assert all(same_bits(got[name], want[name]) for name in want)
        assert late is other[0] or not same_bits(late["output"], want["output"])


def test_shrinking_it_is_delayed_scaling(models: dict[str, nn.Module]) -> None:
    factors = (400.0, 4.0, 1.0)
    ours, theirs = steps(models["speculative"], factors), steps(models["delayed"], factors)
    for got, want in zip(ours, theirs, strict=True):
        assert got.keys() == want.keys()
        assert all(same_bits(got[name], want[name]) for name in want)
