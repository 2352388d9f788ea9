"""The last rank of `float8` under torchrun dies at its second checkpoint; argv: the words."""

import os
import sys
from collections.abc import Callable
from typing import Any

from float8_lab.cli.main import main
from float8_lab.trainer import checkpoint


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


if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    checkpoint.save = at_second_call(checkpoint.save, die)
sys.exit(main(sys.argv[1:]))
