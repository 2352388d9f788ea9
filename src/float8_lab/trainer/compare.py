"""The same training under several recipes: same seeds, same data in the same order; a report.

High precision is trained twice for each seed. The second run starts from the same weights, rounded
to float8 (e5m2) once (`rounded_start`): what it ends apart by is the noise that gaps are to be held
against.
"""

import functools
import gc
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any, cast

import torch

from float8_lab.device import check_device
from float8_lab.errors import ConfigError, LabError
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig
from float8_lab.trainer.data import Corpus, check_length, load_corpus
from float8_lab.trainer.environment import describe_environment, public_path
from float8_lab.trainer.loop import Trainer, train
from float8_lab.trainer.metrics import FAILED, FINISHED, Metrics, read_metrics, summarize
from float8_lab.trainer.plot import plot_comparison
from float8_lab.trainer.run_folder import RunFolder, check_same_run

Row = dict[str, Any]  # what `summarize` gives of a run, or means of a recipe's; None: not known

_MEANS = ["train_loss", "val_loss", "val_gap_nats", "val_gap_percent"]
_MEANS += ["tokens_per_s", "step_ms", "peak_memory_bytes"]

_corpus = functools.cache(load_corpus)  # once in each process


def add_gaps(runs: Sequence[Row]) -> None:
    """Add to each finished run its gap to the mean of the runs in high precision with its seed."""
    finished = [row for row in runs if row["status"] == FINISHED and row["val_loss"] is not None]
    for row in runs:
        row |= dict.fromkeys(("val_gap_nats", "val_gap_percent"))
    for row in finished:
        base = HIGH_PRECISION, row["seed"]
        losses = [x["val_loss"] for x in finished if (x["recipe"], x["seed"]) == base]
        if losses:
            gap = row["val_loss"] - (mean := statistics.fmean(losses))
            row |= {"val_gap_nats": gap, "val_gap_percent": 100 * gap / mean}


def by_recipe(runs: Sequence[Row]) -> list[Row]:
    """Return a row for each recipe: means over its runs, the gap's standard error, and the noise.

    The noise is the same in all rows: by how many percent the two runs in high precision with one
    seed end apart; over several seeds, the root mean square.
    """
    found = [row for row in runs if row["val_gap_percent"] is not None]
    gaps: dict[tuple[str, int], list[float]] = {}  # by recipe and seed
    for row in found:
        gaps.setdefault((row["recipe"], row["seed"]), []).append(row["val_gap_percent"])
    pairs = [each for (name, _), each in gaps.items() if name == HIGH_PRECISION and len(each) == 2]
    noise = math.hypot(*(a - b for a, b in pairs)) / len(pairs) ** 0.5 if pairs else None
    rows: list[Row] = []
    for recipe in dict.fromkeys(row["recipe"] for row in runs):
        of_recipe = [row for row in runs if row["recipe"] == recipe]
        failed = [x for x in of_recipe if x["status"] != FINISHED]
        worst = max(failed or of_recipe, key=lambda x: x["status"] == FAILED)
        row = {"recipe": recipe, "runs": len(of_recipe), "noise_percent": noise}
        row |= {"status": worst["status"], "error": worst["error"]}
        whole = [x for x in of_recipe if x["status"] == FINISHED] or of_recipe
        for name in _MEANS:
            values = [x[name] for x in whole if x[name] is not None]
            row[name] = statistics.fmean(values) if values else None
        each = [x["val_gap_percent"] for x in found if x["recipe"] == recipe != HIGH_PRECISION]
        row["gap_error_percent"] = statistics.stdev(each) / len(each) ** 0.5 if each[1:] else None
        rows.append(row)
        base = rows[0]["tokens_per_s"]
        row["speedup"] = row["tokens_per_s"] / base if row["tokens_per_s"] and base else None
    return rows


def compare(
    base: TrainConfig,
    recipes: Sequence[str],
    observers: Sequence[Any] = (),
    *,
    repeats: int = 1,
    noise: bool = True,
    at_once: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    stop: Event | None = None,
) -> Row:
    """Train high precision and each recipe; return the report, which is in `report.json`, too.

    Its `runs` are a row for each run, its `recipes` a row for each recipe (`by_recipe`). Each run
    has the settings of `base` and a folder below its `output`. There are `repeats` seeds, from that
    of `base` on. Without `noise` high precision is trained once. One that diverges or does not fit
    is reported as failed. `at_once` processes have one run each, spread over all GPUs; observers
    are pickled for them. A comparison that is there already is a `ConfigError`, unless it is to
    `resume`, which keeps finished runs, or to `overwrite`. `stop` ends it with checkpoints.
    """
    order = [HIGH_PRECISION, *(recipe for recipe in recipes if recipe != HIGH_PRECISION)]
    if len(set(order)) < len(order):
        raise ConfigError(f"a recipe is named twice in: {' '.join(recipes)}")
    output = Path(base.output)
    configs = []
    for seed, recipe in itertools.product(range(base.seed, base.seed + repeats), order):
        for rounded in (False, True) if noise and recipe == HIGH_PRECISION else (False,):
            name = f"{recipe}{'-rounded' * rounded}{f'-seed{seed}' * (seed != base.seed)}"
            own: Any = {"recipe": recipe, "seed": seed, "rounded_start": rounded}
            configs.append(base.replace(**own, output=str(output / name)))
    corpus = _corpus(base.data)
    check_length(corpus, base.seq_len, base.batch_size)
    for recipe in order:
        # A step of a very small model: what does not work on this device says so at once.
        small: Any = {"model": "tiny", "seq_len": min(base.seq_len, 16), "batch_size": 1}
        small |= {"recipe": recipe.replace("+activations", ""), "compile": False}
        Trainer(base.replace(**small), corpus).train_step()
    _prepare(output, configs, corpus, resume=resume, overwrite=overwrite)

    settings = {k: public_path(v) if isinstance(v, str) else v for k, v in vars(base).items()}
    about: Row = {"environment": describe_environment(check_device(base.device))}
    about |= {"settings": settings, "corpus": corpus.describe()}
    about["corpus"]["name"] = public_path(corpus.name)
    runs: list[Row] = []
    report: Row = {}
    for row in _each(configs, observers, at_once, stop or Event()):
        runs.append(row)
        add_gaps(runs)
        report = {"recipes": by_recipe(runs), "runs": runs, **about}
        text = json.dumps(report, indent=1, allow_nan=False)
        (output / "report.json").write_text(text + "\n")
    curves: dict[str, list[Metrics]] = {}
    for row in runs:
        curves.setdefault(row["recipe"], []).append(read_metrics(output / row["metrics"]))
    first = curves.get(HIGH_PRECISION, [])
    pairs = list(zip(first[::2], first[1::2], strict=False)) if noise else []
    if first and first[0].train:
        title = f"Llama {base.model} on {public_path(corpus.name)}, {base.dtype}"
        title += f", {base.tokens_per_step:,} tokens per step"
        plot_comparison(curves, pairs, title, output / "loss.png")
    return report


def _each(
    configs: Sequence[TrainConfig], observers: Sequence[Any], at_once: int, stop: Event
) -> Iterator[Row]:
    """Yield the rows of all runs in order; once `stop` is set, of those that had begun."""
    if at_once == 1:
        yield from filter(None, (_run(config, observers, stop) for config in configs))
        return
    spawn, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    stopped, number = spawn.Event(), spawn.Value("i", 0)
    with ProcessPoolExecutor(at_once, spawn, _begin, (stopped, number)) as pool:
        try:
            # The processes inherit that Ctrl-C, which is for this one, is blocked.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            waiting = [pool.submit(_run, config, observers) for config in configs]
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for each in waiting:
                while not wait([each], 0.2).done:
                    if stop.is_set():
                        stopped.set()
                if row := each.result():
                    yield row
        except BaseException:  # of this process: none trains on
            for child in set(multiprocessing.active_children()).difference(others):
                child.terminate()
            raise


_stopped: Any = None  # of a process that trains for another one: the event that ends its run


def _begin(stopped: Any, number: Any) -> None:
    """Begin a process that trains for another one, and ends with it."""
    global _stopped
    _stopped, parent = stopped, cast("Any", multiprocessing.parent_process())
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()
    with number:
        if gpus := torch.cuda.device_count():
            torch.cuda.set_device(number.value % gpus)
        number.value += 1


def _run(config: TrainConfig, observers: Sequence[Any], stop: Any = None) -> Row | None:
    """Train one recipe, or take what an earlier attempt left of it; None if it is to stop."""
    stop = stop or _stopped
    if stop.is_set():
        return None
    folder = RunFolder(config.output)
    status, error = FINISHED, None
    if folder.status != FINISHED:
        # Each run starts with its whole budget of recompilations, and without former tensors.
        torch.compiler.reset()
        gc.collect()
        unfinished = folder.saved[-1] if folder.saved else None
        more: Any = {"resume": unfinished, "corpus": _corpus(config.data), "stop": stop}
        try:
            status = train(config, observers=observers, **more).status
        except LabError as problem:
            status, error = FAILED, str(problem)
    row = {"recipe": config.recipe, "seed": config.seed, "rounded_start": config.rounded_start}
    row |= {"status": status, **summarize(read_metrics(folder.metrics))}
    return {**row, "metrics": f"{folder.path.name}/{folder.metrics.name}", "error": error}


def _prepare(
    output: Path, configs: list[TrainConfig], corpus: Corpus, *, resume: bool, overwrite: bool
) -> None:
    """Make the folder ready: to `resume` runs without a checkpoint go, to `overwrite` all."""
    there = [x for file in output.glob("*/metrics.jsonl") if (x := RunFolder(file.parent)).used]
    if ((output / "report.json").exists() or there) and not (resume or overwrite):
        do = "go on with it with --resume, replace it with --overwrite, or choose another folder"
        raise ConfigError(f"{output} already holds a comparison: {do} with --output")
    names = {x.path.name for x in there if "-rounded" not in x.path.name}
    if resume and (others := sorted(names.difference(Path(x.output).name for x in configs))):
        do = "name these recipes (and seeds), too, or choose another folder with --output"
        raise ConfigError(f"{output} holds runs of {', '.join(others)}: {do}")
    gone = [x for x in there if not (resume and (x.status == FINISHED or x.saved))]
    kept = {x.path for x in there}.difference(x.path for x in gone)
    for config in configs:
        if (path := Path(config.output)) in kept:
            check_same_run(config, corpus, path)
    for name in () if resume else ("report.json", "report.md", "report.txt", "loss.png"):
        (output / name).unlink(missing_ok=True)
    for folder in gone:
        shutil.rmtree(folder.path)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {output}: {error}") from error
