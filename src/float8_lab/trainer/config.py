"""Settings of one training run: one frozen dataclass, complete and checked when it exists."""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from float8 import Float8LinearConfig, Float8LinearRecipeName
from float8_lab.device import check_device
from float8_lab.errors import ConfigError
from float8_lab.models.presets import PRESETS, ModelConfig, preset

HIGH_PRECISION = "high_precision"  # the recipe name that trains without any float8
RECIPES = [recipe.value for recipe in Float8LinearRecipeName]  # names of those that train with it

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Groups of settings.
MODEL, OPTIMIZER, DEVICE = "Model and data", "Optimizer", "Speed and memory"
RANKS, OUTPUT = "Several ranks", "Output"

_BOUNDS = {
    "at least 1": lambda value: value >= 1,
    "at least 2": lambda value: value >= 2,
    "0 or more": lambda value: value >= 0,
    "more than 0": lambda value: value > 0,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
    "between 0 and 1": lambda value: 0 <= value <= 1,
}


@dataclass(frozen=True)
class Setting:
    """What there is to say of a field of `TrainConfig`, kept in its metadata."""

    group: str  # where help pages list it
    text: str  # what it means
    default: Any = None  # where neither the user nor the model's preset says something else
    shown: str = ""  # the default in words, where it depends on more than the model
    bound: str = ""  # what its value must be, one of `_BOUNDS`
    flag: str = ""  # its option, where that is not its name
    # Leaves the numbers as they are, as all of `RANKS` and `OUTPUT` do: may change on resume.
    free: bool = False


def _setting(group: str, text: str, default: Any = None, **rest: Any) -> Any:
    return field(metadata={"setting": Setting(group, text, default, **rest)})


_model, _optimizer, _device, _ranks, _output = (
    functools.partial(_setting, group) for group in (MODEL, OPTIMIZER, DEVICE, RANKS, OUTPUT)
)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides how a run goes. Build it with `TrainConfig.create`.

    Parameters and optimizer state are always float32. `dtype="bfloat16"` runs the forward pass
    under autocast, so that AdamW updates float32 weights; `dtype="float32"` uses no autocast.

    Raises:
        ConfigError: (a `ValueError`) naming the setting, what it got, and what to do.
    """

    recipe: str = _model(
        f"{HIGH_PRECISION} for no float8, or one of {', '.join(RECIPES)}.", HIGH_PRECISION
    )
    model: str = _model(f"One of {', '.join(PRESETS)}.", shown="tiny")
    data: str | None = _model(  # What it holds is compared when a run is resumed.
        "File or folder of text; a token is a byte. A tenth of the files is for validation.",
        shown="the Python standard library",
        free=True,
    )
    seq_len: int = _model("Tokens per sequence.", bound="at least 2")
    vocab_size: int = _model("Rows of embedding and head; the data needs 256.")
    tied_head: bool = _model(
        "Share the head's weight with the embedding.", flag="--tied-head/--untied-head"
    )
    seed: int = _model("Decides initial weights and order of the data.", 0, bound="0 or more")
    steps: int = _optimizer(
        "Optimizer steps of the whole run; the schedule ends there.", bound="at least 1"
    )
    batch_size: int = _optimizer("Sequences per forward pass, of all ranks.", bound="at least 1")
    accumulate: int = _optimizer("Forward passes per optimizer step.", 1, bound="at least 1")
    learning_rate: float = _optimizer("Peak of the schedule.", bound="more than 0")
    min_lr_ratio: float = _optimizer(
        "The cosine ends at this part of the peak.", 0.1, bound="between 0 and 1"
    )
    warmup_steps: int = _optimizer(
        "Steps of linear warm-up.", shown="a twentieth of the steps", bound="0 or more"
    )
    weight_decay: float = _optimizer("AdamW's, for matrices only.", 0.1, bound="0 or more")
    beta1: float = _optimizer("AdamW's.", 0.9, bound="at least 0 and below 1")
    beta2: float = _optimizer("AdamW's.", 0.95, bound="at least 0 and below 1")
    grad_clip: float = _optimizer("Largest gradient norm; 0 for no limit.", 1.0, bound="0 or more")
    device: str = _device("cpu, cuda or cuda:N.", shown="cuda if there is one")
    dtype: str = _device(
        f"{' or '.join(DTYPES)}: what high-precision matrix multiplies compute in. Weights and "
        "optimizer stay float32; bfloat16 means autocast.",
        shown="bfloat16 on CUDA, else float32",
    )
    compile: bool = _device("torch.compile every block.", False)
    activation_checkpointing: bool = _device(
        "Run blocks again in backward instead of keeping their activations.", False
    )
    # How a run is spread over ranks belongs to its start: a resumed one may have others.
    fsdp: bool = _ranks("Shard the model over the ranks that torchrun started.", False)
    fsdp_float8_all_gather: bool = _ranks("Gather sharded weights in float8.", False)
    hsdp: int = _ranks(
        "Replicas of the sharded model; they divide the ranks.", 1, bound="at least 1"
    )
    tp: int = _ranks(
        "Tensor parallel: how many ranks share each layer. More ranks than that need --fsdp.",
        1,
        bound="at least 1",
    )
    sequence_parallel: bool = _ranks("The ranks of --tp share tokens between layers, too.", False)
    output: str = _output("Folder of the run.", shown="runs/MODEL-RECIPE")
    log_interval: int = _output(
        "Steps between looks at the loss; each waits for the device.", 10, bound="at least 1"
    )
    eval_interval: int = _output(
        "Steps between validations; 0: at the end only.", 0, bound="0 or more"
    )
    eval_batches: int = _output("Batches per validation.", 20, bound="at least 1")
    checkpoint_interval: int = _output(
        "Steps between checkpoints; 0: none on the way.", 0, bound="0 or more"
    )
    keep_checkpoints: int = _output("How many of the newest to keep.", 2, bound="at least 1")
    final_checkpoint: bool = _output("Write one after the last step.", True)
    stop_after: int = _output(
        "End after this step with a checkpoint; 0: run all steps.",
        0,
        shown="never",
        bound="0 or more",
    )
    tensorboard: bool = _output("Write TensorBoard events.", True)

    def __post_init__(self) -> None:
        self.model_config()
        recipe = float8_config(self.recipe)
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        check_device(self.device)
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if isinstance(value, int):
                self._require(name, abs(value) < 2**63, "a number that fits 64 bits")
            elif isinstance(value, float):
                self._require(name, math.isfinite(value), "a finite number")
            if setting.bound:
                self._require(name, _BOUNDS[setting.bound](value), setting.bound)
        if self.fsdp_float8_all_gather and recipe is None:
            raise ConfigError(
                f"--fsdp-float8-all-gather needs weights in float8, but --recipe is "
                f"{HIGH_PRECISION}: choose another recipe, or leave it out"
            )
        if not self.fsdp and (self.fsdp_float8_all_gather or self.hsdp > 1):
            name = "fsdp-float8-all-gather" if self.fsdp_float8_all_gather else "hsdp"
            raise ConfigError(f"--{name} is for sharded models: add --fsdp, or leave it out")
        if self.sequence_parallel and self.tp == 1:
            message = "--sequence-parallel is for tensor parallel: add --tp N, or leave it out"
            raise ConfigError(message)
        self.model_config().check_shares("--tp", self.tp, self.seq_len * self.sequence_parallel)

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be {expected}, got {getattr(self, name)}")

    @classmethod
    def create(cls, *, model: str = "tiny", **settings: Any) -> "TrainConfig":
        """Build a config from any fields, None for "not given".

        What is not given comes from the model's preset and the machine.
        """
        chosen = preset(model)
        given = {name: value for name, value in settings.items() if value is not None}
        if unknown := given.keys() - SETTINGS.keys():
            raise ConfigError(f"unknown settings: {', '.join(sorted(unknown))}")
        values = {name: setting.default for name, setting in SETTINGS.items()} | vars(chosen)
        values |= {"vocab_size": chosen.model.vocab_size, "tied_head": chosen.model.tied_head}
        values |= {"device": "cuda" if torch.cuda.is_available() else "cpu"}
        values |= {**given, "model": model}
        derived = {
            # bfloat16 matrix multiplies are slower than float32 ones on most CPUs.
            "dtype": "bfloat16" if values["device"].startswith("cuda") else "float32",
            "warmup_steps": values["steps"] // 20,
            "output": str(Path("runs") / f"{model}-{values['recipe']}"),
        }
        return cls(**(values | derived | given))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """The config of which `values` are `dataclasses.asdict`; a `ConfigError` if of none."""
        if not isinstance(values, dict):
            raise ConfigError(f"the saved settings are a {type(values).__name__}, not a dict")
        values = ONE_PROCESS | values  # a run of an older version may know fewer ways to be spread
        if wrong := SETTINGS.keys() ^ values.keys():
            raise ConfigError(
                "the saved settings come from a different version of float8: "
                f"{', '.join(sorted(wrong))} missing or unknown"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"the saved settings hold a value of a wrong type: {error}") from None

    def model_config(self) -> ModelConfig:
        """Shape of the model, with this run's vocabulary and head."""
        shape = preset(self.model).model
        return dataclasses.replace(shape, vocab_size=self.vocab_size, tied_head=self.tied_head)

    @property
    def spread(self) -> bool:
        """Whether the model is spread over the ranks that torchrun started."""
        return self.fsdp or self.tp > 1

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

    def differences(self, other: "TrainConfig") -> dict[str, tuple[Any, Any]]:
        """Settings that change the numbers and differ, as name -> (this one's, the other's)."""
        return {
            name: (getattr(self, name), getattr(other, name))
            for name, setting in SETTINGS.items()
            if not (setting.free or setting.group in (RANKS, OUTPUT))
            and getattr(self, name) != getattr(other, name)
        }


SETTINGS: dict[str, Setting] = {
    f.name: f.metadata["setting"] for f in dataclasses.fields(TrainConfig)
}
"""What there is to say of each field of `TrainConfig`."""

ONE_PROCESS = {
    name: setting.default for name, setting in SETTINGS.items() if setting.group == RANKS
}
"""How one process trains."""


def float8_config(recipe: str) -> Float8LinearConfig | None:
    """The conversion settings of a recipe, None for `"high_precision"`."""
    if recipe == HIGH_PRECISION:
        return None
    try:
        return Float8LinearConfig.from_recipe_name(recipe)
    except ValueError as error:
        raise ConfigError(f"{error} (or {HIGH_PRECISION!r} to train without float8)") from error
