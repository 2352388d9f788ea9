"""`grouped_linear`: single layers in a loop, bit by bit, float64, odd groups, compiled code."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from float8 import Float8LinearConfig, grouped_linear, linear, save_gemm_outputs
from float8.gemm import grouped_outer
from sqnr import sqnr
from support.devices import on_devices
from support.models import seeded
from support.spies import OpCounter

N, K = 48, 80
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SIZES = [[0, 1, 15, 16, 17], [100, 0, 0, 37], [0, 0, 64], [33]]


def inputs(sizes: list[int], behind: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
    """Return input, weight, offs and the gradient of the output."""
    T, E = sum(sizes) + behind, len(sizes)
    x = seeded(0, T, K, device=device).to(torch.bfloat16).requires_grad_()
    w = seeded(1, E, N, K, device=device).to(torch.bfloat16).requires_grad_()
    g = seeded(2, T, N, device=device).to(torch.bfloat16)
    return x, w, torch.tensor(sizes, device=device).cumsum(0).to(torch.int32), g


def run(x: Tensor, w: Tensor, offs: Tensor, g: Tensor, config: object) -> tuple[Tensor, ...]:
    """Return output and gradients of `grouped_linear`."""
    y = grouped_linear(x, w, offs, config=config)
    return y.detach(), *torch.autograd.grad(y, (x, w), g)


def loop(sizes: list[int], x: Tensor, w: Tensor, g: Tensor, layer: object) -> tuple[Tensor, ...]:
    """Return the same of a layer for each group by itself, one after the other."""
    made = []
    for rows, weight, grad in zip(x.split(sizes), w, g.split(sizes), strict=True):
        a, b = rows.detach().requires_grad_(), weight.detach().requires_grad_()
        y = layer(a, b)
        made.append((y.detach(), *torch.autograd.grad(y, (a, b), grad)))
    ys, dxs, dws = zip(*made, strict=True)
    return torch.cat(ys), torch.cat(dxs), torch.stack(dws)


def as_grouped(recipe: str) -> Float8LinearConfig:
    """Return the recipe as grouped GEMMs run it, with gradients in e4m3, emulated."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    e4m3 = replace(config.cast_config_grad_output, target_dtype=torch.float8_e4m3fn)
    return replace(
        config,
        cast_config_grad_output=e4m3,
        cast_config_grad_output_for_grad_weight=(
            config.cast_config_grad_output_for_grad_weight if recipe.endswith("gw_hp") else None
        ),
        emulate=True,
    )


@on_devices
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_a_loop_of_layers(device: str, recipe: str, sizes: list[int]) -> None:
    """All groups but the rows behind the last, which are zero. Emulated, so that bits compare."""
    config = as_grouped(recipe)
    x, w, offs, g = inputs(sizes, 5, device)
    y, dx, dw = run(x, w, offs, g, config)
    end = sum(sizes)
    assert not y[end:].any()
    assert not dx[end:].any()
    wanted = loop(sizes, x[:end], w, g[:end], lambda a, b: linear(a, b, config=config))
    for got, want in zip((y[:end], dx[:end], dw), wanted, strict=True):
        # A GEMM of another size may add in another order.
        assert got.equal(want), sqnr(want, got)
    empty = [size == 0 for size in sizes]
    assert not dw[empty].any()


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_as_exact_as_layers(device: str, recipe: str) -> None:
    """Against float64, SQNR of the three products, by the GEMMs that the device has."""
    sizes = [256, 128, 384]
    x, w, offs, g = inputs(sizes, device=device)
    exact = loop(sizes, x.double(), w.double(), g.double(), F.linear)
    layers = loop(sizes, x, w, g, lambda a, b: linear(a, b, config=recipe))
    for want, got, layer in zip(exact, run(x, w, offs, g, recipe), layers, strict=True):
        assert sqnr(want, got) >= sqnr(want, layer) - 0.1


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_stays_with_its_expert(device: str, recipe: str) -> None:
    sizes = [17, 5, 10]
    x, w, offs, g = inputs(sizes, device=device)
    clean = run(x, w, offs, g, recipe)
    with torch.no_grad():
        x[18] = float("nan")
        g[19] = float("inf")
    for good, bad, groups in zip(clean, run(x, w, offs, g, recipe), (3, 3, 0), strict=True):
        of_good, of_bad = (z.split(sizes) if groups else z for z in (good, bad))
        assert not of_bad[1].isfinite().all()
        for e in (0, 2):
            assert of_bad[e].equal(of_good[e])


@on_devices
@pytest.mark.parametrize("keeps", [False, True])
def test_checkpointing_keeps_what_its_policy_says(device: str, keeps: bool) -> None:
    x, w, offs, g = inputs([17, 15], device=device)
    contexts = partial(create_selective_checkpoint_contexts, save_gemm_outputs)
    how = {"context_fn": contexts} if keeps else {}
    with OpCounter() as counter:
        y = checkpoint(grouped_linear, x, w, offs, use_reentrant=False, **how)
        got = torch.autograd.grad(y, (x, w), g)
    assert counter.ops["float8.grouped_matmul"] == (3 if keeps else 4)
    for a, b in zip(got, run(x, w, offs, g, None)[1:], strict=True):
        assert a.equal(b)


@on_devices
def test_weights_that_lie_transposed_are_read_as_they_lie(device: str) -> None:
    """Those of gpt-oss are [E, K, N]: the same bits, and a gradient that lies as they do."""
    x, w, offs, g = inputs([20, 0, 44], device=device)
    stored = w.detach().transpose(1, 2).contiguous().requires_grad_()
    y = grouped_linear(x, stored.transpose(1, 2), offs)
    dx, dstored = torch.autograd.grad(y, (x, stored), g)
    for got, want in zip((y, dx, dstored.transpose(1, 2)), run(x, w, offs, g, None), strict=True):
        assert got.equal(want)


def test_no_rows_and_partial_gradients() -> None:
    x, w, offs, g = inputs([16, 16])
    none = grouped_linear(x[:0], w, torch.zeros(2, dtype=torch.int32))
    assert none.shape == (0, N)
    assert not torch.autograd.grad(none.sum(), w)[0].any()
    y, dx, dw = run(x, w, offs, g, None)
    frozen = grouped_linear(x, w.detach(), offs)
    assert torch.autograd.grad(frozen, x, g)[0].equal(dx)
    first = grouped_linear(x.detach(), w, offs)
    assert torch.autograd.grad(first, w, g)[0].equal(dw)
    with torch.no_grad():
        assert grouped_linear(x, w, offs).equal(y)


def test_autocast_chooses_the_dtype() -> None:
    x, w, offs, g = inputs([16, 8])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_linear(x.float(), w.detach().float().requires_grad_(), offs)
    assert y.dtype == torch.bfloat16
    assert y.equal(run(x, w, offs, g, None)[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_code_holds_for_all_sizes(recipe: str) -> None:
    """One graph without breaks for groups of any sizes; with other numbers of rows one more."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    counted = torch.compile(grouped_linear, fullgraph=True, backend=counting)
    for sizes in ([8, 0, 24], [0, 32, 0], [1, 2, 3], [50, 60, 70]):
        x, w, offs, g = inputs(sizes)
        y = compiled(x, w, offs, config=recipe)
        counted(x, w, offs, config=recipe)
        wanted = run(x, w, offs, g, recipe)
        for got, want in zip((y, *torch.autograd.grad(y, (x, w), g)), wanted, strict=True):
            assert got.equal(want)
    assert len(graphs) <= 2


@pytest.mark.parametrize("recipe", RECIPES)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compiled_code_need_not_know_how_many_rows_there_are(recipe: str) -> None:
    """As under expert parallel, where what other ranks send says so; it may be none."""

    def received(x: Tensor, w: Tensor, sizes: Tensor) -> Tensor:
        rows = x.index_select(0, torch.arange(sizes.sum().item()))
        return grouped_linear(rows, w, sizes.cumsum(0).to(torch.int32), config=recipe)

    torch._dynamo.reset()
    compiled = torch.compile(received, fullgraph=True, backend="aot_eager")
    for sizes in ([3, 9], [0, 0], [33, 20]):
        x, w, _, g = inputs(sizes)
        got, want = (f(x, w, torch.tensor(sizes)) for f in (compiled, received))
        assert got.equal(want)
        for a, b in zip(*(torch.autograd.grad(y, (x, w), g) for y in (got, want)), strict=True):
            assert a.equal(b)


def test_checkpointed_code_keeps_its_input_alone() -> None:
    x, w, offs, g = inputs([40, 24])
    wanted = run(x, w, offs, g, None)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = checkpoint(grouped_linear, x, w, offs, use_reentrant=False)
    assert {t.data_ptr() for t in kept if t.numel()} <= {t.data_ptr() for t in (x, w, offs)}
    for got, want in zip((y, *torch.autograd.grad(y, (x, w), g)), wanted, strict=True):
        assert got.equal(want)


def test_it_is_differentiable_once() -> None:
    x, w, offs, g = inputs([16, 16])
    (dx,) = torch.autograd.grad(grouped_linear(x, w, offs), x, g, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()


WILD = [
    ([10, 5, 20, 32], [10, 10, 20, 32]),
    ([-1, 15, 20, 40], [0, 15, 20, 32]),
    ([-(2**31), 2**31 - 1, 3, -7], [0, 32, 32, 32]),
]


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("wild", "tame"), WILD, ids=str)
def test_offs_that_lead_nowhere(device: str, recipe: str, wild: list[int], tame: list[int]) -> None:
    """A CPU says so; a GPU, which nobody waits for, has the groups that the docstring names."""
    x, w, offs, g = inputs([8] * 4, device=device)
    offs.copy_(torch.tensor(wild))
    a, b = x.detach()[:, :40].contiguous(), x.detach()
    expected = grouped_outer(a, b, torch.tensor(tame, dtype=torch.int32, device=device))
    assert grouped_outer(a, b, offs).equal(expected)
    if device == "cuda":
        made = run(x, w, offs, g, recipe), run(x, w, offs.new_tensor(tame), g, recipe)
        assert all(got.equal(want) for got, want in zip(*made, strict=True))
        return
    torch._dynamo.reset()
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    for call, rows in ((grouped_linear, x), (grouped_linear, x[:0]), (compiled, x)):
        with pytest.raises(ValueError, match=re.escape(f"got offs {wild} for {len(rows)} rows")):
            call(rows, w, offs, config=recipe)


def test_bad_input_raises() -> None:
    x, w, offs, _ = (t.detach() for t in inputs([16, 16]))
    for match, kind, args, config in (
        ("dtype torch.int64, expected torch.int32", TypeError, (x, w, offs.long()), None),
        ("expected the same", TypeError, (x, w.float(), offs), None),
        ("dtype torch.int8", TypeError, (x.to(torch.int8), w, offs), None),
        (r"expected \[T, K\]", ValueError, (x, w.transpose(1, 2), offs), None),
        (r"expected \[T, K\]", ValueError, (x, w, offs[:1]), None),
        ("one device", ValueError, (x, w.to("meta"), offs), None),
        ("multiples of 16", ValueError, (x[:, :70], w[:, :, :70], offs), None),
        ("delayed scaling", ValueError, (x, w, offs), "delayed"),
        ("block scales", ValueError, (x, w, offs), "blockwise"),
        ("recipe", ValueError, (x, w, offs), "columnwise"),
        ("dict", TypeError, (x, w, offs), {}),
    ):
        with pytest.raises(kind, match=match):
            grouped_linear(*args, config=config)
    odd = as_grouped("rowwise")
    y = grouped_linear(x[:, :70], w[:, :, :70], offs, config=odd)
    assert sqnr(loop([16, 16], x[:, :70], w[:, :, :70].requires_grad_(), y, F.linear)[0], y) > 26


@pytest.mark.parametrize("recipe", RECIPES)
def test_features_of_any_number_with_emulate(recipe: str) -> None:
    """Zeros beside them change nothing."""
    x, w, offs, g = inputs([5, 0, 27])
    odd = x[:, :70], w[:, :41, :70], offs, g[:, :41]
    wide = (F.pad(odd[0], (0, 10)), F.pad(odd[1], (0, 10, 0, 7)), offs, F.pad(odd[3], (0, 7)))
    got, want = (run(*args, as_grouped(recipe)) for args in (odd, wide))
    assert all(a.equal(b[..., : a.shape[-1]]) for a, b in zip(got[:2], want[:2], strict=True))
    assert got[2].equal(want[2][:, :41, :70])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compiled_code_takes_all_dtypes(dtype: torch.dtype) -> None:
    """torch's own grouped GEMM, which the gradient of the weight is here, takes bfloat16 there."""
    torch._dynamo.reset()
    x, w, _, g = (t.detach() for t in inputs([5, 27]))
    x, w = (t.to(dtype).requires_grad_() for t in (x, w))
    g = g.to(dtype)
    offs, recipe = torch.tensor([5, 32], dtype=torch.int32), "rowwise_with_gw_hp"
    y = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")(
        x, w, offs, config=recipe
    )
    made = y, *torch.autograd.grad(y, (x, w), g)
    assert all(a.equal(b) for a, b in zip(made, run(x, w, offs, g, recipe), strict=True))
