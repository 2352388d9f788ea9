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
from float8_lab.bench.shapes import Shape, select_shapes
from float8_lab.bench.variants import COMPILED, EAGER, HIGH_PRECISION, make_variants
from float8_lab.cli import bench_run as run
from float8_lab.cli.bench_run import Bench, choices, words
from float8_lab.cli.options import Debug

app = typer.Typer(
    help="Time GEMMs, casts, layers, blocks and sharded training, each checked first.",
    no_args_is_help=True,
)


def _count(shapes: dict[str, tuple[Shape, ...]]) -> int:
    return sum(map(len, shapes.values()))


@app.command("matmul")
def matmul_command(
    shapes: run.ShapeSets = None,
    mkn: run.Mkn = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also the GEMMs of both gradients.")
    ] = False,
    device: run.Device = "cuda",
    rounds: run.Rounds = 20,
    output: run.Output = None,
    plot: run.Plot = None,
    debug: Debug = False,
) -> None:
    """One GEMM per shape: bf16, float8 without and with fast accumulation."""
    selected = select_shapes(words(shapes), mkn or [])
    settings = {"shapes": selected, "gradients": gradients, "rounds": rounds}
    bench = Bench.start("matmul", device, output, **settings)
    groups = bench_matmul(selected, bench.device, rounds, gradients=gradients)
    rows = bench.collect(groups, _count(selected) * (3 if gradients else 1))
    bench.finish("GEMM, both operands contiguous along K, bf16 result", rows, plot)


@app.command("linear")
def linear_command(
    shapes: run.ShapeSets = None,
    mkn: run.Mkn = None,
    recipe: run.Recipes = None,
    mode: run.Mode = "both",
    peers: run.Peers = None,
    device: run.Device = "cuda",
    rounds: run.Rounds = 15,
    output: run.Output = None,
    plot: run.Plot = None,
    debug: Debug = False,
) -> None:
    """One layer forward and backward per shape and recipe, against nn.Linear in bf16.

    Each result is checked against bf16's, which is checked against float64. A shape set of several
    layers ends with its sums.
    """
    selected = select_shapes(words(shapes), mkn or [])
    settings = {"shapes": selected, **choices(recipe, mode, peers), "rounds": rounds}
    bench = Bench.start("linear", device, output, **settings)
    variants = make_variants(settings["recipes"], settings["modes"], bench.find_peers())
    sums = sum(len(members) > 1 for members in selected.values())
    groups = bench_linear(selected, variants, bench.device, rounds)
    rows = bench.collect(groups, _count(selected) + sums)
    host = host_microseconds(variants, bench.device)
    bench.finish("linear layer, forward + backward", rows, plot, host_us=host)
    for name, microseconds in host.items():
        bench.console.print(f"host time to issue forward + backward, {name}: {microseconds:.0f} us")


@app.command("cast")
def cast_command(
    shapes: run.ShapeSets = None,
    mkn: run.Mkn = None,
    device: run.Device = "cuda",
    rounds: run.Rounds = 30,
    output: run.Output = None,
    debug: Debug = False,
) -> None:
    """Amax, casts and transposes of the tensors of these layers, against a device copy.

    Every kernel is compared with its plain-torch twin first, bit by bit.
    """
    selected = select_shapes(words(shapes), mkn or [])
    bench = Bench.start("cast", device, output, shapes=selected, rounds=rounds)
    comparisons = check_awkward(bench.device)
    bench.console.print(f"{comparisons} comparisons with the plain-torch twins: bitwise equal")
    groups = bench_cast(selected, bench.device, rounds)
    rows = bench.collect(groups, len(distinct_tensors(selected)))
    host = cast_host_microseconds(bench.device)
    bench.finish("casts of bf16 tensors", rows, comparisons=comparisons, host_us=host)
    for name, microseconds in host.items():
        bench.console.print(f"host time per eager call, {name}: {microseconds:.1f} us")


@app.command("block")
def block_command(
    model: run.Model = "llama3-8b",
    blocks: run.Blocks = 4,
    seq_len: run.SeqLen = 8192,
    batch: run.Batch = 1,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Forwards and backwards per step, gradients accumulated.")
    ] = 1,
    recipe: run.Recipes = None,
    mode: run.Mode = "both",
    peers: run.Peers = None,
    device: run.Device = "cuda",
    rounds: run.Rounds = 15,
    output: run.Output = None,
    debug: Debug = False,
) -> None:
    """A stack of Llama blocks forward and backward, with the sync of delayed scaling.

    Every gradient of every variant is checked against bf16's first. Memory is the peak of a step
    over the resting state. With several microbatches, each recipe runs once more with
    `float8.cached_weights` around them.
    """
    size = StackSize(model, blocks, seq_len, batch, microbatches)
    settings = {**dataclasses.asdict(size), **choices(recipe, mode, peers), "rounds": rounds}
    bench = Bench.start("block", device, output, **settings)
    recipes, modes, cached = settings["recipes"], settings["modes"], microbatches > 1
    variants = make_variants(recipes, modes, bench.find_peers(), cached=cached)
    rows = bench.collect(bench_block(size, variants, bench.device, rounds), len(variants) + 1)
    title = f"{blocks} {model} block(s), {batch} x {seq_len} tokens, forward + backward"
    bench.finish(title + f" of {microbatches} microbatches" * cached, rows)


@app.command("profile")
def profile_command(
    traces: Annotated[Path, typer.Option(help="Folder for the traces.")] = Path("runs/profile"),
    model: run.Model = "llama3-8b",
    blocks: run.Blocks = 1,
    seq_len: run.SeqLen = 8192,
    batch: run.Batch = 1,
    recipe: Annotated[str, typer.Option(help="bf16, or a recipe as for `block`.")] = "tensorwise",
    mode: Annotated[str, typer.Option(help="eager or compiled.")] = "compiled",
    device: run.Device = "cuda",
    output: run.Output = None,
    debug: Debug = False,
) -> None:
    """Where the time of a stack of Llama blocks goes; writes traces of forward and backward.

    The traces open in chrome://tracing and ui.perfetto.dev.
    """
    size = StackSize(model, blocks, seq_len, batch)
    if mode not in (EAGER, COMPILED):
        raise ValueError(f"mode: got {mode!r}, expected {EAGER} or {COMPILED}")
    settings = {**dataclasses.asdict(size), "recipe": recipe, "mode": mode}
    variant = make_variants([recipe] * (recipe != HIGH_PRECISION), [mode], [])[-1]
    bench = Bench.start("profile", device, output, **settings)
    rows = profile_block(size, variant, bench.device, traces)
    title = f"{recipe} {mode}: {blocks} {model} block(s), {batch} x {seq_len} tokens"
    bench.finish(title, rows)
    bench.console.print(f"traces: {traces}/forward.json, {traces}/backward.json")
