"""Many tensors cast by one kernel, bit for bit as each by itself."""

import pytest
import torch
from torch import Tensor

from float8.config import CastConfig
from float8.fsdp import foreach_cast
from float8.quantize import scales_of
from kernels.float8_codes import FORMATS, assert_same, awkward, special

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = (17, 33), (1, 1), (0, 5), (3, 1365), (1, 4096), (2, 4096), (130, 150), (0, 0)


def check(
    tensors: list[Tensor], scales: list[Tensor], dtype: torch.dtype, via: torch.dtype
) -> None:
    rounded = tensors[0].dtype != via
    got = foreach_cast._cast_triton(tensors, scales[0], dtype, rounded)
    cpu = [scale.cpu() for scale in scales]
    plain = foreach_cast.foreach_cast(
        [x.cpu() for x in tensors], cpu, CastConfig(target_dtype=dtype), via
    )
    assert_same([x.cpu() for x in got], plain)


@pytest.mark.parametrize(
    ("source", "via"), [(FP32, BF16), (FP32, FP32), (BF16, BF16), (torch.float16, torch.float16)]
)
def test_each_as_by_itself(
    source: torch.dtype, via: torch.dtype, triton_device: torch.device
) -> None:
    for dtype in FORMATS:
        tensors = [awkward(shape, source).to(triton_device) for shape in SHAPES]
        tensors.append(special(source).to(triton_device))  # with Inf and NaN
        config = CastConfig(target_dtype=dtype)
        full = [x for x in tensors if x.numel()]
        scales = scales_of([x if x.numel() else full[0] for x in tensors], config, via)
        check(tensors, scales, dtype, via)


def test_addresses_of_any_alignment(triton_device: torch.device) -> None:
    x = awkward((70, 90), FP32).to(triton_device).flatten()
    tensors = [x[1:5000], x[5000:], x[:5000]]
    check(tensors, scales_of(tensors, CastConfig(), BF16), FORMATS[0], BF16)
