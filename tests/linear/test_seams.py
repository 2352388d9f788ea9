"""What finer scales, ranks and float8 weights plug into, each with a stand-in."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import tolerances
from float8 import Float8Linear, Float8Tensor
from float8.config import ScalingGranularity
from float8.gemm import Gemm, matmul
from float8.linear.functional import apply_linear, linear
from float8.linear.plan import LinearPlan
from float8.quantize.quantize import columns, quantize
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec, Part, Quantized
from sqnr import same_bits, sqnr
from support.configs import tensorwise
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded
from support.reference import reference_cast, reference_scale, zero_padded
from support.spies import saved_tensors

AXISWISE = ScalingGranularity.AXISWISE
BY_ROWS = CastSpec(E4M3, AXISWISE)
M, K, N = 24, 40, 56


# ---------------------------------------------------------------- a second granularity


def rows_to_float8(x: Tensor, spec: CastSpec, scale: Tensor | None = None) -> Part:
    """A scale for each row, [R, 1], along which a GEMM contracts; data not padded."""
    if scale is None:
        amax = x.abs().amax(dim=1, keepdim=True).float()
        scale = amax_to_scale(amax, spec.dtype, spec.power_of_2)
    return Part((x.float() / scale).to(spec.dtype), scale)


def quantize_rows(
    x: Tensor, spec: CastSpec, *, row=False, col=False, scale=None, **_: object
) -> Quantized:
    by_columns = rows_to_float8(x.t().contiguous(), spec, scale) if col else None
    return Quantized(rows_to_float8(x, spec, scale) if row else None, by_columns, spec)


def multiply_rows(a: Part, b: Part, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    wide_a, wide_b = (part.data.double() * part.scale.double() for part in (a, b))
    return (wide_a @ wide_b.t()).to(out_dtype)


@pytest.fixture
def _axiswise(monkeypatch: pytest.MonkeyPatch) -> None:
    finer_casts, finer_gemms = quantize.__globals__["FINER"], matmul.__globals__["FINER"]
    monkeypatch.setitem(finer_casts, AXISWISE, quantize_rows)
    monkeypatch.setitem(finer_gemms, (AXISWISE, AXISWISE), multiply_rows)


def plan_by_rows(grad_output: CastSpec, share_weight: bool) -> LinearPlan:
    gemm = Gemm(emulate=True, granularities=(AXISWISE, AXISWISE))
    return LinearPlan(
        input=BY_ROWS,
        weight=BY_ROWS,
        grad_output=grad_output,
        input_for_grad_weight=BY_ROWS,
        weight_for_grad_input=BY_ROWS,
        grad_output_for_grad_weight=grad_output,
        share_input=True,
        share_weight=share_weight,
        share_grad_output=True,
        output=gemm,
        grad_input=gemm,
        grad_weight=gemm,
        pad=True,
    )


def dequantised(x: Tensor, spec: CastSpec) -> Tensor:
    """`x` in float64 after a cast along its rows."""
    data, scale = rows_to_float8(x, spec)
    return data.double() * scale.double()


@on_devices
@pytest.mark.usefixtures("_axiswise")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("share_weight", [False, True])
@pytest.mark.parametrize("keep_input", [False, True])
def test_a_scale_for_each_row(
    device: str, keep_input: bool, share_weight: bool, format: torch.dtype, dtype: torch.dtype
) -> None:
    """All three GEMMs, each operand scaled along what it is contracted over.

    Rows and columns differ by up to 1000 in size, so a scale of the wrong dim shows.
    """
    sizes = torch.logspace(-1.5, 1.5, 64, device=device)
    x = (seeded(0, M, K).to(device) * sizes[:M, None] * sizes.flip(0)[:K]).to(dtype)
    w = (seeded(1, N, K).to(device) * sizes[:N, None]).to(dtype)
    g = (seeded(2, M, N).to(device) * sizes.flip(0)[:M, None]).to(dtype)
    bias = seeded(3, N).to(device, dtype)
    plan = plan_by_rows(CastSpec(format, AXISWISE), share_weight)
    leaves = x, w, bias = [t.detach().requires_grad_() for t in (x, w, bias)]
    y = apply_linear(x, w, bias, plan, keep_input=keep_input)
    y.backward(g)

    wide = plan.grad_output
    wanted = {
        "output": dequantised(x, BY_ROWS) @ dequantised(w, BY_ROWS).t() + bias.double(),
        "input": dequantised(g, wide) @ dequantised(w.t().contiguous(), BY_ROWS).t(),
        "weight": dequantised(g.t().contiguous(), wide)
        @ dequantised(x.t().contiguous(), BY_ROWS).t(),
        "bias": g.double().sum(0),
    }
    got = dict(zip(wanted, (y, *(leaf.grad for leaf in leaves)), strict=True))
    for name in wanted:
        assert got[name].dtype == dtype
        # Float64 products of the same operands: nothing but the rounding of the result.
        bound = tolerances.HIGH_PRECISION if dtype == torch.float32 else tolerances.GEMM
        assert sqnr(wanted[name], got[name]) > bound, name


@pytest.mark.usefixtures("_axiswise")
def test_what_is_kept_of_an_input_with_finer_scales_is_float8() -> None:
    plan = plan_by_rows(BY_ROWS, share_weight=False)
    x, w = seeded(0, M, K).requires_grad_(), seeded(1, N, K).requires_grad_()
    with saved_tensors() as saved:
        apply_linear(x, w, None, plan)
    assert [tuple(s.shape) for s in saved if s.dtype == E4M3] == [(K, M)]
    assert not any(s.data_ptr() == x.data_ptr() for s in saved)


def test_a_granularity_that_nothing_casts_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"got .*AXISWISE.*expected TENSORWISE"):
        quantize(seeded(0, M, K), BY_ROWS, row=True)


def test_bytes_are_not_transposed_under_scales_that_are_not() -> None:
    with pytest.raises(ValueError, match=r"scales of shape \(24, 1\), expected one element"):
        columns(rows_to_float8(seeded(0, M, K), BY_ROWS))


# ---------------------------------------------------------------- an amax of all ranks


@dataclass
class Doubled:
    """Stands for a collective: another rank holds an element twice as large."""

    calls: int = 0

    def __call__(self, amax: Tensor) -> Tensor:
        assert amax.dim() == 0
        assert amax.dtype == torch.float32
        self.calls += 1
        return 2 * amax


@on_devices
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_reduce_stands_between_amax_and_cast(
    device: str, format: torch.dtype, power_of_2: bool
) -> None:
    x = seeded(0, M, K, device=device)
    spec, reduce = CastSpec(format, power_of_2=power_of_2), Doubled()
    alone = quantize(x, spec, row=True, col=True)
    made = quantize(x, spec, row=True, col=True, reduce=reduce)
    assert reduce.calls == 1
    scale = 2 * reference_scale(x, format, power_of_2)
    assert same_bits(made.row.scale, scale)
    assert same_bits(made.row.scale, 2 * alone.row.scale)
    data = reference_cast(x, scale, format)
    assert same_bits(made.row.data, zero_padded(data, M, 48))
    assert same_bits(made.col.data, zero_padded(data.t(), 48, 32))
    assert made.col.scale is made.row.scale


def test_reduce_is_not_asked_where_the_scale_is_known() -> None:
    x, reduce = seeded(0, M, K), Doubled()
    scale = torch.tensor(0.5)
    made = quantize(x, CastSpec(E4M3), row=True, scale=scale, reduce=reduce)
    assert reduce.calls == 0
    assert made.row.scale is scale


def test_reduce_in_compiled_code() -> None:
    """It goes into the graph between amax and cast, bitwise as in eager mode."""

    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x, CastSpec(E4M3), row=True, reduce=lambda amax: 2 * amax).row

    torch._dynamo.reset()
    x = seeded(0, M, K)
    for backend in ("aot_eager", "inductor"):
        got = torch.compile(cast, backend=backend, fullgraph=True)(x)
        assert all(same_bits(*pair) for pair in zip(got, cast(x), strict=True))


# ---------------------------------------------------------------- a weight in float8


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("shape", [(N, K), (19, 33)], ids=str)
def test_a_float8_weight_gives_what_the_layer_that_casts_it_gives(
    device: str, shape: tuple[int, int], power_of_2: bool, dtype: torch.dtype
) -> None:
    config = tensorwise(round_scales_to_power_of_2=power_of_2)
    module = nn.Linear(shape[1], shape[0], device=device, dtype=dtype)
    module.weight.requires_grad_(False)
    layer = Float8Linear.from_float(module, config)
    held = Float8Tensor.from_high_precision(module.weight, round_scales_to_power_of_2=power_of_2)
    results = []
    for run in (layer, lambda x: linear(x, held, module.bias, config=config)):
        module.bias.grad = None
        x = seeded(0, 3, 8, shape[1], device=device, dtype=dtype).requires_grad_()
        y = run(x)
        y.backward(seeded(1, *y.shape, device=device, dtype=dtype))
        results.append((y, x.grad, module.bias.grad))
    for mine, theirs in zip(*results, strict=True):
        assert same_bits(mine, theirs)
