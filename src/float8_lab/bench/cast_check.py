"""The kernels against their plain-torch twins, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.convert.measure import WrongResultError
from float8.formats import E4M3, E5M2
from float8.kernels.amax import amax_reference
from float8.kernels.cast import cast_reference
from float8.kernels.transpose import transpose_reference
from float8.quantize.history import DelayedScale
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec

_PAIRS = (
    (torch.bfloat16, E4M3),
    (torch.bfloat16, E5M2),
    (torch.float16, E4M3),
    (torch.float32, E5M2),
)
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"row": True, "col": True, "pad_rows": True},
    {"row": True, "col": False, "pad_rows": False},
    {"row": False, "col": True, "pad_rows": False},
)
# NaN and Inf of either sign, -0.0; a subnormal of each dtype is added.
_SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0)


def check_tensor(x: Tensor) -> None:
    """Compare everything that is timed on `x` [R, C] bf16.

    Raises:
        WrongResultError: A result differs; says which.
    """
    scale = torch.tensor(0.01, device=x.device)
    what = f"of {tuple(x.shape)}"
    for y in (x, x.t()):
        _agree(f"amax {what}", kernels.amax(y), amax_reference(y))
        _check_casts(y, scale, E4M3, what)
    amax = torch.zeros((), device=x.device)
    spec, state = CastSpec(E4M3), DelayedScale(scale, amax)
    dynamic = kernels.cast_dynamic(x, spec, row=True, col=True)
    delayed = kernels.cast_delayed(x, spec, state, row=True, col=True)
    _agree(f"amax of cast_delayed {what}", amax, amax_reference(x))
    for name, done in (("dynamic", dynamic), ("delayed", delayed)):
        expected = cast_reference(x, done.scale, E4M3, True, True)
        _agree_all(f"cast_{name} {what}", (done.row, done.col), expected)
    own = amax_to_scale(amax_reference(x), E4M3, False)
    _agree(f"scale of cast_dynamic {what}", dynamic.scale, own)
    _agree(f"scale of cast_delayed {what}", delayed.scale, scale)
    data = kernels.cast(x, scale, E4M3, row=True, col=False)[0]
    assert data is not None
    turned = kernels.transpose_bytes(data)
    _agree(f"transpose {what}", turned, data.view(torch.uint8).t().contiguous())


def check_case(size: tuple[int, int], device: torch.device) -> int:
    """Compare on awkward values and strides, in all dtypes; returns how many comparisons.

    Raises:
        WrongResultError: A result differs; says which.
    """
    count = 0
    scale = torch.tensor(0.0371, device=device)
    for source, dtype in _PAIRS:
        x = _awkward(size, source, device)
        for y in (x, x.t(), x[:, ::2], x[:1].expand(40, -1)):
            what = f"of {source} {tuple(y.shape)} with strides {y.stride()}"
            _check_casts(y, scale, dtype, what)
            finite = y.nan_to_num(1.0, 2.0, -2.0)
            _agree(f"amax {what}", kernels.amax(finite), amax_reference(finite))
            count += len(_LAYOUTS) + 1
            if y.isnan().any():
                expected = torch.tensor(True, device=device)
                _agree(f"amax of NaN {what}", kernels.amax(y).isnan(), expected)
                count += 1
    data = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    for part in (data, data.t(), data[:, ::2]):
        _agree(
            f"transpose of {tuple(part.shape)}",
            kernels.transpose_bytes(part),
            transpose_reference(part),
        )
        count += 1
    return count


def _check_casts(x: Tensor, scale: Tensor, dtype: torch.dtype, what: str) -> None:
    for layouts in _LAYOUTS:
        got = kernels.cast(x, scale, dtype, **layouts)
        expected = cast_reference(x, scale, dtype, **layouts)
        given = [data for data in got if data is not None]
        _agree_all(f"cast to {dtype} {what}, {layouts}", given, expected)


def _awkward(size: tuple[int, int], source: torch.dtype, device: torch.device) -> Tensor:
    """Many magnitudes, with NaN, Inf, zeros of both signs and subnormals strewn in."""
    magnitudes = torch.randn(size, device=device).mul(5).exp()
    x = (torch.randn(size, device=device) * magnitudes).to(source)
    tiny = torch.finfo(source).smallest_normal / 4
    for i, value in enumerate(itertools.chain(_SPECIAL, (tiny, -tiny))):
        x.view(-1)[i * 5 :: 173] = value
    return x


def _agree_all(what: str, got: Sequence[Tensor | None], expected: Sequence[Tensor]) -> None:
    if len(got) != len(expected) or any(data is None for data in got):
        raise WrongResultError(f"{what}: a layout is missing or too many; nothing was timed")
    for a, b in zip(got, expected, strict=True):
        assert a is not None
        _agree(what, a, b)


def _agree(what: str, got: Tensor, expected: Tensor) -> None:
    if got.dtype.itemsize == 1 and got.dtype != torch.bool:
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    if not torch.equal(got, expected):
        raise WrongResultError(f"{what}: not bitwise equal to its twin; nothing was timed")
