"""Models of transformers: converted, trained, saved, loaded, and back.

Gradients of Llamas, what changes none of their bits, and generation.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tolerances
from float8 import (
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    high_precision_state_dict,
)
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import same_bits, sqnr
from support.configs import RECIPES
from support.devices import on_devices
from support.lazily import Lazily
from support.models import fp8_state, seeded
from support.rings import short

transformers, hf = Lazily("transformers"), Lazily("support.hugging_face")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 256}
GROUPED = {**TEXT, "num_key_value_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 256, "n_positions": 32}
GPT2 |= {f"{each}_pdrop": 0.0 for each in ("attn", "embd", "resid")}
IMAGE = {**SIZES, **STILL, "image_size": 32, "patch_size": 8, "num_labels": 16}
MOE = {**GROUPED, "num_experts": 4, "moe_intermediate_size": 64}
MOE |= {"shared_expert_intermediate_size": 64}
T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
SOUND = {"d_model": 64, "vocab_size": 256, "num_mel_bins": 16, "dropout": 0.0}
SOUND |= {f"max_{each}_positions": 32 for each in ("source", "target")}
SOUND |= {f"{each}_token_id": 0 for each in ("pad", "bos", "eos", "decoder_start")}
for each in ("encoder", "decoder"):
    SOUND |= {f"{each}_layers": 2, f"{each}_attention_heads": 4, f"{each}_ffn_dim": 128}


class Kind(NamedTuple):
    sizes: dict[str, Any]
    converted: int
    skipped: tuple[str, ...] = ("lm_head",)
    others: int = 0  # weights of routers
    batch: str = "text"


GATES = tuple(f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2))
KINDS = {
    "LlamaForCausalLM": Kind(GROUPED, 14),
    "MistralForCausalLM": Kind(GROUPED, 14),
    "Qwen2ForCausalLM": Kind(GROUPED, 14),
    "Qwen3ForCausalLM": Kind({**GROUPED, "head_dim": 16}, 14),
    "GPT2LMHeadModel": Kind(GPT2, 0, others=8),
    "BertForMaskedLM": Kind({**TEXT, **STILL}, 14, ()),
    "GPTNeoXForCausalLM": Kind(TEXT, 8),
    "Phi3ForCausalLM": Kind({**GROUPED, "pad_token_id": 0}, 8),
    "Gemma2ForCausalLM": Kind({**GROUPED, "head_dim": 16}, 14),
    "MixtralForCausalLM": Kind({**GROUPED, "num_local_experts": 4}, 8, others=2),
    "Qwen2MoeForCausalLM": Kind(MOE, 14, (*GATES, "lm_head"), 2),
    "T5ForConditionalGeneration": Kind(T5, 32),
    "ViTForImageClassification": Kind(IMAGE, 13, (), batch="image"),
    "Dinov2ForImageClassification": Kind(IMAGE, 13, (), batch="image"),
    "WhisperForConditionalGeneration": Kind(SOUND, 33, (), batch="sound"),  # its head: proj_out
}


def built(name: str) -> nn.Module:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model: nn.Module = kind(kind.config_class(**KINDS[name].sizes))
    return model


def batch(kind: Kind, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, 256, (2, 16), generator=torch.Generator().manual_seed(seed))
    if kind.batch == "image":
        return {"pixel_values": seeded(seed, 2, 3, 32, 32), "labels": tokens[:, 0] % 16}
    if kind.batch == "sound":
        return {"input_features": seeded(seed, 2, 16, 64), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


FIRST = "GPT2LMHeadModel", "Qwen2MoeForCausalLM", "WhisperForConditionalGeneration"
CASES = [*((name, "delayed") for name in FIRST), ("LlamaForCausalLM", "tensorwise")]
CASES += [(name, "delayed") for name in KINDS if name not in FIRST]


@pytest.mark.parametrize(("name", "recipe"), short(range(4), CASES))
def test_models_of_transformers(name: str, recipe: str, tmp_path: Path) -> None:
    kind, plain = KINDS[name], built(name)
    model = convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    report = conversion_report(model)
    assert len(report.converted) == kind.converted
    assert tuple(layer.fqn for layer in report.skipped) == kind.skipped
    assert len(report.others) == kind.others
    for seed in range(2):
        gradients = []
        for each in (plain, model):
            each.train().zero_grad()
            each(**batch(kind, seed)).loss.backward()
            sync(each)
            found = [p.grad.flatten() for p in each.parameters() if p.grad is not None]
            gradients.append(torch.cat(found))
        assert sqnr(*gradients) > tolerances.MODEL  # one by one those of some biases are noise
    if recipe == "tensorwise":
        assert model.state_dict().keys() == plain.state_dict().keys()
        model.save_pretrained(tmp_path)
    else:
        model.save_pretrained(tmp_path, state_dict=high_precision_state_dict(model))
    loaded, told = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    convert_to_high_precision(model)
    wanted = plain.eval()(**batch(kind, 2)).loss
    for each in (model, loaded):
        assert [type(x) for x in each.modules()] == [type(x) for x in plain.modules()]
        assert torch.equal(each.eval()(**batch(kind, 2)).loss, wanted)


# ---------------------------------------------------------------- Llamas


def converted(plain: nn.Module, recipe: str) -> nn.Module:
    return convert_to_float8_training(copy.deepcopy(plain), config=recipe)


def step(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    found: dict[str, Tensor] = hf.step(model, seed, length=31)
    return found


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_accurate(dtype: torch.dtype, recipe: str, device: str) -> None:
    plain = hf.llama().to(device, dtype)
    model = converted(plain, recipe)
    exact = plain.float()
    for seed in range(2):
        reference, got = step(exact, seed), step(model, seed)
        assert got.keys() == reference.keys()
        assert got.pop("loss").item() == pytest.approx(reference["loss"].item(), abs=0.02)
        for key in got:
            assert got[key].dtype == dtype
            assert sqnr(reference[key], got[key]) > tolerances.MODEL, key


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MORE: dict[str, dict[str, Any]] = {"Mixtral": EXPERTS}
MORE["GptOss"] = EXPERTS | {"head_dim": 16, "layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("name", "recipe", "how"),
    short(
        {0, 1},
        [
            ("Llama", "delayed", "checkpoint"),
            ("GptOss", "rowwise", "reentrant checkpoint"),
            ("Llama", "delayed", "reentrant checkpoint"),
            ("Mixtral", "rowwise", "checkpoint"),
            ("Llama", "delayed", "compiled"),
        ],
    ),
)
def test_what_changes_no_bit(name: str, recipe: str, how: str) -> None:
    plain = hf.llama(name=name, num_hidden_layers=1, **MORE.get(name, {}))
    if how == "compiled":  # of seven layers, which are alike to a compiler, one is enough
        takes = {"module_filter_fn": lambda mod, fqn: fqn.endswith("o_proj")}
        model, other = (
            convert_to_float8_training(copy.deepcopy(plain), config=recipe, **takes).train()
            for _ in range(2)
        )
    else:
        model, other = (converted(plain, recipe).train() for _ in range(2))
    if how == "compiled":
        torch._dynamo.reset()
        other.compile(backend="aot_eager", fullgraph=True)
    else:
        hf.checkpoint(other, reentrant=how != "checkpoint")
    for seed in range(2):
        wanted, got = hf.step(model, seed), hf.step(other, seed)
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "recipe", ["rowwise", "delayed", pytest.param("tensorwise", marks=pytest.mark.exhaustive)]
)
def test_generation_after_training(recipe: str) -> None:
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
