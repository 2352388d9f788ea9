"""`float8 bench`: time GEMMs, casts, layers and blocks, each checked before it is timed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from float8_lab.bench.block import StackSize, bench_block
from float8_lab.bench.cast import bench_cast, check_awkward, distinct_tensors
from float8_lab.bench.cast import host_microseconds as cast_host_microseconds
from float8_lab.bench.linear import bench_linear, host_microseconds
from float8_lab.bench.matmul import bench_matmul
from float8_lab.bench.profile import profile_block
from float8_lab.bench.shapes import SHAPE_SETS, Shape, select_shapes
from float8_lab.bench.variants import COMPILED, EAGER, HIGH_PRECISION, MODES, make_variants
from float8_lab.cli import bench_tables as tables
from float8_lab.cli.bench_run import Bench
from float8_lab.cli.options import Debug
from float8_lab.models.presets import PRESETS

app = typer.Typer(
    help="Time GEMMs, casts, layers, blocks and sharded training, each checked first.",
    no_args_is_help=True,
)

ShapeSets = Annotated[
    list[str] | None,
    typer.Option("--shapes", help=f"Of {', '.join(SHAPE_SETS)}; several: with commas."),
]
Mkn = Annotated[
    list[str] | None,
    typer.Option("--mkn", help="A shape as M,K,N: tokens, in and out features; repeatable."),
]
Device = Annotated[str, typer.Option(help="cuda, cuda:N, or cpu to try it with host times.")]
Rounds = Annotated[int, typer.Option(min=1, help="Samples per variant; medians are reported.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write results: .json or .csv.")
]
Plot = Annotated[Path | None, typer.Option(help="Write a heat map of speedups over shapes.")]
RECIPE_HELP = (
    "Several: with commas. Switches of Float8LinearConfig behind a +, as in "
    "tensorwise+round_scales_to_power_of_2; +fast_accum for all GEMMs."
)
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", help=RECIPE_HELP, show_default="tensorwise,delayed"),
]
Mode = Annotated[str, typer.Option(help=f"{', '.join(MODES)}.")]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peers", help="Also measure torchao, te (TransformerEngine) or torchao,te."),
]

Model = Annotated[str, typer.Option(help=f"Shape of the blocks: {', '.join(PRESETS)}.")]
Blocks = Annotated[int, typer.Option(min=1, help="How many blocks.")]
SeqLen = Annotated[int, typer.Option(min=1, help="Tokens per sequence.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences.")]
Microbatches = Annotated[
    int, typer.Option(min=1, help="Forwards and backwards per step, gradients accumulated.")
]

RECIPES = ("tensorwise", "delayed")


def _count(shapes: dict[str, tuple[Shape, ...]]) -> int:
    return sum(len(members) for members in shapes.values())


def split_words(values: list[str] | None) -> list[str]:
    """Words of options that may be repeated or hold several words with commas between."""
    return [word for value in values or [] for word in value.split(",") if word]


def parse_modes(mode: str) -> tuple[str, ...]:
    """The modes that an option stands for; a `ValueError` names those there are."""
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}")
    return MODES[mode]


@app.command("matmul")
def matmul_command(
    shapes: ShapeSets = None,
    mkn: Mkn = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also the GEMMs of both gradients.")
    ] = False,
    device: Device = "cuda",
    rounds: Rounds = 20,
    output: Output = None,
    plot: Plot = None,
    debug: Debug = False,
) -> None:
    """One GEMM per shape: bf16, float8 without and with fast accumulation."""
    selected = select_shapes(split_words(shapes), mkn or [])
    settings = {"shapes": selected, "gradients": gradients}
    bench = Bench.start("matmul", device, output, rounds=rounds, **settings)
    groups = bench_matmul(selected, bench.device, rounds, gradients=gradients)
    rows = bench.collect(groups, _count(selected) * (3 if gradients else 1))
    bench.finish("GEMM, both operands contiguous along K, bf16 result", tables.MATMUL, rows, plot)


@app.command("linear")
def linear_command(
    shapes: ShapeSets = None,
    mkn: Mkn = None,
    recipe: Recipes = None,
    mode: Mode = "both",
    peers: Peers = None,
    device: Device = "cuda",
    rounds: Rounds = 15,
    output: Output = None,
    plot: Plot = None,
    debug: Debug = False,
) -> None:
    """One layer forward and backward per shape and recipe, against nn.Linear in bf16.

    Each result is checked against bf16's, which is checked against float64. A shape set of several
    layers ends with its sums.
    """
    selected = select_shapes(split_words(shapes), mkn or [])
    recipes = split_words(recipe) or list(RECIPES)
    others = split_words(peers)
    modes = parse_modes(mode)
    settings = {"shapes": selected, "recipes": recipes, "modes": modes, "peers": others}
    bench = Bench.start("linear", device, output, rounds=rounds, **settings)
    variants = make_variants(recipes, modes, bench.find_peers(others))
    sums = sum(len(members) > 1 for members in selected.values())
    groups = bench_linear(selected, variants, bench.device, rounds)
    rows = bench.collect(groups, _count(selected) + sums)
    host = host_microseconds(variants, bench.device)
    bench.finish("linear layer, forward + backward", tables.LINEAR, rows, plot, host_us=host)
    for name, microseconds in host.items():
        bench.console.print(f"host time to issue forward + backward, {name}: {microseconds:.0f} us")


@app.command("cast")
def cast_command(
    shapes: ShapeSets = None,
    mkn: Mkn = None,
    device: Device = "cuda",
    rounds: Rounds = 30,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Amax, casts and transposes of the tensors of these layers, against a device copy.

    Every kernel is compared with its plain-torch twin first, bit by bit.
    """
    selected = select_shapes(split_words(shapes), mkn or [])
    bench = Bench.start("cast", device, output, shapes=selected, rounds=rounds)
    comparisons = check_awkward(bench.device)
    bench.console.print(f"{comparisons} comparisons with the plain-torch twins: bitwise equal")
    groups = bench_cast(selected, bench.device, rounds)
    rows = bench.collect(groups, len(distinct_tensors(selected)))
    host = cast_host_microseconds(bench.device)
    bench.finish("casts of bf16 tensors", tables.CAST, rows, comparisons=comparisons, host_us=host)
    for name, microseconds in host.items():
        bench.console.print(f"host time per eager call, {name}: {microseconds:.1f} us")


@app.command("block")
def block_command(
    model: Model = "llama3-8b",
    blocks: Blocks = 4,
    seq_len: SeqLen = 8192,
    batch: Batch = 1,
    microbatches: Microbatches = 1,
    recipe: Recipes = None,
    mode: Mode = "both",
    peers: Peers = None,
    device: Device = "cuda",
    rounds: Rounds = 15,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """A stack of Llama blocks forward and backward, with the sync of delayed scaling.

    Every gradient of every variant is checked against bf16's first. Memory is the peak of a step
    over the resting state. With several microbatches, each recipe runs once more with
    `float8.cached_weights` around them.
    """
    size = StackSize(model, blocks, seq_len, batch, microbatches)
    recipes = split_words(recipe) or list(RECIPES)
    others = split_words(peers)
    modes = parse_modes(mode)
    settings = {**dataclasses.asdict(size), "recipes": recipes, "modes": modes}
    settings |= {"peers": others, "rounds": rounds}
    bench = Bench.start("block", device, output, **settings)
    variants = make_variants(recipes, modes, bench.find_peers(others), cached=microbatches > 1)
    groups = bench_block(size, variants, bench.device, rounds)
    rows = bench.collect(groups, len(variants) + 1)
    title = f"{blocks} {model} block(s), {batch} x {seq_len} tokens, forward + backward"
    if microbatches > 1:
        title += f" of {microbatches} microbatches"
    bench.finish(title, tables.BLOCK, rows)


@app.command("profile")
def profile_command(
    traces: Annotated[Path, typer.Option(help="Folder for the traces.")] = Path("runs/profile"),
    model: Model = "llama3-8b",
    blocks: Blocks = 1,
    seq_len: SeqLen = 8192,
    batch: Batch = 1,
    recipe: Annotated[str, typer.Option(help="bf16, or a recipe as for `block`.")] = "tensorwise",
    mode: Annotated[str, typer.Option(help="eager or compiled.")] = "compiled",
    device: Device = "cuda",
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Where the time of a stack of Llama blocks goes; writes traces of forward and backward.

    The traces open in chrome://tracing and ui.perfetto.dev.
    """
    size = StackSize(model, blocks, seq_len, batch)
    if mode not in (EAGER, COMPILED):
        raise ValueError(f"mode: got {mode!r}, expected {EAGER} or {COMPILED}")
    settings = {**dataclasses.asdict(size), "recipe": recipe, "mode": mode}
    recipes = [] if recipe == HIGH_PRECISION else [recipe]
    variant = make_variants(recipes, [mode], [])[-1]
    bench = Bench.start("profile", device, output, **settings)
    rows = profile_block(size, variant, bench.device, traces)
    title = f"{recipe} {mode}: {blocks} {model} block(s), {batch} x {seq_len} tokens"
    bench.finish(title, tables.PROFILE, rows)
    bench.console.print(f"traces: {traces}/forward.json, {traces}/backward.json")
