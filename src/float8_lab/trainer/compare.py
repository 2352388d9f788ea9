"""The same training under several recipes: same seed, same data in the same order."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from float8_lab.trainer.build import load_libraries
from float8_lab.trainer.checkpoint import list_checkpoints
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig, float8_config
from float8_lab.trainer.data import Corpus, check_length, load_corpus
from float8_lab.trainer.device import check_device
from float8_lab.trainer.environment import describe_environment, public_path
from float8_lab.trainer.errors import ConfigError, TrainerError
from float8_lab.trainer.interrupt import StopRequest
from float8_lab.trainer.metrics import (
    FAILED,
    FINISHED,
    Metrics,
    Observer,
    read_metrics,
    summarize,
)
from float8_lab.trainer.plot import plot_comparison
from float8_lab.trainer.report import RunRow, make_row, write_report
from float8_lab.trainer.run_folder import (
    RunFolder,
    check_same_run,
    describe_corpus,
    read_config_file,
)
from float8_lab.trainer.train import train


@dataclass(frozen=True)
class Comparison:
    """What a comparison left.

    Attributes:
        rows: One per run that was started, the first one high precision.
        report: Path of `report.json`.
        plot: Path of the plot, None if no run has a step to show.
        interrupted: Whether a signal ended it early.
    """

    rows: list[RunRow]
    report: Path
    plot: Path | None
    interrupted: bool

    @property
    def failed(self) -> list[RunRow]:
        """Runs that ended in an error."""
        return [row for row in self.rows if row.status == FAILED]


def compare(
    base: TrainConfig,
    recipes: Sequence[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    observers: Callable[[str], Sequence[Observer]] = lambda recipe: (),
    stop: StopRequest | None = None,
) -> Comparison:
    """Train high precision and then each recipe, and report the gaps.

    A run that fails is reported as failed and does not keep the others from running; the report
    is written again after each run.

    Args:
        base: The settings; `recipe` is replaced, and run i goes to `output`/its recipe.
        recipes: Recipes besides high precision, which is always run and always first.
        resume: Go on with a comparison that was interrupted: finished runs are kept.
        overwrite: Delete the runs of an earlier comparison in the same folder.
        observers: Gives the observers of each recipe's run.
        stop: Ends the comparison; the run under way leaves a checkpoint.

    Raises:
        ConfigError: (a `ValueError`) if a recipe is unknown, named twice or not supported by the
            device, or the folder holds a comparison and neither `resume` nor `overwrite` is set.
        DataError: If there is no usable data.
    """
    order = [HIGH_PRECISION, *(recipe for recipe in recipes if recipe != HIGH_PRECISION)]
    if len(set(order)) < len(order):
        raise ConfigError(f"a recipe is named twice in: {' '.join(recipes)}")
    for recipe in order:
        float8_config(recipe)
    corpus = load_corpus(base.data)
    check_length(corpus, base.seq_len)
    output = Path(base.output)
    configs = [_config_of(base, recipe) for recipe in order]
    for config in configs:
        load_libraries(config, check_device(config.device))
    _prepare(output, configs, corpus, resume=resume, overwrite=overwrite)

    stop = stop or StopRequest()
    rows: list[RunRow] = []
    report = output / "report.json"
    for config in configs:
        rows.append(_run(config, rows, corpus, observers(config.recipe), stop))
        report = write_report(
            output,
            rows,
            environment=describe_environment(check_device(base.device)),
            settings=_public_settings(base),
            corpus={**describe_corpus(corpus), "name": public_path(corpus.name)},
        )
        if stop.requested:
            break
    plot = _plot(output, rows, base, corpus)
    return Comparison(rows, report, plot, interrupted=stop.requested)


def _config_of(base: TrainConfig, recipe: str) -> TrainConfig:
    return base.replace(recipe=recipe, output=str(Path(base.output) / recipe))


def _prepare(
    output: Path, configs: list[TrainConfig], corpus: Corpus, *, resume: bool, overwrite: bool
) -> None:
    """Make the folder ready, or say why it is not, before anything runs.

    With `resume`, runs that cannot be gone on with (killed before their first checkpoint) are
    deleted; with `overwrite`, all of them are.
    """
    folders = [RunFolder(Path(config.output)) for config in configs]
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
        kept = _result(folder).exists() or list_checkpoints(folder.checkpoints)
        if resume and kept:
            check_same_run(config, corpus, read_config_file(folder), folder.path)
            if _result(folder).exists():
                _read_result(folder)
        elif folder.used:
            shutil.rmtree(folder.path)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {output}: {error}") from error


def _run(
    config: TrainConfig,
    rows: list[RunRow],
    corpus: Corpus,
    observers: Sequence[Observer],
    stop: StopRequest,
) -> RunRow:
    """Train one recipe, or take what an earlier attempt left of it."""
    folder = RunFolder(Path(config.output))
    error = None
    known: dict[str, Any] = {"parameters": config.model_config().num_parameters, "memory_note": ""}
    if _result(folder).exists():
        status = FINISHED
        known = _read_result(folder)
    else:
        if config.compile:
            torch.compiler.reset()  # Each run starts with its whole budget of recompilations.
        unfinished = folder.path if list_checkpoints(folder.checkpoints) else None
        try:
            done = train(config, observers=observers, resume=unfinished, corpus=corpus, stop=stop)
            status = done.status
            known["memory_note"] = done.memory_note
        except Exception as problem:
            status, error = FAILED, _explain(problem, folder)
    if status == FINISHED:
        _result(folder).write_text(json.dumps(known) + "\n")
    metrics = read_metrics(folder.metrics) if folder.metrics.exists() else Metrics()
    return make_row(
        config.recipe,
        status,
        summarize(metrics),
        rows[0] if rows else None,
        metrics=f"{folder.path.name}/{folder.metrics.name}",
        error=error,
        **known,
    )


def _explain(problem: Exception, folder: RunFolder) -> str:
    """One line on a failure; the traceback of an unexpected one goes to the run's folder."""
    if isinstance(problem, TrainerError):
        return str(problem)
    folder.path.mkdir(parents=True, exist_ok=True)
    details = folder.path / "error.txt"
    details.write_text("".join(traceback.format_exception(problem)))
    first_line = (str(problem).splitlines() or [""])[0]
    return f"{type(problem).__name__}: {first_line} (traceback in {details})"


def _result(folder: RunFolder) -> Path:
    """Exists once a run of a comparison is finished."""
    return folder.path / "result.json"


def _read_result(folder: RunFolder) -> dict[str, Any]:
    try:
        known = json.loads(_result(folder).read_text())
        return {"parameters": int(known["parameters"]), "memory_note": str(known["memory_note"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read {_result(folder)} ({error}): delete the folder {folder.path} to have "
            "the run done again"
        ) from error


def _public_settings(base: TrainConfig) -> dict[str, Any]:
    settings = {k: public_path(v) if isinstance(v, str) else v for k, v in base.to_dict().items()}
    del settings["recipe"]
    return settings


def _plot(output: Path, rows: list[RunRow], base: TrainConfig, corpus: Corpus) -> Path | None:
    records = {row.recipe: RunFolder(output / row.recipe).metrics for row in rows}
    runs = {recipe: read_metrics(path) for recipe, path in records.items() if path.exists()}
    if HIGH_PRECISION not in runs or not runs[HIGH_PRECISION].train:
        return None
    title = (
        f"Llama {base.model} on {public_path(corpus.name)}, {base.dtype}, "
        f"{base.tokens_per_step:,} tokens per step"
    )
    plot_comparison(runs, title, output / "loss.png")
    return output / "loss.png"
