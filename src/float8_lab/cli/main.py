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
from importlib import import_module
from pathlib import Path

from float8_lab.errors import LabError, RankFailedError, is_for_all

_LAST_WORDS = 2.0
"""Seconds by which the rank with the cause ends before others: torchrun shows the first one."""

_EXTRAS = ("typer", "rich", "matplotlib", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after `float8`; None for those of this process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "RANK" not in os.environ:
        return _run(words, _call)
    code = _run_as_rank(words, first=os.environ["RANK"] == "0")
    # After an error an orderly end would wait for other ranks; and without one, threads of Gloo may
    # abort a process that ends soon after its group.
    dist = import_module("torch.distributed")
    if arguments is None or (code and dist.is_available() and dist.is_initialized()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _call(words: list[str], *, tells: bool = True) -> None:
    """Parse and run; ends in `SystemExit` or an error. With `tells` wrong words are explained."""
    app = import_module("float8_lab.cli.app")  # not at import, to tell of what is not installed
    try:
        code = app.command(args=words, prog_name="float8", standalone_mode=tells)
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
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRAS:
            raise
        return _fail(
            f"the command line needs {error.name}, which is not installed: "
            "run pip install 'float8[cli]'"
        )
    except (LabError, ValueError, OSError) as error:
        if "--debug" in words:
            traceback.print_exc()
        ours = isinstance(error, LabError)
        code = getattr(error, "exit_code", 2)
        if is_for_all(error) and os.environ.get("RANK", "0") != "0":
            return code  # the first rank tells it
        return _fail(f"{error}{'' if ours else ' (--debug shows where)'}", code)
    return 0


def _run_as_rank(words: list[str], first: bool) -> int:
    """Run one of the processes that `torchrun` started; only the first one writes to stdout.

    An error that all ranks raise is told by the first one, any other by the rank that meets it. Who
    has the cause ends before the others.
    """
    # torchrun shows what is recorded with it
    handler = import_module("torch.distributed.elastic.multiprocessing.errors").get_error_handler()
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
