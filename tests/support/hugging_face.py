"""A small Llama, and runs of transformers' `Trainer`, which need accelerate."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from float8 import convert_to_float8_training, sync_float8_amax_and_scale_history
from float8.integrations.transformers import Float8Callback
from support.models import gradients


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


class Tokens(Dataset):
    """64 sequences of random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = tokens(index, 1)[0]
        return {"input_ids": row, "labels": row}


def converted(recipe: str, seed: int = 0) -> nn.Module:
    """A Llama, all of it but its head."""
    return convert_to_float8_training(
        llama(seed), config=recipe, module_filter_fn=lambda mod, fqn: fqn != "lm_head"
    )


def trainer(model: nn.Module, folder: Path, **more: Any) -> transformers.Trainer:
    arguments = {"max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": 2}
    arguments |= {"per_device_train_batch_size": 4, "report_to": []}
    arguments |= {"disable_tqdm": True, "use_cpu": True}
    settings = transformers.TrainingArguments(str(folder), **arguments | more)
    data = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
    return transformers.Trainer(model, settings, **data, callbacks=[Float8Callback()])


def resumed(recipe: str, checkpoint: Path, folder: Path, more: dict[str, Any]) -> dict[str, Tensor]:
    """The state after the rest of a run."""
    model = converted(recipe, seed=1)
    trainer(model, folder, **more).train(resume_from_checkpoint=str(checkpoint))
    return model.state_dict()
