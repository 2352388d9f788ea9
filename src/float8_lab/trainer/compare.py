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
from float8_lab.trainer.metrics import FAILED, FINISHED, Observer, read_metrics, summarize
from float8_lab.trainer.plot import plot_comparison
from float8_lab.trainer.run_folder import RunFolder, check_same_run

Row = dict[str, Any]
"""One run: what `summarize` gives, its recipe, how it ended, and gaps to high precision.

None stands for what is not known; `metrics` is relative to the report.
"""


def add_gaps(row: Row, base: Row) -> None:
    """Add to `row` what it differs by from `base`, the row of high precision.

    Gaps stay None unless both runs finished: losses after different numbers of steps say nothing
    about a recipe.
    """
    comparable = row["status"] == base["status"] == FINISHED
    for kind in ("train", "val"):
        losses = [each[f"{kind}_loss"] for each in (row, base)]
        known = comparable and None not in losses
        row[f"{kind}_gap_nats"] = losses[0] - losses[1] if known else None
    nats = row["val_gap_nats"]
    row["val_gap_percent"] = None if nats is None else 100 * nats / base["val_loss"]
    timed = row["tokens_per_s"] and base["tokens_per_s"]
    row["speedup"] = row["tokens_per_s"] / base["tokens_per_s"] if timed else None


def cells(row: Row) -> dict[str, str]:
    """A row as text by column; "-" for what is not known."""

    def show(name: str, form: str, unit: str = "", per: float = 1) -> str:
        return "-" if row[name] is None else format(row[name] / per, form) + unit

    finished = row["status"] == FINISHED
    return {
        "recipe": row["recipe"] if finished else f"{row['recipe']} ({row['status']})",
        "train loss": show("train_loss", ".4f"),
        "val loss": show("val_loss", ".4f"),
        "gap (nats)": show("val_gap_nats", "+.4f"),
        "gap (%)": show("val_gap_percent", "+.2f"),
        "tokens/s": show("tokens_per_s", ",.0f"),
        "speed-up": show("speedup", ".2f", "x"),
        "step (ms)": show("step_ms", ".1f"),
        "peak MiB": show("peak_memory_bytes", ",.0f", per=2**20),
    }


def write_report(folder: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Write `report.json` and `report.md`."""
    content = json.dumps({"runs": rows, **about}, indent=1, allow_nan=False)
    (folder / "report.json").write_text(content + "\n")
    table, corpus = [cells(row) for row in rows], about["corpus"]
    lines = ["| " + " | ".join(table[0]) + " |", "|---" + "|---:" * (len(table[0]) - 1) + "|"]
    lines += ["| " + " | ".join(row.values()) + " |" for row in table]
    lines += ["", "Losses in nats per byte; gaps in validation loss to the first row."]
    lines += [f"{row['recipe']} failed: {row['error']}" for row in rows if row["error"]]
    lines += ["", f"- data: {corpus['name']}, {corpus['train_bytes']:,} training bytes"]
    lines += [f"- {key}: {value}" for key, value in about["environment"].items() if value]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def compare(
    base: TrainConfig,
    recipes: Sequence[str],
    observers: Sequence[Observer] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    stop: Event | None = None,
) -> list[Row]:
    """Train high precision and then each recipe, and report the gaps.

    A run that diverges or does not fit is reported as failed and does not keep the others from
    running; the report is written again after each run, and `loss.png` at the end. Returns a row
    for each run that was started, the first one high precision.

    Args:
        base: The settings; `recipe` is replaced, and run i goes to `output`/its recipe.
        recipes: Recipes besides high precision, which is always run and always first.
        observers: Told what happens in each run.
        resume: Go on with a comparison that was interrupted: finished runs are kept.
        overwrite: Delete the runs of an earlier comparison in the same folder.
        stop: Ends the comparison; the run under way leaves a checkpoint.

    Raises:
        ConfigError: (a `ValueError`) if a recipe is unknown, named twice or not supported by the
            device, or the folder holds a comparison and neither `resume` nor `overwrite` is set.
        DataError: If there is no usable data.
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
        Trainer(config.replace(compile=False, **small), corpus).train_step()
    _prepare(output, configs, corpus, resume=resume, overwrite=overwrite)

    stop = stop or Event()
    settings = {k: public_path(v) if isinstance(v, str) else v for k, v in vars(base).items()}
    del settings["recipe"]
    about = {
        "environment": describe_environment(check_device(base.device)),
        "settings": settings,
        "corpus": {**corpus.describe(), "name": public_path(corpus.name)},
    }
    rows: list[Row] = []
    for config in configs:
        rows.append(_run(config, corpus, observers, stop))
        add_gaps(rows[-1], base=rows[0])
        write_report(output, rows, about)
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
    """Make the folder ready, or say why it is not, before anything runs.

    With `resume`, runs that were killed before their first checkpoint are deleted; with
    `overwrite`, all are.
    """
    folders = [RunFolder(config.output) for config in configs]
    taken = (output / "report.json").exists() or any(folder.used for folder in folders)
    if taken and not (resume or overwrite):
        raise ConfigError(
            f"{output} already holds a comparison: go on with it with --resume, replace it with "
            "--overwrite, or choose another folder with --output"
        )
    for name in () if resume else ("report.json", "report.md", "loss.png"):
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


def _run(config: TrainConfig, corpus: Corpus, observers: Sequence[Observer], stop: Event) -> Row:
    """Train one recipe, or take what an earlier attempt left of it."""
    folder = RunFolder(config.output)
    status, error = FINISHED, None
    if folder.status != FINISHED:
        # Each run starts with its whole budget of recompilations, and without former tensors.
        torch.compiler.reset()
        gc.collect()
        unfinished = folder.path if folder.saved else None
        try:
            run = train(config, observers=observers, resume=unfinished, corpus=corpus, stop=stop)
            status = run.status
        except LabError as problem:
            status, error = FAILED, str(problem)
    return {
        "recipe": config.recipe,
        "status": status,
        **summarize(read_metrics(folder.metrics)),
        "metrics": f"{folder.path.name}/{folder.metrics.name}",
        "error": error,
    }
