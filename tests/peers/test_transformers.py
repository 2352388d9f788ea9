"""Llamas of transformers: their gradients, compiled, checkpointed, and generating."""

import copy
import importlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tolerances
from float8 import convert_to_float8_training
from sqnr import same_bits, sqnr
from support.configs import RECIPES
from support.devices import on_devices
from support.models import fp8_state

transformers = pytest.importorskip("transformers")
hf = importlib.import_module("support.hugging_face")
OTHERS = ["Mistral", "Qwen2", "Qwen3"]
LONGER = (pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)


def converted(plain: nn.Module, recipe: str) -> nn.Module:
    return convert_to_float8_training(copy.deepcopy(plain), config=recipe)


def step(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    found: dict[str, Tensor] = hf.step(model, seed, length=31)
    return found


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", *LONGER])
def test_gradients_are_accurate(name: str, dtype, recipe: str, device: str) -> None:
    plain = hf.llama(name=name).to(device, dtype)
    model = converted(plain, recipe)
    exact = plain.float()
    for seed in range(2):
        reference, got = step(exact, seed), step(model, seed)
        assert got.keys() == reference.keys()
        assert got.pop("loss").item() == pytest.approx(reference["loss"].item(), abs=0.02)
        for key in got:
            assert got[key].dtype == dtype
            assert sqnr(reference[key], got[key]) > tolerances.MODEL, key


CHECKPOINTS = ["checkpoint", "reentrant checkpoint"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MORE: dict[str, dict[str, Any]] = {"Mixtral": EXPERTS}
MORE["GptOss"] = EXPERTS | {"head_dim": 16, "layer_types": ["full_attention"]}
COMPILED = itertools.product(["Llama", *OTHERS], ["delayed"], ["compiled"])


@pytest.mark.parametrize(
    ("name", "recipe", "how"),
    [
        *itertools.product(["Llama"], RECIPES, CHECKPOINTS),
        *itertools.product(MORE, ["rowwise"], CHECKPOINTS),
        ("Llama", "tensorwise", "compiled"),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in COMPILED),
    ],
)
def test_what_changes_no_bit(name: str, recipe: str, how: str) -> None:
    """Compiled in one graph."""
    plain = hf.llama(name=name, num_hidden_layers=1, **MORE.get(name, {}))
    model, other = (converted(plain, recipe).train() for _ in range(2))
    if how == "compiled":
        torch._dynamo.reset()
        other.compile(backend="aot_eager", fullgraph=True)
    else:
        hf.checkpoint(other, reentrant=how != "checkpoint")
    for seed in range(2):
        wanted, got = hf.step(model, seed), hf.step(other, seed)
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_generation_after_training(recipe: str) -> None:
    """With and without a cache, also in training mode, whose state it leaves alone."""
    model = hf.converted(recipe)
    hf.step(model)
    before = {name: x.clone() for name, x in fp8_state(model).items()}
    prompt = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(0))
    for training in (False, True):
        model.train(training)
        how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        cached, whole = (model.generate(prompt, use_cache=x, **how) for x in (True, False))
        assert cached.shape == (2, 15)
        # One scale per tensor depends on which tokens are computed together.
        assert torch.equal(cached, whole) or recipe != "rowwise"
    assert all(torch.equal(x, before[name]) for name, x in fp8_state(model).items())
