"""Each op: what torch asks of it, as opcheck knows it; and ops without Triton."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from float8.config import CastConfig, ScalingGranularity
from float8.experts.kernels.cast_groups import cast_groups
from float8.kernels.amax import amax_reference
from float8.kernels.runtime import ops
from float8.quantize import Cast
from float8.weights import held as held_weights
from float8.weights.held import hold
from kernels.float8_codes import FORMATS
from support.devices import E4M3, on_devices
from support.forks import run_program


def tensors(device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(17, 33, device=device)
    return x, torch.tensor(0.1, device=device), torch.tensor(0.0, device=device)


Args = Iterator[tuple[Any, ...]]


def of_amax(device: str) -> Args:
    yield from ((torch.randn(shape, device=device),) for shape in ((3, 4), (17,), ()))


def of_cast(device: str) -> Args:
    x, scale, _ = tensors(device)
    layouts = (True, True, True), (True, False, False), (False, True, False)
    for n, flags in enumerate(layouts):
        yield x.t() if n % 2 else x, scale, None, None, FORMATS[n % 2], *flags
    yield x, None, None, None, E4M3, True, False, False, True
    yield x, scale, None, None, E4M3, True, True, False, False, torch.bfloat16
    x = torch.randn(17, 260, device=device)
    of_all = itertools.product(((1, None), (1, 128), (128, 128)), layouts)
    for n, (of, flags) in enumerate(of_all):
        yield x.t() if n % 2 else x, None, *of, E4M3, *flags, n % 2 == 0


def of_cast_delayed(device: str) -> Args:
    yield *tensors(device), E4M3, True, False, False, False, True


def of_transpose(device: str) -> Args:
    # uint8, because opcheck cannot compare results in float8.
    data = torch.randint(0, 256, (17, 33), dtype=torch.uint8, device=device)
    yield (data,)
    yield data, torch.ones((), device=device)


def of_count(device: str) -> Args:
    x = torch.randn(17, 33, device=device)
    yield x, x.to(E4M3), torch.ones((), device=device), False
    yield x, x.to(E4M3), None, True


def of_tally(device: str) -> Args:
    numbers, totals = (torch.ones(n, dtype=torch.float64, device=device) for n in (6, 8))
    yield numbers, totals, torch.ones((), dtype=torch.int64), True


def of_scaled_mm(device: str) -> Args:
    a, b = (torch.randn(rows, 32, device=device).to(E4M3) for rows in (17, 48))
    for dtype in torch.float32, torch.bfloat16:
        yield a, b, *(torch.ones((), device=device) for _ in range(2)), dtype


def of_times_held(device: str) -> Args:
    squares = ScalingGranularity.BLOCK_128x128
    for n, (experts, of) in enumerate((((), None), ((3,), None), ((3,), squares))):
        weight = torch.nn.Parameter(torch.randn(*experts, 32, 48, device=device))
        spec = CastConfig(scaling_granularity=of or ScalingGranularity.TENSORWISE)
        kept = hold(weight, Cast(spec))
        offs = of_groups(device)[2] if experts else None
        for current, columns in ((False, n == 1), (True, n != 1)):
            data = kept.col_data if columns else kept.row_data
            scale = kept.col_scale if columns else kept.row_scale
            a = torch.randn(40, data.shape[-1], device=device).to(E4M3)
            of_a = torch.ones(40 if experts else (), device=device)
            of_a = torch.ones(1, 40, device=device).t() if of else of_a
            covers = f"block_1x128 {of.value}" if of else "tensorwise tensorwise"
            # opcheck copies the weight, which has another address then.
            with mock.patch.object(held_weights, "is_current", return_value=current):
                yield (
                    a, of_a, data, scale, weight.detach(), offs, False, 40, data.shape[-2], columns,
                    False, f"{covers} False {bool(experts)} False", torch.bfloat16,
                )  # fmt: skip


def of_matmul(device: str) -> Args:
    b, one = torch.randn(32, 48, device=device).to(E4M3), torch.ones((), device=device)
    for rows in (16, 0):
        a = torch.randn(rows, 48, device=device).to(E4M3)
        yield (
            a,
            one,
            b,
            one.clone(),
            rows,
            32,
            "tensorwise tensorwise False False False",
            torch.bfloat16,
        )


def of_groups(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, the same a second time, and where their three groups end."""
    x = torch.randn(40, 48, device=device)
    return x, x + 1, torch.tensor([5, 5, 37], dtype=torch.int32, device=device)


def of_cast_groups(device: str) -> Args:
    x, offs = of_groups(device)[0], torch.tensor([5, 5, 40], dtype=torch.int32, device=device)
    for row, col, one_scale in itertools.product((False, True), repeat=3):
        if row or (col and one_scale):  # nothing is left unwritten
            yield x, offs, None, E4M3, row, col, 256, one_scale, False
    for row in (False, True):
        yield x, offs, 32 if row else 128, E4M3, row, True, 256, False, row


def of_grouped_matmul(device: str) -> Args:
    x, other, offs = of_groups(device)
    spec = Cast(CastConfig(target_dtype=E4M3))
    a = cast_groups(x, spec, offs, row=True, col=True)
    b = cast_groups(other, spec, offs, col=True)
    w = torch.randn(3, 32, 48, device=device).to(E4M3)
    rows = *a.row, w, torch.ones(3, 32, device=device), offs
    columns = *a.col[:2], *b.col[:2], a.col.ends
    for powers_of_2 in (False, True):
        how = None, f"axiswise axiswise False True {powers_of_2}", torch.bfloat16
        yield *rows, *how
        yield *columns, *how
    runs = Cast(CastConfig(target_dtype=E4M3, scaling_granularity=ScalingGranularity.BLOCK_1x128))
    a, b = (cast_groups(each, runs, offs, row=True, col=True) for each in (x, other))
    squares = torch.randn(3, 32, 128, device=device).to(E4M3), torch.ones(3, 1, 4, device=device)
    yield *a.row, *squares, offs, None, "block_1x128 block_128x128 False True False", torch.bfloat16
    how = "block_1x128 block_1x128 False True False", torch.bfloat16
    yield *a.col[:2], *b.col[:2], a.col.ends, 40, *how


ARGUMENTS: dict[str, Callable[[str], Args]] = {
    "amax": of_amax,
    "cast": of_cast,
    "cast_delayed": of_cast_delayed,
    "cast_groups": of_cast_groups,
    "count": of_count,
    "grouped_matmul": of_grouped_matmul,
    "grouped_outer": lambda device: iter([of_groups(device)]),
    "matmul": of_matmul,
    "scaled_mm": of_scaled_mm,
    "scale_without_gradients": lambda device: iter([(torch.tensor(0.5, device=device),)]),
    "tally": of_tally,
    "times_held": of_times_held,
    "transpose": of_transpose,
}
EVERY_OP = pytest.mark.parametrize("name", sorted(vars(ops.cpu)))


@on_devices
@EVERY_OP
@pytest.mark.parametrize("all_of_all", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_opcheck(device: str, name: str, all_of_all: bool) -> None:
    """torch's own checks: schema, fake implementation; once dynamic shapes under AOTAutograd."""
    checks = "test_schema", "test_faketensor"
    with mock.patch("torch.allclose", allclose):
        for n, args in enumerate(ARGUMENTS[name](device)):
            more = "test_autograd_registration", "test_aot_dispatch_dynamic"
            how = (*checks, *more) if all_of_all or n == 0 else checks
            torch.library.opcheck(getattr(torch.ops.float8, name).default, args, test_utils=how)


def allclose(a: Tensor, b: Tensor, *, of_torch=torch.allclose, **how: Any) -> bool:
    """torch's, which cannot compare float8."""
    if a.dtype in FORMATS:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return of_torch(a, b, **how)


@EVERY_OP
def test_ops_are_compliant_with_the_compiler(name: str) -> None:
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.float8, name).default.tags


@pytest.mark.xdist_group("programs")
def test_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None  # makes `import triton` raise ImportError
import torch
from float8 import kernels
from float8.config import CastConfig, ScalingGranularity
assert kernels.amax(torch.tensor([1.0, -2.0])).item() == 2.0
spec = CastConfig(target_dtype=torch.float8_e5m2)
row, col = kernels.cast(torch.ones(3, 5), spec, row=True, col=True)
assert row.data.shape == (3, 16) and col.data.shape == (16, 16)
assert kernels.transpose_bytes(row.data).shape == (16, 16)
"""
    done = run_program(program)
    assert done.returncode == 0, done.stderr


def test_absence_of_triton_is_said_once() -> None:
    ops._warn_without_triton.cache_clear()
    op = ops.without_triton(amax_reference)
    with pytest.warns(UserWarning, match="Install triton"):
        assert op(torch.ones(2)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(torch.ones(2)) == 1
