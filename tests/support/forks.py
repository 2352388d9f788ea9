"""Programs run in forks of a process that has imported some modules and never ran anything.

Each is as alone as in a process of its own, but for these imports, which take most of its time.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

PEERS = ("lightning", "peft", "transformers.trainer", "transformers.models.llama.modeling_llama")
EAGER = ("float8", "torch._dynamo")
"""What samples and examples that compile nothing import: torch's optimizers ask for Dynamo."""
TORCH = (*EAGER, "torch._inductor.compile_fx", "graphs", "titan_datasets")
"""What others import; `graphs` makes no code of Inductor, `titan_datasets` needs no `datasets`."""
COMPILER = (*TORCH, *PEERS)
"""And what those of other libraries import."""


def run_program(
    program: str, imported: tuple[str, ...] = ("torch",), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `program` as a script, alone in an empty working directory.

    Args:
        program: its code.
        imported: modules that are there already; those that are not installed are left out.
        env: environment variables.
    """
    server = _server(imported)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(program)
        server.stdin.write(json.dumps([folder, env]) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(["program.py"], code, out, err)


@functools.cache
def _server(imported: tuple[str, ...]) -> Any:
    command = [sys.executable, __file__, *imported]  # which ends when its stdin does
    # Threads that wait for another process on their core spin, which takes most of the time.
    pipe, env = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
    atexit.register(server.__exit__, None, None, None)  # closes its pipes and waits for its end
    return server


def _serve() -> None:
    for name in sys.argv[1:]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for line in sys.stdin:
        folder, env = json.loads(line)
        child = os.fork()
        if not child:
            _run(folder, env)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


def _run(folder: str, env: dict[str, str]) -> None:
    code = 1
    try:
        os.chdir(folder)
        os.environ.update(env)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            flags = os.O_RDWR | os.O_CREAT
            os.dup2(os.open(name if number else os.devnull, flags), number)
        sys.argv, sys.path[0] = ["program.py"], folder
        runpy.run_path("program.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
