"""A run with Lightning's `Trainer`; needs lightning."""

import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from float8 import Float8LinearConfig, all_linears
from float8.integrations.lightning import Float8Callback
from support.models import FeedForward, seeded

DELAYED = Float8LinearConfig.from_recipe_name("delayed")


class Module(lightning.LightningModule):
    """Reconstructs its input, by one optimizer, or by hand and two."""

    def __init__(self, seed: int = 0, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = FeedForward(32, 64), FeedForward(32, 64)
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = (self.second(self.first(batch)) - batch).square().mean()
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", (self.second(self.first(batch)) - batch).square().mean())

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return [torch.optim.AdamW(x.parameters(), 1e-2) for x in (self.first, self.second)]


def data() -> DataLoader:
    return DataLoader(seeded(0, 64, 32), 16)


def trainer(folder: Path, epochs: int, **more: Any) -> lightning.Trainer:
    """Two steps an epoch, of two microbatches each if these are accumulated."""
    warnings.filterwarnings("ignore", message=".*num_workers|.*log_every_n_steps")
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            Float8Callback(config=DELAYED, module_filter_fn=all_linears),
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
        ],
        **more,
    )


def run(
    folder: Path, seed: int = 0, checkpoint: Path | None = None, **more: Any
) -> dict[str, Tensor]:
    """Train two epochs, the second only if there is a checkpoint."""
    module = Module(seed)
    path = None if checkpoint is None else str(checkpoint)
    trainer(folder, 2, **more).fit(module, data(), data(), ckpt_path=path, weights_only=True)
    return module.state_dict()


def resumed(folder: Path, checkpoint: Path) -> dict[str, Tensor]:
    """The rest of a run."""
    return run(folder, 1, checkpoint, accumulate_grad_batches=2)
