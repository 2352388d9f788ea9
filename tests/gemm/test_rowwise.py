"""The rowwise kernel given one scale per operand: on its own, chosen, and under a compiler."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import tolerances
from float8 import Float8Linear, Float8LinearConfig
from float8.config import Float8GemmConfig
from float8.gemm import GemmKernel, MeasuredGemm, choice, scaled_mm
from sqnr import sqnr
from support.devices import E4M3, E5M2, GPU, on_devices
from support.models import seeded

TENSORWISE, ROWWISE = GemmKernel.TENSORWISE, GemmKernel.ROWWISE
FAST = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
FORMATS = pytest.mark.parametrize("format_a", [E4M3, E5M2], ids=["e4m3", "e5m2"])


class ScaleShapes(TorchDispatchMode):
    """The shapes of the scales of every float8 GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_mm.default:
            assert args[2].is_contiguous()
            assert args[3].is_contiguous()
            self.found.append((tuple(args[2].shape), tuple(args[3].shape)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def rowwise_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table by which the rowwise kernel is ever so much faster, on any device."""
    table = (MeasuredGemm(64, 64, 64, "e4m3", 1e9, 1.0),)
    monkeypatch.setattr(choice, "table_of", lambda device: table)


def operands(
    device: str, format_a: torch.dtype = E4M3, M: int = 33, K: int = 96, N: int = 48
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = seeded(0, M, K, device=device).mul(50).to(format_a)
    b = seeded(1, N, K, device=device).mul(50).to(E4M3)
    return a, torch.tensor(0.3, device=device), b, torch.tensor(0.7, device=device)


def exact(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    return (a.double() * scale_a.double()) @ (b.double() * scale_b.double()).t()


@on_devices
@FORMATS
@pytest.mark.parametrize("M", [2, 33, 257])
def test_product(device: str, format_a: torch.dtype, M: int) -> None:
    given = operands(device, format_a, M)
    rowwise = scaled_mm(*given, **FAST, kernel=ROWWISE)
    tensorwise = scaled_mm(*given, **FAST, kernel=TENSORWISE)
    assert (rowwise.dtype, rowwise.shape) == (torch.bfloat16, (M, 48))
    assert sqnr(exact(*given), rowwise) > tolerances.GEMM
    assert sqnr(tensorwise, rowwise) > tolerances.GEMM


@GPU
@FORMATS
@pytest.mark.parametrize("shape", [(1000, 8192, 4096), (8191, 4096, 6144)])
def test_large_products_are_as_good_as_tensorwise_ones(format_a: torch.dtype, shape) -> None:
    given = operands("cuda", format_a, *shape)
    wanted = exact(*given)
    quality = [sqnr(wanted, scaled_mm(*given, **FAST, kernel=k)) for k in (TENSORWISE, ROWWISE)]
    assert quality[1] > quality[0] - 1


@on_devices
def test_vectors_may_be_given(device: str) -> None:
    a, scale_a, b, scale_b = operands(device)
    vectors = scale_a.expand(33, 1).contiguous(), scale_b.expand(1, 48).contiguous()
    got = scaled_mm(a, vectors[0], b, vectors[1], **FAST, kernel=ROWWISE)
    assert torch.equal(got, scaled_mm(a, scale_a, b, scale_b, **FAST, kernel=ROWWISE))


@on_devices
def test_non_finite_shows(device: str) -> None:
    a, scale_a, b, scale_b = operands(device)
    a.view(torch.uint8)[3, 5] = 0x7F
    got = scaled_mm(a, scale_a, b, scale_b, **FAST, kernel=ROWWISE)
    assert got[3].isnan().all()
    assert got[:3].isfinite().all()
    nan = torch.tensor(float("nan"), device=device)
    assert scaled_mm(a, nan, b, scale_b, **FAST, kernel=ROWWISE).isnan().all()


@on_devices
def test_the_choice_decides_which_scales_the_kernel_gets(device: str, rowwise_always) -> None:
    given = operands(device)
    cases = [
        (FAST, ((33, 1), (1, 48))),
        ({**FAST, "kernel": TENSORWISE}, ((), ())),
        ({**FAST, "use_fast_accum": False}, ((), ())),
        ({**FAST, "out_dtype": torch.float32}, ((), ())),
    ]
    for options, wanted in cases:
        with ScaleShapes() as scales:
            scaled_mm(*given, **options)
        assert scales.found == [wanted], options
    with ScaleShapes() as scales:
        scaled_mm(*given, **FAST, emulate=True)
    assert scales.found == []


def test_without_a_table_nothing_changes() -> None:
    with ScaleShapes() as scales:
        scaled_mm(*operands("cpu"), **FAST)
    assert scales.found == [((), ())]


# ---------------------------------------------------------------- under torch.compile


def vectors_made(graph: GraphModule) -> int:
    """Scales that are repeated, in a graph of Dynamo and the ones inside it."""
    graphs = (module.graph for module in graph.modules() if isinstance(module, GraphModule))
    return sum(len(graph.find_nodes(op="call_method", target="expand")) for graph in graphs)


@on_devices
@pytest.mark.filterwarnings("error:Dynamo detected a call")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_it_is_one_graph_with_the_kernel_chosen(
    device: str, backend: str, rowwise_always
) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(functools.partial(scaled_mm, **FAST), backend=counter, fullgraph=True)
    given = operands(device)
    got = compiled(*given)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert torch.equal(got, scaled_mm(*given, **FAST))
    assert vectors_made(graph) == 2


@on_devices
def test_dynamic_dims_are_tensorwise_and_compile_once(device: str, rowwise_always) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        functools.partial(scaled_mm, **FAST), backend=counter, fullgraph=True, dynamic=True
    )
    for M in (33, 40, 7, 160):
        given = operands(device, M=M)
        assert torch.equal(compiled(*given), scaled_mm(*given, **FAST, kernel=TENSORWISE))
    assert counter.frame_count == 1
    assert vectors_made(counter.graphs[0]) == 0


@on_devices
def test_token_counts_compile_twice_at_most(device: str, rowwise_always) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(functools.partial(scaled_mm, **FAST), backend=counter, fullgraph=True)
    for M in (33, 40, 7, 160, 33):
        given = operands(device, M=M)
        assert sqnr(scaled_mm(*given, **FAST), compiled(*given)) > tolerances.GEMM
    assert counter.frame_count == 2


@on_devices
def test_all_three_gemms_of_a_layer(device: str, rowwise_always) -> None:
    fast = Float8GemmConfig(use_fast_accum=True)
    config = Float8LinearConfig(gemm_config_grad_input=fast, gemm_config_grad_weight=fast)
    plain = nn.Linear(32, 48, bias=False, device=device, dtype=torch.bfloat16)
    layer = Float8Linear.from_float(plain, config)
    x = seeded(0, 17, 32, device=device).bfloat16().requires_grad_()

    def step(call) -> list[Tensor]:
        output = call(x)
        return [output, *torch.autograd.grad(output.float().square().sum(), (x, layer.weight))]

    with ScaleShapes() as scales:
        eager = step(layer)
    assert scales.found == [((17, 1), (1, 48)), ((17, 1), (1, 32)), ((48, 1), (1, 32))]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = step(torch.compile(layer, backend=counter, fullgraph=True))
    assert counter.frame_count == 1
    assert vectors_made(counter.graphs[0]) == 6
    for wanted, got in zip(eager, compiled, strict=True):
        assert torch.equal(wanted, got)


@GPU
def test_an_h100_takes_the_rowwise_kernel_where_it_was_measured_faster() -> None:
    if choice.table_of(torch.device("cuda", 0)) is None:
        pytest.skip("no table for this GPU")
    given = operands("cuda", M=8192, K=4096, N=6144)
    with ScaleShapes() as scales:
        scaled_mm(*given, **FAST)
    assert scales.found == [((8192, 1), (1, 6144))]
