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
from importlib import import_module
from pathlib import Path
from typing import Any

from float8_lab.errors import GET_EXTRAS, LabError, RankFailedError, is_for_all

# Seconds by which the rank with the cause ends before others: torchrun shows the first one.
_LAST_WORDS = 2.0
_EXTRAS = ("typer", "rich", "matplotlib", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the words after `float8`, by default those of this process; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rank = os.environ.get("RANK")
    if rank is None:
        return _run(words)[0]
    # One of the processes that `torchrun` started; only the first one writes to stdout.
    _error_handler().initialize()
    with contextlib.ExitStack() as stack:
        if rank != "0":
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        code, elsewhere = _run(words)
    if elsewhere:
        time.sleep(_LAST_WORDS)
    # After an error an orderly end would wait for other ranks; and without one, threads of Gloo may
    # abort a process that ends soon after its group.
    dist = import_module("torch.distributed")
    if arguments is None or (code and dist.is_available() and dist.is_initialized()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(words: list[str]) -> tuple[int, bool]:
    """Parse and run; what is the user's to know becomes a line.

    An error that all ranks raise is told by the first one, any other by the rank that meets it.
    Returns the exit code, and whether another rank has the cause.
    """
    rank = os.environ.get("RANK")
    first = rank in (None, "0")
    try:
        app = import_module("float8_lab.cli.app")  # not before: extras may not be installed
        code = app.command(args=words, prog_name="float8", standalone_mode=first) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        missing = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and missing in _EXTRAS:
            needs = f"the command line needs {missing}, which is not installed"
            return _fail(f"{needs}: run {GET_EXTRAS}"), False
        if type(error).__module__.partition(".")[0] in ("typer", "click"):
            return getattr(error, "exit_code", 1), not first  # wrong words, which the first told
        elsewhere = isinstance(error, RankFailedError) or (is_for_all(error) and not first)
        if rank is not None and not elsewhere:
            _error_handler().record_exception(error)
        if not isinstance(error, (LabError, ValueError, OSError)):
            if rank is None:
                raise
            sys.stderr.write(f"rank {rank}: {traceback.format_exc()}")
            return 1, elsewhere
        if "--debug" in words:
            traceback.print_exc()
        if first or not is_for_all(error):
            _fail(f"{error}{'' if isinstance(error, LabError) else ' (--debug shows where)'}")
        return getattr(error, "exit_code", 2), elsewhere
    return code, bool(code) and not first


def _error_handler() -> Any:
    """What torchrun shows the errors of."""
    return import_module("torch.distributed.elastic.multiprocessing.errors").get_error_handler()


def _fail(message: str, code: int = 2) -> int:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"rank {rank}: "
    sys.stderr.write(f"{where}error: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    sys.argv[0] = "float8"  # as results name it
    sys.exit(main())
