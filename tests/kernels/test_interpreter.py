"""The Triton tests of this folder run in Triton's interpreter, where no GPU can run them."""

import re
from pathlib import Path

import pytest
import torch

from support.forks import run_program


@pytest.mark.xdist_group("programs")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the Triton kernels itself")
def test_kernels_in_interpreter(pytestconfig: pytest.Config) -> None:
    names = "test_groups.py", "test_triton.py", "test_foreach_cast.py"
    paths = [str(Path(__file__).with_name(name)) for name in names]
    chosen = pytestconfig.getoption("markexpr")
    marks = f"not gpu and ({chosen})" if chosen else "not gpu"
    command = ["-v", "-p", "no:cacheprovider", "-m", marks]
    command += ["-c", str(pytestconfig.inipath), "--rootdir", str(pytestconfig.rootpath), *paths]
    program = f"import sys, pytest; sys.exit(pytest.main({command}))"
    done = run_program(program, TRITON_INTERPRET="1", PYTEST_ADDOPTS="")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        assert re.search(rf"{name}::.* PASSED", done.stdout), done.stdout
