"""`float8 bench train`, `fsdp` and `tp`: commands that start their own ranks."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from float8_lab.bench.fsdp import PASSES, ShardedStep, TrainStep, bench_on_ranks
from float8_lab.bench.model import Size
from float8_lab.bench.results import check_output
from float8_lab.bench.tp import ParallelStep
from float8_lab.bench.variants import BF16, COMPILED, FLOAT8, GRAPHED, make_variants
from float8_lab.cli.measure import Bench, Compared, Keep, Run, draw
from float8_lab.cli.options import takes
from float8_lab.errors import ConfigError
from float8_lab.models.presets import preset
from float8_lab.ranks import join_ranks, start_ranks

ONE_70B = {"model": "llama3-70b", "blocks": 1}


@dataclass
class RanksRun(Run):
    """Where ranks run, and how often."""

    device: Annotated[str, "cuda, or cpu to try it without a GPU."] = "cuda"
    rounds: Annotated[int, "Timed steps in each of two passes."] = 10
    ranks: Annotated[int | None, "Processes, each with a GPU; else all GPUs, or 2 on a CPU."] = None


def _measure_on_ranks(
    name: str,
    title: str,
    step: Any,
    size: Size,
    chosen: dict[str, Any],
    where: RanksRun,
    plot: Path | None = None,
    **how: Any,
) -> None:
    """Start the ranks, and on each of them time that step of all variants; the first one tells.

    `how` are arguments of the step.
    """
    if where.device not in ("cuda", "cpu"):
        raise ConfigError(f"device: got {where.device!r}, expected cuda or cpu, and --ranks N")
    preset(size.model)
    if GRAPHED in chosen["modes"]:
        do = "use bench model: CUDA graphs read weights where they lay, and gathered ones move"
        raise ConfigError(f"mode: got graphed on ranks, expected eager, compiled or both; {do}")
    make_variants(**chosen)  # so that what is wrong is said once
    where.checked()
    start_ranks(where.device, where.ranks)
    with join_ranks(True) as group:
        output = where.output if group.rank == 0 else None
        where = replace(where, device=str(group.device(where.device)), output=output)
        about = {**vars(size), **chosen, **how, "ranks": group.size, "passes": PASSES}
        gathers = {"fsdp": (BF16, FLOAT8), "train": (FLOAT8 if group.size > 1 else "",)}
        variants = make_variants(**chosen, gathers=gathers.get(name, ("",)))
        bench = Bench(name, where, **about)
        make = partial(step, **how)
        groups = bench_on_ranks(make, variants, size, bench.device, where.rounds)
        rows = bench.collect(groups, PASSES * len(variants), growing=True)
        if group.rank == 0:
            found = bench.finish(f"{size}, {title} on {group.size} rank(s)", rows)
            if plot is not None:
                draw("picture", found, plot)


@takes({"blocks": 8, "mode": COMPILED}, size=Size, compared=Compared, where=RanksRun)
def fsdp(
    size: Size,
    compared: Compared,
    where: RanksRun,
    keep: Keep = None,
    masters: Annotated[bool, "Parameters in float32; else, as all that is gathered, bf16."] = False,
) -> None:
    """Training steps of Llama blocks that FSDP2 shards: 16-bit and float8 gathers.

    A step is forward, backward and fused AdamW, with the scaling attached to it. It starts its own
    ranks by torchrun (NCCL; Gloo on a CPU). Bytes are counted, per step and rank, own shards
    included. Every gradient of every variant is checked against bf16's first. Each variant has its
    rounds in two passes over the list.
    """
    title, chosen = "forward + backward + AdamW under FSDP2", compared.chosen(keep)
    _measure_on_ranks("fsdp", title, ShardedStep, size, chosen, where, masters=masters)


@takes({"blocks": None, "mode": COMPILED}, size=Size, compared=Compared, where=RanksRun)
def train(
    size: Size,
    compared: Compared,
    where: RanksRun,
    checkpointing: Annotated[str, "off; selective: keep GEMMs and attention; full."] = "off",
    lora: Annotated[bool, "Train adapters of PEFT on a frozen bf16 model, on one rank."] = False,
    transformers: Annotated[bool, "The Llama of transformers."] = False,
    plot: Annotated[Path | None, "Draw tokens/s and memory: a .png file; for a GPU."] = None,
    results: Annotated[Path | None, "Draw those of a results file, and measure nothing."] = None,
) -> None:
    """Training of a whole Llama, set up as torchtitan does, on one GPU or several.

    A step is embedding, blocks, head in 16 bits, loss, backward and fused AdamW, with float32
    masters: under autocast on one rank, under FSDP2 with float8 gathers on several. Blocks are
    compiled one by one. Gradients of the first step, and the last loss, are checked against bf16's.
    As `fsdp`, each variant has its rounds in two passes over the list; `drift` is how much slower
    the second was. The first step has the compilation, as far as caches on disk lack it.
    """
    check_output(plot, ".png", "plot")
    if results is not None:
        draw("picture", results, plot)
        return
    kept = {"off": None, "selective": ["gemms+attention"], "full": ["nothing"]}
    if checkpointing not in kept:
        expected = ", ".join(kept)
        raise ConfigError(f"checkpointing: got {checkpointing!r}, expected one of {expected}")
    if not lora and any("only" in name.split("+") for name in compared.recipe or []):
        raise ConfigError("recipe: got +only, expected --lora with it: such weights do not train")
    if lora and (where.ranks or 1) > 1:
        raise ConfigError(f"--lora got --ranks {where.ranks}, expected 1")
    if plot is not None and where.device == "cpu":
        raise ConfigError("plot: got the device cpu, whose memory is not measured; expected cuda")
    where = replace(where, ranks=1) if lora else where
    chosen = compared.chosen(kept[checkpointing], all_layers=False)
    title = "training" + ", LoRA" * lora + ", of transformers" * transformers
    how: Any = {"lora": lora, "transformers": transformers}
    _measure_on_ranks("train", title, TrainStep, size, chosen, where, plot, **how)


@takes({**ONE_70B, "mode": COMPILED}, size=Size, compared=Compared, where=RanksRun)
def tp(size: Size, compared: Compared, where: RanksRun) -> None:
    """Llama blocks under tensor and sequence parallel: forward and backward.

    As `fsdp`; output and gradients are checked against bf16 on one device.
    """
    title = "forward + backward under tensor and sequence parallel"
    _measure_on_ranks("tp", title, ParallelStep, size, compared.chosen(), where)
