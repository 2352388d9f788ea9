"""Settings of one training run: one frozen dataclass, complete and checked when it exists.

torch is imported where a run is made: `--help` shows these settings without its seconds.
"""

import dataclasses
import functools
import os
import sys
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.models import OptionInfo

from float8_lab.errors import ConfigError
from float8_lab.models.presets import PRESETS, preset

HIGH_PRECISION = "high_precision"  # the recipe name that trains without any float8
RECIPES = ["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]  # of the library
RECIPES += ["mxfp8", "mxfp8_with_gw_hp"]
DTYPES = ["float32", "bfloat16"]

# Panels of help pages.
MODEL, OPTIMIZER = "Model and data", "Optimizer"
DEVICE, OUTPUT = "Speed and memory", "Output"

_LARGEST = 2**63 - 1  # what PyTorch takes as a seed
Record = TypeVar("Record", bound=Any)


def check_types(record: Record) -> Record:
    """Return a dataclass; a `ConfigError` if some field has no value of its type.

    A bool is no int, an int is a float.
    """
    for each in dataclasses.fields(record):
        got, kinds = getattr(record, each.name), typing.get_args(each.type) or (each.type,)
        if type(got) not in kinds and not (type(got) is int and float in kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{each.name}: got {got!r}, expected {expected}")
    return record


def check_alone() -> None:
    """Raise a `ConfigError` under `torchrun`, whose processes would all train into one folder."""
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        got = f"WORLD_SIZE: got {size}, expected 1 or none, since the trainer is one process"
        raise ConfigError(f"{got}: start it without torchrun; for many GPUs use torchtitan")


def _setting(panel: str, text: str, default: Any = MISSING, shown: str = "", **bounds: Any) -> Any:
    """A field that is an option, too; `shown` is a default that only other words can say.

    None until it is given: a resumed run has its settings from elsewhere.
    """
    if not shown:
        shown = "by model" if default is MISSING else str(default)
        shown = {"True": "yes", "False": "no"}.get(shown, shown)
    option: Any = typer.Option(help=text, rich_help_panel=panel, show_default=shown, **bounds)
    return field(default=default, metadata={"option": option})


_DATA = "File or folder of text; a token is a byte. A tenth of the files is for validation."
_panels = (functools.partial(_setting, panel) for panel in (MODEL, OPTIMIZER, DEVICE, OUTPUT))
_model, _optimizer, _device, _output = _panels


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides how a run goes. Build it with `TrainConfig.create`.

    What cannot work is a `ConfigError`, as are values of another type or out of bounds.
    """

    recipe: str = _model(
        f"{', '.join(RECIPES)}, with switches as in {RECIPES[0]}+held, +head (the output layer, "
        f"too) or +activations (kept in float8, with --compile); MODULE:NAME, a Float8LinearConfig "
        f"of yours; or {HIGH_PRECISION}: no float8.",
        RECIPES[0],
    )
    model: str = _model(f"One of {', '.join(PRESETS)}.", shown="tiny")
    data: str | None = _model(_DATA, None, shown="the Python standard library")
    seq_len: int = _model("Tokens per sequence.", min=2)
    seed: int = _model("Decides initial weights and order of the data.", 0, min=0, max=_LARGEST)
    rounded_start: bool = _model(
        "Round the initial weights to e5m2: another run of the same training, whose loss "
        "differs by noise alone.",
        False,
    )
    steps: int = _optimizer("Optimizer steps of the whole run; the schedule ends there.", min=1)
    batch_size: int = _optimizer("Sequences per forward pass.", min=1)
    accumulate: int = _optimizer("Forward passes per optimizer step.", 1, min=1)
    learning_rate: float = _optimizer("Peak of the schedule.", min=0)
    min_lr_ratio: float = _optimizer("Where the schedule ends, over the peak.", 0.0, min=0, max=1)
    warmup_steps: int = _optimizer(
        "Of linear warm-up.", shown="100; of long runs a twentieth, of short two fifths", min=0
    )
    weight_decay: float = _optimizer("AdamW's, for matrices only.", 0.1, min=0)
    grad_clip: float = _optimizer("Largest gradient norm; 0 for no limit.", 1.0, min=0)
    device: str = _device("cpu, cuda or cuda:N.", shown="cuda if there is one")
    threads: int = _device("Of a CPU; 0: PyTorch's or OMP_NUM_THREADS.", 0, "1 for tiny", min=0)
    dtype: str = _device(
        f"{' or '.join(DTYPES)}: what high-precision matrix multiplies compute in. Weights and "
        "optimizer stay float32; bfloat16 means autocast.",
        shown="bfloat16 on CUDA, else float32",
    )
    compile: bool = _device("torch.compile every block.", False)
    output: str = _output("Folder of the run.", shown="runs/MODEL-RECIPE")
    log_interval: int = _output("Steps between looks at the loss; each is a wait.", 10, min=1)
    eval_interval: int = _output("Steps between validations; 0: at the end only.", 0, min=0)
    eval_batches: int = _output("Batches per validation.", 20, min=1)
    checkpoint_interval: int = _output("Steps between checkpoints; 0: none on the way.", 0, min=0)
    keep_checkpoints: int = _output("How many of the newest to keep.", 2, min=1)
    final_checkpoint: bool = _output("Write one after the last step.", True)
    stop_after: int = _output("End after this step with a checkpoint; 0: never.", 0, min=0)
    tensorboard: bool = _output("Write TensorBoard events.", True)

    def __post_init__(self) -> None:
        from float8_lab.device import check_device

        check_types(self)
        for name, option in OPTIONS.items():
            low, high, got = option.min, option.max or sys.float_info.max, getattr(self, name)
            if low is not None and not low <= got <= high:
                expected = f"{low} to {option.max}" if option.max else f"a finite number >= {low}"
                raise ConfigError(f"{name}: got {got!r}, expected {expected}")
        if not self.learning_rate:
            raise ConfigError("learning_rate: got 0.0, expected more: with it nothing is trained")
        float8_config(self.recipe)  # refuses what it does not know
        preset(self.model)  # so does this
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        check_device(self.device)
        if "+activations" in self.recipe and not self.compile:
            expected = "expected --compile: the compiler keeps them"
            raise ConfigError(f"recipe: got {self.recipe!r}, {expected}")

    @classmethod
    def create(cls, *, model: str = "tiny", **settings: Any) -> "TrainConfig":
        """Build a config of what is given and not None; the rest is by model and machine."""
        import torch

        values = {**vars(preset(model)), "recipe": RECIPES[0]}
        if "OMP_NUM_THREADS" in os.environ:
            values["threads"] = 0
        values |= {"device": "cuda" if torch.cuda.is_available() else "cpu"}
        values |= {name: value for name, value in settings.items() if value is not None}
        values["model"] = model
        output = str(Path("runs") / f"{model}-{values['recipe']}")
        warmup_steps = min(max(100, (n := values["steps"]) // 20), 2 * n // 5)
        derived = {"warmup_steps": warmup_steps, "output": output}
        # bfloat16 matrix multiplies are slower than float32 ones on most CPUs.
        derived["dtype"] = "bfloat16" if values["device"].startswith("cuda") else "float32"
        return cls(**(derived | values))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch_size * self.accumulate * self.seq_len

    @property
    def last_step(self) -> int:
        """Number of the step after which this process ends."""
        return min(self.stop_after, self.steps) if self.stop_after else self.steps

    def replace(self, **settings: Any) -> "TrainConfig":
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **settings)


OPTIONS: dict[str, OptionInfo] = {
    each.name: each.metadata["option"] for each in dataclasses.fields(TrainConfig)
}
"""Options of the command line by the name of their setting."""


def float8_config(recipe: str) -> Any:
    """The `Float8LinearConfig` of a recipe with its switches, None for `"high_precision"`."""
    from float8 import Float8Weights
    from float8_lab.trainer.recipes import recipe_config

    if recipe == HIGH_PRECISION:
        return None
    try:
        name, *switches = recipe.split("+")
        for own in {"head", "activations"}.intersection(switches):  # of the trainer
            switches.remove(own)  # one of two stays, and is refused
        config = recipe_config("+".join([name, *switches]))
    except ValueError as error:
        raise ConfigError(f"{error} (or {HIGH_PRECISION!r} to train without float8)") from error
    if config.float8_weights is Float8Weights.ONLY:
        got = f"recipe: got {recipe!r}, but weights that are in float8 only do not train"
        raise ConfigError(f"{got}: leave +only out, or use +held")
    return config
