"""`numerics_report` on models as users have them: what it says, and that it leaves nothing.

SQNR, underflow and saturation, against numbers computed by hand and against theory.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from float8 import (
    Float8LinearConfig,
    Float8Tensor,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.config import ScalingGranularity
from float8_lab.models.llama import Llama
from float8_lab.numerics import (
    LayerCast,
    MeasuredCast,
    NumericsReport,
    casts_of,
    measure_cast,
    numerics_report,
)
from sqnr import same_bits
from support.configs import of_recipe, tensorwise
from support.devices import E4M3, on_devices
from support.errors import require_errors
from support.experts import Experts
from support.rings import short
from support.trainer import NANO
from support.training import Wrapped

TOKENS = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))


def stack(**kind: Any) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(32, 48, **kind), nn.ReLU(inplace=True), nn.Linear(48, 16, **kind)
    return nn.Sequential(*layers)


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def llama(recipe: str | None = None, device: str = "cpu") -> Llama:
    with torch.device(device):
        model = Llama(replace(NANO.model, n_layers=2), 16)
    model.init_weights(0)
    if recipe is not None:
        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda module, name: name != "output",
        )
    return model


def next_token(logits: Tensor) -> Tensor:
    targets = TOKENS[:, 1:].flatten().to(logits.device)
    return F.cross_entropy(logits.float().flatten(0, 1), targets)


def keys(report: NumericsReport) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(cast.layer, cast.role, cast.gemms) for cast in report.casts}


def test_a_plain_model_by_hand() -> None:
    model, x = stack(), torch.randn(24, 32)
    report = numerics_report(model, x, loss=square)
    both = ("output", "grad_input")
    assert keys(report) == {
        ("0", "input", ("output", "grad_weight")),
        ("0", "weight", ("output",)),  # nobody asks for the gradient of x
        ("0", "grad_output", ("grad_weight",)),
        ("2", "input", ("output", "grad_weight")),
        ("2", "weight", both),
        ("2", "grad_output", ("grad_input", "grad_weight")),
    }
    hidden = model[:2](x)
    read = {("0", "input"): x, ("2", "input"): hidden}
    read |= {(name, "weight"): model[int(name)].weight for name in "02"}
    y = model[2](hidden)
    read["2", "grad_output"] = 2 * y / y.numel()
    specs = {cast.role: cast for cast in casts_of(tensorwise())}
    for cast in report.casts:
        if (tensor := read.get((cast.layer, cast.role))) is None:
            continue
        sums = measure_cast(tensor, specs[cast.role]).tolist()
        amax, _, nonzero, vanished, _, _, signal, noise, *_ = sums
        assert cast.amax == pytest.approx(amax)
        assert cast.underflow == pytest.approx(vanished / nonzero)
        assert cast.saturation == 0
        assert cast.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)
    assert [cast.even_db for cast in report.casts] == sorted(c.even_db for c in report.casts)
    assert report.casts[0].role == "grad_output"  # e5m2


def test_own_configurations_or_those_of_a_recipe() -> None:
    model = llama("rowwise")
    tokens = TOKENS[:, :-1]
    report = numerics_report(model, tokens, loss=next_token)
    assert report.left_out == ("output",)
    assert "no casts: output" in str(report)
    assert len(report.casts) == 2 * 7 * 6
    assert {cast.layer for cast in report.casts} >= {"layers.1.feed_forward.down"}
    report = numerics_report(model, tokens, loss=next_token, recipe="tensorwise")
    assert len(report.casts) == (2 * 7 + 1) * 3
    assert report.left_out == ()
    assert keys(numerics_report(llama(), tokens, loss=next_token)) == keys(report)
    given = numerics_report(model, tokens, loss=next_token, recipe=of_recipe("blockwise"))
    assert len(given.casts) == (2 * 7 + 1) * 5
    lines = str(given).splitlines()
    assert len(lines) == 3 + len(given.casts)
    assert max(map(len, lines)) <= 80
    delayed = numerics_report(model, tokens, loss=next_token, recipe="delayed")
    same = {(c.layer, c.role): c.sqnr_db for c in report.casts}
    assert same == pytest.approx({(c.layer, c.role): c.sqnr_db for c in delayed.casts}, abs=1e-9)


def test_delayed_scales_are_those_of_the_layer() -> None:
    model, x = stack(), torch.randn(24, 32)
    config = Float8LinearConfig.from_recipe_name("delayed")
    convert_to_float8_training(model, config=config, module_filter_fn=all_linears)

    def saturation() -> float:
        report = numerics_report(model, 8 * x, loss=square)
        return next(c.saturation for c in report.casts if (c.layer, c.role) == ("0", "input"))

    assert saturation() == 0  # no history yet
    for _ in range(2):
        square(model(x)).backward()
        sync_float8_amax_and_scale_history(model)
    expected = (8 * x.abs() > x.abs().max()).double().mean().item()
    assert saturation() == pytest.approx(expected, abs=1e-9)
    assert expected > 0.4
    model.eval()
    assert saturation() == 0


def test_experts_count_group_by_group() -> None:
    """Under the names of their Parameters, those that are not copies."""
    model, x, offs = Experts(), torch.randn(20, 32), torch.tensor([8, 8, 20], dtype=torch.int32)
    x[:8] *= 1e4  # one scale for all would cost the other group its bits
    model = convert_to_float8_training(nn.ModuleList([model]), module_filter_fn=all_linears)[0]
    before = everything(model)
    report = numerics_report(model, (x, offs), loss=square)
    assert equal(before, everything(model))
    assert keys(report) == {
        ("w1", "input", ("output", "grad_weight")),
        ("w1", "weight", ("output",)),
        ("w1", "grad_output", ("grad_weight",)),
        ("", "input", ("output", "grad_weight")),
        ("", "weight", ("output", "grad_input")),
        ("", "grad_output", ("grad_input", "grad_weight")),
    }
    assert all(c.sqnr_db > 30 for c in report.casts)  # e4m3 gradients, too
    both = Both(model, nn.Linear(16, 16))
    blocks = numerics_report(both, (x, offs), loss=square, recipe="blockwise")
    whole = next(each for each in casts_of(tensorwise()) if each.role == "input")
    runs = next(x for x in casts_of(of_recipe("blockwise"), True) if x.col and x.role == "input")
    assert runs.config.scaling_granularity is ScalingGranularity.BLOCK_1x128
    for found, spec, key in (
        (report, whole, ("w1", "input", ("output", "grad_weight"))),
        (blocks, runs, ("0.w1", "input", ("grad_weight",))),
    ):
        (cast,) = (c for c in found.casts if (c.layer, c.role, c.gemms) == key)
        sums = sum((measure_cast(part, spec) for part in (x[:8], x[8:])), torch.zeros(12))
        assert cast.sqnr_db == pytest.approx(10 * math.log10(sums[6] / sums[7]), abs=1e-4)
        assert cast.even_db > 30
    delayed = numerics_report(both, (x, offs), loss=square, recipe="delayed")
    assert delayed.left_out == ("0.w1", "0.w2")


class Both(nn.Sequential):
    """Experts, and a layer behind them."""

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self[1](self[0](x, offs))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- nothing left behind


def everything(model: nn.Module) -> list[Any]:
    """What a report could change: objects by identity, numbers by value."""
    seen: list[Any] = []
    for module in model.modules():
        for name, value in module.__dict__.items():
            entries = list(value.items()) if isinstance(value, dict) else value
            seen.append((name, id(value), repr(entries) if "_hooks" in name else None))
        seen.append(list(module.__dict__))
    for tensor in (*model.parameters(), *model.buffers()):
        grad = tensor.grad
        seen.append((id(tensor), tensor._version, tensor.detach().clone(), id(grad)))
        seen.append(None if grad is None else (grad._version, grad.clone()))
    return [*seen, torch.get_rng_state()]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return same_bits(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def train(model: nn.Module, steps: int, between: Callable[[], object]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attach_to_optimizer(model, optimizer)
    losses = []
    for _ in range(steps):
        loss = next_token(model(TOKENS[:, :-1]))
        loss.backward()
        between()
        optimizer.step()
        between()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("recipe", short({2}, [None, "tensorwise", "delayed", "blockwise"]))
def test_nothing_is_left_behind(recipe: str | None) -> None:
    model = llama(recipe)

    def report() -> None:
        before = everything(model)
        numerics_report(model, 255 - TOKENS[:, :-1], loss=next_token)
        assert equal(before, everything(model))

    assert all(map(same_bits, train(model, 2, report), train(llama(recipe), 2, lambda: None)))


def test_state_of_other_modules_and_randomness_stay_also_after_errors() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 16))
    counted = model[0]
    counted.calls = 0  # type: ignore[assignment]

    def count(module: Any, *rest: Any) -> None:
        module.calls += 1

    fired: list[Tensor] = []
    counted.register_forward_pre_hook(count)
    counted.weight.register_post_accumulate_grad_hook(fired.append)
    square(model(torch.randn(8, 32))).backward()
    before = everything(model)
    numerics_report(model, torch.randn(8, 32, generator=torch.Generator()), loss=square)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        numerics_report(model, torch.zeros(2, 7), loss=square)
    with pytest.raises(ZeroDivisionError):
        numerics_report(model, torch.zeros(2, 32), loss=lambda y: y.mean() * (1 / 0))
    assert equal(before, everything(model))
    assert counted.calls == len(fired) == 1


# ---------------------------------------------------------------- models and batches of all kinds


class Wants(nn.Sequential):
    """Takes two arguments, returns an object with a loss."""

    def forward(self, x: Tensor, scale: float) -> Any:
        self.loss = square(self[0](x) * scale)
        return self


def test_batches_of_all_kinds() -> None:
    for batch in ((torch.ones(4, 16), 2.0), {"scale": 2.0, "x": torch.ones(4, 16)}):
        report = numerics_report(Wants(nn.Linear(16, 16)), batch)
        assert {cast.role for cast in report.casts} == {"input", "weight", "grad_output"}
    x = torch.randn(32)  # without tokens
    one, of_one = (numerics_report(stack(), batch, loss=square) for batch in (x, x[None]))
    assert str(one) == str(of_one)
    x[3] = math.inf
    report = numerics_report(stack(), x, loss=square)
    assert math.isnan(report.casts[0].sqnr_db)  # what is not finite comes first
    assert "inf" in str(report)


def test_frozen_weights_need_fewer_casts() -> None:
    model = stack()
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)  # its bias is trained
    report = numerics_report(model, torch.randn(8, 32), loss=square)
    assert keys(report) == {
        (name, role, ("output",)) for name in "02" for role in ("input", "weight")
    }
    with pytest.raises(ValueError, match=r"got a loss without a gradient, expected one"):
        numerics_report(model.requires_grad_(False), torch.randn(8, 32), loss=square)


class Calls(nn.Sequential):
    """Uses its layer once for each argument."""

    def forward(self, *xs: Tensor) -> Tensor:
        return sum((square(self[0](x)) for x in xs), torch.zeros(()))


def test_several_calls_of_a_layer_count_together() -> None:
    model, small, large = Calls(nn.Linear(32, 32)), torch.randn(8, 32), 100 * torch.randn(24, 32)

    def report(*inputs: Tensor) -> Any:
        return next(c for c in numerics_report(model, inputs).casts if c.role == "input")

    one, other, both = report(small), report(large), report(small, large)
    assert both.amax == max(one.amax, other.amax)
    assert both.sqnr_db == pytest.approx(other.sqnr_db, abs=0.1)  # by power
    assert both.underflow == pytest.approx((one.underflow + 3 * other.underflow) / 4)


def test_checkpointed_blocks_and_compiled_ones() -> None:
    tokens = TOKENS[:, :-1]
    plain, again, compiled = (llama("rowwise") for _ in range(3))
    for block in again.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for block in compiled.layers:
        block.compile(backend="eager")
    wanted = str(numerics_report(plain, tokens, loss=next_token))
    for model in (again, compiled):
        assert str(numerics_report(model, tokens, loss=next_token)) == wanted


@on_devices
def test_autocast_decides_what_is_cast(device: str) -> None:
    model, tokens = llama("delayed", device), TOKENS[:, :-1].to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        report = numerics_report(model, tokens, loss=next_token)
    wide = numerics_report(model, tokens, loss=next_token)
    assert keys(report) == keys(wide)
    inputs = [cast.amax for cast in report.casts if cast.role == "input"]
    assert all(torch.tensor(amax).bfloat16().item() == amax for amax in inputs)
    weights, others = (
        {c.layer: c.amax for c in each.casts if c.role == "weight"} for each in (report, wide)
    )
    assert weights == others  # float32 both times


def test_under_reentrant_checkpoints_only_forward_is_measured() -> None:
    model, x = Wrapped(stack(), "reentrant"), torch.randn(8, 32, requires_grad=True)
    before = everything(model)
    report = numerics_report(model, x, loss=square)
    assert {cast.gemms for cast in report.casts} == {("output",)}
    assert equal(before, everything(model))


WRAPPED = DistributedDataParallel.__new__(DistributedDataParallel)
nn.Module.__init__(WRAPPED)
IN_FLOAT8 = stack()
IN_FLOAT8[2].weight = nn.Parameter(Float8Tensor.from_high_precision(torch.randn(16, 48), E4M3))


def test_errors_say_what_to_do() -> None:
    x, calls = torch.randn(4, 32), numerics_report
    by = lambda **more: partial(calls, **more)  # noqa: E731
    require_errors(
        ("TypeError: got model function, expected an nn.Module", calls, [lambda x: x, x]),
        ("ValueError: got a ReLU without linear layers, expected at", calls, [nn.ReLU(), x]),
        (r"ValueError: got a loss of shape \(4, 16\), .* one element; ", calls, [stack(), x]),
        ("ValueError: got a loss of float, exp", by(loss=lambda y: 1.0), [stack(), x]),
        ("ValueError: recipe: got 'rows', expected one of", by(recipe="rows"), [stack(), x]),
        (r"ValueError: pass model\.module", calls, [WRAPPED, x]),
        (r"ValueError: got 2\.weight as a Float8Tensor, expected high pre", calls, [IN_FLOAT8, x]),
    )


# ---------------------------------------------------------------- numbers of one cast

# SQNR in dB of normal numbers that are cast to e4m3 without leaving its normal range.
OF_E4M3 = 31.5


def numbers_of(cast: MeasuredCast, x: Tensor) -> LayerCast:
    return LayerCast.of("it", cast, measure_cast(x, cast).tolist())


# With amax 448 the scale is 1. 2^-11 is less than half of the smallest number, 2^-9; 1.0625 lies
# between 1 and 1.125 and becomes the even one.
BY_HAND = torch.tensor([[448.0, 1.0, 1.0625, 2.0**-11, 0.0]])
SIGNAL = 448.0**2 + 1 + 1.0625**2 + 2.0**-22


def test_a_cast_by_hand() -> None:
    cast = casts_of(tensorwise())[0]
    assert (cast.role, cast.config.dtype) == ("input", E4M3)
    noise = 0.0625**2 + 2.0**-22
    columns = (0.0625 / 1.0625) ** 2 + 1  # relative errors: the fourth is lost, the last is zero
    sums = [448.0, 5, 4, 1, 0, 0, SIGNAL, noise, noise / SIGNAL, 1, columns, 4]
    expected = torch.tensor(sums, dtype=torch.float64)
    torch.testing.assert_close(measure_cast(BY_HAND, cast), expected, rtol=1e-12, atol=0)
    numbers = LayerCast.of("it", cast, sums)
    assert (numbers.layer, numbers.role, numbers.gemms) == ("it", cast.role, cast.gemms)
    assert (numbers.amax, numbers.underflow, numbers.saturation) == (448.0, 0.25, 0.0)
    assert numbers.sqnr_db == pytest.approx(10 * math.log10(SIGNAL / noise))
    assert numbers.even_db == pytest.approx(10 * math.log10(4 / columns))


def test_zeros_what_is_not_finite_and_what_float32_cannot_square() -> None:
    cast = casts_of(tensorwise())[0]
    zeros = numbers_of(cast, torch.zeros(2, 16))
    assert (zeros.amax, zeros.underflow, zeros.saturation) == (0.0, 0.0, 0.0)
    assert (zeros.sqnr_db, zeros.even_db) == (math.inf, math.inf)
    for bad in (math.nan, math.inf):
        x = torch.ones(2, 16)
        x[0, 3] = bad
        numbers = numbers_of(cast, x)
        assert not math.isfinite(numbers.amax)
        assert math.isnan(numbers.sqnr_db)
        assert math.isnan(numbers.even_db)
    tiny = numbers_of(cast, torch.randn(64, 64) * 1e-25)
    assert tiny.sqnr_db == pytest.approx(OF_E4M3, abs=0.5)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_casts_of_columns_are_those_of_the_transposed_tensor(recipe: str) -> None:
    x = torch.randn(200, 136) * torch.logspace(0, -6, 136)
    row, col = (cast for cast in casts_of(of_recipe(recipe)) if cast.role == "grad_output")
    there, back = measure_cast(x, col), measure_cast(x.t().contiguous(), row)
    torch.testing.assert_close(there, back, rtol=1e-12, atol=0)
    assert not torch.equal(measure_cast(x, col), measure_cast(x, row))
