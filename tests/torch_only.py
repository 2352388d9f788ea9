"""Runs the code samples that import torch and float8 only, where nothing else is installed.

`make test-torch-only` makes that environment: neither NumPy nor pytest is there.
"""

import importlib.util
import sys

from support.forks import run_program
from support.ranks import Ranks
from support.samples import Sample, run_on_ranks, samples


def plain(language: str) -> list[Sample]:
    return [sample for sample in samples(language) if sample.needs <= {"torch", "float8"}]


def main() -> None:
    if importlib.util.find_spec("numpy") is not None:
        sys.exit("got an environment with NumPy, expected torch and float8 only")
    alone, together = plain("python"), plain("py")
    if min(len(alone), len(together)) < 5:
        sys.exit(f"got {len(alone)} + {len(together)} samples, expected five of each at least")
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
