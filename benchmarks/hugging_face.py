"""An 8B-shaped Llama of Hugging Face with 4 layers, trained by its `Trainer`: bf16 and float8.

    python benchmarks/hugging_face.py --output benchmarks/results/hugging-face.json

The model is transformers' own. Weights and AdamW's state are bf16, `bf16=True`; one sequence of
8,192 tokens per step. Whole optimizer steps are timed; one run after the other, medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from float8 import conversion_report, convert_to_float8_training
from float8.integrations.transformers import Float8Callback
from float8_lab.bench.variants import recipe_config
from float8_lab.trainer.environment import describe_environment

WARMUP, STEPS = 4, 12
SHAPES = {"8b": (4096, 14336, 32, 8, 128256, 8192), "tiny": (64, 128, 4, 2, 256, 32)}


class Clock(TrainerCallback):
    """Milliseconds of each step; the optimizer's is done when the next one begins."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())

    def milliseconds(self) -> float:
        pairs = zip(self.marks[WARMUP:], self.marks[WARMUP + 1 :], strict=False)
        return statistics.median(1e3 * (end - begin) for begin, end in pairs)


def trained(shape: str, recipe: str, compiled: bool) -> dict[str, Any]:
    """One row: `recipe` as for `bench block`, with `@fused` behind it for `fuse=True`."""
    dim, ffn, heads, kv_heads, vocab, seq = SHAPES[shape]
    torch.manual_seed(0)
    sizes = {"hidden_size": dim, "intermediate_size": ffn, "num_attention_heads": heads}
    config = LlamaConfig(
        vocab_size=vocab, num_hidden_layers=4, num_key_value_heads=kv_heads, use_cache=False,
        max_position_embeddings=seq, dtype=torch.bfloat16, **sizes,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    name, _, fused = recipe.partition("@")
    callbacks: list[Any] = [clock := Clock()]
    if name != "bf16":
        body = None if shape == "8b" else lambda mod, fqn: fqn != "lm_head"
        convert_to_float8_training(
            model, config=recipe_config(name), fuse=bool(fused), module_filter_fn=body
        )
        callbacks.append(Float8Callback())
    share = conversion_report(model).share
    rows = torch.randint(vocab, (WARMUP + STEPS + 1, seq), device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=WARMUP + STEPS, per_device_train_batch_size=1, bf16=device == "cuda",
            torch_compile=compiled, optim="adamw_torch_fused", report_to=[], save_strategy="no",
            logging_steps=WARMUP + STEPS, learning_rate=1e-5, use_cpu=device == "cpu",
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        data: Any = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = trainer.train().training_loss
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    ms = clock.milliseconds()
    return {
        "recipe": recipe, "mode": "compiled" if compiled else "eager", "share": share, "ms": ms,
        "tokens_per_s": seq / ms * 1e3, "peak_gib": peak, "loss": loss,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default="bf16,tensorwise,tensorwise@fused")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for mode in args.modes.split(","):
        base = None
        for recipe in args.recipes.split(","):
            row = trained(args.shape, recipe, mode == "compiled")
            base = base or row["ms"]
            row["speedup"] = base / row["ms"]
            rows.append(row)
            cells = (f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
            print("  ".join(cells), flush=True)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    if args.output:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        about = describe_environment(device) | {"transformers": transformers.__version__}
        commit = os.environ.get("FLOAT8_COMMIT") or about.pop("git_commit")
        results = {"environment": {**about, "commit": commit}, "rows": rows}
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
