"""Entry point of the `float8` command: runs it and turns errors into one line and an exit code.

Exit codes: 0 done, 1 the training or a measurement failed, 2 something about the call is wrong,
130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from float8.bench.ranks import RankFailedError
from float8.measure import WrongResultError
from float8.trainer.errors import OutOfMemoryError, TrainerError, TrainingDivergedError

_EXTRAS = ("typer", "rich", "matplotlib", "numpy")

_cli: ModuleType | None
try:
    from float8.cli import app as _cli
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
    session = _cli.Session()
    try:
        _cli.run(list(sys.argv[1:] if arguments is None else arguments), session)
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


def _fail(message: str, code: int = 2) -> int:
    sys.stderr.write("error: " + " ".join(message.split()) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
