"""A rank of `float8` under torchrun; argv: the words.

If `FAILS` is set, the last one dies at its second checkpoint: when its shards are about to be
written, and those of others may be.
"""

import os
import sys
from typing import Any

from float8_lab.cli.main import main
from float8_lab.trainer import checkpoint

plain, calls = checkpoint.save, []


def save(*args: Any, **options: Any) -> Any:
    calls.append(1)
    if len(calls) == 2:
        os.fsync = lambda descriptor: os._exit(9)
    return plain(*args, **options)


if "FAILS" in os.environ and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    checkpoint.save = save
if code := main(sys.argv[1:]):  # for what exits by itself torchrun would wait
    sys.exit(code)
