"""Every recipe from one start: bf16 trains until losses no longer jump, then all go on alike.

    python benchmarks/one_start.py --data FOLDER --output benchmarks/results/NAME.json

Two runs from the beginning part ways in their first steps, where losses fall fast, and the lead of
one lasts: bf16 differs so from itself by half a percent. From a common start what is left of the
difference is due to the recipe. bf16 goes on twice, to show how much that is.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch

from float8_lab.bench.results import write_results
from float8_lab.trainer import data
from float8_lab.trainer.config import HIGH_PRECISION, RECIPES, TrainConfig
from float8_lab.trainer.environment import describe_environment
from float8_lab.trainer.loop import Trainer
from float8_lab.trainer.metrics import Observer, StepRecord, ValidationRecord

AGAIN = "high_precision again"


class Losses(Observer):
    """Of all steps, and of the last validation."""

    def __init__(self) -> None:
        self.train: list[float] = []
        self.validation = float("nan")

    def on_records(self, records: Sequence[StepRecord]) -> None:
        self.train += [record.loss for record in records]

    def on_validation(self, record: ValidationRecord) -> None:
        self.validation = record.loss


def started(config: TrainConfig, corpus: data.Corpus, steps: int) -> dict[str, Any]:
    """Weights and the optimizer's state after `steps` in high precision."""
    trainer = Trainer(config.replace(recipe=HIGH_PRECISION), corpus)
    trainer.model.train()
    while trainer.step < steps:
        trainer.train_step()
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}


def continued(
    config: TrainConfig, corpus: data.Corpus, start: dict[str, Any], steps: int
) -> Losses:
    """The rest of a run by the recipe of `config`; histories of delayed scaling begin empty."""
    losses = Losses()
    trainer = Trainer(config, corpus, [losses])
    missing, unexpected = trainer.model.load_state_dict(start["model"], strict=False)
    assert not unexpected
    assert not set(missing) & {name for name, _ in trainer.model.named_parameters()}
    # It keeps the tensors that it is given, and writes into them.
    trainer.optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))
    trainer.step = steps
    trainer.run(Event())
    return losses


def row(recipe: str, losses: Losses, last: int, window: int = 50) -> dict[str, Any]:
    """Losses in nats per byte: `train_loss` the mean of each `window` steps, `mean` of the last."""
    parts = range(0, len(losses.train), window)
    return {
        "recipe": recipe,
        "mean": statistics.mean(losses.train[-last:]),
        "val_loss": losses.validation,
        "train_loss": [statistics.mean(losses.train[at : at + window]) for at in parts],
    }


def gaps(rows: list[dict[str, Any]]) -> None:
    """Add to each what it has above the mean of the runs in high precision, in percent."""
    for name in ("mean", "val_loss"):
        base = statistics.mean(r[name] for r in rows if r["recipe"].startswith(HIGH_PRECISION))
        for each in rows:
            each[f"{name}_gap_percent"] = 100 * (each[name] / base - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--model", default="150m")
    parser.add_argument("--start", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--last", type=int, default=400, help="how many steps `mean` is of")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-batches", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    config = TrainConfig.create(
        model=args.model, steps=args.steps, batch_size=args.batch_size, learning_rate=5e-4,
        warmup_steps=min(80, args.start), compile=not args.no_compile, data=str(args.data),
        seed=args.seed, eval_interval=0, eval_batches=args.eval_batches, tensorboard=False,
        checkpoint_interval=0, final_checkpoint=False,
    )  # fmt: skip
    corpus = data.load_corpus(config.data)
    start = started(config, corpus, args.start)
    rows = []
    for name in [HIGH_PRECISION, AGAIN, *args.recipes.split(",")]:
        recipe = HIGH_PRECISION if name == AGAIN else name
        torch._dynamo.reset()
        losses = continued(config.replace(recipe=recipe), corpus, start, args.start)
        rows.append(row(name, losses, args.last))
        print(name, json.dumps({k: rows[-1][k] for k in ("mean", "val_loss")}), flush=True)
    gaps(rows)
    if args.output:
        about = describe_environment(torch.device(config.device))
        about["git_commit"] = os.environ.get("FLOAT8_COMMIT") or about["git_commit"]
        settings = {**vars(args), "data": args.data.name, "output": None}
        write_results(args.output, {"environment": about, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
