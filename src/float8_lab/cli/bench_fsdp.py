"""`float8 bench fsdp`: training steps under FSDP2, on all GPUs of this host."""

from __future__ import annotations

from typing import Annotated

import typer

from float8_lab.bench.block import StackSize
from float8_lab.bench.fsdp import PASSES, bench_fsdp, communication_settings
from float8_lab.bench.fsdp_variants import PEERS, Plan, sharded_variants
from float8_lab.bench.ranks import rank_count
from float8_lab.cli import bench_tables as tables
from float8_lab.cli.bench import (
    RECIPES,
    Batch,
    Blocks,
    Mode,
    Model,
    Output,
    Recipes,
    SeqLen,
    parse_modes,
    split_words,
)
from float8_lab.cli.bench_run import Bench
from float8_lab.cli.options import Debug
from float8_lab.models.presets import preset

Device = Annotated[str, typer.Option(help="cuda, or cpu to try it with host times.")]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Processes, each with a GPU.", show_default="all GPUs; 2 on a CPU"),
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Timed steps per variant in each of two passes over the list.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peers", help="torchao: also measure it, with its float8 all-gather."),
]


def fsdp_command(
    model: Model = "llama3-8b",
    blocks: Blocks = 8,
    seq_len: SeqLen = 8192,
    batch: Batch = 1,
    recipe: Recipes = None,
    mode: Mode = "compiled",
    peers: Peers = None,
    ranks: Ranks = None,
    device: Device = "cuda",
    rounds: Rounds = 10,
    output: Output = None,
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
    size = StackSize(model, blocks, seq_len, batch)
    recipes = split_words(recipe) or list(RECIPES)
    others = split_words(peers)
    for peer in others:
        if peer not in PEERS:
            raise ValueError(f"peers: got {peer!r}, expected {', '.join(PEERS)}")
    modes = parse_modes(mode)
    world = rank_count(device, ranks)
    settings = {"model": model, "blocks": blocks, "seq_len": seq_len, "batch": batch}
    settings |= {"recipes": recipes, "modes": modes, "peers": others}
    settings |= {"ranks": world, "rounds": rounds, "passes": PASSES, "optimizer": "fused AdamW"}
    bench = Bench.start("fsdp", device, output, **settings)
    plan = Plan(size, tuple(recipes), modes, tuple(bench.find_peers(others)), rounds)
    variants = sharded_variants(plan)
    rows = bench.collect(bench_fsdp(plan, world, device), PASSES * len(variants) + 1)
    title = f"{blocks} {model} block(s) under FSDP2 on {world} rank(s), {batch} x {seq_len} tokens "
    title += "each, forward + backward + optimizer"
    bench.finish(title, tables.FSDP, rows, communication=communication_settings())
