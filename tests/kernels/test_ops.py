import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import kernels
from float8.config import CastConfig
from float8.kernels.amax import amax_reference
from float8.kernels.cast_groups import cast_groups
from float8.kernels.runtime import ops
from float8.linear import weight as held_weights
from float8.linear.weight import hold
from float8.quantize import Cast
from float8.scales import amax_to_scale
from kernels.float8_codes import FORMATS, same_bytes

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", CPU_AND_GPU)
E4M3 = torch.float8_e4m3fn


def tensors(device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(17, 33, device=device)
    return x, torch.tensor(0.1, device=device), torch.tensor(0.0, device=device)


Args = Iterator[tuple[Any, ...]]


def of_amax(device: str) -> Args:
    yield from ((torch.randn(shape, device=device),) for shape in ((3, 4), (17,), ()))


def of_cast(device: str) -> Args:
    x, scale, _ = tensors(device)
    layouts = (True, True, True), (True, False, False), (False, True, False)
    for dtype, flags in itertools.product(FORMATS, layouts):
        yield x, scale, None, None, dtype, *flags
        yield x.t(), scale, None, None, dtype, *flags
    yield x, None, None, None, E4M3, True, False, False, True
    yield x, scale, None, None, E4M3, True, True, False, False, torch.bfloat16
    x = torch.randn(17, 260, device=device)
    for of, flags in itertools.product(((1, None), (1, 128), (128, 128)), layouts):
        for y, power_of_2 in ((x, True), (x.t(), False)):
            yield y, None, *of, E4M3, *flags, power_of_2


def of_cast_delayed(device: str) -> Args:
    yield *tensors(device), E4M3, True, False, False, False, True


def of_transpose(device: str) -> Args:
    # uint8, because opcheck cannot compare results in float8.
    data = torch.randint(0, 256, (17, 33), dtype=torch.uint8, device=device)
    yield (data,)
    yield data, torch.ones((), device=device)


def of_times_held(device: str) -> Args:
    for experts in ((), (3,)):
        weight = torch.nn.Parameter(torch.randn(*experts, 32, 48, device=device))
        kept = hold(weight, Cast(CastConfig(target_dtype=E4M3)))
        offs = of_groups(device)[2] if experts else None
        for current, columns in itertools.product((False, True), repeat=2):
            data = kept.col_data if columns else kept.row_data
            scale = kept.col_scale if columns else kept.row_scale
            a = torch.randn(40, data.shape[-1], device=device).to(E4M3)
            of_a = torch.ones(40 if experts else (), device=device)
            # opcheck copies the weight, which has another address then.
            with mock.patch.object(held_weights, "is_current", return_value=current):
                yield (
                    a, of_a, data, scale, weight.detach(), offs, False, 40, data.shape[-2], columns,
                    False, "tensorwise", "tensorwise", False, bool(experts), torch.bfloat16,
                )  # fmt: skip


def of_matmul(device: str) -> Args:
    b, one = torch.randn(32, 48, device=device).to(E4M3), torch.ones((), device=device)
    for rows in (16, 0):
        a = torch.randn(rows, 48, device=device).to(E4M3)
        how = "tensorwise", "tensorwise", False, False, torch.bfloat16
        yield a, one, b, one.clone(), rows, 32, *how


def of_groups(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, the same a second time, and where their three groups end."""
    x = torch.randn(40, 48, device=device)
    return x, x + 1, torch.tensor([5, 5, 37], dtype=torch.int32, device=device)


def of_cast_groups(device: str) -> Args:
    x, offs = of_groups(device)[0], torch.tensor([5, 5, 40], dtype=torch.int32, device=device)
    layouts = (True, True), (True, False), (False, True)
    for layout, one_scale in itertools.product(layouts, (False, True)):
        yield x, offs, E4M3, *layout, 256, one_scale, False  # nothing is left unwritten


def of_grouped_matmul(device: str) -> Args:
    x, other, offs = of_groups(device)
    a, row = (
        cast_groups(x, offs, CastConfig(target_dtype=E4M3), row=True, col=True),
        torch.ones(3, 32),
    )
    b, how = (
        cast_groups(other, offs, CastConfig(target_dtype=E4M3), row=False, col=True),
        (True, False),
    )
    w = torch.randn(3, 32, 48, device=device).to(E4M3)
    yield *a.row, w, row.to(device), offs, *how, torch.bfloat16
    yield *a.col, *b.col, a.ends, *how, torch.bfloat16


ARGUMENTS: dict[str, Callable[[str], Args]] = {
    "amax": of_amax,
    "cast": of_cast,
    "cast_delayed": of_cast_delayed,
    "cast_groups": of_cast_groups,
    "grouped_matmul": of_grouped_matmul,
    "grouped_outer": lambda device: iter([of_groups(device)]),
    "matmul": of_matmul,
    "times_held": of_times_held,
    "transpose": of_transpose,
}
EVERY_OP = pytest.mark.parametrize("name", sorted(vars(ops.cpu)))


@devices
@EVERY_OP
def test_opcheck(device: str, name: str) -> None:
    """torch's own checks: schema, fake implementation, dynamic shapes under AOTAutograd."""
    with mock.patch("torch.allclose", allclose):
        for args in ARGUMENTS[name](device):
            torch.library.opcheck(getattr(torch.ops.float8, name).default, args)


def allclose(a: Tensor, b: Tensor, *, of_torch=torch.allclose, **how: Any) -> bool:
    """torch's, which cannot compare float8."""
    if a.dtype in FORMATS:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return of_torch(a, b, **how)


@EVERY_OP
def test_ops_are_compliant_with_the_compiler(name: str) -> None:
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.float8, name).default.tags


@devices
class TestCast:
    def test_order_and_absence(self, device: str) -> None:
        x = torch.randn(20, 40, device=device, requires_grad=True)
        scale = torch.tensor(0.01, device=device, requires_grad=True)
        twin = ops.cpu.cast(x, scale, None, None, E4M3, True, True)
        own = amax_to_scale(kernels.amax(x), E4M3, True)
        of_own = ops.cpu.cast(x, own, None, None, E4M3, True, True)
        for row, col in ((True, True), (True, False), (False, True)):
            for given, spec, want in (
                (scale, CastConfig(target_dtype=E4M3), twin),
                (None, CastConfig(target_dtype=E4M3, power_of_2=True), of_own),
            ):
                made = kernels.cast(x * 1, spec, scale=given, row=row, col=col)
                assert [part is not None for part in made] == [row, col]
                for part, data in zip(made, want, strict=True):
                    if part is not None:
                        used = part.scale
                        assert used is scale if given is not None else torch.equal(used, own)
                        assert same_bytes(part.data, data)
                        assert not part.data.requires_grad
        assert not kernels.amax(x * 2).requires_grad
        assert not kernels.transpose_bytes(twin[0]).requires_grad

    def test_wrong_input_says_what_to_do(self, device: str) -> None:
        x = torch.randn(4, 4, device=device)
        one = torch.ones((), device=device)

        def cast(x: object = x, scale: object = one, **flags: bool) -> None:
            flags = {"row": True, "col": True} | flags
            kernels.cast(x, CastConfig(), scale=scale, **flags)  # type: ignore[arg-type]

        with pytest.raises(TypeError, match=r"torch\.float64 tensor.* expected a float32, bfl"):
            cast(x=x.double())
        with pytest.raises(ValueError, match=r"shape \(2, 2, 4\).* expected 2 dim.* x\.reshape"):
            cast(x=x.view(2, 2, 4))
        with pytest.raises(ValueError, match=r"scale is a torch\.bfloat16 .* expected one float32"):
            cast(scale=one.bfloat16())
        with pytest.raises(ValueError, match=r"shape \(4,\).* expected one float32 element"):
            cast(scale=torch.ones(4, device=device))
        with pytest.raises(ValueError, match=r"row=False, col=False"):
            cast(row=False, col=False)
        with pytest.raises(TypeError, match=r"torch\.float32 tensor .*float8_e4m3fn"):
            kernels.transpose_bytes(x)
        with pytest.raises(TypeError, match=r"shape \(1, 4, 4\).* expected a matrix"):
            kernels.transpose_bytes(x[None].to(torch.uint8))
        if device == "cuda":
            with pytest.raises(ValueError, match=r"on cpu; expected one float32 element on cuda"):
                cast(scale=torch.ones(()))


def scaled_cast(x: Tensor) -> list[Tensor]:
    """From a tensor to its operands; by 512, so that no compiler rounds the quotient."""
    y = x * 2
    row, col = kernels.cast(
        y,
        CastConfig(target_dtype=E4M3),
        scale=kernels.amax(y) / 512,
        row=True,
        col=True,
        pad_rows=True,
    )
    assert row is not None
    assert col is not None
    return [row.data, col.data, kernels.transpose_bytes(row.data)]


@devices
class TestCompile:
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_one_graph_for_all_sizes(self, device: str, backend: str) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(scaled_cast, backend=counter, fullgraph=True)
        for shape in ((33, 20), (5, 7), (160, 256)):
            x = torch.randn(shape, device=device, requires_grad=backend == "inductor")
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            for got, want in zip(compiled(x), scaled_cast(x), strict=True):
                assert same_bytes(got, want)
                assert not got.requires_grad
        # torch 2.11 also hands over an empty graph.
        assert len([g for g in counter.graphs if g.graph.find_nodes(op="placeholder")]) == 1

    def test_amax_is_left_to_the_compiler_and_cast_is_opaque(self, device: str) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        torch.compile(scaled_cast, backend=counter, fullgraph=True)(torch.ones(4, 4, device=device))
        targets = [node.target for node in counter.graphs[0].graph.nodes]
        assert torch.ops.float8.cast.default in targets
        assert torch.ops.float8.amax.default not in targets


def test_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None  # makes `import triton` raise ImportError
import torch
from float8 import kernels
from float8.config import CastConfig
assert kernels.amax(torch.tensor([1.0, -2.0])).item() == 2.0
spec = CastConfig(target_dtype=torch.float8_e5m2)
row, col = kernels.cast(torch.ones(3, 5), spec, row=True, col=True)
assert row.data.shape == (3, 16) and col.data.shape == (16, 16)
assert kernels.transpose_bytes(row.data).shape == (16, 16)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_absence_of_triton_is_said_once() -> None:
    ops._warn_without_triton.cache_clear()
    op = ops.without_triton(amax_reference)
    with pytest.warns(UserWarning, match="Install triton"):
        assert op(torch.ones(2)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(torch.ones(2)) == 1
