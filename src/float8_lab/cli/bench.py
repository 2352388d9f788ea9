"""`float8 bench`: time models, layers and training, each checked before it is timed."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch.distributed as dist
import typer

from float8_lab.bench import experts, tables
from float8_lab.bench.model import Size, model_step
from float8_lab.bench.profile import STEPS, ProfiledStep
from float8_lab.bench.ranks import ParallelStep, TrainStep
from float8_lab.bench.step import PASSES, bench_steps
from float8_lab.bench.variants import COMPILED, GRAPHED, make_variants
from float8_lab.cli.app import COMMANDS
from float8_lab.cli.measure import Bench, Checkpointing, Compared, Place, RanksRun, Recipes, Run
from float8_lab.cli.options import App, Words, takes
from float8_lab.device import use_device
from float8_lab.errors import ConfigError, FailedError
from float8_lab.ranks import join_ranks, start_ranks

SHAPES = f"{', '.join(experts.EXPERTS)}; or E,rows,hidden,ff."
app = App(help=COMMANDS["bench"], no_args_is_help=True)


@app.command("train")
@takes({"blocks": None, "mode": COMPILED}, size=Size, compared=Compared, where=RanksRun)
def train_command(
    size: Size,
    compared: Compared,
    where: RanksRun,
    checkpointing: Checkpointing = None,
    lora: Annotated[bool, "Train adapters of PEFT on a frozen bf16 model, on one rank."] = False,
    microbatches: Annotated[int, "Of each optimizer step; ranks reduce their gradients once."] = 1,
) -> None:
    """Training of a whole model, set up as torchtitan does, on one GPU or several.

    A step is embedding, blocks, head (in 16 bits but for +head), loss, backward and fused AdamW,
    with float32 masters: under autocast on one rank, under FSDP2 with float8 gathers on several.
    Blocks are compiled one by one. Gradients of the first step, and the last loss, are checked
    against bf16's, with one microbatch. It starts its own ranks by torchrun. Each variant has its
    rounds in two passes over the list; `drift` is how much slower the second was.
    """
    if not lora and any("only" in name.split("+") for name in compared.recipe or []):
        raise ConfigError("recipe: got +only, expected --lora with it: such weights do not train")
    if lora and (where.ranks or 1) > 1:
        raise ConfigError(f"--lora got --ranks {where.ranks}, expected 1")
    where = replace(where, ranks=1) if lora else where
    chosen = compared.chosen(checkpointing, all_layers=False, head=True)
    if microbatches > 1 and GRAPHED in chosen["modes"]:  # captured before they are timed
        raise ConfigError(f"microbatches: got {microbatches} with mode graphed, expected 1")
    title, args = "training" + ", LoRA" * lora, {"lora": lora, "microbatches": microbatches}
    _measure_on_ranks("train", title, TrainStep, size, chosen, where, **args)


@app.command("tp")
@takes(
    {"model": "llama3-70b", "blocks": 1, "mode": COMPILED},
    size=Size,
    compared=Compared,
    where=RanksRun,
)
def tp_command(size: Size, compared: Compared, where: RanksRun) -> None:
    """Llama blocks under tensor and sequence parallel: forward and backward.

    As `train`; output and gradients are checked against bf16 on one device.
    """
    size.config()  # refuses models of transformers
    title = "forward + backward under tensor and sequence parallel"
    _measure_on_ranks("tp", title, ParallelStep, size, compared.chosen(), where)


def _measure_on_ranks(
    name: str,
    title: str,
    step: Any,
    size: Size,
    chosen: dict[str, Any],
    where: RanksRun,
    **args: Any,
) -> None:
    """Start the ranks, and on each check and time `step`, built with `args`; the first prints."""
    if where.device not in ("cuda", "cpu"):
        raise ConfigError(f"device: got {where.device!r}, expected cuda or cpu, and --ranks N")
    make_variants(**chosen)  # so that what is wrong is said once
    where.checked()
    start_ranks(where.device, where.ranks)
    with join_ranks():
        ranks = dist.get_world_size()
        output = where.output if dist.get_rank() == 0 else None
        where = replace(where, device=str(use_device(where.device)), output=output)
        about: Any = {**args, "ranks": ranks, "passes": PASSES}
        chosen = {**chosen, "sharded": name == "train" and ranks > 1}
        step, title = partial(step, **args), f"{title} on {ranks} rank(s)"
        _measure(name, title, step, size, chosen, where, **about)


def _measure(
    name: str, title: str, make: Any, size: Size, chosen: dict[str, Any], where: Place, **about: Any
) -> None:
    """Check and time a step of each variant, which `make` builds; print and write the results."""
    passes, rounds = (PASSES, where.rounds) if isinstance(where, Run) else (1, STEPS)
    variants = make_variants(**chosen, tokens=size.tokens)
    bench = Bench(name, where, **vars(size), **chosen, **about)
    make = partial(make, size=size, device=bench.device)
    rate = "tokens_per_s" + "_per_gpu" * (name == "train")
    counts = None if name == "profile" else {rate: size.tokens * about.get("microbatches", 1)}
    groups = bench_steps(make, variants, bench.device, rounds, passes=passes, tokens=counts)
    rows = bench.collect(groups, passes * len(variants))
    bench.finish(f"{size}, {title}", rows)


@app.command("model")
@takes(size=Size, compared=Compared, where=Run)
def model_command(
    size: Size,
    compared: Compared,
    where: Run,
    checkpointing: Checkpointing = None,
    all_layers: Annotated[bool, "Convert layers that float8 makes slower, too."] = False,
) -> None:
    """A plain Llama that was converted as users do, forward and backward, beside bf16.

    Blocks without embedding and head; the sync of delayed scaling and casts of held weights are in
    each step. Every gradient of every variant is checked against bf16's first. Memory is what a
    model holds and the peak of a step over it.
    """
    chosen = compared.chosen(checkpointing, all_layers=all_layers)
    _measure("model", "forward + backward", model_step, size, chosen, where)


@app.command("profile")
@takes({"mode": COMPILED}, size=Size, compared=Compared, where=Place)
def profile_command(size: Size, compared: Compared, where: Place) -> None:
    """Where the time of a stack of Llama blocks goes: GEMMs, attention, casts and all else.

    Of the same steps as `model`; on a GPU the time of its kernels. A kernel that casts among other
    things is a cast: compare casts and all else together.
    """
    chosen = compared.chosen(all_layers=False)
    make = partial(model_step, kind=ProfiledStep)
    _measure("profile", "forward + backward", make, size, chosen, where)


@app.command("experts")
@takes({"rounds": 60}, where=Run)
def experts_command(
    where: Run,
    shape: Annotated[Words, typer.Option(help="Repeatable; else all of these: " + SHAPES)] = None,
    recipe: Recipes = None,
    microbatches: Annotated[int, "In which weights that are held are cast once."] = 4,
) -> None:
    """Layers of experts forward and backward beside bf16.

    Times are of one microbatch. Memory is the peak of a step over the weights. Each layer is
    checked against bf16's first.
    """
    recipes, names = recipe or experts.RECIPES, shape or [*experts.EXPERTS]
    shapes = [experts.parse_experts(name) for name in names]
    bench = Bench("experts", where, shapes=names, recipes=recipes, microbatches=microbatches)
    groups = experts.bench_experts(shapes, recipes, bench.device, where.rounds, microbatches)
    bench.finish("experts", bench.collect(groups, len(shapes)))


@app.command("tables")
@takes()
def tables_command(check: Annotated[bool, "Only say whether they are up to date."] = False) -> None:
    """Write the tables of pages in docs, and their picture, in a checkout, from its results."""
    if tables.write_tables(check) and check:
        raise FailedError(f"{tables.PAGE.name}: not up to date, run float8 bench tables")
