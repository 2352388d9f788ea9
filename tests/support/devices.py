"""The devices and dtypes that tests are parametrized over."""

import pytest
import torch

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8_MAX = {E4M3: 448.0, E5M2: 57344.0}


def on_devices(test):
    """Run a test on the CPU and, where there is one, on a GPU: it takes `device`."""
    return pytest.mark.parametrize("device", DEVICES)(test)
