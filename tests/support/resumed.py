"""Runs with delayed scaling that are saved before step 2 and go on from there, also elsewhere."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from float8 import all_linears, attach_to_optimizer, convert_to_float8_training, float8_state_dict
from support.models import FeedForward, seeded


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(64, 128), FeedForward(64, 128))
    return convert_to_float8_training(model, config="delayed", module_filter_fn=all_linears)


def train(model: nn.Module, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    x = seeded(seed, 32, 64)
    (model(x) - x).square().mean().backward()
    optimizer.step()


def averaged(folder: Path, steps: range, ema: bool) -> dict[str, Tensor]:
    """The averages of torch, by whose state dicts all is saved."""
    model = model_of()
    average_of = get_ema_multi_avg_fn(0.9) if ema else None
    average = AveragedModel(model, multi_avg_fn=average_of, use_buffers=not ema)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    attach_to_optimizer(model, optimizer)
    parts = {"model": model, "average": average, "optimizer": optimizer}
    if steps.start == 2:
        for name, state in torch.load(folder / "all.pt", weights_only=True).items():
            parts[name].load_state_dict(state)
    for step in steps:
        if step == 2 and steps.start == 0:
            torch.save({name: x.state_dict() for name, x in parts.items()}, folder / "all.pt")
        train(model, optimizer, step)
        average.update_parameters(model)
    x = average.eval()(seeded(9, 32, 64)).detach()
    return {"output": x, **average.state_dict(), **model.state_dict()}


def lora(folder: Path, steps: range) -> dict[str, Tensor]:
    """PEFT saves what it trains; beside it lies the state of delayed scaling."""
    import peft

    from support import hugging_face as hf

    if steps.start == 2:
        model = peft.PeftModel.from_pretrained(hf.llama(), folder, is_trainable=True)
    else:
        torch.manual_seed(0)
        how = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(hf.llama(), how)
    convert_to_float8_training(model, config="delayed")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    attach_to_optimizer(model, optimizer)
    if steps.start == 2:
        model.load_state_dict(load_file(folder / "float8.safetensors"), strict=False)
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    model.train()
    for step in steps:
        if step == 2 and steps.start == 0:
            model.save_pretrained(folder)
            save_file(float8_state_dict(model), folder / "float8.safetensors")
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        optimizer.zero_grad()
        model(input_ids=hf.tokens(step), labels=hf.tokens(step)).loss.backward()
        optimizer.step()
    return model.state_dict()


def run(name: str, folder: Path, steps: range) -> dict[str, Tensor]:
    """Run one of the two above; `ema` or `swa` is the kind of averages."""
    return lora(folder, steps) if name == "lora" else averaged(folder, steps, name == "ema")
