"""`float8 plan` has a number and a verdict for each model of a newcomer, without a GPU."""

import re
import sys
from pathlib import Path

import pytest
import torch

from float8_lab.cli.main import main
from support.lazily import needs_installed

needs_installed("peft", "transformers")

MODELS = """
import transformers
from peft import LoraConfig, get_peft_model

def llama(vocab_size, hidden_size, intermediate_size, layers, heads, kv=8, **more):
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, **more)
    return transformers.LlamaForCausalLM(config)

def llama3_8b():
    return llama(128256, 4096, 14336, 32, 32)

def lora_13b(layers=40):
    how = LoraConfig(r=16, target_modules="all-linear")
    return get_peft_model(llama(32000, 5120, 13824, layers, 40, 40), how)

def lora_of_4_layers():
    return lora_13b(4)

def qwen3_30b_a3b():
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8)
    return transformers.Qwen3MoeForCausalLM(config)

def mixtral_8x7b():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig())

def vit_l():
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        num_labels=1000)
    return transformers.ViTForImageClassification(config)
"""
ON_EIGHT = "--data-parallel 8"
SPLIT = f"{ON_EIGHT} --expert-parallel 8"
ON_MORE = "GiB; on {} (FSDP2, without activations) it pays"
LARGE = f"does not fit on 8 GPUs, 87.0 of 79 {ON_MORE.format(16)}"
CASES = [
    ("lora_of_4_layers --tokens 4096", 1.25, "it pays", 6.0),
    (f"qwen3_30b_a3b {ON_EIGHT} --tokens 4096 --gpu H200", 1.32, "it pays", 56.9),
    ("vit_l --tokens 50432 --sequence 197", 1.04, "about level", 4.5),
]
MORE = [
    (f"mixtral_8x7b {SPLIT}", 1.31, LARGE, 43.5),
    (
        *("llama3_8b --tokens 4096", 1.25),
        *(f"does not fit on 1 GPU, 119.7 of 79 {ON_MORE.format(2)}", 59.8),
    ),
    ("lora_13b --tokens 4096 --recipe tensorwise+only", 1.36, "it pays", 14.0),
    (f"qwen3_30b_a3b {ON_EIGHT} --recipe tensorwise+held", 1.12, "it pays", 56.9),
]
CASES += [pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE]


@pytest.mark.parametrize(("words", "speedup", "verdict", "gib"), CASES, ids=str)
def test_a_number_and_a_verdict(
    words: str,
    speedup: float,
    verdict: str,
    gib: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("models_to_plan.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "models_to_plan", raising=False)
    model = words if words.startswith("--") else f"models_to_plan:{words}"
    assert main(["plan", "--gpu", "H100", *model.split()]) == 0
    out = capsys.readouterr().out
    first, last = out.splitlines()[1], out.splitlines()[-1]
    found = re.fullmatch(r"(.*): a step ([\d.]+)x as fast, its linear layers ([\d.]+)x(.*)", first)
    assert found
    assert first == last
    assert found[1] == verdict
    assert float(found[2]) == pytest.approx(speedup, abs=0.011)
    experts = "experts" in out
    assert experts == (", its experts " in found[4])
    assert (": may as well lose, so time it\n" in out) == (verdict == "about level")
    waits = "H200" in words
    assert ("\nwaiting for gathers " in out) == waits
    if waits:  # so experts gain that would lose alone
        assert re.search(r"experts.down_proj .*float8: modelled 1.57x of bf16", out)
    if "held" in words:  # and why, if they do not
        others = "1.47x with the other weights of these experts"
        assert re.search(rf"experts.down_proj .*float8: modelled 1.31x of bf16, {others}\n", out)
    split = "--expert-parallel" in words  # which a conversion does not know of
    assert split == ("module_filter_fn=" in out) == ("'model.layers.N.mlp.experts'" in out)
    unknown = ["on more than 4 GPUs"] * ("--data-parallel" in words)
    unknown += ["under expert parallel"] * split
    unknown += ["of models that read no tokens"] * ("vit_l" in words)
    error = f"error not known: nothing was measured {', '.join(unknown)}" if unknown else "±5%"
    assert f"\nmodelled ({error})" in out
    memory = 139 if "H200" in words else 79
    top = "activations come on top"
    assert f"\nparameters, gradients, AdamW: {gib} of {memory} GiB a GPU; {top}\n" in out
    assert re.search(r"\nattention found: \d+ modules, \w*Attention\n", out)
    only = "\nfrozen base in float8 alone, --recipe tensorwise+only: a step "
    told = {"lora_13b": "1.36x, 14.0 GiB\n", "lora_of_4_layers": "1.32x, 2.5 GiB\n"}
    base = told.get(words.removesuffix(" --tokens 4096"))
    assert (only in out) == (base is not None)
    assert base is None or only + base in out
    pooled = "\nclassifier: judged at all tokens, timed at one of each sequence\n"
    assert (pooled in out) == ("vit_l" in words)
    assert "measured" not in out.replace("nothing was measured", "")
