"""Weights held in float8 are in memory once, also while somebody keeps the last loss."""

import gc
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from float8 import Float8Weights, attach_to_optimizer, convert_to_float8_training
from float8.linear import Float8Module
from support.configs import of_recipe
from support.microbatches import HELD, ON_THE_FLY, with_weights
from support.models import seeded
from support.rings import short
from support.training import Wrapped

MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "checkpointed": partial(Wrapped, how="checkpoint"),
    "compiled": partial(torch.compile, backend="aot_eager"),
    "inductor": torch.compile,
}


class Experts(nn.Module):
    """Those of a Mixtral, behind a layer, so that their input needs a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
        config = mixtral.MixtralConfig(hidden_size=width, intermediate_size=2 * width)
        config._experts_implementation = "grouped_mm"
        self.before, self.experts = nn.Linear(width, width), mixtral.MixtralSparseMoeBlock(config)
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.before(x)[None])


def dense(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


MODELS = {"dense": dense, "experts": Experts}


class Training:
    """Steps whose loss is kept, as in a loop that says `loss = model(x)`."""

    def __init__(
        self, name: str, recipe: str, mode: str, weights: Float8Weights, width: int, device: str
    ) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name](width).to(device, torch.bfloat16)
        convert_to_float8_training(
            self.model,
            config=with_weights(of_recipe(recipe), weights),
            module_filter_fn=lambda mod, fqn: not fqn.endswith("gate"),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        attach_to_optimizer(self.model, self.optimizer)
        self.run = MODES[mode](self.model)
        self.x = seeded(0, 64, width, dtype=torch.bfloat16, device=device)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.run(self.x).float().square().mean()
        self.loss.backward()

    def held(self) -> list[Tensor]:
        modules = (mod for mod in self.model.modules() if isinstance(mod, Float8Module))
        return [x for mod in modules for each in mod._float8_held for x in each[1:]]


KEPT = [*itertools.product(MODELS, ["tensorwise", "rowwise"], ["eager", "checkpointed"])]
KEPT += [("dense", "tensorwise", "compiled"), ("experts", "rowwise", "compiled")]


@pytest.mark.parametrize(("name", "recipe", "mode"), short(range(8), KEPT))
def test_a_kept_loss_keeps_no_held_weight(name: str, recipe: str, mode: str) -> None:
    training = Training(name, recipe, mode, HELD, 32, "cpu")
    training.backward()
    training.optimizer.step()
    gc.collect()  # torch 2.13's Dynamo leaves what it read while it compiled to the collector
    training.backward()
    before = [StorageWeakRef(x.untyped_storage()) for x in training.held()]
    assert len(before) >= 12
    training.optimizer.step()
    assert training.loss is not None
    assert all(each.expired() for each in before)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "checkpointed", "inductor"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_has_held_weights_once(name: str, recipe: str, mode: str) -> None:
    """Both layouts of each weight, of a byte per value, above the same training without."""
    peaks = {}
    for weights in (ON_THE_FLY, HELD):
        training = Training(name, recipe, mode, weights, 2048, "cuda")
        for _ in range(2):  # compiled by then
            training.backward()
            training.optimizer.step()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            training.backward()
            training.optimizer.step()
        peaks[weights] = torch.cuda.max_memory_allocated()
        values = sum(x.numel() for x in training.held() if x.dtype.itemsize == 1)
        del training
        torch._dynamo.reset()
    assert values > 20e6
    assert peaks[HELD] - peaks[ON_THE_FLY] < 1.1 * values
