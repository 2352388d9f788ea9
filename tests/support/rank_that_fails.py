"""A rank of `float8` under torchrun on which something goes wrong: HOW, then the words.

On the last rank only, at the second checkpoint ("dies") or at the second step ("raises").
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from float8_lab.cli.main import main
from float8_lab.trainer import checkpoint, loop


def at_second_call(function: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            act()
        return function(*args, **options)

    return counted


def die() -> None:
    """When its shards are about to be written, and those of others may be."""
    os.fsync = lambda descriptor: os._exit(9)


def fail() -> None:
    raise ZeroDivisionError("the cause of it all")


how, *words = sys.argv[1:]
if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    if how == "dies":
        checkpoint.save = at_second_call(checkpoint.save, die)
    if how == "raises":
        loop.Trainer.train_step = at_second_call(loop.Trainer.train_step, fail)
sys.exit(main(words))
