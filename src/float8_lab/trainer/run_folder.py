"""The folder of one run: what lies where, and what may be done with one that exists.

- `config.json`: settings and data of the run
- `conversion.txt`: what was converted to float8, layer by layer
- `metrics.jsonl`: one line per step and validation
- `tensorboard/`: the same for TensorBoard
- `checkpoints/`: see `checkpoint`
- `failed-1/`: the same of an earlier run that failed before its first checkpoint
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from float8_lab.errors import CheckpointError, ConfigError
from float8_lab.trainer.checkpoint import is_checkpoint, list_checkpoints, read_state
from float8_lab.trainer.config import ONE_PROCESS, TrainConfig
from float8_lab.trainer.data import Corpus
from float8_lab.trainer.metrics import FAILED, read_metrics


class RunFolder:
    """Paths of what lies in the run's folder `path`, as the module says; none need exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.config = path / "config.json"
        self.conversion = path / "conversion.txt"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"

    @property
    def saved(self) -> list[Path]:
        """The checkpoints, oldest step first."""
        return list_checkpoints(self.checkpoints)

    @property
    def used(self) -> bool:
        """Whether a run was written here before."""
        return bool(self.saved) or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    @property
    def status(self) -> str:
        """How that run ended, as `Metrics` says it."""
        return read_metrics(self.metrics).status


def describe_run(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """What `check_same_run` needs, JSON-ready."""
    return {"config": dataclasses.asdict(config), "corpus": corpus.describe()}


def open_run_folder(
    config: TrainConfig, corpus: Corpus, *, checkpoint: Path | None = None
) -> RunFolder:
    """Make the run's folder and write its `config.json`.

    What a run left there that failed before its first checkpoint goes to `failed-1`, `failed-2`
    and so on. A run that resumes from `checkpoint` may go on in the folder of that checkpoint.

    Raises:
        ConfigError: (a `ValueError`) if another run lies there, it cannot be written, or the run
            cannot go on from the checkpoint with these settings.
    """
    folder = RunFolder(config.output)
    own = False
    if checkpoint is not None:
        check_same_run(config, corpus, read_state(checkpoint), checkpoint)
        own = folder.path.resolve() in checkpoint.resolve().parents
        if not own and read_state(checkpoint)["step"] >= config.steps:
            raise ConfigError(
                f"{checkpoint} is of the last of {config.steps} steps: nothing is left to train; "
                f"resume an earlier one, or leave --output out to see its results again"
            )
    failed = folder.status == FAILED and not folder.saved
    if folder.used and not own and not failed:
        way_on = "it has no checkpoint to go on from, so delete it if it is not running any more"
        if folder.saved:
            way_on = f"continue it with --resume {folder.path}"
        raise ConfigError(
            f"{folder.path} already holds a run: {way_on}, or choose another folder with --output"
        )
    try:
        if failed:
            targets = (folder.path / f"failed-{number}" for number in itertools.count(1))
            aside = next(path for path in targets if not path.exists())
            aside.mkdir()
            for path in vars(folder).values():
                if path != folder.path and path.exists():
                    path.rename(aside / path.name)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(json.dumps(describe_run(config, corpus), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder.path}: {error}") from error
    return folder


def read_config_file(folder: RunFolder) -> dict[str, Any]:
    """What `config.json` holds, for `check_same_run`; a `ConfigError` if it is damaged."""
    try:
        saved: dict[str, Any] = json.loads(folder.config.read_text())
        TrainConfig.from_dict(saved["config"])
        str(saved["corpus"]["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"cannot read the settings of the run in {folder.path} from {folder.config.name} "
            f"({problem}): delete that folder to have the run done again"
        ) from error
    return saved


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest one of the run that lies there."""
    if is_checkpoint(path):
        return path
    if not path.is_dir():
        raise CheckpointError(f"nothing to resume at {path}: give a run's folder or a checkpoint")
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints:
        raise CheckpointError(f"no checkpoint in {path}: the run was not saved")
    return checkpoints[-1]


def saved_config(checkpoint: Path) -> TrainConfig:
    """The settings of a checkpoint's run, to go on in its folder, in one process."""
    config = TrainConfig.from_dict(read_state(checkpoint)["config"])
    return config.replace(output=str(checkpoint.parent.parent), stop_after=0, **ONE_PROCESS)


def check_same_run(config: TrainConfig, corpus: Corpus, saved: dict[str, Any], where: Path) -> None:
    """Raise a `ConfigError` unless a run goes on with the settings and the data it began with.

    It may go on on another GPU, as each of several ranks does. `saved` is what `describe_run` gave
    when it began; `where` names what is resumed.
    """
    old = TrainConfig.from_dict(saved["config"])
    wrong = [
        f"{name} was {before!r} and is now {now!r}"
        for name, (now, before) in config.differences(old).items()
        if name != "device" or torch.device(now).type != torch.device(before).type
    ]
    before, now = saved["corpus"]["fingerprint"], corpus.fingerprint
    if before != now:
        wrong.append(f"the text of the data has changed (fingerprint {before} and now {now})")
    if wrong:
        raise ConfigError(
            f"cannot resume {where} with different settings: {'; '.join(wrong)}. "
            "Use the settings of the run, or start a new one with another --output"
        )
