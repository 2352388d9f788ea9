"""A Llama of Hugging Face as users have it: converted, compiled, checkpointed, saved, loaded."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tolerances
from float8 import Float8Linear, Float8LinearConfig, convert_to_float8_training
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import same_bits, sqnr
from support.devices import on_devices
from support.models import fp8_state

transformers = pytest.importorskip("transformers")
recipes = pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])


def llama(device: str, layers: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device)


def converted(model: nn.Module, recipe: str) -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    not_head = {"module_filter_fn": lambda module, name: name != "lm_head"}
    return convert_to_float8_training(model, config=config, **not_head)


def step(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(seed)).to(device)
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    sync(model)
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


@on_devices
@recipes
def test_it_trains_as_in_high_precision(recipe: str, device: str) -> None:
    plain, model = llama(device), converted(llama(device), recipe)
    assert sum(isinstance(module, Float8Linear) for module in model.modules()) == 14
    for seed in range(3):
        wanted, got = step(plain, seed), step(model, seed)
        assert got["loss"].item() == pytest.approx(wanted["loss"].item(), abs=0.02)
        for name, grad in wanted.items():
            assert sqnr(grad, got[name]) > tolerances.MODEL, name


@pytest.mark.parametrize("reentrant", [False, True])
@recipes
def test_activation_checkpointing_changes_no_bit(recipe: str, reentrant: bool) -> None:
    model, checkpointed = (converted(llama("cpu"), recipe).train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    for seed in range(2):
        wanted, got = step(model, seed), step(checkpointed, seed)
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_generation_after_training(recipe: str) -> None:
    """With and without a cache, also in training mode, whose state it leaves alone."""
    model = converted(llama("cpu"), recipe)
    step(model)
    before = {name: x.clone() for name, x in fp8_state(model).items()}
    prompt = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(0))
    for training in (False, True):
        model.train(training)
        how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        cached, whole = (model.generate(prompt, use_cache=x, **how) for x in (True, False))
        assert cached.shape == (2, 15)
        # One scale per tensor depends on which tokens are computed together.
        assert torch.equal(cached, whole) or recipe != "rowwise"
    assert all(torch.equal(x, before[name]) for name, x in fp8_state(model).items())


@recipes
def test_compiled(recipe: str) -> None:
    model, compiled = (converted(llama("cpu", layers=1), recipe) for _ in range(2))
    compiled.compile(backend="aot_eager")
    for seed in range(2):
        wanted, got = step(model, seed), step(compiled, seed)
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


@recipes
def test_it_is_saved_and_loaded_as_a_plain_model(recipe: str, tmp_path: Path) -> None:
    model = converted(llama("cpu"), recipe)
    step(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(module, Float8Linear) for module in loaded.modules())
    for name, parameter in loaded.named_parameters():
        assert same_bits(parameter, model.get_parameter(name)), name
