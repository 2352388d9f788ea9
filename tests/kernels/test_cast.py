"""`cast` as a function: eager, traced by a compiler, opaque to it, and what it refuses."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion

from float8 import kernels
from float8.config import CastConfig, ScalingGranularity
from float8.delayed.cast import DelayedScale
from float8.kernels.cast import _cast_op
from float8.quantize import Cast, quantize
from float8.scales import Operand, Quantized, amax_to_scale, dequantised
from kernels.float8_codes import assert_same
from support.devices import E4M3, on_devices
from support.errors import require_errors

pytestmark = pytest.mark.xdist_group("compilers")  # one worker makes them ready

SPECS = [
    CastConfig(target_dtype=E4M3, scaling_granularity=of, power_of_2=of.one_scale)
    for of in ScalingGranularity
]
TENSOR, ROWS, RUNS, SQUARES, *OF_32 = SPECS
LONG = 2048  # rows so long that Inductor takes their amaxes in one kernel and divides in another


def flat(parts: tuple[Operand | None, Operand | None]) -> list[Tensor]:
    return [tensor for part in parts for tensor in part or ()]


@on_devices
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.scaling_granularity.value)
@pytest.mark.parametrize("traced", [False, True])
def test_order_and_absence(device: str, spec: CastConfig, traced: bool) -> None:
    x = torch.randn(20, 128, device=device, requires_grad=True)
    scale = torch.tensor(0.01, device=device, requires_grad=True)
    own = amax_to_scale(kernels.amax(x), E4M3, True)
    cases = [(None, own), (scale, scale)] if spec is TENSOR else [(None, None)]
    for given, used in cases:
        want = flat(kernels.cast(x, spec, scale=used, row=True, col=True, pad_rows=True))
        for row, col in ((True, True), (True, False), (False, True)):
            how: dict[str, Any] = {"scale": given, "pad_rows": True, "traced": traced}
            parts = kernels.cast(x * 1, spec, row=row, col=col, **how)
            assert [part is not None for part in parts] == [row, col]
            assert_same(flat(parts), want[:2] * row + want[2:] * col)
            for part in (part for part in parts if part is not None):
                assert given is None or part.scale is given
                assert part.data.is_contiguous()
                assert not part.data.requires_grad
    assert not kernels.amax(x * 2).requires_grad


@on_devices
@pytest.mark.parametrize("traced", [False, True])
def test_wrong_input_says_what_to_do(device: str, traced: bool) -> None:
    x, one = torch.randn(4, 4, device=device), torch.ones((), device=device)

    def cast(x: Tensor, spec: CastConfig, row: bool = True, **more: Any) -> None:
        kernels.cast(x, spec, row=row, col=row, traced=traced, **more)

    def scaled(spec: CastConfig, scale: Tensor) -> None:
        cast(x, spec, scale=scale)

    for spec in (TENSOR, ROWS):
        require_errors(
            (r"TypeError: torch\.float64 tensor.* a float32, bfl", cast, [x.double(), spec]),
            (r"ValueError: shape \(4,\).* expected 2 dim", cast, [x[0], spec]),
            (r"ValueError: 2 dim.* x\.reshape", cast, [x.view(2, 2, 4), spec]),
            (r"ValueError: row=False, col=False", cast, [x, spec, False]),
        )
    require_errors(
        (r"ValueError: a torch\.bfloat16 .* one float32", scaled, [TENSOR, one.bfloat16()]),
        (r"ValueError: shape \(4,\).* expected one float32 element", scaled, [TENSOR, x[0]]),
        (r"ValueError: on meta; expected one float32 elem", scaled, [TENSOR, one.to("meta")]),
        (r"ValueError: expected none: scales of", scaled, [ROWS, one]),
        (r"TypeError: torch\.float32 tensor .*float8_e4m3fn", kernels.transpose_bytes, [x]),
        (r"TypeError: shape \(1, 4, 4\).* matrix", kernels.transpose_bytes, [x[None].to(E4M3)]),
    )
    with pytest.raises(ValueError, match=r"expected none: scales of"):
        DelayedScale(one, one).cast(x, ROWS, row=True, col=True)


ROWS_OF_FINER = 200, 384, 1000, 129  # up to 128 are one block: compiled once more


@on_devices
@pytest.mark.parametrize(
    ("spec", "C", "ours"),
    [
        (TENSOR, None, ["cast"]),
        pytest.param(ROWS, 160, ["transpose"], marks=pytest.mark.exhaustive),
        (RUNS, 256, ["transpose"]),
        pytest.param(SQUARES, 160, ["cast"], marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_one_graph_for_all_sizes(
    device: str, spec: CastConfig, backend: str, C: int | None, ours: list[str]
) -> None:
    """A compiler sees all but the transposition, or an opaque cast; the amax always."""
    counter = CompileCounterWithBackend(backend)
    # Inductor of torch 2.11 divides 1 by a scale that it has not yet rounded to float32: a
    # product next to a tie may then go the other way. A power of two needs no rounding.
    if spec is ROWS and backend == "inductor" and TorchVersion(torch.__version__) < "2.13":
        spec = dataclasses.replace(spec, power_of_2=True)

    def cast(x: Tensor, traced: bool = True) -> list[Tensor]:
        # By 512, so that no compiler rounds the quotient.
        scale = kernels.amax(x * 2) / 512 if spec is TENSOR else None
        how = {"scale": scale, "row": True, "col": True, "pad_rows": True, "traced": traced}
        return flat(kernels.cast(x * 2, spec, **how))

    torch._dynamo.reset()
    # All sizes; of blocks rows alone, because Dynamo reasons for long about both.
    dynamic = None if spec in (RUNS, SQUARES) else True
    compiled = torch.compile(cast, backend=counter, fullgraph=True, dynamic=dynamic)
    sizes = [(33, 20), (5, 7), (160, 256)] if C is None else [(rows, C) for rows in ROWS_OF_FINER]
    for size in sizes:
        x = torch.randn(size, device=device, requires_grad=C is None and backend == "inductor")
        if not dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        assert_same(compiled(x), cast(x, traced=False))
    # torch 2.11 also hands over an empty graph.
    (graph,) = (g.graph for g in counter.graphs if g.graph.find_nodes(op="placeholder"))
    names = (str(node.target) for node in graph.nodes)
    assert [name for name in names if "float8." in name] == [f"float8.{op}.default" for op in ours]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[R, C] bf16; Inductor goes on with the float32 of before the rounding."""
    return (x.float() * weight.float()).to(torch.bfloat16)


def test_the_op_of_a_gpu_takes_arguments_by_name() -> None:
    """As Inductor passes those that have defaults."""
    x, layout = torch.empty(0, 24), (None, 16, E4M3, True, False)
    by_name = _cast_op(x, None, *layout, pad_rows=True, power_of_2=True, via=None, after=None)
    by_place = _cast_op(x, None, *layout, True, True, None, None)
    assert [y.shape for y in by_name] == [y.shape for y in by_place]


@pytest.mark.parametrize(
    ("granularity", "device"),
    [
        (ScalingGranularity.AXISWISE, "cpu"),
        *(pytest.param(of, "cuda", marks=pytest.mark.gpu) for of in ScalingGranularity),
    ],
)
def test_data_fit_their_scales(granularity: ScalingGranularity, device: str) -> None:
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
    made, exact = torch.compile(cast, fullgraph=True)(x, weight), x.double() * weight.double()
    for part, expected in ((made.row, exact), (made.col, exact.t())):
        assert part is not None
        got = dequantised(part, granularity).double()
        # Rounded to 4 significant bits, maybe of what was rounded to 8 before.
        assert ((got - expected).abs() <= expected * (2**-4 + 2**-8) + 2**-16).all()
        if device == "cpu":  # on a GPU all kernels would see the same amax, rounded or not
            assert (part.scale == 2**-6).all()  # that of 3.503
