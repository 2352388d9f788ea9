"""How far a forward has to be followed in a debugger."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import float8
from float8 import Float8Linear

LIBRARY = str(Path(float8.__file__).parent)


@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 32)], ids=["2d", "3d"])
def test_a_forward_makes_few_calls_through_few_files(shape: tuple[int, ...]) -> None:
    """In eager mode on the CPU, within the library."""
    layer, x = Float8Linear(32, 48), torch.randn(shape)
    layer(x)  # what is done once
    calls: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        layer(x)
    finally:
        sys.setprofile(before)
    assert 0 < len(calls) <= 30, calls
    assert len({file for file, _ in calls}) <= 8, calls
