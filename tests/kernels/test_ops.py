import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import kernels
from float8.kernels.amax import amax_reference
from float8.kernels.cast import cast_reference
from float8.kernels.runtime import ops
from kernels.float8_codes import FORMATS, same_bytes

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", CPU_AND_GPU)
E4M3 = torch.float8_e4m3fn


@devices
class TestOpcheck:
    """torch's own checks: schema, fake implementation, dynamic shapes under AOTAutograd."""

    @pytest.mark.parametrize("shape", [(3, 4), (17,), ()], ids=str)
    def test_amax(self, device: str, shape: tuple[int, ...]) -> None:
        torch.library.opcheck(torch.ops.float8.amax.default, (torch.randn(shape, device=device),))

    @pytest.mark.parametrize("dtype", FORMATS, ids=str)
    @pytest.mark.parametrize(
        "flags", [(True, True, True), (True, False, False), (False, True, False)]
    )
    @pytest.mark.parametrize("transposed", [False, True])
    def test_cast(
        self, device: str, dtype: torch.dtype, flags: tuple[bool, bool, bool], transposed: bool
    ) -> None:
        x = torch.randn(17, 33, device=device)
        x = x.t() if transposed else x
        scale = torch.tensor(0.1, device=device)
        torch.library.opcheck(torch.ops.float8.cast.default, (x, scale, dtype, *flags))

    @pytest.mark.parametrize("name", ["cast_dynamic", "cast_delayed"])
    def test_casts_that_choose_their_scale(self, device: str, name: str) -> None:
        x, scale, amax = self.tensors(device)
        args = (E4M3, True, False, False, False)
        if name == "cast_delayed":
            args = (scale, amax, *args, True)
        torch.library.opcheck(getattr(torch.ops.float8, name).default, (x, *args))

    @pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)], ids=str)
    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("flag", [False, True])  # of axiswise: pad_rows; of blockwise: square
    def test_casts_with_finer_scales(
        self, device: str, layouts: tuple[bool, bool], transposed: bool, flag: bool
    ) -> None:
        x = torch.randn(17, 260, device=device)
        x = x.t() if transposed else x
        axiswise = (x, E4M3, *layouts, flag, False)
        torch.library.opcheck(torch.ops.float8.cast_axiswise.default, axiswise)
        blockwise = (x, E4M3, flag, *layouts, True)
        torch.library.opcheck(torch.ops.float8.cast_blockwise.default, blockwise)

    @pytest.mark.parametrize("known", [False, True])
    def test_fused(self, device: str, known: bool) -> None:
        x, scale, amax = self.tensors(device)
        state = (scale, amax) if known else (None, None)
        other = (scale.clone(), amax.clone()) if known else (None, None)
        ops, flags = torch.ops.float8, (False, known)
        torch.library.opcheck(ops.swiglu_cast.default, (x, x + 1, E4M3, *state, *flags))
        norm = (x, x[0].clone(), 1e-5, E4M3, *state, *flags)
        torch.library.opcheck(ops.rms_norm_cast.default, norm)
        rstd = torch.rand(17, device=device)
        torch.library.opcheck(ops.rms_norm_recast.default, (x, x[0].clone(), rstd, scale, E4M3))
        residual = x - 1 if known else None
        backward = ([x + 1, x * 2], x, x[0].clone(), rstd, residual)
        torch.library.opcheck(ops.rms_norm_backward.default, backward)
        square = torch.randn(16, 16, device=device).t()
        backward = ([square, square], square, x[0, :16].clone(), rstd[:16], None)
        torch.library.opcheck(ops.rms_norm_backward.default, backward)
        backward = (x, x + 1, x - 1, torch.ones_like(scale), E4M3, FORMATS[1], *state, *other)
        torch.library.opcheck(ops.swiglu_backward_cast.default, (*backward, *flags))

    @staticmethod
    def tensors(device: str) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(17, 33, device=device)
        return x, torch.tensor(0.1, device=device), torch.tensor(0.0, device=device)

    def test_transpose(self, device: str) -> None:
        # uint8, because opcheck itself cannot compare float8.
        data = torch.randint(0, 256, (17, 33), dtype=torch.uint8, device=device)
        torch.library.opcheck(torch.ops.float8.transpose.default, (data,))
        after = torch.ones((), device=device)
        torch.library.opcheck(torch.ops.float8.transpose.default, (data, after))


@pytest.mark.parametrize(
    "name",
    [
        "amax",
        "cast",
        "cast_axiswise",
        "cast_blockwise",
        "cast_delayed",
        "cast_dynamic",
        "rms_norm_backward",
        "rms_norm_cast",
        "rms_norm_recast",
        "swiglu_backward_cast",
        "swiglu_cast",
        "transpose",
    ],
)
def test_ops_are_compliant_with_the_compiler(name: str) -> None:
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.float8, name).default.tags


@devices
class TestCast:
    def test_order_and_absence(self, device: str) -> None:
        x = torch.randn(20, 40, device=device)
        scale = torch.tensor(0.01, device=device)
        twin = cast_reference(x, scale, E4M3, row=True, col=True)
        for row, col in ((True, True), (True, False), (False, True)):
            out = kernels.cast(x, scale, E4M3, row=row, col=col)
            assert same_bytes(out[0], twin[0] if row else None)
            assert same_bytes(out[1], twin[1] if col else None)

    def test_carries_no_gradient(self, device: str) -> None:
        x = torch.randn(20, 40, device=device, requires_grad=True)
        scale = torch.tensor(0.01, device=device, requires_grad=True)
        out = kernels.cast(x * 2, scale, E4M3, row=True, col=True)
        assert out[0] is not None
        assert out[1] is not None
        assert not out[0].requires_grad
        assert not out[1].requires_grad
        assert not kernels.amax(x * 2).requires_grad
        assert not kernels.transpose_bytes(out[0]).requires_grad

    def test_wrong_input_says_what_to_do(self, device: str) -> None:
        x = torch.randn(4, 4, device=device)
        one = torch.ones((), device=device)

        def cast(x: object = x, scale: object = one, dtype: object = E4M3, **flags: bool) -> None:
            flags = {"row": True, "col": True} | flags
            kernels.cast(x, scale, dtype, **flags)  # type: ignore[arg-type]

        with pytest.raises(TypeError, match=r"torch\.float64 tensor.* expected a float32, bfl"):
            cast(x=x.double())
        with pytest.raises(ValueError, match=r"shape \(2, 2, 4\).* expected 2 dim.* x\.reshape"):
            cast(x=x.view(2, 2, 4))
        with pytest.raises(TypeError, match=r"dtype is torch\.int8; expected torch\.float8_e4m3fn"):
            cast(dtype=torch.int8)
        with pytest.raises(TypeError, match=r"scale is a torch\.bfloat16 .* expected a float32"):
            cast(scale=one.bfloat16())
        with pytest.raises(ValueError, match=r"shape \(4,\).* expected one element"):
            cast(scale=torch.ones(4, device=device))
        with pytest.raises(ValueError, match=r"row=False, col=False"):
            cast(row=False, col=False)
        if device == "cuda":
            with pytest.raises(ValueError, match=r"scale is on cpu .* expected one device"):
                cast(scale=torch.ones(()))


def scaled_cast(x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """From a tensor to its operands; by 512, so that no compiler rounds the quotient."""
    y = x * 2
    return kernels.cast(y, kernels.amax(y) / 512, E4M3, row=True, col=True)


@devices
class TestCompile:
    def test_one_graph_for_all_sizes(self, device: str) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(scaled_cast, backend=counter, fullgraph=True, dynamic=True)
        for rows in (2, 17, 40, 100):
            x = torch.randn(rows, 48, device=device)
            for got, want in zip(compiled(x), scaled_cast(x), strict=True):
                assert same_bytes(got, want)
        # torch 2.11 also hands over an empty graph.
        assert len([g for g in counter.graphs if g.graph.find_nodes(op="placeholder")]) == 1

    def test_amax_is_left_to_the_compiler_and_cast_is_opaque(self, device: str) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        torch.compile(scaled_cast, backend=counter, fullgraph=True)(torch.ones(4, 4, device=device))
        targets = [node.target for node in counter.graphs[0].graph.nodes]
        assert torch.ops.float8.cast.default in targets
        assert torch.ops.float8.amax.default not in targets

    def test_inductor(self, device: str) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(scaled_cast, fullgraph=True, dynamic=True)
        for rows in (17, 40):
            x = torch.randn(rows, 48, device=device, requires_grad=True)
            out = compiled(x)
            for got, want in zip(out, scaled_cast(x), strict=True):
                assert same_bytes(got, want)
                assert got is not None
                assert not got.requires_grad

    def test_fake_follows_symbolic_rows_without_a_guard(self, device: str) -> None:
        torch._dynamo.reset()

        def every_op(x: Tensor) -> list[Tensor | None]:
            scale = torch.ops.float8.amax.default(x)
            row, col = kernels.cast(x, scale, E4M3, row=True, col=True, pad_rows=True)
            assert row is not None
            return [row, col, kernels.transpose_bytes(row)]

        x = torch.randn(33, 20, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(every_op, backend=counter, fullgraph=True)
        for y in (x, torch.randn(5, 7, device=device), torch.randn(160, 256, device=device)):
            for got, want in zip(compiled(y), every_op(y), strict=True):
                assert same_bytes(got, want)
        assert len([g for g in counter.graphs if g.graph.find_nodes(op="placeholder")]) == 1


def test_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None  # makes `import triton` raise ImportError
import torch
from float8 import kernels
assert kernels.amax(torch.tensor([1.0, -2.0])).item() == 2.0
row, col = kernels.cast(torch.ones(3, 5), torch.ones(()), torch.float8_e5m2, row=True, col=True)
assert row.shape == (3, 16) and col.shape == (16, 16)
assert kernels.transpose_bytes(row).shape == (16, 16)
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
