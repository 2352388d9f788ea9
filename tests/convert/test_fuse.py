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

import tolerances
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    SwiGLU,
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    swiglu_feed_forward,
)
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import same_bits, sqnr
from support.configs import RECIPES, tensorwise
from support.devices import DTYPES, on_devices
from support.models import FeedForward, forward_backward, seeded
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


class Inherited(Meta):
    pass


class Overrides(Meta):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Packed(nn.Module):
    """Gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = (nn.Linear(*dims, bias=False) for dims in ((32, 96), (48, 32)))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Wrapped(Layers):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TakesMore(Layers):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y if residual is None else residual + y


RESULT = "self.w2(F.silu(self.w1(x)) * self.w3(x))"


def kind_of(code: str, arguments: str = "self, x", base: type = Layers) -> type[nn.Module]:
    """A class whose forward runs `code`."""
    scope: dict[str, Any] = {}
    exec(f"def forward({arguments}):\n {code}", globals(), scope)
    return type("Written", (base,), scope)


KNOWN: list[Any] = [
    Meta,
    WithModule,
    Inherited,
    kind_of("return self.w2(silu(self.w1(x)) * self.w3(x))"),
    kind_of("g = torch.nn.functional.silu(self.w1(x)); return self.w2(self.w3(x) * g)"),
]
OTHER_RESULTS = [
    "self.drop(self.w2(F.silu(self.w1(x)) * self.w3(x)))",
    "self.w2(F.gelu(self.w1(x)) * self.w3(x))",
    "self.w2(F.silu(self.w1(x)) * self.w3(x) * 2)",
    "self.w2(F.silu(self.w1(x), inplace=True) * self.w3(x))",
    "self.w2(torch.rsqrt(self.w1(x)) * self.w3(x))",
    "self.w2(self.act.to(x.dtype)(self.w1(x)) * self.w3(x))",
    "self.w2(F.silu(self.w1(x)) * self.w3(self.w1(x)))",
    "self.w2(F.silu(self.w1.forward(x)) * self.w3(x))",
    "self.w2(F.silu(self.w1(x)) * (self.w3(x) if self.training else x))",
    "self.w2((self.act, F.silu)[self.training](self.w1(x)) * self.w3(x))",
    "self.w2((F.silu, self.act)[x is None](self.w1(x)) * self.w3(x))",
    "self.w2(F.silu(self.w1(x)) * (lambda y: self.w3(y))(x))",
    "self.w2(*[F.silu(self.w1(y)) * self.w3(y) for y in (x,)])",
]
MORE = [
    "if self.training: x = 2 * x",
    "if seen: x = 2 * x",
    "assert x.shape[-1] == 32",
    "for _ in range(2): pass",
    "seen.append(x)",
    "seen += [x]",
    "print(x)",
    "import this",
    "global silu; silu = F.gelu",
    "self.last = self.w1(x)",
    "self.calls += 1",
    "del self.act",
    "self.__dict__['last'] = x",
    "self.tracer.graph = x",
    "self.counted",
    "self.w1(x)",
    "self.act(x)",
    "x.mul_(2)",
    "x *= 2",
    "x[0] = 0",
    "torch.manual_seed(0)",
    "yield x",
]
UNKNOWN = [
    Overrides,
    Packed,
    Wrapped,
    TakesMore,
    *(kind_of(f"return {result}") for result in OTHER_RESULTS),
    *(kind_of(f"{more}\n return {RESULT}") for more in MORE),
    kind_of(f"with torch.no_grad(): x = 2 * x\n return {RESULT}"),
    kind_of(f"try: seen.append(x)\n except NameError: pass\n return {RESULT}"),
    kind_of("g = F.silu(self.w1(x)); g *= self.w3(x)\n return self.w2(g)"),
    kind_of(f"return {RESULT}", "self, x, *, residual=None"),
    kind_of("return self.w2(F.silu(self.w1(*x)) * self.w3(*x))", "self, *x"),
]


def times_three(x: Tensor) -> Tensor:
    return 3 * x


class Shadowed(Meta):
    """An attribute of the class wins over the submodule of that name."""

    w3 = property(lambda self: times_three)


Gelu = kind_of("return self.w2(F.gelu(self.w1(x)) * self.w3(x))")


def converted(plain: nn.Module, config: Any = None, *, fuse: Any = True) -> nn.Module:
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
def test_whatever_may_compute_something_else_is_left_alone(
    kind: type[nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    seed, seen[:] = torch.initial_seed(), []
    with pytest.warns(UserWarning, match="nothing of .* was fused: .* is not known to be down"):
        model = converted(kind())
    assert type(model) is kind
    assert "is not known to be down(silu(gate(x)) * up(x))" in str(fate(model))
    # Nothing of it was run.
    assert (seen, capsys.readouterr().out) == ([], "")
    assert torch.initial_seed() == seed
    assert vars(model).keys() <= {*vars(Layers()), "_float8_left_alone"}
    assert silu is F.silu


def test_a_shadowed_submodule_is_not_trusted() -> None:
    with pytest.warns(UserWarning, match="nothing of Shadowed was fused"):
        assert type(converted(Shadowed())) is Shadowed


# ---------------------------------------------------------------- what the user says


NAMED = SwiGLU("w1", "w3", "w2")


def test_a_class_that_is_not_recognised_can_be_named() -> None:
    plain, x, g = nn.Sequential(TakesMore(), Meta()), seeded(0, 16, 32), seeded(1, 16, 32)
    model, apart = converted(plain, fuse={TakesMore: NAMED}), converted(plain, fuse=False)
    assert [each.reason for each in conversion_report(model).fused] == [None, None]  # adds to True
    assert isinstance(model[0], TakesMore)
    assert casts_of_swiglu(model, x) == 2
    by_hand = converted(Meta(), fuse=False)
    by_hand.load_state_dict(model[0].state_dict())
    by_hand.forward = lambda x: swiglu_feed_forward(x, by_hand.w1, by_hand.w3, by_hand.w2)
    wanted, got = forward_backward(by_hand, x, g), forward_backward(model[0], x, g)
    assert all(same_bits(wanted[name], got[name]) for name in wanted)
    # With more than one argument its own forward runs.
    assert torch.equal(model[0](x, residual=x), apart[0](x, residual=x))
    assert torch.equal(model[0](x=x), model[0](x))
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made(x), model(x))
        assert casts_of_swiglu(made, x) == 2
        assert type(convert_to_high_precision(made)[0]) is TakesMore


def test_a_named_class_is_no_subclass_with_another_forward() -> None:
    model = converted(nn.Sequential(Meta(), Overrides(), Inherited()), fuse={Meta: NAMED})
    assert [each.reason is None for each in conversion_report(model).fused] == [True, False, True]


def test_what_keeps_a_named_class_from_being_fused_is_told() -> None:
    with pytest.warns(UserWarning, match="nothing of TakesMore was fused: one layer has a bias"):
        module = converted(TakesMore(bias=True), fuse={TakesMore: NAMED})
    assert type(module) is TakesMore
    assert fate(module) == "one layer has a bias"
    assert fate(copy.deepcopy(module)) == fate(module)
    for linear in (module.w1, module.w2, module.w3):
        linear.bias = None
    assert fate(module) == "convert again with fuse=True"
    assert fate(converted(module, fuse={TakesMore: NAMED})) is None


@pytest.mark.parametrize(
    ("fuse", "error", "message"),
    [
        ("yes", TypeError, "got 'yes', expected True, False or a dict such as {LlamaMLP"),
        (None, TypeError, "got None, expected True, False"),
        ({"Meta": NAMED}, TypeError, r"got 'Meta' and SwiGLU\(.*, expected a dict such as"),
        ({Meta: ("w1", "w3", "w2")}, TypeError, "got <class '.*Meta'> and .*, expected a dict"),
        (
            {Meta: SwiGLU("w1", "up", "w2")},
            ValueError,
            "got up='up' for a Meta, expected one of its submodules: w1, w3, w2, act, drop",
        ),
    ],
)
def test_wrong_arguments_change_nothing(fuse: Any, error: type, message: str) -> None:
    model = Meta()
    with pytest.raises(error, match=f"fuse: {message}"):
        convert_to_float8_training(model, fuse=fuse, module_filter_fn=all_linears)
    assert not conversion_report(model).converted


def test_names_are_strings() -> None:
    with pytest.raises(TypeError, match="SwiGLU: got up=3, expected the name of a submodule"):
        SwiGLU("w1", 3, "w2")


# ---------------------------------------------------------------- why not, and what changes


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


def twice(module: nn.Module, args: Any, y: Tensor) -> Tensor:
    return 2 * y


def after(module: Any, change: Callable[[Any], object]) -> nn.Module:
    change(module)
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (with_activation(nn.GELU()), "its activation is a GELU, not SiLU"),
        (with_activation(Twice()), "its activation is a Twice, not SiLU"),
        (with_activation(Called()), "its activation is a Called, not SiLU"),
        (
            after(WithModule(), lambda x: x.act.register_forward_hook(twice)),
            "its activation has hooks, or a `forward` of its own",
        ),
        (Meta(bias=True), "one layer has a bias"),
        (after(Meta(), lambda x: x.w3.register_forward_hook(twice)), "one layer has hooks"),
        (
            after(Meta(), lambda x: setattr(x.w3, "weight", x.w1.weight)),
            "two layers share a weight",
        ),
        (after(Meta(), lambda x: setattr(x, "forward", twice)), "it has a `forward` of its own"),
    ],
)
def test_reasons(module: nn.Module, reason: str) -> None:
    kind = type(module)
    with pytest.warns(UserWarning, match="nothing of .* was fused"):
        convert_to_float8_training(module, fuse=True)
    assert type(module) is kind
    assert str(fate(module)).startswith(reason)


CHANGES: dict[str, Callable[[Any], object]] = {
    "layer": lambda x: setattr(x, "w1", nn.Sequential(x.w1, nn.Tanh())),
    "activation": lambda x: setattr(x, "act", nn.GELU()),
    "hook on the activation": lambda x: x.act.register_forward_hook(twice),
    "hook on a layer": lambda x: x.w2.register_forward_hook(twice),
    "forward": lambda x: setattr(x, "forward", lambda input: 3 * x.w2(x.w1(input))),
    "forward of the class": lambda x: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_takes_effect(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = WithModule()
    apart, fused = converted(plain, fuse=False), converted(plain)
    x, g = seeded(0, 16, 32), seeded(1, 16, 32)
    before = forward_backward(fused, x, g)
    if change == "forward of the class":
        monkeypatch.setattr(WithModule, "forward", lambda self, x: 3 * self.w2(self.w1(x)))
    for model in (apart, fused):
        CHANGES[change](model)
    wanted, got = forward_backward(apart, x, g), forward_backward(fused, x, g)
    assert all(same_bits(wanted[name], got[name]) for name in wanted)
    assert not torch.equal(got["output"], before["output"])
    assert fate(fused) is not None


def test_undone() -> None:
    plain = nn.Sequential(Meta(), Gelu())
    parameters = dict(plain.named_parameters())
    called: list[nn.Module] = []
    plain[0].register_forward_hook(lambda module, *_: called.append(module))
    fused = convert_to_float8_training(plain, fuse=True)
    assert fused is plain
    assert dict(fused.named_parameters()) == parameters
    assert list(fused[0].state_dict()) == list(Meta().state_dict())
    fused(seeded(0, 16, 32))
    assert called == [plain[0]]
    convert_to_high_precision(fused)
    assert type(fused[0]) is Meta
    assert conversion_report(fused).fused == ()  # reasons are forgotten, too
    assert all(vars(each).keys() == vars(Meta()).keys() for each in fused)


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
    monkeypatch.setattr(Meta, "forward", KNOWN[-1].forward)
    assert fate(pickle.loads(pickled)) is None
    assert fate(converted(Meta())) is None


class Refuses(Meta):
    def __init_subclass__(cls) -> None:
        raise TypeError("it is final")


def test_a_class_that_takes_no_subclass_is_left_alone() -> None:
    with pytest.warns(UserWarning, match="Refuses takes no subclass: it is final"):
        assert type(converted(Refuses())) is Refuses


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
        "  0       Meta             fused",
        "  1       Written          not fused: Written.forward is not known to be "
        "down(silu(gate(x)) * up(x))",
    ]


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = converted(nn.Sequential(Meta(), Norm(32)))
    assert all(each.reason is None for each in conversion_report(model).fused)
    assert model(torch.empty(8, 32, device="meta")).shape == (8, 32)
    assert model.bfloat16()(torch.empty(8, 32, device="meta").bfloat16()).shape == (8, 32)


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


def norm_of(weight: str, dim: int) -> type[nn.Module]:
    scale = f"torch.rsqrt(wide.pow(2).mean({dim}, keepdim=True) + self.variance_epsilon)"
    code = f"wide = x.to(torch.float32); return {weight} * (wide * {scale}).to(x.dtype)"
    return kind_of(code, base=Norm)


@pytest.mark.parametrize(("weight", "dim"), [("(1 + self.weight)", -1), ("self.weight", -2)])
def test_other_norms_are_left_alone(weight: str, dim: int) -> None:
    kind, known = norm_of(weight, dim), norm_of("self.weight", -1)
    assert type(normed(known, torch.bfloat16)[1]) is not known
    why = "Written.forward is not known to be an RMSNorm"
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
