"""The fused SwiGLU feed-forward: values, gradients, what it saves, when it is fused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    swiglu_feed_forward,
    sync_float8_amax_and_scale_history,
    why_not_fused,
)
from sqnr import sqnr
from support.configs import DELAYED, DISABLED, RECIPES, delayed, of_recipe, tensorwise
from support.devices import DTYPES, on_devices
from support.models import forward_backward, fp8_state, seeded, three_ways
from support.spies import OpCounter, saved_tensors

SHAPES = [((32,), 64, 96), ((3, 11), 40, 50), ((5,), 64, 16)]


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, *, fused: bool, norm: bool, bias: bool = False):
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5) if norm else None
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.fused = fused
        if norm:
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return self.gate, self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return swiglu_feed_forward(x, *self.layers, norm=self.norm)
        x = x if self.norm is None else self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


def three(
    dim: int, hidden: int, config: Float8LinearConfig, device: str, dtype: torch.dtype, norm: bool
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The model in float64, in float8 layer by layer, and fused; equal weights."""
    torch.manual_seed(0)
    plain = FeedForward(dim, hidden, fused=False, norm=norm).to(device, dtype)
    made = three_ways(plain, config)
    assert why_not_fused(*made[2].layers) is None
    return made


@on_devices
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("leading", "dim", "hidden"), SHAPES)
def test_as_accurate_as_layer_by_layer(
    device: str, leading: tuple[int, ...], dim: int, hidden: int, dtype, recipe: str, norm: bool
) -> None:
    reference, apart, fused = three(dim, hidden, of_recipe(recipe), device, dtype, norm)
    for step in range(3):
        x = seeded(step, *leading, dim, device=device).to(dtype)
        g = seeded(step + 9, *leading, dim, device=device).to(dtype)
        exact = forward_backward(reference, x.double(), g.double())
        wanted, got = forward_backward(apart, x, g), forward_backward(fused, x, g)
        assert got.keys() == wanted.keys()
        for name, value in got.items():
            assert value.dtype == wanted[name].dtype
            assert value.shape == wanted[name].shape
            # Float8 noise around the same value: no worse than apart, up to luck on few numbers.
            assert sqnr(exact[name], value) > sqnr(exact[name], wanted[name]) - 2.5, name
            assert sqnr(exact[name], value) > 12, name
            if dtype == torch.float32 and not norm:
                # x's dtype rounds nothing: the same operands, but for the last bits of silu.
                assert sqnr(wanted[name], value) > 45, name
        for model in (apart, fused):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in fp8_state(fused).items():
            theirs = dict(fp8_state(apart))[name]
            assert torch.allclose(buffer, theirs, rtol=0.05), name  # the same, roundings apart


@on_devices
def test_saves_no_product_and_casts_once(device: str) -> None:
    M, dim, hidden = 32, 64, 96
    _, apart, fused = three(dim, hidden, tensorwise(), device, torch.bfloat16, norm=False)
    x = seeded(0, M, dim, dtype=torch.bfloat16, device=device).requires_grad_()

    def saved_bytes(model: nn.Module) -> int:
        with saved_tensors() as saved:
            model(x)
        parameters = {p.data_ptr() for p in model.parameters()}
        kept = {s.data_ptr(): s.nbytes for s in saved if s.data_ptr() not in parameters}
        return sum(kept.values())

    # x in float8, gate and up as they are, five scales.
    assert saved_bytes(fused) == M * dim + 2 * (2 * M * hidden) + 5 * 4
    assert saved_bytes(fused) < 0.7 * saved_bytes(apart)
    with OpCounter() as counter:
        fused(x).sum().backward()
    # x, three weights, grad_output; once more, as columns, x and the weights.
    assert counter.ops["float8.cast"] == 1 + 3 + 1 + 1 + 3
    assert counter.ops["float8.swiglu_cast"] == counter.ops["float8.swiglu_backward_cast"] == 1
    assert counter.gemms == 9


@on_devices
@pytest.mark.parametrize("frozen", ["gate", "up", "down", "norm", "all"])
def test_frozen_parameters(device: str, frozen: str) -> None:
    _, apart, fused = three(32, 48, tensorwise(), device, torch.float32, norm=True)
    for model in (apart, fused):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen != "all" and not name.startswith(frozen))
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 32, device=device)
    wanted, got = forward_backward(apart, x, g), forward_backward(fused, x, g)
    assert got.keys() == wanted.keys()
    assert len(got) < 6
    for name in got:
        assert sqnr(wanted[name], got[name]) > 30, name


@on_devices
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 20), (torch.float16, 30)])
def test_autocast_normalises_before_it_casts(device: str, dtype: torch.dtype, close: int) -> None:
    _, apart, fused = three(32, 48, tensorwise(), device, torch.float32, norm=True)
    x = seeded(0, 16, 32, device=device)
    x[3, 4] = 1e5  # no float16
    x.requires_grad_()
    with torch.autocast(device, dtype):
        wanted, got = apart(x), fused(x)
    assert got.dtype == wanted.dtype == dtype
    assert got.isfinite().all()
    assert sqnr(wanted, got) > close  # float16: the product is not rounded to it
    got.sum().backward()
    assert x.grad.dtype == torch.float32
    assert fused.gate.weight.grad.dtype == torch.float32


@on_devices
@pytest.mark.parametrize("operand", ["x", "grad", "gate", "down"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_non_finite_shows(device: str, recipe: str, operand: str) -> None:
    _, _, fused = three(32, 48, of_recipe(recipe), device, torch.float32, norm=True)
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 32, device=device)
    forward_backward(fused, x, g)
    sync_float8_amax_and_scale_history(fused)
    bad = {"x": x, "grad": g, "gate": fused.gate.weight.data, "down": fused.down.weight.data}
    bad[operand][3, 5] = float("inf")
    results = forward_backward(fused, x, g)
    assert not results["input"].isfinite().all()
    assert operand == "grad" or not results["output"].isfinite().all()


@on_devices
def test_activation_checkpointing_changes_nothing(device: str) -> None:
    _, _, fused = three(32, 48, delayed(), device, torch.float32, norm=True)
    other = copy.deepcopy(fused)
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 32, device=device)
    wanted = forward_backward(fused, x, g)
    y = x.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(other, y, use_reentrant=False).backward(g)
    assert torch.equal(y.grad, wanted["input"])
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.grad, wanted[name])
    for name, buffer in fp8_state(other).items():
        assert torch.equal(buffer, dict(fp8_state(fused))[name])


HIGH_PRECISION_GRAD_WEIGHT = tensorwise(
    cast_config_input_for_grad_weight=DISABLED, cast_config_grad_output_for_grad_weight=DISABLED
)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "is a Linear"),
        (tensorwise(pad_inner_dim=False), "pad_inner_dim"),
        (HIGH_PRECISION_GRAD_WEIGHT, "high precision"),
        (tensorwise(cast_config_weight_for_grad_input=DELAYED), "differently"),
        (tensorwise(), "different configurations"),
    ],
)
def test_why_not_fused_and_that_it_computes_all_the_same(config, reason: str) -> None:
    """Other reasons are in `tests/convert/test_fuse.py`."""
    model = FeedForward(32, 48, fused=True, norm=False)
    if config is not None:
        convert_to_float8_training(model, config=config)
    if reason == "different configurations":
        model.up = convert_to_float8_training(model.up, config=delayed())
    assert reason in str(why_not_fused(*model.layers))
    other, x = copy.deepcopy(model), seeded(0, 16, 32)
    other.fused = False
    assert torch.equal(model(x), other(x))


@on_devices
def test_layers_with_a_forward_or_weights_of_their_own_are_called(device: str) -> None:
    _, _, fused = three(32, 48, tensorwise(), device, torch.float32, norm=False)
    x = seeded(0, 16, 32, device=device)
    up = fused.up
    up.forward = lambda x: Float8Linear.forward(up, x) + 1000
    assert "forward" in why_not_fused(*fused.layers)
    assert fused(x).abs().mean() > 100
    del up.forward
    torch.nn.utils.parametrizations.spectral_norm(fused.up)
    assert "Parametrized" in why_not_fused(*fused.layers)
    other = copy.deepcopy(fused)
    other.fused = False
    assert torch.equal(fused(x), other(x))


@on_devices
@pytest.mark.parametrize("kind", ["layer-norm", "subclass", "patched", "wide", "default eps"])
def test_other_norms(device: str, kind: str) -> None:
    class PlusOne(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)

    _, apart, fused = three(32, 48, tensorwise(), device, torch.float32, norm=True)
    for model in (apart, fused):
        if kind == "layer-norm":
            model.norm = nn.LayerNorm(32, device=device)
        elif kind == "subclass":
            model.norm = PlusOne(32, device=device)
        elif kind == "patched":
            model.norm.forward = lambda x: 3 * x
        elif kind == "wide":
            model.norm = nn.RMSNorm((16, 32), device=device)
        else:
            model.norm.eps = None
    x = (1e-3 if kind == "default eps" else 1) * seeded(0, 16, 32, device=device)
    assert sqnr(apart(x), fused(x)) > 40


@on_devices
def test_a_layer_used_elsewhere_too_keeps_its_own_amax(device: str) -> None:
    _, apart, fused = three(32, 48, delayed(), device, torch.float32, norm=False)
    x = seeded(0, 16, 32, device=device)
    for model in (apart, fused):
        model.gate(1000 * x)
        model(x)
    for name, buffer in fp8_state(fused).items():
        assert torch.allclose(buffer, dict(fp8_state(apart))[name], rtol=0.05), name


@on_devices
def test_without_gradients_nothing_is_recorded(device: str) -> None:
    _, apart, fused = three(32, 48, delayed(), device, torch.float32, norm=True)
    x = seeded(0, 16, 32, device=device)
    with torch.no_grad():
        assert sqnr(apart(x), fused(x)) > 30
        assert fused(x[:0]).shape == (0, 32)
    assert all(bool((buffer == 0).all()) for buffer in fp8_state(fused).values())


def test_errors_are_those_of_layers() -> None:
    _, _, fused = three(32, 48, delayed(), "cpu", torch.float32, norm=False)
    with pytest.raises(ValueError, match=r"got input of shape \(16, 31\)"):
        fused(seeded(0, 16, 31))
    with pytest.raises(TypeError, match=r"torch\.bfloat16 and weight of dtype torch\.float32"):
        fused(seeded(0, 16, 32, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.1)
    fused(seeded(0, 16, 32)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="not synced"):
        fused(seeded(1, 16, 32))
