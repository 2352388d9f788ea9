"""Shapes by name and one by one; the device that is asked for."""

import pytest
import torch

from float8_lab.bench.shapes import SHAPE_SETS, parse_shape, select_shapes
from float8_lab.bench.timing import input_sets
from float8_lab.device import float8_device


def test_sets_and_given_shapes_add_up() -> None:
    selected = select_shapes(["llama3-8b"], ["64, 32,16"])
    assert selected["given"] == ((64, 32, 16),)
    assert selected["llama3-8b"][2] == (8192, 4096, 28672)
    every = [str(shape) for members in SHAPE_SETS.values() for shape in members]
    assert list(map(str, map(parse_shape, every))) == every
    for text in ("", "64,64,64,64", "a,64,64", "0,64,64", "8,8,8"):
        with pytest.raises(ValueError, match="expected M,K,N"):
            parse_shape(text)


@pytest.mark.gpu
def test_input_sets_outgrow_the_cache() -> None:
    device = float8_device("cuda")
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    assert input_sets(1 << 24, device) * (1 << 24) >= 4 * cache
    assert input_sets(1 << 40, device) == 2
    with pytest.raises(ValueError, match="'cuda:99' is not there: PyTorch sees"):
        float8_device("cuda:99")
