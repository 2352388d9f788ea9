"""`float8 bench tp`: tensor and sequence parallel, see `float8_lab.bench.tp`."""

import dataclasses
from typing import Annotated

from float8_lab.bench.block import StackSize
from float8_lab.bench.fsdp import communication_settings
from float8_lab.bench.tp import PASSES, bench_tp, require_shares
from float8_lab.bench.variants import make_variants
from float8_lab.cli.bench import (
    Bench,
    RanksRun,
    RanksVariants,
    Run,
    Variants,
    app,
    on_ranks,
    ranks_option,
)
from float8_lab.cli.options import takes


@app.command("tp")
@takes({"model": "llama3-70b", "blocks": 1}, size=StackSize, compared=RanksVariants, where=RanksRun)
def tp_command(
    size: StackSize,
    compared: Variants,
    where: Run,
    ranks: Annotated[int | None, ranks_option(2)] = None,
) -> None:
    """Llama blocks under tensor and sequence parallel: forward and backward.

    It starts its own ranks by torchrun (NCCL; Gloo on a CPU). Before anything is timed each recipe
    is compared with the same recipe on one device: scales of weights bit by bit, output and
    gradients by what their SQNR against bf16 loses. Bytes are counted, per step and rank, own parts
    included. Each variant has its rounds in several passes over the list.
    """
    chosen = compared.chosen()
    variants = make_variants(**chosen)
    with on_ranks(where, chosen["peers"], ranks) as (where, group):
        require_shares(size, group.size)
        settings = {**dataclasses.asdict(size), **chosen, "ranks": group.size}
        bench = Bench("tp", where, **settings, passes=PASSES)
        rows = bench.collect(
            bench_tp(variants, size, bench.device, where.rounds), len(variants) + 1
        )
        title = f"{size}, tensor and sequence parallel on {group.size} ranks, forward + backward"
        if group.rank == 0:
            for row in rows:
                if row["left_out"] is not None:
                    left_out = f"{row['recipe']}, {row['mode']} is left out: {row['left_out']}"
                    bench.console.print(left_out)
            bench.finish(title, rows, communication=communication_settings())
