"""trl's `SFTTrainer` trains a converted model and resumes it; no extra installs it."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sqnr import same_bits
from support.models import fp8_state

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
hf = importlib.import_module("support.hugging_face")

LINES = ["the cat sat on the mat", "a dog ran after a ball all day long"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *sorted({x for line in LINES for x in line.split()})]
    made = Tokenizer(models.WordLevel({x: n for n, x in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def trained(folder: Path, resume: str | None = None, lora: Any = None, **more: Any) -> nn.Module:
    arguments = {"max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": 2}
    arguments |= {"per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True}
    trainer = trl.SFTTrainer(
        hf.converted("delayed"),
        trl.SFTConfig(str(folder), use_cpu=True, bf16=False, **arguments | more),
        train_dataset=datasets.Dataset.from_list([{"text": line} for line in LINES * 16]),
        processing_class=tokenizer(),
        callbacks=[hf.Float8Callback()],
        peft_config=lora,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


@pytest.mark.parametrize("how", ["plain", "packing", "LoRA", "checkpointing"])
def test_it_is_resumed_bit_by_bit(how: str, tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    more = {
        "packing": {"packing": True, "max_length": 32},
        "LoRA": {"lora": lora},
        "checkpointing": {"gradient_checkpointing": True},
    }.get(how, {})
    torch.manual_seed(0)
    whole = trained(tmp_path / "whole", **more)
    rest = trained(tmp_path / "rest", resume=str(tmp_path / "whole/checkpoint-2"), **more)
    histories = [x for name, x in fp8_state(whole).items() if "history" in name]
    assert len(histories) == 28
    assert all((x > 0).sum() == 4 for x in histories)  # one of each step, not microbatch
    state = rest.state_dict()
    assert all(same_bits(x, state[name]) for name, x in whole.state_dict().items())
