"""A wing comes off: delete its files and its names in `float8/__init__.py`, and the core trains."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import float8

LIBRARY = Path(float8.__file__).parent
WINGS = {
    "watch": (["numerics.py"], ["Watch"]),
    "memory of activations": (["memory"], ["activations_in_float8", "save_gemm_outputs"]),
    "integrations": (["integrations"], []),
    "names of torchao": (
        [p.name for p in LIBRARY.glob("*.py") if re.match("float8_|fsdp_utils", p.name)],
        [],
    ),
}
TESTS = ["linear/test_values.py", "convert/test_convert.py", "tensor/test_float8_tensor.py"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("wing", WINGS)
def test_the_core_trains_without(wing: str, tmp_path: Path) -> None:
    files, names = WINGS[wing]
    shutil.copytree(LIBRARY, tmp_path / "float8", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "float8" / name for name in files):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    init = tmp_path / "float8/__init__.py"
    for name in names:
        lines = init.read_text().splitlines(keepends=True)
        init.write_text("".join(line for line in lines if not re.search(rf"\b{name}\b", line)))
    tests = [str(Path(__file__).parent / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    path = {"PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""}
    marks = ["-m", "not exhaustive", "--rootdir", str(Path(__file__).parents[1])]
    done = subprocess.run(
        [*command, *marks], env=os.environ | path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d+ passed", done.stdout), done.stdout
