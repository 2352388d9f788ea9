"""Entry point of the `float8` command: runs it and turns errors into one line and an exit code.

Exit codes: 0 done, 1 the training or a measurement failed, 2 something about the call is wrong,
130 interrupted. A rank that another one's error ended: 1.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from float8.convert.measure import WrongResultError
from float8_lab.bench.ranks import RankFailedError
from float8_lab.trainer.errors import (
    LostRankError,
    OtherRankError,
    OutOfMemoryError,
    TrainerError,
    TrainingDivergedError,
)

_LAST_WORDS = 2.0
"""Seconds by which the rank with the cause ends before others: torchrun shows the first one."""

_EXTRAS = ("typer", "rich", "matplotlib", "numpy")

_cli: ModuleType | None
try:
    from float8_lab.cli import app as _cli
except ModuleNotFoundError as missing:
    # Without the extras, say so when the command is run, not with a traceback at import.
    if (missing.name or "").partition(".")[0] not in _EXTRAS:
        raise
    _cli = None
    _missing = missing.name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after `float8`; None for those of this process.

    Returns:
        The exit code.
    """
    if _cli is None:
        return _fail(
            f"the command line needs {_missing}, which is not installed: "
            "run pip install 'float8[cli]'"
        )
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "RANK" not in os.environ:
        return _run(_cli.run, words, _cli.Session())
    return _run_as_rank(words, _cli.Session(), first=os.environ["RANK"] == "0")


def _run(command: Callable[[list[str], Any], None], words: list[str], session: Any) -> int:
    try:
        command(words, session)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (TrainerError, WrongResultError, RankFailedError, ValueError, OSError) as error:
        if session.debug:
            traceback.print_exc()
        failed = isinstance(
            error, (TrainingDivergedError, OutOfMemoryError, WrongResultError, RankFailedError)
        )
        hint = "" if failed or isinstance(error, TrainerError) else " (--debug shows where)"
        return _fail(f"{error}{hint}", 1 if failed else 2)
    return 0


def _run_as_rank(words: list[str], session: Any, first: bool) -> int:
    """Run one of the processes that `torchrun` started: it shows its own errors, no others.

    Does not return after an error on the way: an orderly end would wait for the other ranks.
    """

    # What is recorded is what torchrun shows as the cause.
    @record
    def command(words: list[str], session: Any) -> None:
        assert _cli is not None
        try:
            _cli.run(words, session, show_usage=first)
        except OtherRankError as error:
            if first and isinstance(error, LostRankError):
                _fail(str(error))
            time.sleep(_LAST_WORDS)
            raise SystemExit(1) from error
        except TrainingDivergedError as error:  # All ranks see it.
            if first:
                raise
            raise SystemExit(1) from error

    with contextlib.ExitStack() as stack:
        if not first:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            code = _run(command, words, session)
        except BaseException:
            sys.stderr.write(f"rank {os.environ['RANK']}: {traceback.format_exc()}")
            code = 1
    if code and dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _fail(message: str, code: int = 2) -> int:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"rank {rank}: "
    sys.stderr.write(f"{where}error: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
