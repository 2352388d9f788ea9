"""Entry point of the `float8` command: runs it and turns errors into one line and an exit code.

Exit codes: 0 done, 1 the training or a measurement failed, 2 something about the call is wrong,
130 interrupted.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from float8.convert.measure import WrongResultError
from float8_lab.errors import LabError, RankFailedError, is_for_all

# Seconds by which the rank with the cause ends before others: torchrun shows the first one.
_LAST_WORDS = 2.0
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
        return _run(words, _call)
    code = _run_as_rank(words, first=os.environ["RANK"] == "0")
    # After an error an orderly end would wait for other ranks; and without one, threads of Gloo may
    # abort a process that ends soon after its group.
    if arguments is None or (code and dist.is_available() and dist.is_initialized()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _call(words: list[str], *, tells: bool = True) -> None:
    """Parse and run; ends in `SystemExit` or an error. With `tells` wrong words are explained."""
    assert _cli is not None
    try:
        code = _cli.command(args=words, prog_name="float8", standalone_mode=tells)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("typer", "click"):
            raise
        raise SystemExit(getattr(error, "exit_code", 1)) from None  # what the parser says
    raise SystemExit(code)


def _run(words: list[str], call: Callable[[list[str]], None]) -> int:
    """Run the command; what is the user's to know becomes a line and an exit code."""
    try:
        call(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (LabError, WrongResultError, ValueError, OSError) as error:
        if "--debug" in words:
            traceback.print_exc()
        ours = isinstance(error, (LabError, WrongResultError))
        code = getattr(error, "exit_code", 1 if ours else 2)
        if is_for_all(error) and os.environ.get("RANK", "0") != "0":
            return code  # the first rank tells it
        return _fail(f"{error}{'' if ours else ' (--debug shows where)'}", code)
    return 0


def _run_as_rank(words: list[str], first: bool) -> int:
    """Run one of the processes that `torchrun` started; only the first one writes to stdout.

    An error that all ranks raise is told by the first one, any other by the rank that meets it. Who
    has the cause ends before the others.
    """
    handler = get_error_handler()  # torchrun shows what is recorded with it
    handler.initialize()
    elsewhere = False  # whether another rank tells the cause

    def call(words: list[str]) -> None:
        nonlocal elsewhere
        try:
            _call(words, tells=first)
        except SystemExit as end:
            elsewhere = bool(end.code) and not first
            raise
        except Exception as error:
            elsewhere = isinstance(error, RankFailedError) or (is_for_all(error) and not first)
            if not elsewhere:
                handler.record_exception(error)
            raise

    try:
        with contextlib.ExitStack() as stack:
            if not first:
                nowhere = stack.enter_context(Path(os.devnull).open("w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            code = _run(words, call)
    except BaseException:
        sys.stderr.write(f"rank {os.environ['RANK']}: {traceback.format_exc()}")
        code = 1
    if elsewhere:
        time.sleep(_LAST_WORDS)
    return code


def _fail(message: str, code: int = 2) -> int:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"rank {rank}: "
    sys.stderr.write(f"{where}error: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    sys.argv[0] = "float8"  # as results name it
    sys.exit(main())
