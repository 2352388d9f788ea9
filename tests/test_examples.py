"""Every example runs to its end."""

from pathlib import Path

import pytest

from support.forks import COMPILER, run_program

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    done = run_program(example.read_text(), COMPILER)
    assert done.returncode == 0, done.stderr
