"""Entry point of the `float8` command: runs it and turns errors into one line and an exit code.

0: done, 1: training or a measurement failed, 2: the call is wrong, 130: interrupted.
"""

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from float8_lab.errors import GET_EXTRAS, LabError, RankFailedError

# Seconds by which the rank with the cause ends before others: torchrun shows the first one.
_LAST_WORDS = 2.0
_ARGUMENT = r"set emulate=True (in Float8LinearConfig )?to"  # of the library: here it is a switch
_EXTRAS = ("typer", "rich", "matplotlib", "numpy", "tensorboard")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the words after `float8`, by default those of this process; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rank = os.environ.get("RANK")  # of one of the processes that `torchrun` started
    with contextlib.ExitStack() as stack:
        if rank not in (None, "0"):  # only the first one writes to stdout
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        code, elsewhere = _run(words, rank)
    if rank is not None:
        if elsewhere:
            time.sleep(_LAST_WORDS)
        # After an error an orderly end would wait for other ranks; and without one, threads of
        # Gloo may abort a process that ends soon after its group.
        dist = import_module("torch.distributed")
        if arguments is None or (code and dist.is_available() and dist.is_initialized()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


def _run(words: list[str], rank: str | None) -> tuple[int, bool]:
    """Parse and run; what is the user's to know becomes a line.

    Returns the exit code, and whether another rank has the cause, and tells it.
    """
    first = rank in (None, "0")
    where = "" if first else f"rank {rank}: "
    try:
        app = import_module("float8_lab.cli.app")  # not before: extras may not be installed
        code = app.command(args=words, prog_name="float8", standalone_mode=first) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        missing = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and missing in (*_EXTRAS, "peft", "transformers"):
            needs = f"the command line needs {missing}, which is not installed"
            get = GET_EXTRAS if missing in _EXTRAS else f"pip install {missing}"
            error = LabError(f"{needs}: run {get}")
        if type(error).__module__.partition(".")[0] in ("typer", "click"):
            return getattr(error, "exit_code", 1), not first  # wrong words, which the first told
        elsewhere = isinstance(error, RankFailedError)
        if rank is not None and not elsewhere:  # for what torchrun shows at the end
            errors = import_module("torch.distributed.elastic.multiprocessing.errors")
            errors.get_error_handler().record_exception(error)
        expected = isinstance(error, (LabError, ValueError, OSError))
        if not expected and rank is None:
            raise
        if not expected or "--debug" in words:
            sys.stderr.write(f"{where}{traceback.format_exc()}")
        if expected:
            hint = "" if isinstance(error, LabError) else " (--debug shows where)"
            text = re.sub(_ARGUMENT, "add +emulate to the recipe to", " ".join(str(error).split()))
            sys.stderr.write(f"{where}error: {text}{hint}\n")
        return getattr(error, "exit_code", 2 if expected else 1), elsewhere
    return code, bool(code) and not first


if __name__ == "__main__":
    sys.argv[0] = "float8"  # as results name it
    sys.exit(main())
