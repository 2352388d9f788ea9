"""The same training under several recipes: same seed, same data in the same order; a report."""

import json
import shutil
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from float8_lab.trainer.metrics import FAILED, FINISHED, Observer, Summary, read_metrics, summarize
from float8_lab.trainer.plot import plot_comparison
from float8_lab.trainer.run_folder import RunFolder, check_same_run, read_config_file


@dataclass(frozen=True, kw_only=True)
class RunRow(Summary):
    """One run of a comparison; None stands for what is not known. Gaps are to high precision."""

    recipe: str
    status: str  # `"finished"`, `"interrupted"`, `"stopped"` or `"failed"`
    parameters: int  # how many are trained
    metrics: str  # the run's record, relative to the report
    error: str | None = None  # why it failed
    train_gap_nats: float | None = None
    val_gap_nats: float | None = None
    val_gap_percent: float | None = None
    speedup: float | None = None


def with_gaps(row: RunRow, base: RunRow) -> RunRow:
    """`row` with what it differs by from `base`, the row of high precision.

    Gaps stay None unless both runs finished: losses after different numbers of steps say nothing
    about a recipe.
    """
    found: dict[str, Any] = {}
    if row.tokens_per_s and base.tokens_per_s:
        found["speedup"] = row.tokens_per_s / base.tokens_per_s
    if row.status == base.status == FINISHED:
        if row.train_loss is not None and base.train_loss is not None:
            found["train_gap_nats"] = row.train_loss - base.train_loss
        if row.val_loss is not None and base.val_loss:
            found["val_gap_nats"] = row.val_loss - base.val_loss
            found["val_gap_percent"] = 100 * found["val_gap_nats"] / base.val_loss
    return replace(row, **found)


def write_report(folder: Path, rows: list[RunRow], about: dict[str, Any]) -> None:
    """Write `report.json` and `report.md`; each is replaced in one go."""
    content = {"runs": [asdict(row) for row in rows], **about}
    files = {
        "report.json": json.dumps(content, indent=1, allow_nan=False) + "\n",
        "report.md": _markdown(rows, about["environment"], about["corpus"]),
    }
    for name, text in files.items():
        temporary = folder / f".{name}.unfinished"
        temporary.write_text(text)
        temporary.replace(folder / name)


def cells(row: RunRow) -> dict[str, str]:
    """A row as text by column; "-" for what is not known."""

    def show(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else format(value, form) + unit

    memory = row.peak_memory_bytes
    return {
        "recipe": row.recipe if row.status == FINISHED else f"{row.recipe} ({row.status})",
        "train loss": show(row.train_loss, ".4f"),
        "val loss": show(row.val_loss, ".4f"),
        "gap (nats)": show(row.val_gap_nats, "+.4f"),
        "gap (%)": show(row.val_gap_percent, "+.2f"),
        "tokens/s": show(row.tokens_per_s, ",.0f"),
        "speed-up": show(row.speedup, ".2f", "x"),
        "step (ms)": show(row.step_ms, ".1f"),
        "peak MiB": show(None if memory is None else memory / 2**20, ",.0f"),
    }


def _markdown(rows: list[RunRow], environment: dict[str, Any], corpus: dict[str, Any]) -> str:
    table = [cells(row) for row in rows]
    lines = ["| " + " | ".join(table[0]) + " |", "|---" + "|---:" * (len(table[0]) - 1) + "|"]
    lines += ["| " + " | ".join(row.values()) + " |" for row in table]
    lines += ["", "Losses in nats per byte; gaps in validation loss to the first row."]
    lines += [f"{row.recipe} failed: {row.error}" for row in rows if row.error]
    lines += ["", f"- data: {corpus['name']}, {corpus['train_bytes']:,} training bytes"]
    lines += [f"- {name}: {value}" for name, value in environment.items() if value is not None]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Comparison:
    """What a comparison left."""

    rows: list[RunRow]  # one per run that was started, the first one high precision
    report: Path  # of `report.json`
    plot: Path | None  # None if no run has a step to show
    interrupted: bool  # whether a signal ended it early

    @property
    def failed(self) -> list[RunRow]:
        """Runs that ended in an error."""
        return [row for row in self.rows if row.status == FAILED]


def compare(
    base: TrainConfig,
    recipes: Sequence[str],
    observers: Sequence[Observer] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    stop: Event | None = None,
) -> Comparison:
    """Train high precision and then each recipe, and report the gaps.

    A run that fails is reported as failed and does not keep the others from running; the report
    is written again after each run.

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
        _try(config, corpus)
    _prepare(output, configs, corpus, resume=resume, overwrite=overwrite)

    stop = stop or Event()
    settings = {k: public_path(v) if isinstance(v, str) else v for k, v in vars(base).items()}
    del settings["recipe"]
    about = {
        "environment": describe_environment(check_device(base.device)),
        "settings": settings,
        "corpus": {**corpus.describe(), "name": public_path(corpus.name)},
    }
    rows: list[RunRow] = []
    for config in configs:
        row = _run(config, corpus, observers, stop)
        rows.append(with_gaps(row, base=rows[0] if rows else row))
        write_report(output, rows, about)
        if stop.is_set():
            break
    runs = {row.recipe: read_metrics(output / row.metrics) for row in rows}
    plot = output / "loss.png" if runs[HIGH_PRECISION].train else None
    if plot is not None:
        title = f"Llama {base.model} on {public_path(corpus.name)}, {base.dtype}"
        plot_comparison(runs, f"{title}, {base.tokens_per_step:,} tokens per step", plot)
    return Comparison(rows, output / "report.json", plot, interrupted=stop.is_set())


def _try(config: TrainConfig, corpus: Corpus) -> None:
    """Take one step of a very small model with the run's recipe, and throw it away.

    What is loaded and allocated once per process on first use (50 MiB on a CPU) is then there
    before a run's memory is measured, instead of being counted against the first run. And what does
    not work on this device says so at once.
    """
    tokens = {"seq_len": min(config.seq_len, 16), "batch_size": 1}
    small = config.replace(model="tiny", vocab_size=256, compile=False, **tokens)
    Trainer(small, corpus).train_step()


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
    if not resume:
        for name in ("report.json", "report.md", "loss.png"):
            (output / name).unlink(missing_ok=True)
    for config, folder in zip(configs, folders, strict=True):
        if resume and (folder.status == FINISHED or folder.saved):
            check_same_run(config, corpus, read_config_file(folder), folder.path)
        elif folder.used:
            shutil.rmtree(folder.path)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {output}: {error}") from error


def _run(config: TrainConfig, corpus: Corpus, observers: Sequence[Observer], stop: Event) -> RunRow:
    """Train one recipe, or take what an earlier attempt left of it.

    The traceback of an error that nobody expected goes to the run's folder.
    """
    folder = RunFolder(config.output)
    status, error = FINISHED, None
    if folder.status != FINISHED:
        if config.compile:
            torch.compiler.reset()  # Each run starts with its whole budget of recompilations.
        unfinished = folder.path if folder.saved else None
        try:
            done = train(config, observers=observers, resume=unfinished, corpus=corpus, stop=stop)
            status = done.status
        except LabError as problem:
            status, error = FAILED, str(problem)
        except Exception as problem:
            details = folder.path / "error.txt"
            folder.path.mkdir(parents=True, exist_ok=True)
            details.write_text(traceback.format_exc())
            first_line = (str(problem).splitlines() or [""])[0]
            status = FAILED
            error = f"{type(problem).__name__}: {first_line} (traceback in {details})"
    return RunRow(
        **vars(summarize(read_metrics(folder.metrics))),
        recipe=config.recipe,
        status=status,
        parameters=config.model_config().num_parameters,
        metrics=f"{folder.path.name}/{folder.metrics.name}",
        error=error,
    )
