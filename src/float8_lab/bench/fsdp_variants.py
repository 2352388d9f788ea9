"""The variants of a sharded model that are held against each other, and what a rank is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from float8.sync import attach_to_optimizer
from float8_lab.bench.block import StackSize
from float8_lab.bench.peers import torchao_float8_gather
from float8_lab.bench.variants import Variant, converter, make_variants

PEERS = ("torchao",)
"""Those that have a float8 all-gather."""

BF16, FLOAT8 = "bf16", "float8"


@dataclass(frozen=True)
class Plan:
    """What every rank runs; picklable.

    Attributes:
        size: Blocks and tokens of each rank.
        recipes: Of this library.
        modes: `eager`, `compiled` or both.
        peers: Installed ones of `PEERS`.
        rounds: Steps that are timed, in each of the two passes.
    """

    size: StackSize
    recipes: tuple[str, ...]
    modes: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class ShardedVariant:
    """One way to train the sharded stack.

    Attributes:
        variant: What its layers do.
        gather: In what its weights are gathered, `bf16` or `float8`.
        attach: Has scaling done at every step of an optimizer.
    """

    variant: Variant
    gather: str
    attach: Callable[[nn.Module, torch.optim.Optimizer], object]

    @property
    def name(self) -> str:
        """Recipe, mode and gather."""
        return f"{self.variant.name}, {self.gather} gather"


def sharded_variants(plan: Plan) -> list[ShardedVariant]:
    """High precision first, in each mode; every recipe with a gather in 16 bits, then in float8.

    Raises:
        ValueError: There is no such recipe.
    """
    found = []
    for variant in make_variants(plan.recipes, plan.modes, []):
        found.append(ShardedVariant(variant, BF16, attach_to_optimizer))
        config = variant.config
        if config is not None:
            config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
            gathering = Variant(variant.recipe, variant.mode, converter(config), config=config)
            found.append(ShardedVariant(gathering, FLOAT8, attach_to_optimizer))
    if PEERS[0] in plan.peers:
        peer, precompute = torchao_float8_gather()

        def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
            return optimizer.register_step_post_hook(lambda *_: precompute(model))

        for mode in plan.modes:
            variant = Variant(peer.name, mode, peer.convert, peer.around)
            found.append(ShardedVariant(variant, FLOAT8, attach))
    return found
