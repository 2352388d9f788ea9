"""The Triton tests of this folder run in Triton's interpreter, where no GPU can run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the Triton kernels itself")
def test_kernels_in_interpreter(pytestconfig: pytest.Config) -> None:
    names = "test_groups.py", "test_triton.py"
    paths = [str(Path(__file__).with_name(name)) for name in names]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *paths]
    command += ["-m", pytestconfig.getoption("markexpr")]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        assert re.search(rf"{name}::.* PASSED", done.stdout), done.stdout
