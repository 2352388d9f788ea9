"""Settings of one training run: one frozen dataclass, complete and checked when it exists."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from float8 import Float8LinearConfig
from float8_lab.models.presets import ModelConfig, Preset, preset
from float8_lab.trainer.device import check_device
from float8_lab.trainer.errors import ConfigError

HIGH_PRECISION = "high_precision"
"""The recipe name that trains without any float8."""

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_FREE = {"free": True}  # Marks settings that do not change the numbers: a resume may change them.


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides how a run goes. Build it with `TrainConfig.create`.

    Parameters and optimizer state are always float32. `dtype="bfloat16"` runs the forward pass
    under autocast, so that AdamW updates float32 weights; `dtype="float32"` uses no autocast.

    Attributes:
        model: Name of a preset in `presets.PRESETS`.
        vocab_size: Rows of embedding and head.
        tied_head: Whether the head shares the embedding's weight.
        recipe: `"high_precision"` or a recipe of `Float8LinearConfig.from_recipe_name`.
        dtype: `"float32"` or `"bfloat16"`: what high-precision matrix multiplies compute in.
        device: `"cpu"`, `"cuda"` or `"cuda:N"`.
        seed: Decides the initial weights and the order of the data.
        data: File or folder to train on; None for the Python standard library's sources.
        steps: Optimizer steps of the whole run; the schedule ends there.
        batch_size: Sequences per forward pass, those of all ranks together.
        accumulate: Forward passes per optimizer step.
        seq_len: Tokens (bytes) per sequence.
        learning_rate: Peak of the schedule.
        min_lr_ratio: The schedule ends at this fraction of the peak.
        warmup_steps: Steps of linear warm-up.
        weight_decay: Of matrices; vectors are not decayed.
        beta1: AdamW's first-moment decay.
        beta2: AdamW's second-moment decay.
        grad_clip: Largest global gradient norm; 0 for no clipping.
        compile: Whether to `torch.compile` every block.
        activation_checkpointing: Whether blocks are run again in backward to save memory.
        fsdp: Whether the model is sharded over the ranks that torchrun started.
        fsdp_float8_all_gather: Whether sharded weights of converted layers are gathered in float8.
        hsdp: Replicas of the sharded model; the ranks are divided among them.
        output: Folder of the run.
        log_interval: Steps between looks at the loss; each one waits for the device.
        eval_interval: Steps between validations; 0 for one at the end only.
        eval_batches: Batches per validation.
        checkpoint_interval: Steps between checkpoints; 0 for none but the last.
        keep_checkpoints: How many of the newest checkpoints stay on disk.
        final_checkpoint: Whether to write a checkpoint after the last step.
        stop_after: End early, with a checkpoint, after this step of the run; 0 to run all steps.
        tensorboard: Whether to write TensorBoard events.

    Raises:
        ConfigError: (a `ValueError`) naming the setting, what it got, and what to do.
    """

    model: str
    vocab_size: int
    tied_head: bool
    recipe: str
    dtype: str
    device: str
    seed: int
    data: str | None = field(metadata=_FREE)  # What it holds is compared instead.
    steps: int
    batch_size: int
    accumulate: int
    seq_len: int
    learning_rate: float
    min_lr_ratio: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    grad_clip: float
    compile: bool
    activation_checkpointing: bool
    # How a run is spread over ranks belongs to its start: a resumed one may have others.
    fsdp: bool = field(metadata=_FREE)
    fsdp_float8_all_gather: bool = field(metadata=_FREE)
    hsdp: int = field(metadata=_FREE)
    output: str = field(metadata=_FREE)
    log_interval: int = field(metadata=_FREE)
    eval_interval: int = field(metadata=_FREE)
    eval_batches: int = field(metadata=_FREE)
    checkpoint_interval: int = field(metadata=_FREE)
    keep_checkpoints: int = field(metadata=_FREE)
    final_checkpoint: bool = field(metadata=_FREE)
    stop_after: int = field(metadata=_FREE)
    tensorboard: bool = field(metadata=_FREE)

    def __post_init__(self) -> None:
        self.model_config()
        float8_config(self.recipe)
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        check_device(self.device)
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int):
                self._require(f.name, abs(value) < 2**63, "a number that fits 64 bits")
            elif isinstance(value, float):
                self._require(f.name, math.isfinite(value), "a finite number")
        for name in ("steps", "batch_size", "accumulate", "log_interval", "eval_batches"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "warmup_steps",
            "eval_interval",
            "checkpoint_interval",
            "stop_after",
            "weight_decay",
            "grad_clip",
            "seed",
        ):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._require("seq_len", self.seq_len >= 2, "at least 2")
        self._require("keep_checkpoints", self.keep_checkpoints >= 1, "at least 1")
        self._require("learning_rate", self.learning_rate > 0, "more than 0")
        self._require("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "between 0 and 1")
        self._require("hsdp", self.hsdp >= 1, "at least 1 replica")
        if self.fsdp_float8_all_gather:
            self._require_float8()
        if not self.fsdp and (self.fsdp_float8_all_gather or self.hsdp > 1):
            name = "fsdp-float8-all-gather" if self.fsdp_float8_all_gather else "hsdp"
            raise ConfigError(f"--{name} is for sharded models: add --fsdp, or leave it out")
        self._require("beta1", 0 <= self.beta1 < 1, "at least 0 and below 1")
        self._require("beta2", 0 <= self.beta2 < 1, "at least 0 and below 1")

    def _require_float8(self) -> None:
        if float8_config(self.recipe) is None:
            raise ConfigError(
                f"--fsdp-float8-all-gather needs weights in float8, but --recipe is "
                f"{HIGH_PRECISION}: choose another recipe, or leave it out"
            )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be {expected}, got {getattr(self, name)}")

    @classmethod
    def create(cls, *, model: str = "tiny", **settings: Any) -> TrainConfig:
        """Build a config, what is not given coming from the model's preset and the machine.

        Args:
            model: Name of a preset.
            **settings: Any fields of `TrainConfig`; None means "not given".

        Raises:
            ConfigError: (a `ValueError`) as `TrainConfig` does, or for a setting that is unknown.
        """
        chosen = known_preset(model)
        given = {name: value for name, value in settings.items() if value is not None}
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := given.keys() - known:
            raise ConfigError(f"unknown settings: {', '.join(sorted(unknown))}")
        device = given.get("device", "cuda" if torch.cuda.is_available() else "cpu")
        steps = given.get("steps", chosen.steps)
        recipe = given.get("recipe", HIGH_PRECISION)
        defaults: dict[str, Any] = {
            "vocab_size": chosen.model.vocab_size,
            "tied_head": chosen.model.tied_head,
            "recipe": recipe,
            # bfloat16 matrix multiplies are slower than float32 ones on most CPUs.
            "dtype": "bfloat16" if device.startswith("cuda") else "float32",
            "device": device,
            "seed": 0,
            "data": None,
            "steps": steps,
            "batch_size": chosen.batch_size,
            "accumulate": 1,
            "seq_len": chosen.seq_len,
            "learning_rate": chosen.learning_rate,
            "min_lr_ratio": 0.1,
            "warmup_steps": steps // 20,
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.95,
            "grad_clip": 1.0,
            "compile": False,
            "activation_checkpointing": False,
            "fsdp": False,
            "fsdp_float8_all_gather": False,
            "hsdp": 1,
            "output": str(Path("runs") / f"{model}-{recipe}"),
            "log_interval": 10,
            "eval_interval": 0,
            "eval_batches": 20,
            "checkpoint_interval": 0,
            "keep_checkpoints": 2,
            "final_checkpoint": True,
            "stop_after": 0,
            "tensorboard": True,
        }
        return cls(model=model, **(defaults | given))

    def model_config(self) -> ModelConfig:
        """Shape of the model, with this run's vocabulary and head."""
        shape = known_preset(self.model).model
        try:
            return dataclasses.replace(shape, vocab_size=self.vocab_size, tied_head=self.tied_head)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch_size * self.accumulate * self.seq_len

    @property
    def last_step(self) -> int:
        """Number of the step after which this process ends."""
        return min(self.stop_after, self.steps) if self.stop_after else self.steps

    def replace(self, **settings: Any) -> TrainConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **settings)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The config that `to_dict` wrote.

        Raises:
            ConfigError: (a `ValueError`) if fields are missing or unknown, or hold what
                `to_dict` never writes.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"the saved settings are a {type(values).__name__}, not a dict")
        known = {f.name for f in dataclasses.fields(cls)}
        if wrong := known ^ values.keys():
            raise ConfigError(
                "the saved settings come from a different version of float8: "
                f"{', '.join(sorted(wrong))} missing or unknown"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"the saved settings hold a value of a wrong type: {error}") from None

    def differences(self, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """Settings that change the numbers and differ, as name -> (this one's, the other's)."""
        return {
            f.name: (getattr(self, f.name), getattr(other, f.name))
            for f in dataclasses.fields(self)
            if not f.metadata.get("free") and getattr(self, f.name) != getattr(other, f.name)
        }


def float8_config(recipe: str) -> Float8LinearConfig | None:
    """The conversion settings of a recipe, None for `"high_precision"`.

    Raises:
        ConfigError: (a `ValueError`) naming the valid recipes if there is none of that name.
    """
    if recipe == HIGH_PRECISION:
        return None
    try:
        return Float8LinearConfig.from_recipe_name(recipe)
    except ValueError as error:
        raise ConfigError(f"{error} (or {HIGH_PRECISION!r} to train without float8)") from error


def known_preset(model: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: (a `ValueError`) if there is none.
    """
    try:
        return preset(model)
    except ValueError as error:
        raise ConfigError(str(error)) from None
