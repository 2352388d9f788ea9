"""`float8 bench`: time GEMMs, casts, layers, blocks and steps, each checked before it is timed.

`float8 bench numerics` times nothing.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from float8_lab.bench import cast, fsdp, linear, matmul, numerics, profile, tp
from float8_lab.bench.block import StackSize, bench_block
from float8_lab.bench.results import check_output, plot_speedups, write_results
from float8_lab.bench.shapes import SHAPE_SETS, Shape, select_shapes
from float8_lab.bench.variants import (
    COMPILED,
    EAGER,
    HIGH_PRECISION,
    MODES,
    make_variants,
    peer_version,
)
from float8_lab.cli.options import Debug, Output, takes
from float8_lab.cli.progress import make_console
from float8_lab.cli.table import Rows, print_table
from float8_lab.device import float8_device
from float8_lab.errors import ConfigError
from float8_lab.models.presets import preset
from float8_lab.ranks import join_ranks, start_ranks
from float8_lab.trainer.checkpoint import check_checkpoint
from float8_lab.trainer.config import RECIPES, TrainConfig
from float8_lab.trainer.data import check_length, load_corpus, train_batch
from float8_lab.trainer.environment import describe_environment
from float8_lab.trainer.loop import Trainer
from float8_lab.trainer.run_folder import find_checkpoint, saved_config

app = typer.Typer(
    help="Time GEMMs, casts, layers, blocks and sharded training, each checked first.",
    no_args_is_help=True,
    add_completion=False,
)

Words = list[str] | None
Peers = Annotated[Words, "Also torchao, te (TransformerEngine) or torchao,te."]
Plot = Annotated[Path | None, "Write a heat map of speedups over shapes."]


@dataclass
class Place:
    """Where a measurement runs, and where its results go."""

    device: Annotated[str, "cuda, cuda:N, or cpu to try it without a GPU."] = "cuda"
    output: Output = None
    debug: Debug = False

    def checked(self) -> torch.device:
        """The device; refuses what cannot work before anything is measured."""
        if self.output is not None:
            check_output(self.output)
        return float8_device(self.device)


@dataclass
class Run(Place):
    """How often a benchmark measures, too."""

    rounds: Annotated[int, "Samples per variant; medians are reported."] = 15


class Bench:
    """One measurement on the terminal: where it runs, what it prints and what it leaves behind."""

    def __init__(self, name: str, where: Place, **settings: Any) -> None:
        self.device = where.checked()
        torch.manual_seed(0)
        self.console = make_console()
        self._name, self._output = name, where.output
        if isinstance(where, Run):
            settings["rounds"] = where.rounds
        versions = {peer: peer_version(peer) for peer in settings.get("peers", [])}
        environment = describe_environment(self.device) | versions
        self._about = {"environment": environment, "settings": settings}
        self.console.print("{device}, torch {torch}".format(**environment))
        for peer, version in versions.items():
            if version is None:
                self.console.print(f"{peer} is not installed: left out")

    def collect(self, groups: Iterable[Rows], total: int) -> Rows:
        """All rows; a bar moves with each group where there is a terminal, else a line says so."""
        rows: Rows = []
        hidden = not self.console.is_terminal
        how: dict[str, Any] = {"console": self.console, "transient": True, "disable": hidden}
        for number, group in enumerate(track(groups, self._name, total, **how), 1):
            rows += group
            if hidden:
                self.console.print(f"  {number}/{total}")
        return rows

    def finish(
        self,
        title: str,
        rows: Rows,
        plot: Path | None = None,
        draw: Callable[[Rows, str, Path], None] = plot_speedups,
        **extra: Any,
    ) -> None:
        """Print the table, write the files; `extra` is what belongs to no row."""
        if self.device.type == "cpu" and any({"ms", "us", "bf16_ms"} & row.keys() for row in rows):
            title += " (host times)"
        for row in rows:
            if row.get("left_out"):
                self.console.print("{recipe}, {mode} is left out: {left_out}".format(**row))
        print_table(self.console, title, rows)
        if self._output is not None:
            results = {"benchmark": self._name, "rows": rows, **self._about, "extra": extra}
            write_results(self._output, results)
            self.console.print(f"results: {self._output}")
        if plot is not None:
            draw(rows, f"{title}\n{self._about['environment']['device']}", plot)
            self.console.print(f"plot: {plot}")


@dataclass
class Shapes:
    """Shapes of linear layers."""

    shapes: Annotated[Words, f"Of {', '.join(SHAPE_SETS)}; several: with commas."] = None
    mkn: Annotated[Words, "A shape as M,K,N: tokens, in and out features; repeatable."] = None

    def selected(self) -> dict[str, tuple[Shape, ...]]:
        """By the name of their set."""
        return select_shapes(words(self.shapes), self.mkn or [])


@dataclass
class Variants:
    """What is compared with bf16."""

    recipe: Annotated[
        Words,
        typer.Option(
            help="Several: with commas. Switches of Float8LinearConfig behind a +, as in "
            "tensorwise+round_scales_to_power_of_2; +fast_accum for all GEMMs.",
            show_default="tensorwise,delayed",
        ),
    ] = None
    mode: Annotated[str, f"{', '.join(MODES)}."] = "both"
    peers: Peers = None

    def chosen(self) -> dict[str, Any]:
        """What `make_variants` takes."""
        if self.mode not in MODES:
            raise ConfigError(f"mode: got {self.mode!r}, expected one of {', '.join(MODES)}")
        recipes = words(self.recipe) or ["tensorwise", "delayed"]
        return {"recipes": recipes, "modes": MODES[self.mode], "peers": words(self.peers)}


def words(values: Words) -> list[str]:
    """Words of options that may be repeated or hold several words with commas between."""
    return [word for value in values or [] for word in value.split(",") if word]


@app.command("matmul")
@takes({"rounds": 20}, layers=Shapes, where=Run)
def matmul_command(
    layers: Shapes,
    where: Run,
    gradients: Annotated[bool, "Also the GEMMs of both gradients."] = False,
    plot: Plot = None,
) -> None:
    """One GEMM per shape: bf16, float8 without and with fast accumulation."""
    shapes = layers.selected()
    bench = Bench("matmul", where, shapes=shapes, gradients=gradients)
    groups = matmul.bench_matmul(shapes, bench.device, where.rounds, gradients=gradients)
    rows = bench.collect(groups, sum(map(len, shapes.values())) * (3 if gradients else 1))
    bench.finish("GEMM, both operands contiguous along K, bf16 result", rows, plot)


@app.command("linear")
@takes(layers=Shapes, compared=Variants, where=Run)
def linear_command(layers: Shapes, compared: Variants, where: Run, plot: Plot = None) -> None:
    """One layer forward and backward per shape and recipe, against nn.Linear in bf16.

    Each result is checked against bf16's. A shape set of several layers ends with its sums.
    """
    shapes, chosen = layers.selected(), compared.chosen()
    bench = Bench("linear", where, shapes=shapes, **chosen)
    variants = make_variants(**chosen)
    total = sum(len(members) + (len(members) > 1) for members in shapes.values())
    rows = bench.collect(linear.bench_linear(shapes, variants, bench.device, where.rounds), total)
    host = linear.host_microseconds(variants, bench.device)
    bench.finish("linear layer, forward + backward", rows, plot, host_us=host)
    for name, microseconds in host.items():
        bench.console.print(f"host time to issue forward + backward, {name}: {microseconds:.0f} us")


@app.command("cast")
@takes({"rounds": 30}, layers=Shapes, where=Run)
def cast_command(layers: Shapes, where: Run) -> None:
    """Amax, casts and transposes of the tensors of these layers, against a device copy.

    Every kernel is compared with its plain-torch twin first, bit by bit.
    """
    shapes = layers.selected()
    bench = Bench("cast", where, shapes=shapes)
    tensors = cast.distinct_tensors(shapes)
    rows = bench.collect(cast.bench_cast(tensors, bench.device, where.rounds), len(tensors))
    host = cast.host_microseconds(bench.device)
    bench.finish("casts of bf16 tensors", rows, host_us=host)
    bench.console.print("compared with the plain-torch twins: bitwise equal")
    for name, microseconds in host.items():
        bench.console.print(f"host time per eager call, {name}: {microseconds:.1f} us")


@app.command("block")
@takes(size=StackSize, compared=Variants, where=Run)
def block_command(
    size: StackSize,
    compared: Variants,
    where: Run,
    microbatches: Annotated[int, "Forwards and backwards per step, gradients accumulated."] = 1,
) -> None:
    """A stack of Llama blocks forward and backward, with the sync of delayed scaling.

    Every gradient of every variant is checked against bf16's first. Memory is the peak of a step
    over the resting state. With several microbatches, each recipe runs once more with its weights
    held in float8.
    """
    size, chosen = dataclasses.replace(size, microbatches=microbatches), compared.chosen()
    bench = Bench("block", where, **dataclasses.asdict(size), **chosen)
    variants = make_variants(**chosen, held=microbatches > 1)
    groups = bench_block(size, variants, bench.device, where.rounds)
    rows = bench.collect(groups, len(variants) + 1)
    several = f" of {microbatches} microbatches" if microbatches > 1 else ""
    bench.finish(f"{size}, forward + backward{several}", rows)


@app.command("profile")
@takes({"blocks": 1}, size=StackSize, where=Place)
def profile_command(
    size: StackSize,
    where: Place,
    traces: Annotated[Path, "Folder for the traces."] = Path("runs/profile"),
    recipe: Annotated[str, "bf16, or a recipe as for `block`."] = "tensorwise",
    mode: Annotated[str, "eager or compiled."] = COMPILED,
) -> None:
    """Where the time of a stack of Llama blocks goes; writes traces of forward and backward.

    The traces open in chrome://tracing and ui.perfetto.dev.
    """
    if mode not in (EAGER, COMPILED):
        raise ConfigError(f"mode: got {mode!r}, expected {EAGER} or {COMPILED}")
    variant = make_variants([recipe] * (recipe != HIGH_PRECISION), [mode])[-1]
    bench = Bench("profile", where, **dataclasses.asdict(size), recipe=recipe, mode=mode)
    rows = profile.profile_block(size, variant, bench.device, traces)
    bench.finish(f"{recipe} {mode}: {size}", rows)
    bench.console.print(f"traces: {traces}/forward.json, {traces}/backward.json")


@dataclass
class RanksRun(Run):
    """Where ranks run, and how often."""

    device: Annotated[str, "cuda, or cpu to try it without a GPU."] = "cuda"
    rounds: Annotated[int, "Timed steps in each of two passes."] = 10
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes, each with a GPU.", show_default="all GPUs; 2 on a CPU"
        ),
    ] = None


@dataclass
class RanksVariants(Variants):
    """What is compared with bf16; of the peers only torchao gathers in float8."""

    mode: Annotated[str, f"{', '.join(MODES)}."] = COMPILED
    peers: Annotated[Words, "Also measure torchao."] = None


def _bench_on_ranks(
    name: str,
    step: type[fsdp.RanksStep],
    title: str,
    size: StackSize,
    compared: Variants,
    where: RanksRun,
    **settings: Any,
) -> None:
    """Start the ranks, and on each of them time that step of all variants; the first one tells."""
    chosen = compared.chosen()
    if where.device not in ("cuda", "cpu"):
        raise ConfigError(
            f"device: got {where.device!r}, expected cuda or cpu; say --ranks for how many"
        )
    for peer in chosen["peers"]:
        if peer != "torchao":
            raise ConfigError(f"peers: got {peer!r}, expected torchao")
    preset(size.model)
    variants = make_variants(**chosen, sharded=step is fsdp.ShardedStep)
    where.checked()
    start_ranks(where.device, where.ranks)
    with join_ranks(True) as group:
        where = dataclasses.replace(where, device=str(group.device(where.device)))
        about = {**dataclasses.asdict(size), **chosen, "ranks": group.size, "passes": fsdp.PASSES}
        bench = Bench(name, where, **about, **settings)
        groups = fsdp.bench_on_ranks(step, variants, size, bench.device, where.rounds)
        rows = bench.collect(groups, fsdp.PASSES * len(variants) + 1)
        if group.rank == 0:
            title = title.format(size=size, ranks=group.size)
            bench.finish(title, rows, communication=fsdp.communication_settings())


@app.command("fsdp")
@takes({"blocks": 8}, size=StackSize, compared=RanksVariants, where=RanksRun)
def fsdp_command(size: StackSize, compared: Variants, where: RanksRun) -> None:
    """Training steps of Llama blocks that FSDP2 shards: 16-bit and float8 gathers.

    A step is forward, backward and fused AdamW, with the scaling attached to it; parameters are
    bf16. It starts its own ranks by torchrun (NCCL; Gloo on a CPU). Bytes are counted, per step and
    rank, own shards included. Every gradient of every variant is checked against bf16's first, and
    compared bit by bit between the gathers of a recipe. Each variant has its rounds in two passes
    over the list.
    """
    title = "{size} each, under FSDP2 on {ranks} rank(s), forward + backward + optimizer"
    how = {"optimizer": "fused AdamW"}
    _bench_on_ranks("fsdp", fsdp.ShardedStep, title, size, compared, where, **how)


@app.command("tp")
@takes({"model": "llama3-70b", "blocks": 1}, size=StackSize, compared=RanksVariants, where=RanksRun)
def tp_command(size: StackSize, compared: Variants, where: RanksRun) -> None:
    """Llama blocks under tensor and sequence parallel: forward and backward.

    It starts its own ranks by torchrun (NCCL; Gloo on a CPU). Before anything is timed each recipe
    is compared with the same recipe on one device: scales of weights bit by bit, output and
    gradients by what their SQNR against bf16 loses. Bytes are counted, per step and rank, own parts
    included. Each variant has its rounds in two passes over the list.
    """
    title = "{size}, tensor and sequence parallel on {ranks} ranks, forward + backward"
    _bench_on_ranks("tp", tp.ParallelStep, title, size, compared, where)


_MODEL, _STEPS = "tiny", 20  # what is trained if nothing is said
_TOKENS = 4096  # of a captured batch, about


@app.command("numerics")
@takes({"mkn": ["2048,1024,3072"]}, layers=Shapes, where=Place)
def numerics_command(
    layers: Shapes,
    where: Place,
    recipe: Annotated[
        Words, typer.Option(help="Several: with commas; as for `linear`.", show_default="all")
    ] = None,
    peers: Peers = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A run's folder (its newest checkpoint is meant) or one checkpoint of the model "
            "whose tensors are captured.",
            show_default=f"{_MODEL}, trained for {_STEPS} steps",
        ),
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=0, help="Of the model.", show_default="the middle one")
    ] = None,
    plot: Annotated[Path | None, "Draw the SQNR of each recipe."] = None,
) -> None:
    """SQNR in dB of a layer's three GEMMs against float64, under each recipe.

    On random tensors of the given shapes, of several families, and on what the layers of one block
    of a trained model read in a batch of its training data. Delayed scaling has seen three steps
    before. `even` counts all tokens alike, of grad_weight all channels, though a few may have most
    of the power. Underflow and saturation: shares of nonzero elements that become zero, or are cut.
    """
    chosen = {"recipes": words(recipe) or RECIPES, "peers": words(peers)}
    shapes = [shape for members in layers.selected().values() for shape in members]
    bench = Bench("numerics", where, shapes=shapes, **chosen)
    variants = make_variants(chosen["recipes"], [EAGER], chosen["peers"])
    trainer = _trained(checkpoint, bench.device)
    config = trainer.config
    blocks = config.model_config().n_layers
    block = blocks // 2 if block is None else block
    if block >= blocks:
        raise ConfigError(f"block: got {block}, expected less than {blocks}")
    captured = _captured(trainer, f"layers.{block}.")
    samples = itertools.chain(numerics.random_samples(shapes, bench.device), captured.items())
    total = len(numerics.FAMILIES) * len(shapes) + len(captured)
    rows = bench.collect(numerics.bench_numerics(samples, variants), total)
    run = {"model": config.model, "recipe": config.recipe, "step": trainer.step, "block": block}
    title = (
        f"{', '.join(map(str, shapes))}; then block {block} of {config.model} after step "
        f"{trainer.step} of {config.recipe}"
    )
    bench.finish(title, rows, plot, draw=numerics.plot_numerics, trained=run)


def _trained(checkpoint: Path | None, device: torch.device) -> Trainer:
    """A run after its checkpoint, or after a few steps; it leaves no files."""
    config = TrainConfig.create(model=_MODEL, steps=_STEPS)
    if checkpoint is not None:
        checkpoint = find_checkpoint(checkpoint)
        check_checkpoint(checkpoint)
        config = saved_config(checkpoint)
    config = config.replace(device=str(device), compile=False, activation_checkpointing=False)
    corpus = load_corpus(config.data)
    check_length(corpus, config.seq_len)
    trainer = Trainer(config, corpus)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    else:
        for _ in range(_STEPS):
            trainer.train_step()
    return trainer


def _captured(trainer: Trainer, prefix: str) -> dict[str, numerics.Sample]:
    """Of the batches that the run would see next, cut to a few thousand tokens."""
    config = trainer.config
    size = min(config.batch_size, max(1, _TOKENS // config.seq_len))
    cut = {"seed": config.seed, "batch_size": size, "seq_len": config.seq_len}
    first = trainer.step * config.accumulate * config.batch_size
    numbers = range(first, first + numerics.STEPS * size, size)
    batches = (train_batch(trainer.corpus.train, first=number, **cut) for number in numbers)
    losses = [functools.partial(trainer.loss, batch) for batch in batches]
    return numerics.captured_samples(trainer.model, prefix, losses)
