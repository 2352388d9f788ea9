"""LoRA of PEFT on a converted model, and a model with LoRA converted: trained, saved, merged."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from float8 import (
    Float8Weights,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    high_precision_state_dict,
)
from float8 import sync_float8_amax_and_scale_history as sync
from float8.linear import Float8Linear
from sqnr import same_bits, sqnr
from support.configs import BOTH, delayed, tensorwise
from support.lazily import Lazily

peft, hf = Lazily("peft"), Lazily("support.hugging_face")
safetensors = Lazily("safetensors.torch")
pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it

ORDERS = ("convert first", "LoRA first")


def adapted(order: str, config, **more) -> nn.Module:
    plain = hf.llama()
    if order == "convert first":
        convert_to_float8_training(plain, config=config)
    lora = hf.with_lora(plain, **more).eval()  # no dropout
    with torch.no_grad():  # else it has no effect yet
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    if order == "LoRA first":
        convert_to_float8_training(lora, config=config)
    return lora


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=hf.tokens()).logits


def train(model: nn.Module, steps: int = 2) -> nn.Module:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    attachment = attach_to_optimizer(model, optimizer)
    for seed in range(steps):
        optimizer.zero_grad()
        model(input_ids=hf.tokens(seed), labels=hf.tokens(seed)).loss.backward()
        optimizer.step()
    attachment.remove()
    return model


@BOTH
@pytest.mark.parametrize(
    "dora", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["DoRA", "LoRA"]
)
def test_both_orders_train_alike_and_merge(config, dora: bool) -> None:
    """Adapters stay in high precision; DoRA reads the weights. Merged as in high precision."""
    first, second = (train(adapted(order, config, use_dora=dora)) for order in ORDERS)
    for lora in (first, second):
        names = {name for name, x in lora.named_modules() if isinstance(x, Float8Linear)}
        assert len(names) == 14
        assert all(name.endswith(".base_layer") for name in names)
    state = second.state_dict()
    assert all(same_bits(x, state[name]) for name, x in first.state_dict().items())
    plain = convert_to_high_precision(copy.deepcopy(second))
    assert conversion_report(plain).converted == ()
    assert sqnr(logits(plain), logits(second)) > 15
    wanted = plain.merge_and_unload()
    for merged in (first.merge_and_unload(), second.merge_and_unload()):
        assert len(conversion_report(merged).converted) == 14
        state = merged.state_dict()
        assert all(torch.equal(state[name], x) for name, x in wanted.state_dict().items())
        assert sqnr(logits(wanted), logits(merged)) > 15
        sync(merged)
        convert_to_high_precision(merged)
        assert torch.equal(logits(merged), logits(wanted))
        assert [*map(type, merged.modules())] == [*map(type, hf.llama().modules())]


@pytest.mark.parametrize("order", ORDERS)
def test_an_adapter_is_saved_without_float8_and_loads_into_the_plain_model(
    order: str, tmp_path: Path
) -> None:
    lora = train(adapted(order, delayed(), modules_to_save=["lm_head"]))
    lora.save_pretrained(tmp_path)
    names = safetensors.load_file(tmp_path / "adapter_model.safetensors").keys()
    assert any("lora_A" in name for name in names)
    assert any("lm_head" in name for name in names)
    assert not any("fp8" in name for name in names)
    plain = peft.PeftModel.from_pretrained(hf.llama(), tmp_path).eval()
    assert sqnr(logits(plain), logits(lora)) > 15
    convert_to_float8_training(plain, config=delayed())
    assert torch.equal(logits(plain), logits(lora))


def test_weights_in_float8_only_say_what_to_do_before_merging_and_saving(tmp_path: Path) -> None:
    lora = adapted("LoRA first", tensorwise(float8_weights=Float8Weights.ONLY))
    lora.save_pretrained(tmp_path / "adapter")  # has none of them
    cure = r"weight in float8 only, call convert_to_high_precision\(model\) first.*FSDP2"
    with pytest.raises(NotImplementedError, match=cure):
        lora.merge_and_unload()
    base = lora.unload()
    with pytest.raises(RuntimeError, match=r"state_dict=high_precision_state_dict\(model\)"):
        base.save_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "base", state_dict=high_precision_state_dict(base))
    saved = type(base).from_pretrained(tmp_path / "base")
    assert torch.equal(logits(saved), logits(convert_to_high_precision(base)))
