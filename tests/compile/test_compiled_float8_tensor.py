"""Float8Tensor under torch.compile: as input, inside, as output and across graph breaks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from float8 import Float8Tensor
from sqnr import same_bits
from support.devices import on_devices
from support.forks import run_program
from support.models import seeded
from support.rings import short
from support.tensors import assert_same, full

pytestmark = pytest.mark.filterwarnings("ignore:.*rounded to float8")
from_high_precision = Float8Tensor.from_high_precision


def compiled(f: Callable, backend: str = "aot_eager", **how: bool | None) -> Callable:
    return torch.compile(f, backend=backend, **{"fullgraph": True} | how)


def a_b(device: str = "cpu") -> tuple[Tensor, Tensor]:
    return seeded(0, 16, 32, device=device), seeded(1, 32, 48, device=device)


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) * 2


def cast_and_product(a: Tensor, b: Tensor) -> Tensor:
    return product(from_high_precision(a * 3), from_high_precision(b)).relu()


@on_devices
@pytest.mark.parametrize(
    ("backend", "dynamic"), short({0}, [("aot_eager", None), ("inductor", True)])
)
def test_as_graph_input(
    device: str,
    backend: str,
    dynamic: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr("torch._dynamo.utils.warn_once_cache", set(), raising=False)
    counters.clear()
    a, b = map(from_high_precision, a_b(device))
    assert same_bits(compiled(product, backend, dynamic=dynamic)(a, b), product(a, b))
    assert not [w for w in recwarn.list if "caching" in str(w.message)]
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 0


@on_devices
@pytest.mark.parametrize("of", ["inputs", "what inputs were made of", "what is cast inside"])
def test_gradients(device: str, of: str) -> None:
    function = cast_and_product if of == "what is cast inside" else product
    results = []
    for f in (function, compiled(function)):
        a, b = leaves = [t.requires_grad_() for t in a_b(device)]
        if of == "inputs":
            a, b = leaves = [from_high_precision(t).detach().requires_grad_() for t in leaves]
        elif of == "what inputs were made of":
            a, b = map(from_high_precision, leaves)
        y = f(a, b)
        y.sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    for wanted, got in zip(*results, strict=True):
        assert type(got) is Tensor
        assert same_bits(got, wanted)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_graph_output(device: str, dtype: torch.dtype) -> None:
    def f(x: Tensor) -> Float8Tensor:
        return from_high_precision(x * 2, round_scales_to_power_of_2=True)

    x = seeded(0, 16, 33, device=device, dtype=dtype)
    assert_same(compiled(f)(x), f(x))


@on_devices
def test_across_a_graph_break(device: str) -> None:
    def f(x: Tensor) -> Tensor:
        a = from_high_precision(x * 2)
        torch._dynamo.graph_break()
        return a.t().to_original_precision() * 3

    x = seeded(0, 16, 32, device=device)
    assert same_bits(compiled(f, fullgraph=False)(x), f(x))


def test_ops_in_a_graph() -> None:
    def ops(t: Float8Tensor) -> list[Float8Tensor]:
        joined, copied = torch.cat(t.split(5)), t.t().reshape(16, 32)
        return [t.view(32, 16), t.t(), t[3:9], joined, copied, t.clone()]

    t, source = from_high_precision(seeded(0, 16, 32)), from_high_precision(seeded(1, 16, 32))
    for got, wanted in zip(compiled(ops)(t), ops(t), strict=True):
        assert_same(got, wanted)
    compiled(lambda t, source: t.copy_(source) is t)(t, source)
    assert_same(t, source)


def test_as_a_parameter() -> None:
    module = nn.Linear(32, 48, bias=False)
    module.weight = nn.Parameter(from_high_precision(module.weight.detach()))
    x = seeded(0, 16, 32)
    outputs = [run(x) for run in (module, compiled(module))]
    assert same_bits(*outputs)
    outputs[1].sum().backward()
    assert module.weight.grad.shape == (48, 32)


def test_a_new_scale_or_shape_is_no_new_program() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda t: t.to_original_precision() * 2, backend=counter, fullgraph=True)
    for factor in (1.0, 5.0):
        t = from_high_precision(seeded(0, 16, 32) * factor)
        assert same_bits(run(t), t.to_original_precision() * 2)
    assert counter.frame_count == 1
    for rows in (24, 40, 8):
        t = from_high_precision(seeded(rows, rows, 32))
        assert same_bits(run(t), t.to_original_precision() * 2)
    assert counter.frame_count == 2


@pytest.mark.xdist_group("programs")
def test_the_cache_key_says_all_but_the_values_also_in_another_process() -> None:
    def key(t: Float8Tensor) -> str:
        return t._stable_hash_for_caching()

    x = torch.ones(16, 32)
    t = from_high_precision(x)
    others = [
        from_high_precision(x[:8]),
        from_high_precision(x.t()),
        t.t(),
        from_high_precision(x, torch.float8_e5m2),
        from_high_precision(x.bfloat16()),
        from_high_precision(x, scale=torch.ones(1)),
        t.to("meta"),
        t.clone().requires_grad_(),
        full(),
        full(amax=None),
    ]
    assert key(t) == key(from_high_precision(seeded(1, 16, 32)))
    assert len({key(t), *map(key, others)}) == len(others) + 1
    done = run_program(  # strings hash differently in each process
        "import torch; from float8 import Float8Tensor; "
        "t = Float8Tensor.from_high_precision(torch.ones(16, 32)); "
        "print(t._stable_hash_for_caching())"
    )
    assert done.stdout.strip() == key(t), done.stderr
