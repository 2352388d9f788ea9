"""Which GEMMs run, and their values: against float64 products of the same casts, and no casts.

`float8.linear` computes what a layer does.
"""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import float8
import tolerances
from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    ScalingGranularity,
    convert_to_float8_training,
    linear,
)
from sqnr import assert_same_bits, same_bits, sqnr
from support.configs import (
    BOTH,
    DELAYED,
    DISABLED,
    DYNAMIC,
    FINER,
    MIXES,
    RECIPES,
    delayed,
    mixed,
    of_recipe,
    tensorwise,
)
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import forward_backward, seeded
from support.reference import reference_values
from support.spies import OpCounter

TENSOR, ROW, RUN, SQUARE = (0, 0), (1, 0), (1, 128), (128, 128)
"""The blocks that a scale covers, of an operand that is contracted along its second dim."""

X8 = W8 = (TENSOR, E4M3)
G8 = (TENSOR, E5M2)
CASTS: dict[str, tuple[Any, ...]] = {
    # input, weight; grad_output, weight.t(); grad_output.t(), input.t()
    "tensorwise": ((X8, W8), (G8, W8), (G8, X8)),
    "rowwise": (((ROW,), (ROW,)),) * 3,
    "rowwise_with_gw_hp": (((ROW,), (ROW,)), ((ROW,), W8), (None, None)),
    "blockwise": (((RUN,), (SQUARE,)),) * 3,
}
"""Arguments of `reference_values`; None: in high precision."""

SHAPES = [(128, 128, 256), (48, 400, 144), (17, 130, 33), (1, 16, 16), (300, 5, 3)]
EMULATED = (17, 130, 33)
"""Also with `emulate=True`."""
SHORT = [(EMULATED, torch.float32), ((1, 16, 16), torch.bfloat16), ((300, 5, 3), torch.float16)]


def tensors(M: int, K: int, N: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Input, weight and grad_output whose rows and columns differ by up to 1000 in size.

    So a scale that is taken of the wrong rows or columns shows.
    """
    sizes = torch.logspace(-1.5, 1.5, 512)
    x = seeded(0, M, K) * sizes[:M, None] * sizes.flip(0)[:K]
    w = seeded(1, N, K) * sizes[:N, None] * sizes[:K].roll(7)
    g = seeded(2, M, N) * sizes.flip(0)[:M, None] * sizes[:N].roll(11)
    return tuple(t.to(device, dtype) for t in (x, w, g))


def layer_of(w: Tensor, config: Float8LinearConfig) -> Float8Linear:
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
    linear.weight = nn.Parameter(w.clone())
    return Float8Linear.from_float(linear, config)


def assert_products(
    got: dict[str, Tensor], x: Tensor, w: Tensor, g: Tensor, casts: tuple[Any, ...], **more: Any
) -> None:
    """Output and gradients are products of operands that were cast in these ways."""
    exact = x.device.type == "cpu" and x.dtype == torch.float32
    close = tolerances.HIGH_PRECISION if exact else tolerances.GEMM
    operands = ((x, w), (g, w.t()), (g.t(), x.t()))
    for name, pair, kinds in zip(("output", "input", "weight"), operands, casts, strict=True):
        a, b = (
            t.cpu().double() if kind is None else reference_values(t, *kind, **more)
            for t, kind in zip(pair, kinds, strict=True)
        )
        assert got[name].dtype == x.dtype
        assert got[name].is_contiguous()
        assert sqnr(a @ b.t(), got[name].cpu()) > close, name


@on_devices
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(*each, marks=[] if each in SHORT else pytest.mark.exhaustive)
        for each in itertools.product(SHAPES, DTYPES)
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", CASTS)
def test_recipes(recipe: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    x, w, g = tensors(*shape, dtype, device)
    rounds = {False, True} if recipe == "tensorwise" else {recipe != "blockwise"}
    for power_of_2, emulate in itertools.product(rounds, {False, shape == EMULATED}):
        config = of_recipe(recipe, round_scales_to_power_of_2=power_of_2, emulate=emulate)
        got = forward_backward(layer_of(w, config), x, g)
        assert_products(got, x, w, g, CASTS[recipe], power_of_2=power_of_2)


@on_devices
@pytest.mark.parametrize("mix", MIXES)
def test_each_role_takes_its_own_kind_of_scale(device: str, mix) -> None:
    """Second step: a delayed role takes the scale of step 1, a dynamic one that of step 2."""
    M, K, N = 23, 41, 17
    # Larger in step 2, so that the delayed scale saturates and the two differ.
    first, second = (
        [s * seeded(10 * s + i, *n, device=device) for i, n in enumerate(((M, K), (N, K), (M, N)))]
        for s in (1, 2)
    )
    layer = layer_of(first[1], mixed(*mix))
    for x, w, g in (first, first, second):  # a scale is known after two steps alike
        with torch.no_grad():
            layer.weight.copy_(w)
        got = forward_backward(layer, x, g)
        float8.sync_float8_amax_and_scale_history(layer)
    x8, w8, g8 = (
        (TENSOR, format, False, source if cast is DELAYED else None)
        for cast, format, source in zip(mix, (E4M3, E4M3, E5M2), first, strict=True)
    )
    assert_products(got, x, w, g, ((x8, w8), (g8, w8), (g8, x8)))  # the second


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [*RECIPES, *FINER])
def test_large_layers(recipe: str) -> None:
    K, N, how = 4096, 16384, {"device": "cuda", "dtype": torch.bfloat16}
    linear = nn.Linear(K, N, **how)
    layer = convert_to_float8_training(copy.deepcopy(linear), config=of_recipe(recipe))
    x, g = (seeded(i, 16, n, **how) for i, n in enumerate((K, N)))
    for _ in range(2) if recipe == "delayed" else ():
        forward_backward(layer, x, g)
        float8.sync_float8_amax_and_scale_history(layer)
    wanted, got = forward_backward(linear, x, g), forward_backward(layer, x, g)
    assert got.keys() == wanted.keys()
    assert sqnr(wanted["output"], got["output"]) >= tolerances.LINEAR_OUTPUT
    assert sqnr(wanted["weight"], got["weight"]) >= tolerances.LINEAR_GRAD_WEIGHT
    assert sqnr(wanted["input"], got["input"]) >= tolerances.LINEAR_GRAD_INPUT
    assert torch.equal(wanted["bias"], got["bias"])  # a plain sum of grad_output: no float8 in it
    assert not torch.equal(wanted["output"], got["output"])  # float8 did run


WIDE, FINE = CastConfig(target_dtype=E5M2), CastConfig(target_dtype=E4M3)
ROWS = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
RUNS = CastConfig(scaling_granularity=ScalingGranularity.BLOCK_1x128)
DEEPSEEK = replace(of_recipe("blockwise"), cast_config_input_for_grad_weight=RUNS)


@on_devices
@pytest.mark.parametrize(
    ("config", "casts"),
    [
        (mixed(WIDE, FINE, FINE), ((G8, W8), (W8, W8), (W8, G8))),
        (
            mixed(
                DYNAMIC,
                DYNAMIC,
                FINE,
                cast_config_input_for_grad_weight=WIDE,
                cast_config_weight_for_grad_input=WIDE,
                cast_config_grad_output_for_grad_weight=FINE,
            ),
            ((X8, W8), (W8, G8), (W8, G8)),
        ),
        (mixed(WIDE, WIDE, DYNAMIC, emulate=True), ((G8, G8),) * 3),
        (mixed(ROWS, DYNAMIC, DYNAMIC), (((ROW,), W8), (G8, W8), (G8, (ROW,)))),
        (tensorwise(cast_config_weight_for_grad_input=ROWS), ((X8, W8), (G8, (ROW,)), (G8, X8))),
        (DEEPSEEK, (((RUN,), (SQUARE,)), ((RUN,), (SQUARE,)), ((RUN,), (RUN,)))),
    ],
    ids=["formats", "second uses", "e5m2, emulated", "rows", "rows for grad_input", "DeepSeek's"],
)
def test_each_cast_is_as_configured(device: str, config, casts) -> None:
    x, w, g = tensors(48, 64, 32, torch.float32, device)
    assert_products(forward_backward(layer_of(w, config), x, g), x, w, g, casts)


@on_devices
def test_a_second_use_with_delayed_scaling_keeps_its_own_history(device: str) -> None:
    site = "grad_output_for_grad_weight"
    cast = CastConfig(scaling_type=DELAYED.scaling_type, target_dtype=E4M3)
    x, w, g1 = tensors(16, 32, 16, torch.float32, device)
    g2 = 2 * seeded(3, 16, 16, device=device)
    layer = layer_of(w, tensorwise(**{f"cast_config_{site}": cast}))
    kinds = ("amax", "amax_history", "scale")
    assert {n for n, _ in layer.named_buffers()} == {f"fp8_{kind}_{site}" for kind in kinds}
    for g in (g1, g1, g2):
        got = forward_backward(layer, x, g)
        float8.sync_float8_amax_and_scale_history(layer)
    late = (TENSOR, E4M3, False, g1)
    assert_products(got, x, w, g2, ((X8, W8), (G8, W8), (late, X8)))


@pytest.mark.gpu  # the CPU always accumulates in float32
def test_fast_accumulation_goes_to_the_gemms_that_ask_for_it() -> None:
    device = "cuda"
    fast = []

    class Fast(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._scaled_mm.default:
                # torch releases differ in passing it by name or, as the eighth, by position.
                fast.append(args[7] if len(args) > 7 else kwargs.get("use_fast_accum", False))
            return func(*args, **(kwargs or {}))

    layer = Float8Linear(32, 48, bias=False, device=device, dtype=torch.bfloat16)
    x = seeded(0, 16, 32, device=device, dtype=torch.bfloat16).requires_grad_()
    with Fast():
        layer(x).sum().backward()
    assert fast == [True, False, False]


X = (16, 32)
SECOND_USES = "input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight"


@on_devices
@BOTH
@pytest.mark.parametrize(
    ("trained", "gemms"),
    [({"weight", "bias", "input"}, 3), ({"bias", "input"}, 2), ({"weight"}, 2), ({"bias"}, 1)],
    ids=["all", "frozen-weight", "input-without-grad", "bias-alone"],
)
def test_only_needed_gemms_run(device: str, config, trained: set[str], gemms: int) -> None:
    layer = Float8Linear(32, 48, device=device, config=config)
    x = seeded(0, *X, device=device)
    tensors = {"weight": layer.weight, "bias": layer.bias, "input": x}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in trained)
    with OpCounter() as counter:
        layer(x).sum().backward()
    assert counter.gemms == gemms
    assert counter.high_precision_gemms == 0
    assert {name for name, tensor in tensors.items() if tensor.grad is not None} == trained
    for mode in (torch.no_grad, torch.inference_mode):
        with OpCounter() as counter, mode():
            y = layer(x)
        assert counter.gemms == 1
        assert not y.requires_grad
        assert torch.equal(y, layer(x))


@on_devices
@pytest.mark.parametrize(
    ("off", "float8_gemms"),
    [
        (("input", "weight"), 2),
        (("grad_output", "weight_for_grad_input"), 2),
        (("grad_output_for_grad_weight", "input_for_grad_weight"), 2),
        (("input", "weight", "grad_output", "weight_for_grad_input"), 1),
        (("input", "weight", "grad_output", *SECOND_USES), 0),
    ],
)
def test_disabled_gemms_run_in_high_precision(
    device: str, off: tuple[str, ...], float8_gemms: int
) -> None:
    casts = {f"cast_config_{site}": DYNAMIC for site in SECOND_USES}
    config = Float8LinearConfig(**casts | {f"cast_config_{site}": DISABLED for site in off})
    layer = Float8Linear(32, 48, bias=False, device=device, config=config)
    x, g = seeded(0, *X, device=device), seeded(1, 16, 48, device=device)
    with OpCounter() as counter:
        got = forward_backward(layer, x, g)
    assert counter.gemms == float8_gemms
    assert counter.high_precision_gemms == 3 - float8_gemms
    w = layer.weight.detach()
    exact = {
        "input": torch.equal(got["output"], x @ w.t()),
        "weight_for_grad_input": torch.equal(got["input"], g @ w),
        "input_for_grad_weight": torch.equal(got["weight"], g.t() @ x),
    }
    assert exact == {site: site in off for site in exact}
    if "input" in off:  # a weight in float8 is dequantized
        in_float8 = Float8Tensor.from_high_precision(layer.weight)
        with torch.no_grad():
            layer.weight.copy_(in_float8)
        assert_same(layer, x, in_float8)


K, N = 33, 40
KINDS = {
    "default": None,
    "powers of two": tensorwise(round_scales_to_power_of_2=True),
    "emulated": tensorwise(emulate=True),
    "grad_weight in high precision": tensorwise(
        cast_config_input_for_grad_weight=DISABLED, cast_config_grad_output_for_grad_weight=DISABLED
    ),
}


def assert_same(
    layer: Float8Linear, x: Tensor, weight: Tensor | None = None, **autocast: torch.dtype
) -> dict[str, Tensor]:
    """Output and gradients of the layer and of the function, which may take another `weight`."""
    g = seeded(1, *x.shape[:-1], layer.out_features, device=x.device, dtype=x.dtype)
    mine = forward_backward(layer, x, g, **autocast)
    used = layer.weight if weight is None else weight
    layer.forward = lambda x: linear(x, used, layer.bias, config=layer.config)
    theirs = forward_backward(layer, x, g, **autocast)
    del layer.forward
    assert_same_bits(theirs, mine)
    assert [t.stride() for t in theirs.values()] == [t.stride() for t in mine.values()]
    return theirs


@on_devices
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_layer(device: str, bias: bool, config: Float8LinearConfig | None) -> None:
    layer = Float8Linear(K, N, bias, device=device, config=config)
    for leading in ((24,), (), (2, 3), (2, 0)):
        got = assert_same(layer, seeded(0, *leading, K, device=device))
        assert got["output"].shape == (*leading, N)
    got = assert_same(layer, seeded(0, 24, K, device=device), autocast=torch.bfloat16)
    assert got["output"].dtype == torch.bfloat16
    assert got["weight"].dtype == torch.float32
    assert_same(layer.half(), seeded(0, 24, K, device=device, dtype=torch.float16))
    no_features = linear(seeded(0, 2, 3, 0, device=device), seeded(0, N, 0, device=device))
    assert same_bits(no_features, torch.zeros(2, 3, N, device=device))


@on_devices
@pytest.mark.parametrize("power_of_2", [False, True])
def test_a_float8_weight_gives_what_the_layer_that_casts_it_gives(
    device: str, power_of_2: bool
) -> None:
    layer = Float8Linear(K, N, config=tensorwise(round_scales_to_power_of_2=power_of_2))
    layer.to(device).weight.requires_grad_(False)
    cast = Float8Tensor.from_high_precision(layer.weight, round_scales_to_power_of_2=power_of_2)
    assert_same(layer, seeded(0, 3, 8, K, device=device), cast)


def test_delayed_scaling_needs_a_layer() -> None:
    for config in (delayed(), mixed(DYNAMIC, DYNAMIC, DELAYED)):
        with pytest.raises(ValueError, match=r"delayed scaling.*use Float8Linear"):
            linear(seeded(0, 16, K), seeded(1, N, K), config=config)
