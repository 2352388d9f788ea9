"""Runs the Triton tests of this folder in Triton's interpreter, where no GPU can run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the Triton kernels itself")
@pytest.mark.parametrize(
    "kernel",
    ["amax", "cast", "cast_axiswise", "cast_blockwise", "cast_scales", "fused", "transpose"],
)
def test_kernel_in_interpreter(kernel: str, pytestconfig: pytest.Config) -> None:
    path = Path(__file__).with_name(f"test_{kernel}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    command += ["-m", pytestconfig.getoption("markexpr")]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout
