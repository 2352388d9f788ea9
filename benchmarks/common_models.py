"""Models that many people train, for `float8 plan` and for the table of them in docs/measuring.md.

From the root of a checkout, with transformers installed; nothing is downloaded, and weights are on
the meta device:

    float8 plan --gpu H100 benchmarks.common_models:llama3_8b   # one of them
    python -m benchmarks.common_models                          # writes the table
"""

import re
from collections.abc import Callable

import torch
import transformers as tf
from torch import nn

from float8 import (
    ConversionReport,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8_lab.bench import tables

PAGE = tables.ROOT / "docs" / "measuring.md"
GPU = "H100"
COLUMNS = (("tensorwise", 8192), ("tensorwise", 2048), ("rowwise", 8192), ("blockwise", 8192))
LLAMA3 = {"num_key_value_heads": 8, "vocab_size": 128256}
QWEN3 = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}


def gpt2() -> nn.Module:
    """GPT-2, 124M."""
    return tf.GPT2LMHeadModel(tf.GPT2Config())


def bert_large() -> nn.Module:
    """BERT large."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096}
    config = tf.BertConfig(num_hidden_layers=24, num_attention_heads=16, **sizes)
    return tf.BertForMaskedLM(config)


def vit_large() -> nn.Module:
    """ViT-L/16."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096}
    config = tf.ViTConfig(num_hidden_layers=24, num_attention_heads=16, num_labels=1000, **sizes)
    return tf.ViTForImageClassification(config)


def llama32_1b() -> nn.Module:
    """Llama 3.2 1B."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192}
    config = tf.LlamaConfig(num_hidden_layers=16, num_attention_heads=32, **sizes, **LLAMA3)
    return tf.LlamaForCausalLM(config)


def mistral_7b() -> nn.Module:
    """Mistral 7B."""
    return tf.MistralForCausalLM(tf.MistralConfig())


def llama3_8b() -> nn.Module:
    """Llama 3 8B."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336}
    config = tf.LlamaConfig(num_hidden_layers=32, num_attention_heads=32, **sizes, **LLAMA3)
    return tf.LlamaForCausalLM(config)


def qwen3_8b() -> nn.Module:
    """Qwen3 8B."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288}
    config = tf.Qwen3Config(num_hidden_layers=36, num_key_value_heads=8, **sizes, **QWEN3)
    return tf.Qwen3ForCausalLM(config)


def llama3_70b() -> nn.Module:
    """Llama 3 70B."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672}
    config = tf.LlamaConfig(num_hidden_layers=80, num_attention_heads=64, **sizes, **LLAMA3)
    return tf.LlamaForCausalLM(config)


def mixtral_8x7b() -> nn.Module:
    """Mixtral 8x7B."""
    return tf.MixtralForCausalLM(tf.MixtralConfig())


def qwen3_30b_a3b() -> nn.Module:
    """Qwen3 30B-A3B."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
    config = tf.Qwen3MoeConfig(num_hidden_layers=48, num_key_value_heads=4, **sizes, **QWEN3)
    return tf.Qwen3MoeForCausalLM(config)


MODELS = (gpt2, bert_large, vit_large, llama32_1b, mistral_7b, llama3_8b, qwen3_8b, llama3_70b)
MODELS += (mixtral_8x7b, qwen3_30b_a3b)


def row(make: Callable[[], nn.Module]) -> list[str]:
    """Return a line of the table: the share of each of `COLUMNS`, and what stays by the first."""
    with torch.device("meta"):
        model = make()
    shares, stays = [], ""
    for recipe, tokens in COLUMNS:
        convert_to_float8_training(model, config=recipe, tokens_per_step=tokens, gpu=GPU)
        report = conversion_report(model)
        shares.append(f"{report.share:.0%}")
        if not stays:
            stays = _names(report) if report.share else "all"
        convert_to_high_precision(model)
    return [(make.__doc__ or "").rstrip("."), *shares, stays]


def _names(report: ConversionReport) -> str:
    """Return names of the layers that stay, "some" if others do not; then experts, modules."""
    converted = {x.fqn.split(".")[-1] for x in report.converted}
    layers = dict.fromkeys(x.fqn.split(".")[-1] for x in report.skipped)
    modules = dict.fromkeys(re.sub("^.*(?=Experts|Router)", "", x.module) for x in report.others)
    experts = ["experts"] * any(x.skip_reason for x in report.experts)
    return ", ".join([*("some " * (n in converted) + n for n in layers), *experts, *modules])


def main() -> None:
    """Write the table into its page."""
    most = COLUMNS[0][1]
    heads = [recipe if tokens == most else f"{tokens} tokens" for recipe, tokens in COLUMNS]
    lines = tables.table(["model", *heads, f"what {COLUMNS[0][0]} leaves"], [*map(row, MODELS)])
    begin = "<!-- common models: written by python -m benchmarks.common_models -->"
    text = "\n".join(["", *lines, "", ""])
    end = "<!-- end of common models -->"
    PAGE.write_text(tables.updated(PAGE.read_text(), begin, end, text))


if __name__ == "__main__":
    main()
