"""torchao's low-bit optimizers step a converted model, and sync it."""

import io
from typing import Any

import pytest
import torch
from torch import nn

from float8 import Float8LinearConfig, all_linears, attach_to_optimizer, convert_to_float8_training
from sqnr import same_bits
from support.configs import RECIPES
from support.models import FeedForward, fp8_state, seeded

optim = pytest.importorskip("torchao.optim")


def made(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = nn.Sequential(FeedForward(64, 128), FeedForward(64, 128))
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    attachment = attach_to_optimizer(model, optimizer)
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        x = seeded(seed, 32, 64)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    attachment.remove()
    return losses


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"])
def test_it_trains_is_synced_and_resumes_bit_by_bit(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function
    )  # of each parameter's step
    model = made(recipe)
    optimizer = getattr(optim, name)(model.parameters(), lr=1e-2)
    first = train(model, optimizer, range(2))
    if recipe == "delayed":
        histories = [x for name, x in fp8_state(model).items() if "history" in name]
        assert all((x > 0).sum() == 2 for x in histories)
    again = made(recipe)
    again.load_state_dict(through_file(model.state_dict()))
    resumed = getattr(optim, name)(again.parameters(), lr=1e-2)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    rest = train(model, optimizer, range(2, 6))
    assert train(again, resumed, range(2, 6)) == rest
    assert rest[-1] < first[0]
    assert all(same_bits(x, again.state_dict()[name]) for name, x in model.state_dict().items())
