"""Entry point of the `float8` command: runs it and turns errors into one line and an exit code.

Exit codes: 0 done, 1 the training or a measurement failed, 2 something about the call is wrong,
130 interrupted.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from float8.convert.measure import WrongResultError
from float8_lab.errors import LabError, OutOfMemoryError

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
    return _run(words) if "RANK" not in os.environ else _run_as_rank(words)


def _run(words: list[str]) -> int:
    """Run the command; what is the user's to know becomes a line and an exit code."""
    assert _cli is not None
    try:
        _cli.command(args=words, prog_name="float8")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (LabError, WrongResultError, ValueError, OSError) as error:
        ours = isinstance(error, (LabError, WrongResultError))
        met_by_all = ours and not isinstance(error, OutOfMemoryError)
        if os.environ.get("RANK", "0") != "0" and not met_by_all:
            raise
        if "--debug" in words:
            traceback.print_exc()
        code = getattr(error, "exit_code", 1 if ours else 2)
        return _fail(f"{error}{'' if ours else ' (--debug shows where)'}", code)
    return 0


def _run_as_rank(words: list[str]) -> int:
    """Run one of the processes that `torchrun` started; only the first one talks to the user.

    Errors that are the user's to know are raised on all ranks. Any other is a cause, which its rank
    tells by itself, and ends before those that miss it. Does not return after an error: an orderly
    end would wait for the other ranks.
    """
    rank = os.environ["RANK"]
    try:
        with contextlib.ExitStack() as stack:
            if rank != "0":
                nowhere = stack.enter_context(Path(os.devnull).open("w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
            code = record(_run)(words) or 0  # what is recorded is what torchrun shows
        if code:
            time.sleep(_LAST_WORDS)
    except BaseException:
        sys.stderr.write(f"rank {rank}: {traceback.format_exc()}")
        code = 1
    if code and dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _fail(message: str, code: int = 2) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
