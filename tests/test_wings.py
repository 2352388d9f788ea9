"""A wing comes off: delete its files and its lines in two lists, and the core trains."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import float8
from support.forks import run_program

LIBRARY = Path(float8.__file__).parent


class Wing(NamedTuple):
    """What to delete of the library; at most three further lines change."""

    files: list[str]
    names: Sequence[str] = ()  # in `float8/__init__.py`
    without: str = ""  # words in names of the core's tests that use the wing
    edits: Sequence[tuple[str, str, str]] = ()


WINGS = {
    "delayed scaling": Wing(
        ["delayed"],
        ["sync_float8_amax_and_scale_history", "forget_float8_amax"],
        "delayed or -del or del- or valid_state or own_kind_of_scale",
        [
            ("linear/module.py", "from float8.delayed.state import StatefulLayer", ""),
            ("linear/module.py", "import not_copied", "import Float8Module, not_copied"),
            ("linear/module.py", "(StatefulLayer, nn.Linear)", "(Float8Module, nn.Linear)"),
        ],
    ),
    "held and only weights": Wing(
        ["weights"],
        ["update_float8_weights"],
        "held or only",
        [
            ("linear/base.py", "from float8.weights.held import HoldsWeights", ""),
            ("linear/base.py", "from float8.weights.only import OnlyWeights", ""),
            ("linear/base.py", "(HoldsWeights, OnlyWeights, Plain", "(Plain"),
        ],
    ),
    "experts": Wing(["experts"], ["grouped_linear"], "experts or grouped"),
    "FSDP2": Wing(
        ["fsdp", "experts/gather.py"],
        ["precompute_float8_dynamic_scale_for_fsdp"],
        "gather",
        [("experts/__init__.py", "from float8.experts.gather import", "#")],
    ),
    "tensor and data parallel": Wing(["parallel"]),
    "checkpoints": Wing(["checkpoints"]),
    "watch": Wing(["numerics.py"], ["Watch"]),
    "memory of activations": Wing(["memory"], ["activations_in_float8", "save_gemm_outputs"]),
    "steps of optimizers": Wing(["step.py"], ["attach_to_optimizer"], "delayed or held"),
    "integrations": Wing(["integrations"]),
    "names of torchao": Wing(
        [path.name for path in LIBRARY.glob("*.py") if re.match("float8_|fsdp_utils", path.name)]
    ),
}
TESTS = ["linear/test_values.py", "convert/test_convert.py"]


def without_lines(path: Path, words: Sequence[str]) -> None:
    """Delete the lines of a file that have one of `words`."""
    lines = path.read_text().splitlines(keepends=True)
    kept = [x for x in lines if not any(re.search(rf"\b{word}\b", x) for word in words)]
    path.write_text("".join(kept))


@pytest.mark.exhaustive
@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("name", WINGS)
def test_the_core_trains_without(name: str, tmp_path: Path) -> None:
    wing, library = WINGS[name], tmp_path / "float8"
    shutil.copytree(LIBRARY, library, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (library / each for each in wing.files):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    without_lines(library / "__init__.py", wing.names)
    modules = "|".join(each.removesuffix(".py").replace("/", ".") for each in wing.files)
    table = library / "wings.py"
    lines = re.findall(rf"from float8\.(?:{modules})\b.* import (.*)", table.read_text())
    without_lines(table, [word for line in lines for word in line.split(", ")])
    assert len(wing.edits) <= 3
    for name, old, new in wing.edits:
        file = library / name
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
    tests = Path(__file__).parent
    command = ["-q", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    command += ["-k", f"not ({wing.without})"] if wing.without else []
    command += ["-c", str(tests.parent / "pyproject.toml"), "--rootdir", str(tests.parent)]
    command += [str(tests / each) for each in TESTS]
    program = f"import sys, pytest; sys.path.insert(0, {str(tmp_path)!r}); "
    program += f"code = pytest.main({command}); import float8; "
    program += f"assert float8.__file__ == {str(library / '__init__.py')!r}; sys.exit(code)"
    done = run_program(program, PYTEST_ADDOPTS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d+ passed", done.stdout), done.stdout
