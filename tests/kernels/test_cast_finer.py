"""`cast` under finer scales as a function: eager, traced by a compiler, and what it refuses."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion

from float8 import kernels
from float8.config import CastConfig, ScalingGranularity
from float8.quantize import Cast, quantize
from float8.scales import DelayedScale, Operand, Quantized, dequantised
from kernels.float8_codes import assert_same

E4M3 = torch.float8_e4m3fn
ROWS, RUNS, SQUARES = (
    CastConfig(target_dtype=E4M3, scaling_granularity=ScalingGranularity[name])
    for name in ("AXISWISE", "BLOCK_1x128", "BLOCK_128x128")
)
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
finer = pytest.mark.parametrize("spec", [ROWS, RUNS, SQUARES], ids=["rows", "runs", "squares"])
LONG = 2048  # rows so long that Inductor takes their amaxes in one kernel and divides in another


def flat(parts: tuple[Operand | None, Operand | None]) -> list[Tensor]:
    return [tensor for part in parts for tensor in part or ()]


@on_devices
@finer
@pytest.mark.parametrize("traced", [False, True])
def test_order_and_absence(device: str, spec: CastConfig, traced: bool) -> None:
    x = torch.randn(20, 128, device=device, requires_grad=True)
    want = flat(kernels.cast(x, spec, row=True, col=True, pad_rows=True))
    for row, col in ((True, True), (True, False), (False, True)):
        parts = kernels.cast(x * 1, spec, row=row, col=col, pad_rows=True, traced=traced)
        assert [part is not None for part in parts] == [row, col]
        assert_same(flat(parts), want[:2] * row + want[2:] * col)
        assert not any(made.requires_grad for made in flat(parts))


@on_devices
@pytest.mark.parametrize("traced", [False, True])
def test_wrong_input_says_what_to_do(device: str, traced: bool) -> None:
    x = torch.randn(4, 4, device=device)

    def cast(x: Tensor = x, row: bool = True) -> None:
        kernels.cast(x, ROWS, row=row, col=row, traced=traced)

    for given in (
        {"scale": torch.ones((), device=device)},
        {"state": DelayedScale(x[0, 0], x[0, 0])},
    ):
        with pytest.raises(ValueError, match=r"expected none: scales of"):
            kernels.cast(x, ROWS, row=True, col=True, traced=traced, **given)
    with pytest.raises(ValueError, match=r"row=False, col=False"):
        cast(row=False)
    with pytest.raises(TypeError, match=r"torch\.float64 tensor"):
        cast(x.double())
    with pytest.raises(ValueError, match=r"expected 2 dim"):
        cast(x[0])


@on_devices
@pytest.mark.parametrize(
    ("spec", "backend", "C"),
    [
        *((spec, "aot_eager", C) for spec in (ROWS, RUNS, SQUARES) for C in (256, 160)),
        (ROWS, "inductor", 160),
        (RUNS, "inductor", 160),
        (SQUARES, "inductor", 160),
        pytest.param(RUNS, "inductor", 256, marks=pytest.mark.exhaustive),
        pytest.param(SQUARES, "inductor", 256, marks=pytest.mark.exhaustive),
    ],
)
def test_one_graph_for_all_sizes(device: str, spec: CastConfig, backend: str, C: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    # Inductor of torch 2.11 divides 1 by a scale that it has not yet rounded to float32: a
    # product next to a tie may then go the other way. A power of two needs no rounding.
    if spec is ROWS and backend == "inductor" and TorchVersion(torch.__version__) < "2.13":
        spec = dataclasses.replace(spec, power_of_2=True)

    def cast(x: Tensor, traced: bool = True) -> list[Tensor]:
        how = {"row": True, "col": True, "pad_rows": True, "traced": traced}
        return flat(kernels.cast(x * 2, spec, **how))

    compiled = torch.compile(cast, backend=counter, fullgraph=True, dynamic=True)
    for rows in (200, 384, 1000, 129):  # up to 128 are one block: compiled once more
        x = torch.randn(rows, C, device=device)
        assert_same(compiled(x), cast(x, traced=False))
    assert len([g for g in counter.graphs if g.graph.find_nodes(op="placeholder")]) == 1


@on_devices
@finer
def test_a_compiler_sees_all_but_the_transposition(device: str, spec: CastConfig) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(x: Tensor) -> list[Tensor]:
        return flat(kernels.cast(x, spec, row=True, col=True, traced=True))

    compiled(torch.randn(32, 256, device=device))
    ours = [str(n.target) for n in counter.graphs[0].graph.nodes if "float8." in str(n.target)]
    assert ours == ["float8.transpose.default"]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[R, C] bf16; Inductor goes on with the float32 of before the rounding."""
    return (x.float() * weight.float()).to(torch.bfloat16)


def compiled_cast(granularity: ScalingGranularity, device: str) -> tuple[Quantized, Tensor]:
    """Of a product whose amax is 3.503 in float32 and 3.5 in bf16, in all runs of 64 elements.

    3.5 is 448 / 128: rounded up to a power of two, the scale of the one is twice that of the other.
    """
    x = torch.rand(LONG, LONG, device=device).to(torch.bfloat16)
    at = torch.arange(LONG, device=device)
    x[(at[:, None] + at) % 64 == 0] = 1.0625
    weight = torch.full((LONG,), 3.296875, device=device, dtype=torch.bfloat16)
    assert product(x, weight).max() == 3.5 < 1.0625 * 3.296875
    spec = CastConfig(target_dtype=E4M3, scaling_granularity=granularity, power_of_2=True)

    def cast(x: Tensor, weight: Tensor) -> Quantized:
        return quantize(product(x, weight), Cast(spec), row=True, col=True, traced=True)

    torch._dynamo.reset()
    return torch.compile(cast, fullgraph=True)(x, weight), x.double() * weight.double()


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ScalingGranularity)
def test_data_fit_their_scales(granularity: ScalingGranularity) -> None:
    made, exact = compiled_cast(granularity, "cuda")
    for part, expected in ((made.row, exact), (made.col, exact.t())):
        assert part is not None
        got = dequantised(part, granularity).double()
        # Rounded to 4 significant bits, maybe of what was rounded to 8 before.
        assert ((got - expected).abs() <= expected * (2**-4 + 2**-8) + 2**-16).all()


def test_amaxes_of_rows_and_columns_are_not_rounded() -> None:
    """Without a GPU: there all kernels would see the same amax, rounded or not."""
    made, _ = compiled_cast(ScalingGranularity.AXISWISE, "cpu")
    for part in made.row, made.col:
        assert part is not None
        assert (part.scale == 2**-6).all()  # that of 3.503
