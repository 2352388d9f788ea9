"""`float8 bench fsdp`: training steps under FSDP2, on all GPUs of this host."""

from __future__ import annotations

from typing import Annotated

import typer

from float8_lab.bench.block import StackSize
from float8_lab.bench.fsdp import PASSES, Plan, bench_fsdp, communication_settings
from float8_lab.bench.ranks import rank_count
from float8_lab.cli import bench_run as run
from float8_lab.cli.bench_run import Bench, choices
from float8_lab.cli.options import Debug
from float8_lab.models.presets import preset


def fsdp_command(
    model: run.Model = "llama3-8b",
    blocks: run.Blocks = 8,
    seq_len: run.SeqLen = 8192,
    batch: run.Batch = 1,
    recipe: run.Recipes = None,
    mode: run.Mode = "compiled",
    peers: Annotated[
        list[str] | None,
        typer.Option("--peers", help="torchao: also measure it, with its float8 all-gather."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes, each with a GPU.", show_default="all GPUs; 2 on a CPU"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it with host times.")] = "cuda",
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Timed steps per variant in each of two passes over the list."),
    ] = 10,
    output: run.Output = None,
    debug: Debug = False,
) -> None:
    """Training steps of Llama blocks that FSDP2 shards: 16-bit and float8 gathers.

    A step is forward, backward and fused AdamW, with the scaling attached to it; parameters are
    bf16. It starts its own ranks (NCCL; Gloo on a CPU): run it without torchrun. Speedups are over
    bf16, compiled if that is measured. Bytes are counted, per step and rank, own shards included.
    Every gradient of every variant is checked against bf16's first, and compared bit by bit
    between the gathers of a recipe.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device: got {device!r}, expected cuda or cpu; say --ranks for how many")
    preset(model)
    chosen = choices(recipe, mode, peers)
    for peer in chosen["peers"]:
        if peer != "torchao":  # the only one that has a float8 all-gather
            raise ValueError(f"peers: got {peer!r}, expected torchao")
    world = rank_count(device, ranks)
    settings = {"model": model, "blocks": blocks, "seq_len": seq_len, "batch": batch, **chosen}
    settings |= {"ranks": world, "rounds": rounds, "passes": PASSES, "optimizer": "fused AdamW"}
    bench = Bench.start("fsdp", device, output, **settings)
    size = StackSize(model, blocks, seq_len, batch)
    found = tuple(bench.find_peers())
    plan = Plan(size, tuple(chosen["recipes"]), chosen["modes"], found, rounds)
    groups = bench_fsdp(plan, world, device)
    rows = bench.collect(groups, PASSES * len(plan.variants()) + 1)
    title = f"{blocks} {model} block(s) under FSDP2 on {world} rank(s), {batch} x {seq_len} tokens "
    title += "each, forward + backward + optimizer"
    bench.finish(title, rows, communication=communication_settings())
