"""`grouped_linear`: single layers in a loop, bit by bit, float64, odd groups, compiled code."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    grouped_linear,
    linear,
    save_gemm_outputs,
)
from float8.experts.grouped import GROUPED_OUTER
from sqnr import sqnr
from support.devices import on_devices
from support.errors import require_errors
from support.models import seeded
from support.rings import short
from support.spies import OpCounter, saved_tensors

EXHAUSTIVE = pytest.mark.exhaustive
N, K = 48, 80
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
recipes = pytest.mark.parametrize("recipe", RECIPES)
coarse_and_fine = pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])


def here(recipe: str) -> Any:
    """Return what can run: MXFP8 is emulated, of which no GPU here has the GEMM."""
    return as_grouped(recipe) if recipe == "mxfp8" else recipe


class Inputs(NamedTuple):
    """Input, weight, offs and the gradient of the output."""

    x: Tensor
    w: Tensor
    offs: Tensor
    g: Tensor

    def run(self, config: Any = None, call: Callable[..., Tensor] = grouped_linear) -> list[Tensor]:
        """Return output and gradients."""
        y = call(self.x, self.w, self.offs, config=config)
        return [y.detach(), *torch.autograd.grad(y, (self.x, self.w), self.g)]

    def to(self, dtype: torch.dtype) -> "Inputs":
        x, w = (t.detach().to(dtype).requires_grad_() for t in self[:2])
        return Inputs(x, w, self.offs, self.g.to(dtype))


def inputs(sizes: list[int], behind: int = 0, device: str = "cpu") -> Inputs:
    T, E = sum(sizes) + behind, len(sizes)
    x, w, g = (seeded(i, *shape) for i, shape in enumerate(((T, K), (E, N, K), (T, N))))
    offs = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    return Inputs(x.to(device), w.to(device), offs, g.to(device)).to(torch.bfloat16)


def loop(sizes: list[int], given: Inputs, layer: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return the same of a layer for each group by itself, one after the other."""
    made = []
    x, w, _, g = given
    for rows, weight, grad in zip(x.split(sizes), w, g.split(sizes), strict=True):
        a, b = rows.detach().requires_grad_(), weight.detach().requires_grad_()
        y = layer(a, b)
        made.append((y.detach(), *torch.autograd.grad(y, (a, b), grad)))
    ys, dxs, dws = zip(*made, strict=True)
    return torch.cat(ys), torch.cat(dxs), torch.stack(dws)


def assert_same(got: Any, wanted: Any) -> None:
    assert all(a.equal(b) for a, b in zip(got, wanted, strict=True))


def compiled(call: Callable[..., Any] = grouped_linear) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def as_grouped(recipe: str) -> Float8LinearConfig:
    """Return the recipe as grouped GEMMs run it, with gradients in e4m3, emulated.

    Where a linear layer has squares of tokens and features they have runs of tokens.
    """
    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe == "mxfp8":
        return replace(config, emulate=True)
    if recipe == "blockwise":
        runs = config.cast_config_input
        return replace(config, cast_config_input_for_grad_weight=runs, emulate=True)
    e4m3 = replace(config.cast_config_grad_output, target_dtype=torch.float8_e4m3fn)
    high = config.cast_config_grad_output_for_grad_weight if recipe.endswith("gw_hp") else None
    return replace(
        config,
        cast_config_grad_output=e4m3,
        cast_config_grad_output_for_grad_weight=high,
        emulate=True,
    )


@on_devices
@pytest.mark.parametrize("sizes", [[0, 1, 15, 16, 17], [127, 0, 0, 130], [0, 0, 64], [33]], ids=str)
@recipes
def test_it_is_a_loop_of_layers(device: str, recipe: str, sizes: list[int]) -> None:
    """All groups but the rows behind the last, which are zero. Emulated, so that bits compare."""
    config = as_grouped(recipe)
    given, end = inputs(sizes, 5, device), sum(sizes)
    y, dx, dw = given.run(config)
    assert not y[end:].any()
    assert not dx[end:].any()
    groups = given._replace(x=given.x[:end], g=given.g[:end])
    wanted = loop(sizes, groups, lambda a, b: linear(a, b, config=config))
    assert_same((y[:end], dx[:end], dw), wanted)  # a GEMM of another size may add otherwise
    assert not dw[[size == 0 for size in sizes]].any()


@on_devices
@recipes
def test_it_is_as_exact_as_layers(device: str, recipe: str) -> None:
    """Against float64, SQNR of the three products, by the GEMMs that the device has."""
    sizes = [256, 128, 384]
    given = inputs(sizes, device=device)
    exact = loop(sizes, given.to(torch.float64), F.linear)
    layers = loop(sizes, given, lambda a, b: linear(a, b, config=here(recipe)))
    for want, got, layer in zip(exact, given.run(here(recipe)), layers, strict=True):
        assert sqnr(want, got) >= sqnr(want, layer) - 0.1


@on_devices
@recipes
def test_what_is_not_finite_stays_with_its_expert(device: str, recipe: str) -> None:
    sizes = [17, 5, 10]
    given = inputs(sizes, device=device)
    clean = given.run(here(recipe))
    with torch.no_grad():
        given.x[18] = float("nan")
        given.g[19] = float("inf")
    for good, bad, groups in zip(clean, given.run(here(recipe)), (3, 3, 0), strict=True):
        of_good, of_bad = (z.split(sizes) if groups else z for z in (good, bad))
        assert not of_bad[1].isfinite().all()
        for e in (0, 2):
            assert of_bad[e].equal(of_good[e])


@on_devices
@pytest.mark.parametrize("keeps", [False, True])
@coarse_and_fine
def test_checkpointing_keeps_what_its_policy_says(device: str, keeps: bool, recipe: str) -> None:
    """And without one its input alone."""
    given = inputs([17, 15], device=device)
    contexts = partial(create_selective_checkpoint_contexts, save_gemm_outputs)
    how = {"context_fn": contexts} if keeps else {}
    with OpCounter() as counter:
        with saved_tensors() as kept:
            call = partial(grouped_linear, config=recipe)
            y = checkpoint(call, *given[:3], use_reentrant=False, **how)
        got = y, *torch.autograd.grad(y, (given.x, given.w), given.g)
    assert counter.ops["float8.grouped_matmul"] == (3 if keeps else 4)
    own = {t.data_ptr() for t in given[:3]}
    assert keeps or {t.data_ptr() for t in kept if t.numel()} <= own
    assert_same(got, given.run(recipe))


@on_devices
@coarse_and_fine
def test_weights_that_lie_transposed_are_read_as_they_lie(device: str, recipe: str) -> None:
    """Those of gpt-oss are [E, K, N]: the same bits, and a gradient that lies as they do."""
    given = inputs([20, 0, 44], device=device)
    stored = given.w.detach().transpose(1, 2).contiguous().requires_grad_()
    y = grouped_linear(given.x, stored.transpose(1, 2), given.offs, config=recipe)
    dx, dstored = torch.autograd.grad(y, (given.x, stored), given.g)
    assert_same((y, dx, dstored.transpose(1, 2)), given.run(recipe))


@coarse_and_fine
def test_no_rows_and_partial_gradients(recipe: str) -> None:
    x, w, offs, g = given = inputs([16, 16], 5)
    grouped = partial(grouped_linear, config=recipe)
    none = grouped(x[:0], w, torch.zeros(2, dtype=torch.int32))
    assert none.shape == (0, N)
    assert not torch.autograd.grad(none.sum(), w)[0].any()
    y, dx, dw = given.run(recipe)
    frozen, first = (grouped(*args, offs) for args in ((x, w.detach()), (x.detach(), w)))
    assert torch.autograd.grad(frozen, x, g)[0].equal(dx)
    assert torch.autograd.grad(first, w, g)[0].equal(dw)
    with torch.no_grad():
        assert grouped(x, w, offs).equal(y)


@on_devices
def test_blocks_with_the_gradient_of_weights_in_high_precision(device: str) -> None:
    high, given = CastConfig(ScalingType.DISABLED), inputs([20, 0, 44], 5, device)
    config = replace(
        Float8LinearConfig.from_recipe_name("blockwise"),
        cast_config_input_for_grad_weight=high,
        cast_config_grad_output_for_grad_weight=high,
    )
    y, dx, _ = given.run("blockwise")
    dw = GROUPED_OUTER(given.g, given.x.detach(), given.offs)
    assert_same(given.run(config), (y, dx, dw))


def test_autocast_chooses_the_dtype() -> None:
    given = inputs([16, 8])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_linear(*given.to(torch.float32)[:3])
    assert y.dtype == torch.bfloat16
    assert y.equal(given.run()[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_compiled_code_holds_for_all_sizes(recipe: str) -> None:
    """One graph for groups of any sizes, one more for other numbers of rows; also of [E, K, N]."""
    for transposed in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        call = torch.compile(grouped_linear, fullgraph=True, backend=counter)
        for sizes in ([8, 0, 24], [0, 32, 0], [1, 2, 3], [50, 60, 70]):
            given = inputs(sizes)
            if transposed:
                stored = given.w.detach().transpose(1, 2).contiguous().requires_grad_()
                given = given._replace(w=stored.transpose(1, 2))
            with saved_tensors() as kept:
                got = given.run(recipe, call)
            assert_same(got, given.run(recipe))
            assert_no_cast_of_weights(kept)
        assert counter.frame_count <= 2


def assert_no_cast_of_weights(kept: list[Tensor]) -> None:
    """It would fill memory until backward, and under FSDP2 hold all weights of all ranks."""
    float8 = [t for t in kept if t.dtype.itemsize == 1]
    assert all(t.dim() == 2 and len(t) == K for t in float8)  # the input, transposed
    assert all(t.numel() <= 3 * N * K for t in kept if t.dim() == 3)  # as large as the weights


@pytest.mark.exhaustive
def test_compiled_code_takes_other_dtypes() -> None:
    """torch's own grouped GEMM, which the gradient of the weight is here, takes bfloat16 there."""
    given = inputs([5, 27]).to(torch.float16)
    assert_same(*(given.run("rowwise_with_gw_hp", call) for call in (compiled(), grouped_linear)))


@pytest.mark.xdist_group("compilers")
@pytest.mark.parametrize("recipe", short({"blockwise"}, ["tensorwise", "blockwise"]))
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compiled_code_need_not_know_how_many_rows_there_are(recipe: str) -> None:
    """As under expert parallel, where what other ranks send says so; it may be none.

    One graph holds for all, checks `offs`, and saves no cast of weights.
    """

    def received(x: Tensor, w: Tensor, sizes: Tensor, config: str) -> Tensor:
        rows = x.index_select(0, torch.arange(sizes.sum().item()))
        return grouped_linear(rows, w, sizes.cumsum(0).to(torch.int32), config=config)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(received, fullgraph=True, backend=counter)
    for sizes in ([3, 9, 0], [0, 0, 0], [33, 20, 1]):
        rows = sum(sizes)
        given = inputs(sizes, 60 - rows)
        given = given._replace(offs=torch.tensor(sizes), g=given.g[:rows])
        with saved_tensors() as kept:
            got = given.run(recipe, call)
        assert_same(got, given.run(recipe, received))
        assert_no_cast_of_weights(kept)
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match=r"got offs \[60, 50, 54\] for 54 rows"):
        call(given.x, given.w, torch.tensor([60, -10, 4]), recipe)


def test_it_is_differentiable_once() -> None:
    x, w, offs, g = inputs([16, 16])
    (dx,) = torch.autograd.grad(grouped_linear(x, w, offs), x, g, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()


WILD = [
    ([10, 5, 20, 32], [10, 10, 20, 32]),
    ([-5, 10, 20, 32], [0, 10, 20, 32]),
    ([-1, 15, 20, 40], [0, 15, 20, 32]),
    ([-(2**31), 2**31 - 1, 3, -7], [0, 32, 32, 32]),
]


@on_devices
@recipes
def test_offs_that_lead_nowhere(device: str, recipe: str) -> None:
    """A CPU says so; a GPU, which nobody waits for, has the groups that the docstring names."""
    given = inputs([8] * 4, device=device)
    a, b = given.x.detach()[:, :40].contiguous(), given.x.detach()
    calls = [(grouped_linear, given.x), (grouped_linear, given.x[:0])]
    for wild, tame in WILD:
        given.offs.copy_(torch.tensor(wild))
        tamed = given._replace(offs=given.offs.new_tensor(tame))
        assert GROUPED_OUTER(a, b, given.offs).equal(GROUPED_OUTER(a, b, tamed.offs))
        if device == "cuda":
            assert_same(given.run(here(recipe)), tamed.run(here(recipe)))
            continue
        for call, x in calls:
            with pytest.raises(ValueError, match=re.escape(f"got offs {wild} for {len(x)} rows")):
                call(x, given.w, given.offs, config=recipe)


def test_a_trace_follows_the_ends_of_groups() -> None:
    x, w, offs = (t.detach() for t in inputs([10, 22])[:3])
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    call = partial(grouped_linear, config=config)
    traced = torch.jit.trace(lambda x, w, offs: call(x, w, offs), (x, w, offs))
    ends = offs.new_tensor([20, 32])
    assert traced(x, w, ends).equal(call(x, w, ends))


def test_bad_input_raises() -> None:
    x, w, offs = (t.detach() for t in inputs([16, 16])[:3])
    blocks = Float8LinearConfig.from_recipe_name("blockwise")
    runs, squares = blocks.cast_config_input, blocks.cast_config_weight
    turned = replace(blocks, cast_config_input=squares, cast_config_weight=runs)
    turned = replace(turned, cast_config_weight_for_grad_input=squares)
    require_errors(
        *(
            (error, partial(grouped_linear, config=config), args)
            for error, args, config in (
                ("TypeError: dtype torch.int64, expected torch.int32", (x, w, offs.long()), None),
                ("TypeError: expected the same", (x, w.float(), offs), None),
                ("TypeError: dtype torch.int8", (x.to(torch.int8), w, offs), None),
                (r"ValueError: expected \[T, K\]", (x, w.transpose(1, 2), offs), None),
                (r"ValueError: expected \[T, K\]", (x, w, offs[:1]), None),
                ("ValueError: one device", (x, w.to("meta"), offs), None),
                ("ValueError: multiples of 16", (x[:, :70], w[:, :, :70], offs), None),
                ("ValueError: delayed scaling", (x, w, offs), "delayed"),
                ("ValueError: weights with scales of 1x128", (x, w, offs), turned),
                ("ValueError: recipe", (x, w, offs), "columnwise"),
                ("TypeError: dict", (x, w, offs), {}),
            )
        )
    )


@recipes
def test_features_of_any_number_with_emulate(recipe: str) -> None:
    """Zeros beside them change nothing."""
    x, w, offs, g = inputs([5, 0, 27])
    odd = Inputs(x[:, :70], w[:, :41, :70], offs, g[:, :41])
    a, b, c = F.pad(odd.x, (0, 10)), F.pad(odd.w, (0, 10, 0, 7)), F.pad(odd.g, (0, 7))
    got = odd.run(as_grouped(recipe))
    y, dx, dw = Inputs(a, b, offs, c).run(as_grouped(recipe))
    assert_same(got, (y[:, :41], dx[:, :70], dw[:, :41, :70]))
