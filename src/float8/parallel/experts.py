"""Expert parallel: tokens are sent to the ranks of their experts, and their gradients back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from float8.autograd import once_differentiable
from float8.config import CastConfig, ScalingGranularity
from float8.formats import E4M3, GEMM_ALIGNMENT, HIGH_PRECISION_DTYPES
from float8.kernels.dequantise import dequantised_by_kernel
from float8.quantize import Cast, quantize
from float8.scales import Operand

_ROWS = Cast(
    CastConfig(target_dtype=E4M3, scaling_granularity=ScalingGranularity.AXISWISE, power_of_2=True)
)
"""Under such scales a token that has arrived is cast once more without another rounding."""


def all_to_all_in_float8(
    input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Send rows to other ranks in float8, as `all_to_all_single_autograd` does in 16 bits.

    For the dispatch of tokens to experts on other ranks: K + 4 instead of 2 * K bytes for each
    token, and for its gradient on the way back. Each row is rounded to e4m3 under a scale of its
    own, a power of two: casting it again for a GEMM with a scale per row changes no value, nor
    does a cast to 1x128 with `round_scales_to_power_of_2`. Without that, as in the recipe
    `blockwise`, each value is rounded a second time, which takes 3 dB of SQNR. Outputs of experts,
    which are added up, should be sent in 16 bits.

    Args:
        input: [T, K] float32, bfloat16 or float16, the rows for rank 0 first. K % 16 == 0.
        output_splits: how many rows come from each rank.
        input_splits: how many rows go to each rank; their sum is T.
        group: the ranks.

    Returns:
        [sum(output_splits), K], dtype of the input; differentiable once.

    Raises:
        TypeError: the dtype is none of those.
        ValueError: `input` is not [T, K], or the splits are not those of T rows and all ranks.
    """
    if input.dtype not in HIGH_PRECISION_DTYPES:
        expected = f"one of {HIGH_PRECISION_DTYPES}"
        raise TypeError(f"all_to_all_in_float8: got dtype {input.dtype}, expected {expected}")
    if input.dim() != 2 or input.shape[1] % GEMM_ALIGNMENT:
        raise ValueError(
            f"all_to_all_in_float8: got shape {tuple(input.shape)}, expected [T, K] with K a "
            f"multiple of {GEMM_ALIGNMENT}"
        )
    splits, ranks = ([*output_splits], [*input_splits]), group.size()
    if any(len(each) != ranks for each in splits) or sum(splits[1]) != len(input):
        raise ValueError(
            f"all_to_all_in_float8: got splits {splits} for {len(input)} rows, expected one number "
            f"for each of {ranks} ranks, and input_splits that sum up to the rows"
        )
    return _AllToAll.apply(input, *splits, group.group_name)  # type: ignore[no-any-return, no-untyped-call]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, output_splits: list[int], input_splits: list[int], group: str
    ) -> Tensor:
        ctx.back = input_splits, output_splits, group
        return _sent(input, output_splits, input_splits, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _sent(grad_output, *ctx.back), None, None, None


def _sent(x: Tensor, output_splits: list[int], input_splits: list[int], group: str) -> Tensor:
    """Cast rows, send bytes and scales, and return those that arrive in the dtype of `x`."""
    row, arrived = quantize(x, _ROWS, row=True).row, []
    for sent in (row.data.view(torch.uint8), row.scale.view(-1, 1)):  # few backends know float8
        got = torch.ops._c10d_functional.all_to_all_single(
            sent.contiguous(), output_splits, input_splits, group
        )
        arrived.append(torch.ops._c10d_functional.wait_tensor(got))
    data, scale = arrived
    values, covers = Operand(data.view(E4M3), scale), _ROWS.how.scaling_granularity
    return dequantised_by_kernel(values, covers, x.dtype)
