"""`float8 bench`: time GEMMs, casts, layers and models, each checked before it is timed."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from float8.convert.report import percent
from float8_lab.bench import cast, experts, limits, linear, matmul, numerics, tables
from float8_lab.bench.model import Size, bench_model, scaled_sizes
from float8_lab.bench.one_start import bench_one_start, mean_of_seeds, runs_of
from float8_lab.bench.profile import FLOOR, bench_profile
from float8_lab.bench.results import check_output
from float8_lab.bench.shapes import SHAPE_SETS, Shape, select_shapes
from float8_lab.bench.variants import COMPILED, EAGER, GRAPHED, make_variants, refuse_filters
from float8_lab.cli import bench_ranks
from float8_lab.cli.app import COMMANDS
from float8_lab.cli.measure import Bench, Compared, Keep, Output, Peers, Place, Run, draw
from float8_lab.cli.options import App, Words, given, settings, split, takes
from float8_lab.cli.table import print_table
from float8_lab.errors import ConfigError, FailedError
from float8_lab.models.presets import preset
from float8_lab.trainer.config import HIGH_PRECISION, ONE_PROCESS, RECIPES, TrainConfig

app = App(help=COMMANDS["bench"], no_args_is_help=True)

AllRecipes = Annotated[
    Words, typer.Option(help="Several: with commas.", show_default="all", callback=split)
]


@dataclass
class Shapes:
    """Shapes of linear layers."""

    shapes: Annotated[Words, f"Of {', '.join(SHAPE_SETS)}; several: with commas."] = None
    mkn: Annotated[
        Words, typer.Option(help="A shape as M,K,N: tokens, in and out features; repeatable.")
    ] = None

    def selected(self) -> dict[str, tuple[Shape, ...]]:
        """By the name of their set."""
        return select_shapes(self.shapes or [], self.mkn or [])

    def listed(self) -> list[Shape]:
        """All of them."""
        return [shape for members in self.selected().values() for shape in members]


@app.command("matmul")
@takes({"rounds": 20}, layers=Shapes, where=Run)
def matmul_command(layers: Shapes, where: Run) -> None:
    """One GEMM per shape: bf16, float8 without and with fast accumulation."""
    shapes = layers.listed()
    bench = Bench("matmul", where, shapes=shapes)
    groups = matmul.bench_matmul(shapes, bench.device, where.rounds)
    rows = bench.collect(groups, len(shapes))
    bench.finish("GEMM, both operands contiguous along K, bf16 result", rows)


@app.command("cast")
@takes({"rounds": 30}, layers=Shapes, where=Run)
def cast_command(layers: Shapes, where: Run) -> None:
    """Amax, casts and transposes of the tensors of these layers, against a device copy.

    Every kernel is compared with its plain-torch twin first, bit by bit.
    """
    shapes = layers.listed()
    bench, sizes = Bench("cast", where, shapes=shapes), cast.distinct_tensors(shapes)
    rows = bench.collect(cast.bench_cast(sizes, bench.device, where.rounds), len(sizes))
    bench.finish("casts of bf16 tensors, bitwise equal to their plain-torch twins", rows)


@app.command("linear")
@takes(layers=Shapes, compared=Compared, where=Run)
def linear_command(
    layers: Shapes,
    compared: Compared,
    where: Run,
    gpu_time: Annotated[bool, "Without the time to issue kernels, on uncached data."] = False,
    seconds: Annotated[int | None, "End after so many, with what is measured by then."] = None,
    plot: Annotated[Path | None, "Draw speed-ups by width and tokens: a .png file."] = None,
    results: Annotated[Path | None, "Draw those of a results file, and measure nothing."] = None,
) -> None:
    """One layer forward and backward per shape and recipe, against nn.Linear in bf16.

    Each result is checked against bf16's. A shape set of several layers ends with its sums.
    """
    check_output(plot, ".png", "plot")
    if results is not None:
        draw("heat_map", results, plot)
        return
    shapes, chosen = layers.selected(), compared.chosen()
    refuse_filters(chosen["peers"], "single layers")
    if gpu_time and GRAPHED in chosen["modes"]:
        got = f"mode: got {compared.mode!r} with --gpu-time, expected eager, compiled or both"
        raise ConfigError(f"{got}: GPU time is taken from a CUDA graph of its own")
    variants = make_variants(**chosen)
    sets = {name: "all" if name in SHAPE_SETS else each for name, each in shapes.items()}
    bench = Bench("linear", where, shapes=sets, gpu_time=gpu_time, **chosen)
    total = sum(len(members) + (len(members) > 1) for members in shapes.values())
    measure = partial(linear.bench_linear, gpu_time=gpu_time)
    rows = bench.collect(measure(shapes, variants, bench.device, where.rounds), total, seconds)
    found = bench.finish("linear layer, forward + backward", rows)
    if plot is not None:
        draw("heat_map", found, plot)


@app.command("experts")
@takes({"rounds": 7}, where=Run)
def experts_command(
    where: Run,
    models: Annotated[Words, f"Of {', '.join(experts.EXPERTS)}; several: with commas."] = None,
    shape: Annotated[Words, typer.Option(help="A layer as E,rows,hidden,ff; repeatable.")] = None,
    recipe: Annotated[
        Words,
        typer.Option(
            help="As for `linear`.",
            show_default="all that can, with and without +held",
            callback=split,
        ),
    ] = None,
    peers: Peers = None,
    microbatches: Annotated[int, "In which weights that are held are cast once."] = 4,
    uneven: Annotated[bool, "Groups of many to few rows, of any number."] = False,
) -> None:
    """Layers of experts forward and backward beside bf16, their GEMMs and their casts alone.

    Times are of one microbatch. Memory is the peak of a step over the weights; `kept` is what
    forward keeps for backward. Each layer and product is checked against bf16's first.
    """
    recipes = recipe or experts.RECIPES
    shapes = experts.select_experts(models or [], shape or [])
    variants = experts.expert_variants(recipes, peers or [])
    how: Any = {"microbatches": microbatches, "uneven": uneven}
    about: Any = {"shapes": shapes, "recipes": recipes, "peers": peers or [], **how}
    bench = Bench("experts", where, **about)
    bench.console.width = min(bench.console.width, 80)
    groups = experts.bench_experts(shapes, variants, bench.device, where.rounds, **how)
    bench.finish("experts", bench.collect(groups, 3 * len(shapes)))


@app.command("numerics")
@takes({"mkn": ["2048,1024,3072"]}, layers=Shapes, where=Place)
def numerics_command(
    layers: Shapes, where: Place, recipe: AllRecipes = None, peers: Peers = None
) -> None:
    """SQNR in dB of a layer's three GEMMs against float64, under each recipe; times nothing.

    On random tensors of several families. Delayed scaling has seen three steps before. `even`
    counts all tokens alike, of grad_weight all channels, though a few may have most of the power.
    """
    chosen: dict[str, Any] = {"recipes": recipe or RECIPES, "peers": peers or []}
    shapes = layers.listed()
    refuse_filters(chosen["peers"], "single layers")
    variants = make_variants(chosen["recipes"], [EAGER], chosen["peers"])
    bench = Bench("numerics", where, shapes=shapes, **chosen)
    bench.console.width = min(bench.console.width, 80)
    samples = numerics.random_samples(shapes, bench.device)
    total = len(numerics.FAMILIES) * len(shapes)
    rows = bench.collect(numerics.bench_numerics(samples, variants), total)
    bench.finish(", ".join(map(str, shapes)), rows)


@app.command("model")
@takes(size=Size, compared=Compared, where=Run)
def model_command(
    size: Size,
    compared: Compared,
    where: Run,
    keep: Keep = None,
    microbatches: Annotated[int, "Forwards and backwards per step, gradients accumulated."] = 1,
    all_layers: Annotated[bool, "Convert layers that float8 makes slower, too."] = False,
    widths: Annotated[Words, "Scale blocks to each of these; with --all-layers."] = None,
) -> None:
    """A plain Llama that was converted as users do, forward and backward, beside bf16.

    Blocks without embedding and head; the sync of delayed scaling and casts of held weights are in
    each step. Every gradient of every variant is checked against bf16's first. Memory is what a
    model holds and the peak of a step over it. With `--widths` and `--all-layers` it says from
    which width on a recipe gains: heads stay as wide as they are, all else is in proportion.
    """
    chosen, scaled = compared.chosen(keep, all_layers=all_layers), widths or []
    sizes, variants = scaled_sizes(size, scaled), make_variants(**chosen)
    more: Any = {"microbatches": microbatches}
    about = {**chosen, "widths": [*map(int, scaled)], **more}
    bench = Bench("model", where, **vars(size), **about)
    groups = bench_model(sizes, variants, bench.device, where.rounds, **more)
    title = f"{size}, forward + backward"
    title += f" of {microbatches} microbatches" if microbatches > 1 else ""
    bench.finish(title, bench.collect(groups, len(sizes) * (len(variants) + 1)))


@app.command("profile")
@takes({"mode": COMPILED}, size=Size, compared=Compared, where=Place)
def profile_command(
    size: Size,
    compared: Compared,
    where: Place,
    traces: Annotated[Path | None, "Folder for a trace of each, for ui.perfetto.dev."] = None,
) -> None:
    """Where the time of a stack of Llama blocks goes, beside the least that it could take.

    GEMMs, attention, casts and all else, of the same steps as `model`; on a GPU of its kernels. A
    kernel that casts among other things is a cast: compare casts and all else together. The floor
    has the GEMMs at the rate of large ones, the bytes that casts move at that of a copy, and bf16's
    own attention and all else, all of this run.
    """
    chosen = compared.chosen(all_layers=False)
    preset(size.model)
    if traces is not None and not traces.is_dir():
        raise ConfigError(f"traces: there is no folder {traces}")
    variants = make_variants(**chosen)
    bench = Bench("profile", where, **vars(size), **chosen)
    groups = bench_profile(variants, size, bench.device, traces)
    rows = bench.collect(groups, len(variants))
    bench.finish(f"{size}, forward + backward", rows)
    print_table(bench.console, "the sum beside its floor", rows, FLOOR.split())


app.command("train")(bench_ranks.train)
app.command("fsdp")(bench_ranks.fsdp)
app.command("tp")(bench_ranks.tp)

_FILES = ("output", "tensorboard", "keep_checkpoints", "final_checkpoint", "checkpoint_interval")


@app.command("one-start")
@takes(chosen=settings(but=("recipe", "stop_after", "eval_interval", *_FILES, *ONE_PROCESS)))
def one_start_command(
    chosen: Any,
    recipe: AllRecipes = None,
    start: Annotated[int, "Steps in high precision that all have in common."] = 300,
    seeds: Annotated[int, "Starts, of --seed and those that follow it."] = 1,
    at_once: Annotated[int, "Runs at the same time, each in a process; they share the GPU."] = 1,
    output: Output = None,
) -> None:
    """Train all recipes on from one start in high precision, and compare losses.

    With one seed high precision goes on twice: what its two runs differ by is noise. With several,
    the first table has means, and standard errors of gaps. Rows of a seed are written when all its
    runs are done.
    """
    off = {"eval_interval": 0, "checkpoint_interval": 0, "tensorboard": False}
    config = TrainConfig.create(**given(chosen), **off, final_checkpoint=False)  # type: ignore[arg-type]
    recipes = list(dict.fromkeys(recipe or RECIPES))
    if HIGH_PRECISION in recipes:
        raise ConfigError(f"recipe: got {HIGH_PRECISION!r}, expected others: it is trained anyway")
    if not start < config.steps:
        raise ConfigError(f"start: got {start}, expected less than the {config.steps} steps")
    place = Place(config.device, output)
    shown = {**given(chosen), "data": Path(config.data or "").name}
    many: Any = {"seeds": seeds, "at_once": at_once}
    bench = Bench("one-start", place, recipes=recipes, start=start, **many, **shown)
    groups = bench_one_start(config, recipes, start, **many)
    rows = bench.collect(groups, seeds * (len(runs_of(recipes, seeds)) + 2))  # start, rows
    title = f"validation losses in nats per byte after step {config.steps}"
    if seeds > 1:
        bench.console.print(f"\n{title}")  # tables are headed by their part
        rows = [*mean_of_seeds(rows), *rows]
    bench.finish(title, rows)


@app.command("limits")
@takes()
def limits_command(
    results: Annotated[Path, typer.Argument(help="What `linear --gpu-time` wrote.")],
    write: Annotated[bool, "Into the library and its page, in a checkout."] = False,
) -> None:
    """From which size on layers gain: the limits that cost the least by what was measured."""
    gpu, found = limits.fit_results(json.loads(results.read_text()))
    for recipe, (least, loss, right) in found.items():
        how = f"{percent(right)} of layers judged rightly, the others cost {loss:.2%}"
        typer.echo(f"{gpu} {recipe}: {', '.join(f'{x:g}' for x in least)}: {how}")
    if write:
        limits.write_limits(gpu, found)


@app.command("tables")
@takes()
def tables_command(check: Annotated[bool, "Only say whether they are up to date."] = False) -> None:
    """Write the tables of README.md and of pages in docs, in a checkout, from its results."""
    changed = tables.write_tables(check)
    if check and changed:
        names = " and ".join(page.name for page in changed)
        raise FailedError(f"{names}: not up to date, run float8 bench tables")
