import pytest
import torch
from torch import Tensor

from float8.formats import ceil16
from float8.kernels.tiles import tile_launch
from float8.kernels.transpose import (
    BYTE_DTYPES,
    launch_config,
    transpose_bytes,
    transpose_reference,
    transpose_triton,
)
from kernels.float8_codes import same_bytes

byte_dtypes = pytest.mark.parametrize("dtype", BYTE_DTYPES, ids=str)
SHAPES = [(1, 1), (17, 33), (1, 300), (130, 7), (64, 48), (0, 5), (5, 0)]
VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[::2, 1:],
    "expanded": lambda x: x[:1].expand(9 * len(x[:1]), -1),
}


def random_bytes(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)


def assert_transposed(out: Tensor, data: Tensor) -> None:
    R, C = data.shape
    expected = torch.zeros(ceil16(C), ceil16(R), dtype=torch.uint8)
    expected[:C, :R] = data.cpu().view(torch.uint8).t()
    assert same_bytes(out.cpu(), expected.view(data.dtype))


@byte_dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("view", VIEWS)
def test_reference(shape: tuple[int, int], dtype: torch.dtype, view: str) -> None:
    data = VIEWS[view](random_bytes(shape, dtype))
    out = transpose_reference(data)
    assert_transposed(out, data)
    assert data.numel() == 0 or out.data_ptr() != data.data_ptr()
    assert same_bytes(transpose_bytes(data), out)


class TestTriton:
    """On the GPU, or in a process of test_interpreter.py."""

    @byte_dtypes
    def test_dtypes(self, dtype: torch.dtype, triton_device: torch.device) -> None:
        data = random_bytes((36, 50), dtype).to(triton_device)
        assert_transposed(transpose_triton(data), data)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, shape: tuple[int, int], triton_device: torch.device) -> None:
        data = random_bytes(shape, torch.float8_e4m3fn).to(triton_device)
        assert_transposed(transpose_triton(data), data)

    @pytest.mark.parametrize("view", VIEWS)
    def test_strides(self, view: str, triton_device: torch.device) -> None:
        data = VIEWS[view](random_bytes((40, 72), torch.float8_e5m2).to(triton_device))
        assert_transposed(transpose_triton(data), data)

    @pytest.mark.parametrize("tile", [(128, 128, 8), (64, 64, 4), (32, 64, 4)])
    @pytest.mark.parametrize("fit", ["even", "words", "bytes"])
    @pytest.mark.parametrize("group", [1, 8])
    def test_launch_configurations(
        self, tile: tuple[int, int, int], fit: str, group: int, triton_device: torch.device
    ) -> None:
        R = {"even": 3 * tile[0], "words": tile[0] + 4, "bytes": tile[0] + 3}[fit]
        C = 2 * tile[1] if fit == "even" else tile[1] + 9
        data = random_bytes((R, C), torch.float8_e4m3fn).to(triton_device)
        config = tile_launch(R, C, *tile, group=group)
        assert config.even == (fit == "even")
        assert_transposed(transpose_triton(data, config=config), data)


def test_launch_config_is_pure() -> None:
    assert launch_config(8192, 4096, sms=132) == launch_config(8192, 4096, sms=132)
    assert launch_config(8192, 4096, sms=132).even
    assert launch_config(16, 16, sms=132).programs == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (4100, 1024), (1001, 4097)])
def test_gpu_matches_reference(shape: tuple[int, int]) -> None:
    data = random_bytes(shape, torch.float8_e4m3fn).cuda()
    assert same_bytes(transpose_triton(data), transpose_reference(data))


@pytest.mark.gpu
def test_more_elements_than_31_bits_count() -> None:
    data = torch.randint(0, 256, (70_016, 32_768), dtype=torch.uint8, device="cuda")
    assert data.numel() > 2**31
    out = transpose_triton(data)
    for first in range(0, 70_016, 7168):
        part = slice(first, first + 7168)
        assert torch.equal(out[:, part], data[part].t())


def test_wrong_input_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"torch\.float32 tensor .* expected float8_e4m3fn"):
        transpose_bytes(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\).* expected 2 dimensions"):
        transpose_bytes(torch.ones(2, 2, 2, dtype=torch.uint8))
