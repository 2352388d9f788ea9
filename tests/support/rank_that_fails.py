"""A rank of `float8` under torchrun on which something goes wrong: HOW, then the words.

On the last rank only, at the second checkpoint ("dies"), at the second step ("raises"), or while it
says what a checkpoint has to hold ("state"); or on all ranks that measure ("wrong").
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from float8_lab.bench import fsdp
from float8_lab.cli.main import main
from float8_lab.models.llama import Llama
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


def fail(error: Exception, *args: object) -> None:
    raise error


how, *words = sys.argv[1:]
if how == "wrong":
    fsdp.AT_LEAST = 1e9
if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    if how == "dies":
        checkpoint.save = at_second_call(checkpoint.save, die)
    if how == "raises":
        cause = partial(fail, ZeroDivisionError("the cause of it all"))
        loop.Trainer.train_step = at_second_call(loop.Trainer.train_step, cause)
    if how == "state":
        Llama.state_dict = partial(fail, RuntimeError("what a state"))
sys.exit(main(words))
