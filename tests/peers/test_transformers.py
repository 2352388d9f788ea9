"""A Llama of Hugging Face as users have it: converted, compiled, checkpointed, and generating."""

import importlib

import pytest
import torch

import tolerances
from float8 import Float8Linear
from sqnr import same_bits, sqnr
from support.configs import RECIPES
from support.devices import on_devices
from support.models import fp8_state

pytest.importorskip("transformers")
hf = importlib.import_module("support.hugging_face")


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_in_high_precision(recipe: str, device: str) -> None:
    plain, model = hf.llama().to(device), hf.converted(recipe).to(device)
    assert sum(isinstance(module, Float8Linear) for module in model.modules()) == 14
    for seed in range(3):
        wanted, got = hf.step(plain, seed), hf.step(model, seed)
        assert got["loss"].item() == pytest.approx(wanted["loss"].item(), abs=0.02)
        for name, grad in wanted.items():
            assert sqnr(grad, got[name]) > tolerances.MODEL, name


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        *((recipe, how) for recipe in RECIPES for how in ("checkpoint", "reentrant checkpoint")),
        ("tensorwise", "compiled"),
        pytest.param("delayed", "compiled", marks=pytest.mark.exhaustive),
    ],
)
def test_what_changes_no_bit(recipe: str, how: str) -> None:
    model, other = (hf.converted(recipe).train() for _ in range(2))
    if how == "compiled":
        torch._dynamo.reset()
        other.compile(backend="eager")
    else:
        other.gradient_checkpointing_enable({"use_reentrant": how != "checkpoint"})
        other.enable_input_require_grads()
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
