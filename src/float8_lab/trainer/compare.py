"""The same training under several recipes: same seed, same data in the same order; a report."""

import gc
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch

from float8_lab.device import check_device
from float8_lab.errors import ConfigError, LabError
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig
from float8_lab.trainer.data import Corpus, check_length, load_corpus
from float8_lab.trainer.environment import describe_environment, public_path
from float8_lab.trainer.loop import Trainer, train
from float8_lab.trainer.metrics import FAILED, FINISHED, read_metrics, summarize
from float8_lab.trainer.plot import plot_comparison
from float8_lab.trainer.run_folder import RunFolder, check_same_run

Row = dict[str, Any]
"""One run: what `summarize` gives, its recipe, how it ended, and gaps to high precision.

None stands for what is not known.
"""


def add_gaps(row: Row, base: Row) -> None:
    """Add to `row` what it differs by from `base`, of high precision, if both runs finished."""
    row |= dict.fromkeys(("val_gap_nats", "val_gap_percent", "speedup"))
    loss, other = row["val_loss"], base["val_loss"]
    if row["status"] == base["status"] == FINISHED and loss is not None and other is not None:
        row |= {"val_gap_nats": loss - other, "val_gap_percent": 100 * (loss - other) / other}
    if row["tokens_per_s"] and base["tokens_per_s"]:
        row["speedup"] = row["tokens_per_s"] / base["tokens_per_s"]


def compare(
    base: TrainConfig,
    recipes: Sequence[str],
    observers: Sequence[Any] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    stop: Event | None = None,
) -> list[Row]:
    """Train high precision and then each recipe, and report the gaps; returns a row for each run.

    Each has the settings of `base` and a folder below its `output`. One that diverges or does not
    fit is reported as failed. A comparison that is there already is a `ConfigError`, unless it is
    to `resume`, which keeps finished runs, or to `overwrite`. `stop` ends it with a checkpoint.
    """
    order = [HIGH_PRECISION, *(recipe for recipe in recipes if recipe != HIGH_PRECISION)]
    if len(set(order)) < len(order):
        raise ConfigError(f"a recipe is named twice in: {' '.join(recipes)}")
    output = Path(base.output)
    configs = [base.replace(recipe=name, output=str(output / name)) for name in order]
    corpus = load_corpus(base.data)
    check_length(corpus, base.seq_len)
    for config in configs:
        # A step of a very small model: what does not work on this device says so at once.
        small = {"model": "tiny", "seq_len": min(config.seq_len, 16), "batch_size": 1}
        plain = config.replace(compile=False, cuda_graphs=False, **small)
        Trainer(plain, corpus).train_step()
    _prepare(output, configs, corpus, resume=resume, overwrite=overwrite)

    stop = stop or Event()
    settings = {k: public_path(v) if isinstance(v, str) else v for k, v in vars(base).items()}
    about: Row = {"environment": describe_environment(check_device(base.device))}
    about |= {"settings": settings, "corpus": corpus.describe()}
    about["corpus"]["name"] = public_path(corpus.name)
    rows: list[Row] = []
    for config in configs:
        rows.append(_run(config, corpus, observers, stop))
        add_gaps(rows[-1], base=rows[0])
        report = json.dumps({"runs": rows, **about}, indent=1, allow_nan=False)
        (output / "report.json").write_text(report + "\n")
        if stop.is_set():
            break
    runs = {row["recipe"]: read_metrics(output / row["metrics"]) for row in rows}
    if runs[HIGH_PRECISION].train:
        title = f"Llama {base.model} on {public_path(corpus.name)}, {base.dtype}"
        title += f", {base.tokens_per_step:,} tokens per step"
        plot_comparison(runs, title, output / "loss.png")
    return rows


def _prepare(
    output: Path, configs: list[TrainConfig], corpus: Corpus, *, resume: bool, overwrite: bool
) -> None:
    """Make the folder ready: to `resume` runs without a checkpoint go, to `overwrite` all."""
    folders = [RunFolder(config.output) for config in configs]
    taken = (output / "report.json").exists() or any(folder.used for folder in folders)
    if taken and not (resume or overwrite):
        do = "go on with it with --resume, replace it with --overwrite, or choose another folder"
        raise ConfigError(f"{output} already holds a comparison: {do} with --output")
    runs = {x.parent.name for x in output.glob("*/config.json")}
    if resume and (others := sorted(runs - {folder.path.name for folder in folders})):
        do = "name these recipes, too, or choose another folder with --output"
        raise ConfigError(f"{output} holds runs of {', '.join(others)}: {do}")
    for name in () if resume else ("report.json", "report.md", "report.txt", "loss.png"):
        (output / name).unlink(missing_ok=True)
    for config, folder in zip(configs, folders, strict=True):
        if resume and (folder.status == FINISHED or folder.saved):
            check_same_run(config, corpus, folder.path)
        elif folder.used:
            shutil.rmtree(folder.path)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {output}: {error}") from error


def _run(config: TrainConfig, corpus: Corpus, observers: Sequence[Any], stop: Event) -> Row:
    """Train one recipe, or take what an earlier attempt left of it."""
    folder = RunFolder(config.output)
    status, error = FINISHED, None
    if folder.status != FINISHED:
        # Each run starts with its whole budget of recompilations, and without former tensors.
        torch.compiler.reset()
        gc.collect()
        unfinished = folder.saved[-1] if folder.saved else None
        try:
            run = train(config, observers=observers, resume=unfinished, corpus=corpus, stop=stop)
            status = run.status
        except LabError as problem:
            status, error = FAILED, str(problem)
    row = {"recipe": config.recipe, "status": status, **summarize(read_metrics(folder.metrics))}
    return {**row, "metrics": f"{folder.path.name}/{folder.metrics.name}", "error": error}
