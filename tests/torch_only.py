"""Runs the code samples that import torch and float8 only, where nothing else is installed.

`make test-torch-only` makes that environment: torch and the built wheel, neither NumPy nor pytest.
"""

import importlib.metadata
import importlib.util
import re
import sys

import float8
from support.forks import run_program
from support.ranks import Ranks
from support.samples import Sample, run_on_ranks, samples


def plain(language: str) -> list[Sample]:
    return [sample for sample in samples(language) if sample.needs <= {"torch", "float8"}]


def broken_links() -> list[str]:
    """Those of the wheel's description that lead into the repository, which it has not."""
    description = str(importlib.metadata.metadata("float8").json["description"])
    return re.findall(r"\]\((?!https?://)([^)\s]*)\)", description)


def main() -> None:
    if importlib.util.find_spec("numpy") is not None:
        sys.exit("got an environment with NumPy, expected torch and float8 only")
    if "site-packages" not in float8.__file__:
        sys.exit(f"got {float8.__file__}, expected float8 as an installed wheel")
    if (version := importlib.metadata.version("float8")) != float8.__version__:
        sys.exit(f"got a wheel of {version}, which says that it is {float8.__version__}")
    if broken := broken_links():
        sys.exit(f"the wheel's description has links to nowhere: {', '.join(broken)}")
    alone, together = plain("python"), plain("py")
    if len(alone) < 5 or len(together) < 4:
        sys.exit(f"got {len(alone)} + {len(together)} samples, expected at least 5 + 4")
    failed = []
    for sample in alone:
        done = run_program(sample.code)
        if done.returncode:
            failed.append(f"{sample.name}\n{done.stderr}")
    two = Ranks(2)
    for sample in together:
        try:
            two.run(run_on_ranks, sample.code)
        except AssertionError as error:
            failed.append(f"{sample.name}\n{error}")
    two.stop()
    print(*failed, f"{len(alone)} + {len(together)} samples, {len(failed)} failed", sep="\n")  # noqa: T201
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
