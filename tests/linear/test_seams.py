"""What ranks and float8 weights plug into, each with a stand-in."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from float8 import Float8Linear, Float8Tensor
from float8.linear.functional import linear
from float8.quantize.quantize import quantize
from float8.quantize.spec import CastSpec
from sqnr import same_bits
from support.configs import tensorwise
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded
from support.reference import reference_cast, reference_scale, zero_padded

M, K, N = 24, 40, 56


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
