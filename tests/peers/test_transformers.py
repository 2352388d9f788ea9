"""A Llama of Hugging Face as users have it: converted, compiled, checkpointed, and generating."""

import importlib

import pytest
import torch

from sqnr import same_bits
from support.configs import RECIPES
from support.models import fp8_state

pytest.importorskip("transformers")
hf = importlib.import_module("support.hugging_face")


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
