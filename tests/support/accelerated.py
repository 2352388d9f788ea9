"""A run with accelerate's `Accelerator`; needs accelerate."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from float8 import Float8LinearConfig, all_linears, attach_to_optimizer, convert_to_float8_training
from support.models import FeedForward, seeded

DELAYED = Float8LinearConfig.from_recipe_name("delayed")


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(FeedForward(32, 64), nn.LayerNorm(32), FeedForward(32, 64))


def run(
    folder: Path, convert: str, steps: range, seed: int = 0, precision: str = "no"
) -> dict[str, Tensor]:
    """Train `steps` with two microbatches each; before step 2 all is saved, or loaded if first."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of another precision
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, project_dir=folder
    )
    model = made(seed)
    if convert == "before":
        convert_to_float8_training(model, config=DELAYED, module_filter_fn=all_linears)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if convert == "after":
        convert_to_float8_training(model, config=DELAYED, module_filter_fn=all_linears)
    attach_to_optimizer(model, optimizer)
    if steps.start == 2:
        accelerator.load_state(str(folder))
    for step in steps:
        if step == 2 and steps.start == 0:
            accelerator.save_state(str(folder))
        for micro in range(2):
            with accelerator.accumulate(model):
                x = seeded(2 * step + micro, 16, 32)
                accelerator.backward((model(x) - x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model).state_dict()
