"""Options that the training commands share, and how they become settings.

Every option is None unless it is given, so that defaults stay in one place, `TrainConfig.create`,
and a resumed run can tell what was asked for now from what it was started with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from float8_lab.models.presets import PRESETS
from float8_lab.trainer.config import DTYPES, TrainConfig

MODEL = "Model and data"
OPTIMIZER = "Optimizer"
DEVICE = "Speed and memory"
OUTPUT = "Output"
BY_MODEL = "by model"

INTERRUPTED_EXIT = 130
STOP_NOTICE = "stopping after this step, with a checkpoint (again: stop at once)"


@dataclass
class Session:
    """What one call of the command line carries around.

    Attributes:
        debug: Whether to show tracebacks.
    """

    debug: bool = False


def _set_debug(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.ensure_object(Session).debug = True


def settings(context: typer.Context) -> dict[str, Any]:
    """The options that were given and are fields of `TrainConfig`."""
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    return {
        name: value
        for name, value in context.params.items()
        if name in fields and value is not None
    }


def option(name: str, text: str, panel: str, default: str | bool = False) -> Any:
    """An option with its text, its panel in the help page, and what holds if it is not given."""
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=default)


Model = Annotated[str | None, option("--model", f"One of {', '.join(PRESETS)}.", MODEL, "tiny")]
VocabSize = Annotated[
    int | None,
    option("--vocab-size", "Rows of embedding and head; the data needs 256.", MODEL, BY_MODEL),
]
TiedHead = Annotated[
    bool | None,
    option(
        "--tied-head/--untied-head", "Share the head's weight with the embedding.", MODEL, BY_MODEL
    ),
]
Data = Annotated[
    str | None,
    option(
        "--data",
        "File or folder of text; a token is a byte. A tenth of the files is for validation.",
        MODEL,
        "the Python standard library",
    ),
]
SeqLen = Annotated[int | None, option("--seq-len", "Tokens per sequence.", MODEL, BY_MODEL)]
Seed = Annotated[
    int | None, option("--seed", "Decides initial weights and order of the data.", MODEL, "0")
]
Steps = Annotated[
    int | None, option("--steps", "Optimizer steps of the whole run.", OPTIMIZER, BY_MODEL)
]
BatchSize = Annotated[
    int | None,
    option("--batch-size", "Sequences per forward pass, of all ranks.", OPTIMIZER, BY_MODEL),
]
Accumulate = Annotated[
    int | None, option("--accumulate", "Forward passes per optimizer step.", OPTIMIZER, "1")
]
LearningRate = Annotated[
    float | None, option("--learning-rate", "Peak of the schedule.", OPTIMIZER, BY_MODEL)
]
MinLrRatio = Annotated[
    float | None,
    option("--min-lr-ratio", "The cosine ends at this part of the peak.", OPTIMIZER, "0.1"),
]
WarmupSteps = Annotated[
    int | None,
    option("--warmup-steps", "Steps of linear warm-up.", OPTIMIZER, "a twentieth of the steps"),
]
WeightDecay = Annotated[
    float | None, option("--weight-decay", "AdamW's, for matrices only.", OPTIMIZER, "0.1")
]
Beta1 = Annotated[float | None, option("--beta1", "AdamW's.", OPTIMIZER, "0.9")]
Beta2 = Annotated[float | None, option("--beta2", "AdamW's.", OPTIMIZER, "0.95")]
GradClip = Annotated[
    float | None,
    option("--grad-clip", "Largest gradient norm; 0 for no limit.", OPTIMIZER, "1.0"),
]
Dtype = Annotated[
    str | None,
    option(
        "--dtype",
        f"{' or '.join(DTYPES)}: what high-precision matrix multiplies compute in. Weights and "
        "optimizer stay float32; bfloat16 means autocast.",
        DEVICE,
        "bfloat16 on CUDA, else float32",
    ),
]
Device = Annotated[
    str | None, option("--device", "cpu, cuda or cuda:N.", DEVICE, "cuda if there is one")
]
Compile = Annotated[
    bool | None, option("--compile/--no-compile", "torch.compile every block.", DEVICE, "no")
]
ActivationCheckpointing = Annotated[
    bool | None,
    option(
        "--activation-checkpointing/--no-activation-checkpointing",
        "Run blocks again in backward instead of keeping their activations.",
        DEVICE,
        "no",
    ),
]
Fsdp = Annotated[
    bool,
    option("--fsdp", "Shard the model over the ranks that torchrun started.", DEVICE, "no"),
]
FsdpFloat8AllGather = Annotated[
    bool,
    option("--fsdp-float8-all-gather", "Gather sharded weights in float8.", DEVICE, "no"),
]
Hsdp = Annotated[
    int | None,
    option("--hsdp", "Replicas of the sharded model; they divide the ranks.", DEVICE, "1"),
]
LogInterval = Annotated[
    int | None,
    option(
        "--log-interval",
        "Steps between looks at the loss; each waits for the device.",
        OUTPUT,
        "10",
    ),
]
EvalInterval = Annotated[
    int | None,
    option("--eval-interval", "Steps between validations; 0: at the end only.", OUTPUT, "0"),
]
EvalBatches = Annotated[
    int | None, option("--eval-batches", "Batches per validation.", OUTPUT, "20")
]
CheckpointInterval = Annotated[
    int | None,
    option("--checkpoint-interval", "Steps between checkpoints; 0: none on the way.", OUTPUT, "0"),
]
KeepCheckpoints = Annotated[
    int | None, option("--keep-checkpoints", "How many of the newest to keep.", OUTPUT, "2")
]
StopAfter = Annotated[
    int | None,
    option("--stop-after", "End after this step with a checkpoint.", OUTPUT, "never"),
]
Tensorboard = Annotated[
    bool | None,
    option("--tensorboard/--no-tensorboard", "Write TensorBoard events.", OUTPUT, "yes"),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_set_debug, is_eager=True, help="Show tracebacks of errors."),
]
