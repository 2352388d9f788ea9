"""The folder of one run: what lies where, and what may be done with one that exists.

- `config.json`: settings and data of the run
- `conversion.txt`: what was converted to float8, layer by layer
- `metrics.jsonl`: one line per step and validation
- `tensorboard/`: the same for TensorBoard
- `checkpoints/`: see `checkpoint`
"""

import dataclasses
import json
from pathlib import Path

import torch

from float8_lab.errors import CheckpointError, ConfigError
from float8_lab.trainer.checkpoint import is_checkpoint, list_checkpoints
from float8_lab.trainer.config import OPTIONS, OUTPUT, TrainConfig
from float8_lab.trainer.data import Corpus
from float8_lab.trainer.metrics import FAILED, read_metrics

_FREE = ("data", "threads")
"""Settings that change no numbers, besides those of `OUTPUT`."""


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
        """Return whether a run was written here before."""
        return bool(self.saved) or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    @property
    def status(self) -> str:
        """Return how that run ended, as `Metrics` says it."""
        return read_metrics(self.metrics).status


def open_run_folder(
    config: TrainConfig, corpus: Corpus, *, checkpoint: Path | None = None
) -> RunFolder:
    """Make the run's folder and write its `config.json`; a `ConfigError` if another run lies there.

    A run may go on in the folder of its `checkpoint`, or where one failed before its first.
    """
    folder = RunFolder(config.output)
    own = checkpoint is not None and folder.path.resolve() in checkpoint.resolve().parents
    if checkpoint is not None:
        check_same_run(config, corpus, checkpoint.parent.parent, extend=True)
    failed = folder.status == FAILED and not folder.saved
    if folder.used and not own and not failed:
        way_on = "it has no checkpoint to go on from, so delete it if it is not running any more"
        if folder.saved:
            way_on = f"continue it with --resume {folder.path}"
        got = f"{folder.path} already holds a run"
        raise ConfigError(f"{got}: {way_on}, or choose another folder with --output")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.conversion.unlink(missing_ok=True)
        about = {"config": dataclasses.asdict(config), "corpus": corpus.describe()}
        beside = folder.path / "config.json.new"  # a process that is killed leaves one or the other
        beside.write_text(json.dumps(about, indent=1) + "\n")
        beside.replace(folder.config)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder.path}: {error}") from error
    return folder


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest one of the run that lies there."""
    if is_checkpoint(path):
        return path
    if not path.is_dir():
        raise CheckpointError(f"nothing to resume at {path}: give a run's folder or a checkpoint")
    if checkpoints := RunFolder(path).saved:
        return checkpoints[-1]
    raise CheckpointError(f"no checkpoint in {path}: the run was not saved")


def saved_config(checkpoint: Path) -> TrainConfig:
    """The settings of a checkpoint's run, to go on in its folder."""
    folder = checkpoint.parent.parent
    config, _ = _read_config(folder)
    return config.replace(output=str(folder), stop_after=0)


def _read_config(folder: Path) -> tuple[TrainConfig, str]:
    """The settings of a run, and the fingerprint of its data."""
    try:
        saved = json.loads((folder / "config.json").read_text())
        if "rounded_start" not in saved["config"]:
            raise ValueError("of an older version, with another schedule and order of data")
        return TrainConfig(**saved["config"]), saved["corpus"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"cannot read the settings of the run in {folder} from config.json ({error})"
        raise ConfigError(f"{got}; train it anew with another --output") from error


def check_same_run(
    config: TrainConfig, corpus: Corpus, folder: Path, *, extend: bool = False
) -> None:
    """Raise a `ConfigError` unless the run in `folder` goes on with what changes its numbers.

    With `extend` it may have more steps: its schedule is the longer one from then on.
    """
    old, fingerprint = _read_config(folder)
    wrong = []
    for name, option in OPTIONS.items():
        now, before = getattr(config, name), getattr(old, name)
        if name == "device":
            now, before = torch.device(now).type, torch.device(before).type
        free = option.rich_help_panel == OUTPUT or name in _FREE
        free = free or (extend and name == "steps" and now > before)
        if not free and now != before:
            wrong.append(f"{name} was {before!r} and is now {now!r}")
    if fingerprint != (now := corpus.fingerprint):
        wrong.append(f"the text of the data has changed (fingerprint {fingerprint} and now {now})")
    if wrong:
        do = "Use the settings of the run, or start a new one with another --output"
        got = f"cannot resume {folder} with different settings: {'; '.join(wrong)}"
        raise ConfigError(f"{got}. {do}")
