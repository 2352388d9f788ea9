"""Scales finer than one per tensor: all three GEMMs against float64 products of the same casts."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tolerances
from float8 import CastConfig, Float8Linear, Float8LinearConfig, ScalingType, linear
from float8.config import ScalingGranularity
from sqnr import same_bits, sqnr
from support.configs import FINER, mixed, of_recipe
from support.devices import DTYPES, on_devices
from support.models import seeded
from support.reference import reference_values
from support.spies import saved_tensors

TENSOR, ROW, RUN, SQUARE = (0, 0), (1, 0), (1, 128), (128, 128)
"""The blocks that a scale covers, of an operand that is contracted along its second dim."""

CASTS = {
    # input, weight; grad_output, weight.t(); grad_output.t(), input.t()
    "rowwise": ((ROW, ROW), (ROW, ROW), (ROW, ROW)),
    "rowwise_with_gw_hp": ((ROW, ROW), (ROW, TENSOR), None),
    "blockwise": ((RUN, SQUARE), (RUN, SQUARE), (RUN, RUN)),
}
SHAPES = [(128, 128, 256), (48, 400, 144), (17, 130, 33), (1, 16, 16), (300, 5, 3)]


def wanted(recipe: str, x: Tensor, w: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a layer, in float64."""
    power_of_2 = Float8LinearConfig.from_recipe_name(recipe).round_scales_to_power_of_2
    pairs = ((x, w), (g, w.t()), (g.t(), x.t()))
    products = []
    for operands, blocks in zip(pairs, CASTS[recipe], strict=True):
        a, b = (
            t.detach().cpu().double() if blocks is None else reference_values(t, block, power_of_2)
            for t, block in zip(operands, blocks or (None, None), strict=True)
        )
        products.append(a @ b.t())
    return dict(zip(("output", "grad_input", "grad_weight"), products, strict=True))


def tensors(M: int, K: int, N: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Input, weight and grad_output whose rows and columns differ by up to 1000 in size.

    So a scale that is taken of the wrong rows or columns shows.
    """
    sizes = torch.logspace(-1.5, 1.5, 512)
    x = seeded(0, M, K) * sizes[:M, None] * sizes.flip(0)[:K]
    w = seeded(1, N, K) * sizes[:N, None] * sizes[:K].roll(7)
    g = seeded(2, M, N) * sizes.flip(0)[:M, None] * sizes[:N].roll(11)
    return tuple(t.to(device, dtype) for t in (x, w, g))


def ran(x: Tensor, w: Tensor, g: Tensor, config: Float8LinearConfig) -> dict[str, Tensor]:
    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = linear(x, w, config=config)
    y.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return {"output": y.detach(), "grad_input": x.grad, "grad_weight": w.grad}


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", FINER)
def test_output_and_gradients(
    recipe: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    x, w, g = tensors(*shape, dtype, device)
    got = ran(x, w, g, of_recipe(recipe))
    for name, product in wanted(recipe, x, w, g).items():
        assert got[name].dtype == dtype
        assert got[name].is_contiguous()
        assert sqnr(product, got[name].cpu()) > tolerances.GEMM, name


@pytest.mark.gpu  # the CPU emulates all of them
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("recipe", FINER)
def test_emulation_agrees_with_the_gemms(recipe: str, device: str) -> None:
    x, w, g = tensors(48, 400, 144, torch.bfloat16, device)
    got = ran(x, w, g, of_recipe(recipe))
    emulated = ran(x, w, g, of_recipe(recipe, emulate=True))
    for name in got:
        assert sqnr(emulated[name], got[name]) > tolerances.GEMM, name


@on_devices
@pytest.mark.parametrize("recipe", FINER)
def test_a_hot_channel_and_a_hot_token_spoil_nobody_else(recipe: str, device: str) -> None:
    """One scale per tensor loses what lies under 2**-16 of the largest value; finer ones do not."""
    M, K, N = 256, 256, 256
    x, w, g = (seeded(i, *size).to(device) for i, size in enumerate(((M, K), (N, K), (M, N))))
    x[3] *= 1e6  # a token
    rest = torch.arange(M, device=device) != 3
    exact = (x.double() @ w.double().t())[rest]
    per_tensor = sqnr(exact, linear(x, w)[rest])
    finer = sqnr(exact, linear(x, w, config=of_recipe(recipe))[rest])
    assert per_tensor < 10
    assert finer > tolerances.LINEAR_OUTPUT
    got = ran(x, w, g, of_recipe(recipe))
    assert sqnr(g.double() @ w.double(), got["grad_input"]) > tolerances.LINEAR_GRAD_INPUT


@on_devices
@pytest.mark.parametrize("recipe", FINER)
def test_zeros_and_what_is_not_finite(recipe: str, device: str) -> None:
    x, w, g = tensors(160, 256, 48, torch.float32, device)
    x[5] = 0
    x[:, 7] = 0
    got = ran(x, w, g, of_recipe(recipe))
    assert (got["output"][5] == 0).all()
    assert (got["grad_weight"][:, 7] == 0).all()
    assert all(t.isfinite().all() for t in got.values())
    x[9, 11] = torch.inf
    got = ran(x, w, g, of_recipe(recipe))
    assert got["output"][9].isnan().all()
    assert got["output"].isfinite().all(dim=1).sum() == 159  # its own row alone
    # In high precision an Inf stays one.
    assert not got["grad_weight"][:, 11].isfinite().any()


@pytest.mark.parametrize("recipe", FINER)
def test_what_is_kept_of_an_input_is_float8(recipe: str) -> None:
    x, w, _ = tensors(48, 400, 144, torch.float32, "cpu")
    x, w = x.requires_grad_(), w.requires_grad_()
    with saved_tensors() as saved:
        linear(x, w, config=of_recipe(recipe))
    high = recipe == "rowwise_with_gw_hp"
    assert any(t.data_ptr() == x.data_ptr() for t in saved) == high


@on_devices
@pytest.mark.parametrize("recipe", FINER)
def test_an_input_that_is_kept_anyway_changes_no_bit(recipe: str, device: str) -> None:
    x, w, g = tensors(48, 400, 144, torch.bfloat16, device)
    layer = Float8Linear(400, 144, False, device, torch.bfloat16, config=of_recipe(recipe))
    layer.weight.data.copy_(w)
    results = []
    for keep in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf, keep_input=keep)
        y.backward(g)
        results.append([y, leaf.grad, layer.weight.grad])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@on_devices
@pytest.mark.parametrize("recipe", FINER)
def test_a_module_checkpointed_under_autocast(recipe: str, device: str) -> None:
    config = of_recipe(recipe)
    torch.manual_seed(0)
    layer = Float8Linear.from_float(nn.Linear(40, 56), config).to(device)
    x = seeded(0, 3, 10, 40).to(device)
    results = []
    for checkpointed in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            if checkpointed:
                y = torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False)
            else:
                y = layer(leaf)
            assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        results.append([y, leaf.grad, layer.weight.grad, layer.bias.grad])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert [tuple(t.shape) for t in results[0]] == [(3, 10, 56), (3, 10, 40), (56, 40), (56,)]


STATIC = [  # shapes decide about the layout of blocks
    pytest.param(recipe, False, marks=[] if recipe == "blockwise" else [pytest.mark.exhaustive])
    for recipe in FINER
]


@on_devices
@pytest.mark.parametrize(("recipe", "dynamic"), [*((recipe, True) for recipe in FINER), *STATIC])
def test_compiled(recipe: str, dynamic: bool, device: str) -> None:
    """One graph for all numbers of tokens if dynamic; the results of eager mode."""
    torch._dynamo.reset()
    config = of_recipe(recipe)
    torch.manual_seed(0)
    layer = Float8Linear.from_float(nn.Linear(256, 384), config)
    model = nn.Sequential(nn.RMSNorm(256), layer, nn.SiLU()).to(device)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
    for tokens in (160, 256, 333) if dynamic else (160,):
        x = seeded(tokens, tokens, 256).to(device)
        results = []
        for run in (model, compiled):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.square().sum().backward()
            results.append([y, leaf.grad, *(p.grad for p in model.parameters())])
        for eager, got in zip(*results, strict=True):
            assert sqnr(eager, got) > tolerances.COMPILED
    graphs = [g for g in counter.graphs if any(n.op == "placeholder" for n in g.graph.nodes)]
    assert len(graphs) == 1


@pytest.mark.parametrize("recipe", FINER)
def test_names_and_reprs(recipe: str) -> None:
    layer = Float8Linear(16, 16, config=of_recipe(recipe))
    assert repr(layer).endswith(f", bias=True, {recipe})")
    wide = dataclasses.replace(layer.config.cast_config_input, target_dtype=torch.float8_e5m2)
    other = dataclasses.replace(layer.config, cast_config_input=wide)
    how = {"rowwise": "axiswise", "rowwise_with_gw_hp": "axiswise", "blockwise": "block_1x128"}
    assert other.short_str().startswith(f"input={how[recipe]}/e5m2")
    assert ("grad_output_for_grad_weight=high precision" in other.short_str()) == (
        recipe == "rowwise_with_gw_hp"
    )
    assert layer.config.round_scales_to_power_of_2 == (recipe != "blockwise")


def test_delayed_scaling_has_one_scale() -> None:
    with pytest.raises(ValueError, match=r"AXISWISE with delayed scaling, expected TENSORWISE"):
        CastConfig(ScalingType.DELAYED, ScalingGranularity.AXISWISE)


def test_pairs_without_a_gemm_are_refused() -> None:
    rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
    runs = CastConfig(scaling_granularity=ScalingGranularity.BLOCK_1x128)
    with pytest.raises(ValueError, match=r"'output'.*axiswise and block_1x128, expected one of"):
        Float8LinearConfig(cast_config_input=rows, cast_config_weight=runs)


def test_a_granularity_without_a_cast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"BLOCK_1x128 with ScalingType.DISABLED, expected TENSOR"):
        CastConfig(ScalingType.DISABLED, ScalingGranularity.BLOCK_1x128)


def test_without_padding_blocks_must_be_whole() -> None:
    config = of_recipe("blockwise", pad_inner_dim=False)
    x, w, _ = tensors(128, 144, 128, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"weight of .*144\), expected a multiple of 128"):
        linear(x, w, config=config)
    x, w, _ = tensors(144, 128, 128, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"144 tokens .*expected a multiple of 128"):
        linear(x, w.requires_grad_(), config=config)


@pytest.mark.parametrize("granularity", ["AXISWISE", "BLOCK_1x128"])
def test_weights_whose_gathered_bytes_would_not_do_are_refused(granularity: str) -> None:
    cast = CastConfig(scaling_granularity=ScalingGranularity[granularity])
    with pytest.raises(ValueError, match=rf"got True with a weight under .*{granularity}"):
        mixed(cast, cast, cast, enable_fsdp_float8_all_gather=True)


def test_single_casts() -> None:
    """One finer operand among per-tensor ones."""
    rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
    config = Float8LinearConfig(cast_config_input=rows)
    x, w, g = tensors(48, 64, 32, torch.float32, "cpu")
    got = ran(x, w, g, config)
    product = reference_values(x, ROW) @ reference_values(w, TENSOR).t()
    assert sqnr(product, got["output"]) > tolerances.GEMM
    wide = torch.float8_e5m2
    product = reference_values(g.t(), TENSOR, dtype=wide) @ reference_values(x.t(), ROW).t()
    assert sqnr(product, got["grad_weight"]) > tolerances.GEMM
