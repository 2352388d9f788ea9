"""`float8 bench tp`: tensor and sequence parallel, see `float8_lab.bench.tp`."""

import dataclasses
from typing import Annotated

import typer

from float8_lab.bench.block import StackSize
from float8_lab.bench.fsdp import communication_settings
from float8_lab.bench.ranks import rank_count, run_ranks
from float8_lab.bench.tp import PASSES, on_rank, require_shares
from float8_lab.bench.variants import make_variants
from float8_lab.cli.bench import Bench, RanksRun, RanksVariants, Size, Variants
from float8_lab.cli.options import takes
from float8_lab.errors import ConfigError


@takes({"model": "llama3-70b", "blocks": 1}, size=Size, compared=RanksVariants, where=RanksRun)
def tp_command(
    size: Size,
    compared: Variants,
    where: RanksRun,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2, help="Processes, each with a GPU.", show_default="all GPUs; 2 on a CPU"
        ),
    ] = None,
) -> None:
    """Llama blocks under tensor and sequence parallel: forward and backward.

    It starts its own ranks (NCCL; Gloo on a CPU): run it without torchrun. Before anything is timed
    each recipe is compared with the same recipe on one device: scales of weights bit by bit, output
    and gradients by what their SQNR against bf16 loses. Bytes are counted, per step and rank, own
    parts included. Each variant has its rounds in several passes over the list.
    """
    device, chosen = where.device, compared.chosen()
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device: got {device!r}, expected cuda or cpu; say --ranks for how many")
    for peer in chosen["peers"]:
        if peer != "torchao":
            raise ConfigError(f"peers: got {peer!r}, expected torchao")
    world = rank_count(device, ranks)
    own = StackSize(**dataclasses.asdict(size))
    require_shares(own, world)
    settings = {**dataclasses.asdict(size), **chosen, "ranks": world, "rounds": where.rounds}
    bench = Bench("tp", device, where.output, **settings, passes=PASSES)
    groups = run_ranks(on_rank, (own, where.rounds, chosen), world, device)
    rows = bench.collect(groups, len(make_variants(**chosen)) + 1)
    for row in rows:
        if row["left_out"] is not None:
            bench.console.print(f"{row['recipe']}, {row['mode']} is left out: {row['left_out']}")
    title = f"{size}, tensor and sequence parallel on {world} ranks, forward + backward"
    bench.finish(title, rows, communication=communication_settings())
