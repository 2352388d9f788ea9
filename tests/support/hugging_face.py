"""A small Llama, and runs of transformers' `Trainer`, which need accelerate."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from float8 import sync_float8_amax_and_scale_history
from support import libraries
from support.lazily import Lazily
from support.models import gradients

ours = Lazily("float8.integrations.transformers")


def llama(seed: int = 0, name: str = "Llama", **more: Any) -> nn.Module:
    """A small Llama of two layers, or a model of another name that is configured alike."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes | more)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def tokens(seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randint(256, (batch, 32), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int = 0, length: int = 32) -> dict[str, Tensor]:
    """The loss and all gradients of one forward and backward, with a sync after them."""
    ids = tokens(seed)[:, :length].to(next(model.parameters()).device)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    sync_float8_amax_and_scale_history(model)
    grads = {n.replace("_orig_mod.", ""): grad for n, grad in gradients(model).items()}
    return {"loss": loss.detach(), **grads}


def checkpoint(model: Any, reentrant: bool) -> None:
    """Have the model recompute its blocks in backward."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


def read_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers load float8 checkpoints as they are, as it does on a GPU."""
    quantizers = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")
    check = "validate_environment"
    monkeypatch.setattr(quantizers.FineGrainedFP8HfQuantizer, check, lambda *args, **more: None)


def dequantised(folder: Path, format: str, **more: Any) -> Any:
    """A checkpoint as transformers reads it, in bfloat16."""
    name = "FineGrainedFP8Config"
    if format == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        name = "CompressedTensorsConfig"
    config = getattr(transformers, name)(dequantize=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, quantization_config=config, **more)


def converted(recipe: str, seed: int = 0) -> nn.Module:
    """A Llama of one layer, all of it but its head."""
    return libraries.converted(libraries.llama(seed), recipe)


def with_lora(model: nn.Module, **more: Any) -> nn.Module:
    """The model with adapters of PEFT at all layers but its head."""
    import peft

    torch.manual_seed(0)
    config = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **more}
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**config))
    return adapted


ARGUMENTS = {"max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": 2, "use_cpu": True}
ARGUMENTS |= {"per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True}


def trainer(
    model: nn.Module | None, folder: Path, *, callback: Any = None, init: Any = None, **more: Any
) -> transformers.Trainer:
    """Of 64 sequences of random tokens; with this callback, or one that only attaches."""
    settings = transformers.TrainingArguments(str(folder), **ARGUMENTS | more)
    rows = [tokens(index, 1)[0] for index in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    callbacks = [callback or ours.Float8Callback()]
    sets = {"train_dataset": data, "eval_dataset": data}
    return transformers.Trainer(model, settings, model_init=init, callbacks=callbacks, **sets)


def train(trainer: transformers.Trainer, folder: Path, resume: bool) -> None:
    """Train in this folder, or go on from its second step."""
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)


LINES = ["the cat sat on the mat", "a dog ran after a ball all day long"]


def sft_trainer(model: nn.Module, folder: Path, lora: bool, **more: Any) -> Any:
    """The trainer of trl, on two sentences."""
    import datasets
    import peft
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *sorted({x for line in LINES for x in line.split()})]
    made = Tokenizer(models.WordLevel({x: n for n, x in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    adapters = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return trl.SFTTrainer(
        model,
        trl.SFTConfig(str(folder), bf16=False, **ARGUMENTS | more),
        train_dataset=datasets.Dataset.from_list([{"text": line} for line in LINES * 16]),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special),
        callbacks=[ours.Float8Callback()],
        peft_config=adapters if lora else None,
    )
