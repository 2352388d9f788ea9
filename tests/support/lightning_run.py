"""A module for Lightning's `Trainer`, which has our callback; needs lightning."""

import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from float8 import all_linears
from float8.integrations.lightning import Float8Callback
from support.libraries import feed_forwards, loss_of
from support.models import seeded


class Module(lightning.LightningModule):
    """Reconstructs its input, by one optimizer, or by hand and two."""

    def __init__(self, model: nn.Module | None = None, by_hand: bool = False) -> None:
        super().__init__()
        self.model = feed_forwards() if model is None else model
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = loss_of(self.model(batch), batch)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", loss_of(self.model(batch), batch))

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return [
            torch.optim.AdamW(half.parameters(), 1e-2) for half in (self.model[0], self.model[2])
        ]


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
            Float8Callback(config="delayed", module_filter_fn=all_linears),
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
        ],
        **more,
    )
