"""`fuse=True`: what is recognised, what is left alone and why, and that it can be undone."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tolerances
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    swiglu_feed_forward,
)
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import same_bits, sqnr
from support.configs import FINER, RECIPES, tensorwise
from support.devices import DTYPES, on_devices
from support.models import FeedForward, forward_backward, fp8_state, seeded
from support.spies import OpCounter

silu = F.silu
seen: list[Any] = []


class Layers(nn.Module):
    def __init__(self, dim: int = 32, hidden: int = 48, *, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=bias)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.1)


class Meta(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class WithModule(Layers):
    def forward(self, hidden_states: Tensor) -> Tensor:
        down = self.w2(self.act(self.w1(hidden_states)) * self.w3(hidden_states))
        return down  # noqa: RET504


class InSteps(Layers):
    """Says something first."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        gate = torch.nn.functional.silu(gate)
        return self.w2(up * gate)


class ByGlobal(Layers):
    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Inherited(Meta):
    pass


KNOWN = [Meta, WithModule, InSteps, ByGlobal, Inherited]


class Branches(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = 2 * x
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Overrides(Meta):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DropsOut(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Gelu(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))


class Packed(nn.Module):
    """Gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = (nn.Linear(*dims, bias=False) for dims in ((32, 96), (48, 32)))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Scales(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x) * 2)


class OtherFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.act(x)
        return self.w2(torch.rsqrt(self.w1(x)) * self.w3(x))


class MovesActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act.to(x.dtype)(self.w1(x)) * self.w3(x))


class GateAgain(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(self.w1(x)))


class CallsMore(Layers):
    """What it calls has an effect, which no result shows."""

    def forward(self, x: Tensor) -> Tensor:
        self.w1(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Notes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        seen.append(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Context(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            up = self.w3(x)
        return self.w2(F.silu(self.w1(x)) * up)


class Sets(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.w1(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Seeds(Layers):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TakesMore(Layers):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Wrapped(Layers):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def times_three(x: Tensor) -> Tensor:
    return 3 * x


class Shadowed(Layers):
    """An attribute of the class wins over the submodule of that name."""

    w3 = property(lambda self: times_three)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self._modules["w3"](self.w3(x)))


UNKNOWN = [
    Branches,
    Overrides,
    DropsOut,
    Gelu,
    Packed,
    Scales,
    OtherFunction,
    MovesActivation,
    GateAgain,
    CallsMore,
    Notes,
    Context,
    Sets,
    Seeds,
    TakesMore,
    Wrapped,
]


def converted(plain: nn.Module, config: Any = None, *, fuse: bool = True) -> nn.Module:
    model = copy.deepcopy(plain)
    config = tensorwise() if config is None else config
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears, fuse=fuse)


def fate(model: nn.Module) -> str | None:
    (report,) = conversion_report(model).fused
    assert report.fqn == "(root)"
    return report.reason


def casts_of_swiglu(model: nn.Module, x: Tensor) -> int:
    with OpCounter() as counter:
        model(x)
    return counter.ops["float8.swiglu_cast"]


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 32), (3, 11, 40)])
def test_as_accurate_as_without(
    shape: tuple[int, ...], dtype: torch.dtype, recipe: str, device: str
) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)
    plain = Meta(shape[-1], 50).to(device, dtype)
    apart, fused = converted(plain, config, fuse=False), converted(plain, config)
    reference = plain.double()
    for step in range(3):
        x, g = (seeded(step + i, *shape, device=device).to(dtype) for i in (0, 9))
        exact = forward_backward(reference, x.double(), g.double())
        wanted, got = forward_backward(apart, x, g), forward_backward(fused, x, g)
        assert wanted.keys() == got.keys()
        for name in wanted:
            assert got[name].dtype == wanted[name].dtype
            assert sqnr(exact[name], got[name]) > sqnr(exact[name], wanted[name]) - 2.5, name
        sync(apart)
        sync(fused)
        for name, buffer in fp8_state(fused).items():
            assert torch.allclose(buffer, dict(fp8_state(apart))[name], rtol=0.05), name
    assert casts_of_swiglu(fused, x) == 1


@pytest.mark.parametrize("kind", KNOWN)
def test_known_by_what_they_compute(kind: type[Layers]) -> None:
    plain, x, g = kind(), seeded(0, 16, 32), seeded(1, 16, 32)
    fused = converted(plain)
    assert fate(fused) is None
    assert isinstance(fused, kind)
    assert (type(fused).__name__, type(fused).__module__) == (kind.__name__, kind.__module__)
    assert casts_of_swiglu(fused, x) == 1
    by_hand = converted(plain, fuse=False)
    by_hand.forward = lambda x: swiglu_feed_forward(x, by_hand.w1, by_hand.w3, by_hand.w2)
    wanted, got = forward_backward(by_hand, x, g), forward_backward(fused, x, g)
    assert all(same_bits(wanted[name], got[name]) for name in wanted)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_whatever_may_compute_something_else_is_left_alone(kind: type[nn.Module]) -> None:
    seed, seen[:] = torch.initial_seed(), []
    with pytest.warns(UserWarning, match="nothing of .* was fused: .* is not known to be down"):
        model = converted(kind())
    assert type(model) is kind
    assert "is not known to be down(silu(gate(x)) * up(x))" in str(fate(model))
    assert not seen  # nothing of it was run
    assert torch.initial_seed() == seed


def test_a_shadowed_submodule_is_not_trusted() -> None:
    with pytest.warns(UserWarning, match="nothing of Shadowed was fused"):
        assert type(converted(Shadowed())) is Shadowed


def with_activation(activation: nn.Module) -> Layers:
    module = WithModule()
    module.act = activation
    return module


class Own(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.silu(input)


class Twice(nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * F.silu(input)


class Called(Own):
    def __call__(self, input: Tensor) -> Tensor:
        return 2 * super().__call__(input)


@pytest.mark.parametrize("activation", [nn.SiLU(inplace=True), Own()])
def test_activations_that_are_silu(activation: nn.Module) -> None:
    assert fate(converted(with_activation(activation))) is None


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def own_forward(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x
    return module


def with_hook_on_a_layer() -> nn.Module:
    module = Meta()
    hooked(module.w3)
    return module


def tied() -> nn.Module:
    module = Meta()
    module.w3.weight = module.w1.weight
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: with_activation(nn.GELU()), "its activation is a GELU, not SiLU"),
        (lambda: with_activation(Twice()), "its activation is a Twice, not SiLU"),
        (lambda: with_activation(Called()), "its activation is a Called, not SiLU"),
        (
            lambda: with_activation(hooked(nn.SiLU())),
            "its activation has hooks, or a `forward` of its own",
        ),
        (lambda: Meta(bias=True), "one layer has a bias"),
        (with_hook_on_a_layer, "one layer has hooks"),
        (tied, "two layers share a weight"),
        (lambda: own_forward(Meta()), "it has a `forward` of its own"),
    ],
)
def test_reasons(make: Callable[[], nn.Module], reason: str) -> None:
    module = make()
    kind = type(module)
    with pytest.warns(UserWarning, match="nothing of .* was fused"):
        converted_module = convert_to_float8_training(module, fuse=True)
    assert type(converted_module) is kind
    assert str(fate(converted_module)).startswith(reason)


@pytest.mark.parametrize("recipe", FINER)
def test_finer_scales_are_not_fused(recipe: str) -> None:
    with pytest.warns(UserWarning, match="nothing of Meta was fused"):
        module = converted(Meta(128, 256), Float8LinearConfig.from_recipe_name(recipe))
    assert type(module) is Meta
    assert fate(module) is not None


def test_layers_left_in_high_precision_are_not_fused() -> None:
    with pytest.warns(UserWarning, match="nothing of Meta was fused: one layer is a Linear"):
        module = convert_to_float8_training(
            Meta(), module_filter_fn=lambda mod, fqn: fqn != "w2", fuse=True
        )
    assert type(module) is Meta


class LowRank(nn.Module):
    """As PEFT puts one in place of a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def put_low_rank(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    module.w1 = LowRank(module.w1)


def put_gelu(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.act = nn.GELU()


def put_hook_on_activation(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.act.register_forward_hook(lambda module, args, y: 2 * y)


def put_hook_on_layer(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.w2.register_forward_hook(lambda module, args, y: 2 * y)


def put_forward(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.forward = lambda x: 3 * module.w2(module.w1(x))


def put_forward_on_class(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WithModule, "forward", lambda self, x: 3 * self.w2(self.w1(x)))


CHANGES = [
    put_low_rank,
    put_gelu,
    put_hook_on_activation,
    put_hook_on_layer,
    put_forward,
    put_forward_on_class,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_takes_effect(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = WithModule()
    apart, fused = converted(plain, fuse=False), converted(plain)
    x, g = seeded(0, 16, 32), seeded(1, 16, 32)
    before = forward_backward(fused, x, g)
    change(apart, monkeypatch)
    change(fused, monkeypatch)
    wanted, got = forward_backward(apart, x, g), forward_backward(fused, x, g)
    assert all(same_bits(wanted[name], got[name]) for name in wanted)
    assert not torch.equal(got["output"], before["output"])
    assert fate(fused) is not None


def test_undone() -> None:
    plain = Meta()
    parameters = dict(plain.named_parameters())
    called: list[nn.Module] = []
    plain.register_forward_hook(lambda module, *_: called.append(module))
    fused = convert_to_float8_training(plain, fuse=True)
    assert fused is plain
    assert dict(fused.named_parameters()) == parameters
    assert list(fused.state_dict()) == list(Meta().state_dict())
    x = seeded(0, 16, 32)
    fused(x)
    assert called == [plain]
    convert_to_high_precision(fused)
    assert type(fused) is Meta
    assert torch.equal(fused(x), plain(x))
    assert conversion_report(fused).fused == ()
    assert vars(fused).keys() == vars(Meta()).keys()


def test_reasons_are_forgotten_when_undone() -> None:
    with pytest.warns(UserWarning, match="was fused"):
        module = converted(Gelu())
    convert_to_high_precision(module)
    assert conversion_report(module).fused == ()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "shallow"])
def test_copies_compute_with_their_own_weights(way: str) -> None:
    fused = converted(WithModule())
    x, g = seeded(0, 16, 32), seeded(1, 16, 32)
    wanted = forward_backward(fused, x, g)
    made = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda module: pickle.loads(pickle.dumps(module)),
        "shallow": copy.copy,
    }[way](fused)
    assert type(made) is type(fused)
    got = forward_backward(made, x, g)
    assert all(same_bits(wanted[name], got[name]) for name in wanted)
    if way != "shallow":
        with torch.no_grad():
            made.w1.weight.zero_()
        assert not torch.equal(made(x), fused(x))
    convert_to_high_precision(made)
    assert type(made) is WithModule


def test_what_was_pickled_with_another_forward_is_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = seeded(0, 16, 32)
    pickled = pickle.dumps(converted(Meta()))
    monkeypatch.setattr(Meta, "forward", Gelu.forward)
    loaded = pickle.loads(pickled)
    assert type(loaded) is Meta
    assert torch.equal(loaded(x), Gelu.forward(loaded, x))
    monkeypatch.setattr(Meta, "forward", InSteps.forward)
    assert fate(pickle.loads(pickled)) is None
    assert fate(converted(Meta())) is None


class Refuses(Meta):
    def __init_subclass__(cls) -> None:
        raise TypeError("it is final")


def test_a_class_that_takes_no_subclass_is_left_alone() -> None:
    with pytest.warns(UserWarning, match="Refuses takes no subclass: it is final"):
        assert type(converted(Refuses())) is Refuses


class OtherNames(nn.Module):
    """Submodules are called as methods and attributes of ours might be."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.changed = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.compute, self.fused = nn.Linear(48, 32, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.fused(self.parts(x)) * self.changed(x))


def test_names_do_not_collide() -> None:
    fused = converted(OtherNames())
    assert fate(fused) is None
    x = seeded(0, 16, 32)
    assert sqnr(converted(fused, fuse=False)(x=x), fused(x)) > tolerances.FFN
    assert casts_of_swiglu(fused, x) == 1


def test_no_cycle_keeps_a_model_alive() -> None:
    fused = converted(WithModule())
    alive = weakref.ref(fused)
    gc.disable()
    try:
        del fused
        assert alive() is None
    finally:
        gc.enable()


def test_again_and_in_part() -> None:
    model = nn.Sequential(Meta(), Meta())
    model[0] = converted(model[0])
    convert_to_float8_training(model, config=tensorwise())
    assert [each.reason for each in conversion_report(model).fused] == [None]
    convert_to_float8_training(model, config=tensorwise(), fuse=True)
    assert [each.fqn for each in conversion_report(model).fused] == ["0", "1"]
    kind = type(model[0])
    convert_to_float8_training(model, config=tensorwise(), fuse=True)
    assert type(model[0]) is type(model[1]) is kind
    finer = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, config=finer)
    assert {each.reason for each in conversion_report(model).fused} == {
        "scales are finer than one per tensor"
    }
    assert model(seeded(0, 16, 32)).isfinite().all()


def test_as_text() -> None:
    model = nn.Sequential(Meta(), Gelu())
    lines = str(conversion_report(converted(model))).splitlines()
    assert lines[-2:] == [
        "  0     Meta             fused",
        "  1     Gelu             not fused: Gelu.forward is not known to be "
        "down(silu(gate(x)) * up(x))",
    ]


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = converted(nn.Sequential(Meta(), Norm(32)))
    assert all(each.reason is None for each in conversion_report(model).fused)
    assert model(torch.empty(8, 32, device="meta")).shape == (8, 32)
    assert model.bfloat16()(torch.empty(8, 32, device="meta").bfloat16()).shape == (8, 32)


def test_wrong_argument() -> None:
    with pytest.raises(TypeError, match="fuse: got 'yes', expected True or False"):
        convert_to_float8_training(Meta(), fuse="yes")


def test_odd_calls_are_those_of_the_class() -> None:
    fused = converted(Meta())
    x = seeded(0, 16, 32)
    assert torch.equal(fused(x=x), converted(fused, fuse=False)(x=x))
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        fused(x, x)
    with pytest.raises(ValueError, match=r"got input of shape \(16, 31\)"):
        fused(seeded(0, 16, 31))
    assert fused(x[:0]).shape == (0, 32)


# ---------------------------------------------------------------- norms


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.arange(dim) / dim)
        self.variance_epsilon = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class PlusOne(Norm):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * x.to(dtype)


class Unbiased(Norm):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class Attends(Layers):
    """A fourth layer, and the shapes of a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w4 = nn.Linear(32, 48, bias=False)


class AttendsPacked(Packed):
    """Keys and values in one layer, which is as wide as gate and up would be."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 48, bias=False)


class OwnRMSNorm(nn.RMSNorm):
    """Computes what `nn.RMSNorm` does."""


class Similarity(nn.Module):
    """The weight is a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32, 48)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, eps=self.eps) @ self.weight


@pytest.mark.parametrize("kind", [Attends, AttendsPacked, partial(OwnRMSNorm, 32), Similarity])
def test_what_is_made_otherwise_is_not_listed(kind: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(kind(), Meta())
    assert [each.fqn for each in conversion_report(converted(model)).fused] == ["1"]


def normed(kind: type[Norm], dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, ...]:
    """As it is, and fused."""
    plain = nn.Sequential(kind(48), nn.Linear(48, 32, bias=False)).to(device, dtype)
    return plain[0], converted(plain)[0]


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_norms_are_one_operation_in_eager_mode(dtype, scale: float, device: str) -> None:
    plain, fused = normed(Norm, dtype, device)
    x = (scale * seeded(0, 3, 11, 48, device=device)).to(dtype)
    g = seeded(1, 3, 11, 48, device=device).to(dtype)
    reference = nn.RMSNorm(48, eps=plain.variance_epsilon).to(device)
    reference.load_state_dict(plain.state_dict())
    exact = forward_backward(reference.double(), x.double(), g.double())
    wanted, got = forward_backward(plain, x, g), forward_backward(fused, x, g)
    for name in wanted:
        assert got[name].dtype == dtype
        # In float32 the order of sums decides, of which neither is the better one.
        least = 130 if dtype == torch.float32 else sqnr(exact[name], wanted[name]) - 0.5
        assert sqnr(exact[name], got[name]) > least, name
    with OpCounter() as counter:
        fused(x)
    assert counter.ops["aten.pow"] <= 1  # on the CPU that is how torch computes it


@pytest.mark.parametrize("kind", [PlusOne, Unbiased])
def test_other_norms_are_left_alone(kind: type[Norm]) -> None:
    why = f"{kind.__name__}.forward is not known to be an RMSNorm"
    with pytest.warns(UserWarning, match=f"nothing of Sequential was fused: {why}"):
        _, fused = normed(kind, torch.bfloat16)
    assert type(fused) is kind


def test_norms_that_promote_are_computed_as_they_are() -> None:
    plain, fused = normed(Norm, torch.float32)
    x = seeded(0, 16, 48, dtype=torch.bfloat16)
    assert same_bits(plain(x), fused(x))
    assert fused(x).dtype == torch.float32
    plain, fused = normed(Norm, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(plain(x), fused(x))
    one = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    plain.weight = fused.weight = one  # for all columns
    assert same_bits(plain(x), fused(x))


# ---------------------------------------------------------------- ways to run it


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module] = Meta) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(32), kind(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


@on_devices
@pytest.mark.parametrize("kind", [Meta, pytest.param(WithModule, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_in_one_graph(recipe: str, kind: type[Layers], device: str) -> None:
    torch._dynamo.reset()
    config = Float8LinearConfig.from_recipe_name(recipe)
    eager = converted(nn.Sequential(Block(kind)).to(device, torch.bfloat16), config)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True)
    for step in range(2):
        x, g = (seeded(step + i, 16, 32, dtype=torch.bfloat16, device=device) for i in (0, 9))
        wanted, got = forward_backward(eager, x, g), forward_backward(compiled, x, g)
        for name, value in wanted.items():
            bound = tolerances.FFN
            assert sqnr(value, got["_orig_mod." * ("." in name) + name]) > bound, name
        sync(eager)
        sync(model)
    with OpCounter() as counter:
        model(x)
    assert counter.ops["float8.swiglu_cast"] == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_changes_no_bit(recipe: str) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = converted(Block(), config)
    other = copy.deepcopy(model)
    for step in range(2):
        x, g = seeded(step, 16, 32), seeded(step + 9, 16, 32)
        wanted = forward_backward(model, x, g)
        other.zero_grad()
        y = x.clone().requires_grad_()
        checkpoint(other, y, use_reentrant=False).backward(g)
        assert same_bits(y.grad, wanted["input"])
        for name, parameter in other.named_parameters():
            assert same_bits(parameter.grad, wanted[name]), name
        sync(model)
        sync(other)


@on_devices
def test_autocast(device: str) -> None:
    plain = Block().to(device)
    apart, fused = converted(plain, fuse=False), converted(plain)
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 32, device=device)
    results = []
    for model in (apart, fused):
        with torch.autocast(device, torch.bfloat16):
            assert model(x).dtype == torch.float32
            results.append(forward_backward(model, x, g))
    for name, value in results[0].items():
        assert sqnr(value, results[1][name]) > tolerances.FFN, name
    with torch.autocast(device, torch.bfloat16):
        assert casts_of_swiglu(fused, x) == 1


def test_layers_made_of_a_subclass_are_fused() -> None:
    class MyLinear(nn.Linear):
        pass

    plain = Meta()
    for name in ("w1", "w2", "w3"):
        shape = getattr(plain, name)
        setattr(plain, name, MyLinear(shape.in_features, shape.out_features, bias=False))
    fused = converted(plain)
    assert fate(fused) is None
    assert type(fused.w1) is not Float8Linear
    assert casts_of_swiglu(fused, seeded(0, 16, 32)) == 1


def test_a_feed_forward_of_the_tests_is_known() -> None:
    """So that tests which fuse it do."""
    assert fate(converted(FeedForward(32, 48))) is None


def test_the_report_says_what_would_be_fused_now() -> None:
    """A reason is found when it is asked for; a call by keyword is fused, too."""
    model = nn.Sequential(FeedForward(32, 48))
    convert_to_float8_training(
        model, fuse=True, module_filter_fn=lambda mod, fqn: not fqn.endswith("w2")
    )
    (each,) = conversion_report(model).fused
    assert "a Linear, not a Float8Linear" in str(each.reason)
    convert_to_float8_training(model, module_filter_fn=all_linears)
    (each,) = conversion_report(model).fused
    assert each.reason == "convert again with fuse=True"
    convert_to_float8_training(model, fuse=True, module_filter_fn=all_linears)
    (each,) = conversion_report(model).fused
    assert each.reason is None
