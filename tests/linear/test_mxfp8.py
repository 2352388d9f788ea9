"""MXFP8: three products, emulated everywhere, and what Blackwell's GEMMs are given."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    CastConfig,
    Float8LinearConfig,
    Float8Tensor,
    ScalingGranularity,
    ScalingType,
    all_linears,
    convert_to_float8_training,
    grouped_linear,
    linear,
)
from float8.experts.kernels.torch_gemms import swizzled_rows, swizzled_tokens
from float8.formats import E4M3
from float8.gemm import Gemm, matmul
from float8.kernels.swizzle import scales_of_rows, swizzled
from float8.linear.plan import plan_linear
from float8.scales import Operand, dequantised
from linear.test_values import assert_products, layer_of, tensors
from sqnr import sqnr
from support.configs import of_recipe
from support.devices import on_devices
from support.models import forward_backward, seeded

RUNS, SQUARES = ScalingGranularity.BLOCK_1x32, ScalingGranularity.BLOCK_32x32
EMULATED = of_recipe("mxfp8", emulate=True)
SQUARE_WEIGHTS = replace(EMULATED, cast_config_weight=CastConfig(scaling_granularity=SQUARES))
RUN, SQUARE = ((1, 32),), ((32, 32),)
CASES: list[tuple[Float8LinearConfig, tuple[Any, ...]]] = [
    (EMULATED, ((RUN, RUN),) * 3),
    (of_recipe("mxfp8_with_gw_hp", emulate=True), ((RUN, RUN), (RUN, RUN), (None, None))),
    (SQUARE_WEIGHTS, ((RUN, SQUARE), (RUN, SQUARE), (RUN, RUN))),
]


@on_devices
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((17, 130, 33), torch.float32),
        ((300, 5, 3), torch.bfloat16),
        pytest.param((48, 400, 144), torch.float16, marks=pytest.mark.exhaustive),
        pytest.param((128, 128, 256), torch.bfloat16, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_products(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    x, w, g = tensors(*shape, dtype, device)
    for config, casts in CASES:
        got = forward_backward(layer_of(w, config), x, g)
        assert_products(got, x, w, g, casts, power_of_2=True)


@on_devices
@pytest.mark.parametrize("recipe", ["mxfp8", "rowwise", "blockwise"])
def test_bfloat16_multiplies_the_same_values(
    device: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the order of sums: before they are rounded few differ, and by one step."""
    config = of_recipe(recipe, emulate=True, round_scales_to_power_of_2=True)
    x, w, g = tensors(64, 128, 96, torch.bfloat16, device)
    made = []
    for exact in torch.bfloat16, torch.float32:
        module = importlib.import_module("float8.gemm")
        monkeypatch.setattr(module, "exact_dtype", lambda *_, exact=exact: exact)
        made.append(forward_backward(layer_of(w, config), x, g))
    for name, value in made[1].items():
        assert sqnr(value, made[0][name]) > 70, name


def test_emulation_in_bfloat16_is_chosen_where_it_is_exact() -> None:
    exact_dtype = importlib.import_module("float8.gemm").exact_dtype
    assert exact_dtype(torch.device("cuda")) == torch.bfloat16
    assert exact_dtype(torch.device("cpu")) == torch.float32  # on some CPUs bfloat16 is slower
    plans = [plan_linear(of_recipe(name)) for name in ("mxfp8", "rowwise", "blockwise")]
    assert [plan.output.powers_of_2 for plan in plans] == [True, True, False]


def test_an_input_in_float8_is_not_taken_for_one_with_powers_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its scale comes from elsewhere; the product of the output has none either, by its weight."""
    config = Float8LinearConfig(
        cast_config_weight=CastConfig(ScalingType.DELAYED),
        round_scales_to_power_of_2=True,
        emulate=True,
    )
    monkeypatch.setattr(importlib.import_module("float8.gemm"), "exact_dtype", lambda _: E4M3)
    x, w, g = tensors(64, 128, 96, torch.bfloat16, "cpu")
    layer = layer_of(w, config)
    layer(Float8Tensor.from_high_precision(x)).backward(g)  # float8 as a dtype of GEMMs would raise
    with pytest.raises((RuntimeError, NotImplementedError)):
        layer(x.detach().requires_grad_()).backward(g)


def test_values_are_exact_in_bfloat16() -> None:
    """All that a cast makes, but under the smallest exponents, where values themselves vanish."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).repeat(225, 1)
    scale = torch.exp2(torch.arange(-120, 105).float())[:, None].expand(-1, 8)
    of = Operand(codes, scale)
    both = (dequantised(of, RUNS, d).double() for d in (torch.bfloat16, torch.float32))
    assert torch.equal(*(x.nan_to_num(-1.0) for x in both))


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (200, 7), (300, 64)], ids=str)
def test_the_order_of_exponents(shape: tuple[int, int]) -> None:
    """By its definition, one exponent after the other."""
    (R, runs), exponents = shape, torch.randint(1, 255, shape, dtype=torch.int32)
    got = swizzled((exponents << 23).view(torch.float32)).view(torch.uint8)
    want = torch.zeros_like(got)
    across = -(-runs // 4)
    for r in range(R):
        for c in range(runs):
            at = r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            want[r // 128 * across + c // 4, at] = exponents[r, c]
    assert torch.equal(got, want)
    special = torch.tensor([[float("nan"), 2.0**-127, 2.0**127]])
    assert swizzled(special).view(torch.uint8)[0, :3].tolist() == [255, 0, 254]


def test_exponents_of_groups() -> None:
    """Each group has tiles of its own, which are those of a matrix by itself."""
    sizes = [64, 0, 130, 200]
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    scale = torch.exp2(torch.randint(-60, 60, (sum(sizes) + 9, 8)).float())
    rows, at = swizzled_rows(scale, offs).view(torch.uint8).view(-1, 512), 0
    for part in scale.split([*sizes, 9]):
        alone = swizzled(part).view(torch.uint8)
        assert torch.equal(rows[at : at + len(alone)], alone)
        at += len(alone)
    ends = torch.tensor([128, 128, 384, 640], dtype=torch.int32)
    scale = torch.exp2(torch.randint(-60, 60, (200, 24)).float())
    tokens, at = swizzled_tokens(scale, ends).view(torch.uint8).view(-1, 512), 0
    for part in scale.split([4, 0, 8, 8, 4], 1):
        alone = swizzled(part.contiguous()).view(torch.uint8)
        assert torch.equal(tokens[at : at + len(alone)], alone)
        at += len(alone)


@pytest.mark.parametrize("of_b", [RUNS, SQUARES], ids=str)
def test_torch_takes_what_blackwells_gemm_is_given(
    of_b: ScalingGranularity,
) -> None:
    """As far as it checks without such a GPU: shapes, strides, numbers of exponents."""
    with torch.device("meta"):
        operands = []
        both = RUNS, of_b
        for rows, of in zip((200, 80), both, strict=True):
            data = torch.empty(rows + -rows % (of.height or 1), 96, dtype=E4M3)
            operands.append(Operand(data, torch.empty(of.scales(tuple(data.shape)))))
        how = {"gemm": Gemm(granularities=both), "out_dtype": torch.bfloat16}
        assert matmul(*operands, (200, 80), **how).shape == (200, 80)
        numbers = [
            swizzled(scales_of_rows(x, y)).numel() for x, y in zip(operands, both, strict=True)
        ]
        assert numbers == [256 * 4, 128 * 4]  # rows to 128, exponents to 4


def test_a_device_without_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = importlib.import_module("float8.convert.choice")
    reason = "an H100 has compute capability 9.0"
    monkeypatch.setattr(choice, "lacks_float8_gemm", lambda *_, **__: reason)
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"got mxfp8, but an H100 .* set emulate=True"):
        convert_to_float8_training(model, config="mxfp8", module_filter_fn=all_linears)
    assert type(model[0]) is nn.Linear
    convert_to_float8_training(model, config=EMULATED)
    assert "mxfp8, emulate" in repr(model)


def test_a_gpu_that_is_modelled_has_no_such_gemm() -> None:
    with pytest.raises(ValueError, match="H100 multiplies no 8-bit exponents; set emulate=True"):
        convert_to_float8_training(nn.Linear(64, 64), config="mxfp8", gpu="H100")


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10, reason="has it"
)
def test_an_older_gpu_says_so() -> None:
    x, w = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (16, 32))
    expected = r"8-bit exponents as scales; set emulate=True"
    with pytest.raises(ValueError, match=expected):
        convert_to_float8_training(nn.Linear(64, 64, device="cuda"), config="mxfp8")
    with pytest.raises(RuntimeError, match=expected):
        linear(x, w, config="mxfp8")
    offs = torch.tensor([16], device="cuda", dtype=torch.int32)
    with pytest.raises(RuntimeError, match=expected):
        grouped_linear(x, w[None], offs, config="mxfp8")


def test_configurations_that_cannot_work() -> None:
    one, of_128 = CastConfig(), CastConfig(scaling_granularity=ScalingGranularity.BLOCK_1x128)
    for other in one, of_128:
        with pytest.raises(ValueError, match=r"expected one of .*block_1x32 x block_1x32"):
            replace(EMULATED, cast_config_weight=other)
    with pytest.raises(ValueError, match=r"enable_fsdp_float8_all_gather: .*a square BLOCK"):
        replace(EMULATED, enable_fsdp_float8_all_gather=True)
    wide = replace(EMULATED.cast_config_grad_output, target_dtype=torch.float8_e5m2)
    runs = CastConfig(scaling_granularity=ScalingGranularity.BLOCK_1x128)
    again = {"cast_config_input_for_grad_weight": runs}
    again["cast_config_grad_output_for_grad_weight"] = runs
    for more, expected in (
        ({"cast_config_grad_output": wide}, r"one of torch\.float8_e5m2 under .*BLOCK_1x32"),
        (again, "got blocks of 32 and 128, expected one of them"),
    ):
        replace(EMULATED, **more)
        with pytest.raises(ValueError, match=expected):
            replace(EMULATED, emulate=False, **more)
    assert replace(SQUARE_WEIGHTS, enable_fsdp_float8_all_gather=True).cast_config_weight.power_of_2


@on_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("experts", [False, True])
def test_compiled_code_computes_the_same(experts: bool, device: str) -> None:
    x, w = (seeded(i, *n, device=device).bfloat16() for i, n in enumerate(((96, 64), (2, 48, 64))))
    offs = torch.tensor([40, 96], device=device, dtype=torch.int32)

    def call(x: Tensor, w: Tensor) -> Tensor:
        if experts:
            return grouped_linear(x, w, offs, config=EMULATED)
        return linear(x, w[0], config=EMULATED)

    torch._dynamo.reset()
    made = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = run(a, b)
        made.append([y, *torch.autograd.grad(y.square().sum(), (a, b))])
    assert all(map(torch.equal, *made))
