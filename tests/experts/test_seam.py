"""Experts that multiply by a method `_grouped_mm(A=, B_t=, offs=)`, as torchtitan's do."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tolerances
from float8 import (
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    grouped_linear,
)
from float8.experts import Float8Experts, GatherExperts
from float8.linear.base import PREFIX
from sqnr import sqnr
from support.configs import of_recipe
from support.models import gradients, seeded

DIM, HIDDEN = 48, 80
SIZES = torch.tensor([70, 0, 33, 12])


class SeamExperts(nn.Module):
    """Weights in float32, multiplied in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"w1": (4, HIDDEN, DIM), "w2": (4, DIM, HIDDEN), "w3": (4, HIDDEN, DIM)}
        for seed, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(0.1 * seeded(seed, *shape)))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        x, offs = x.bfloat16(), sizes.cumsum(0).to(torch.int32)
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        h = F.silu(self._grouped_mm(A=x, B_t=w1, offs=offs))
        h = h * self._grouped_mm(A=x, B_t=w3, offs=offs)
        return self._grouped_mm(A=h, B_t=w2, offs=offs).float()

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return F.grouped_mm(A, B_t, offs=offs)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 4), SeamExperts()


class OwnSeam(SeamExperts):
    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return super()._grouped_mm(A=A, B_t=B_t, offs=offs) / 2


def test_other_modules_may_have_a_list_as_out_features() -> None:
    """As backbones of transformers; only linear layers route."""
    model, backbone = Model(), nn.Module()
    backbone.out_features = ["stage1"]  # type: ignore[assignment]
    model.backbone = backbone
    convert_to_float8_training(model, config=of_recipe("rowwise"))
    (gate,) = conversion_report(model).layers
    assert "a router" in str(gate.skip_reason)
    assert isinstance(model.experts, Float8Experts)


def run(experts: nn.Module) -> dict[str, Tensor]:
    """Return output and gradients, and drop these."""
    x = seeded(7, int(SIZES.sum()), DIM).requires_grad_()
    y = experts(x, SIZES)
    y.backward(seeded(8, *y.shape))
    made = {"y": y.detach(), "x": x.grad, **gradients(experts)}
    experts.zero_grad()
    return made


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_the_seam_multiplies_in_float8(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as three float8 layers, and bit by bit what `grouped_linear` gives there."""
    model = convert_to_float8_training(Model(), config=recipe)
    report = conversion_report(model)
    assert [each.fqn for each in report.experts if each.skip_reason is None] == [
        f"experts.{name}" for name in ("w1", "w2", "w3")
    ]
    assert [each.fqn for each in report.skipped] == ["gate"]
    is_fine, words = recipe == "blockwise", ("input by 1x128 for grad_weight", "use_fast_accum")
    assert [word in repr(model.experts) for word in words] == [is_fine, not is_fine]
    got, plain = run(model.experts), SeamExperts()
    for name, want in run(plain).items():
        assert sqnr(want, got[name]) > tolerances.FFN, name

    def product(self: object, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return grouped_linear(A, B_t.transpose(-2, -1), offs, config=recipe)

    monkeypatch.setattr(SeamExperts, "_grouped_mm", product)
    for name, want in run(plain).items():
        assert got[name].equal(want), name


def test_copies_pickles_states_and_the_way_back() -> None:
    plain = SeamExperts()
    wanted, experts = run(plain), copy.deepcopy(plain)
    parameters = [*experts.parameters()]
    convert_to_float8_training(experts, config="rowwise")
    assert isinstance(experts, Float8Experts)
    assert isinstance(experts, SeamExperts)
    in_float8 = run(experts)
    assert not in_float8["y"].equal(wanted["y"])
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert type(other) is type(experts)
        assert all(x.equal(in_float8[name]) for name, x in run(other).items())
    fresh = SeamExperts()
    nn.init.zeros_(fresh.w1)
    fresh.load_state_dict(experts.state_dict())
    assert fresh.w1.equal(plain.w1)
    convert_to_high_precision(experts)
    assert type(experts) is SeamExperts
    assert vars(experts).keys() == vars(plain).keys()
    assert all(a is b for a, b in zip(experts.parameters(), parameters, strict=True))
    assert all(x.equal(wanted[name]) for name, x in run(experts).items())


def test_another_seam_is_left_alone() -> None:
    """What replaced it does more than multiply: ours would drop that, or never be called."""
    by_class, by_attribute = OwnSeam(), SeamExperts()
    by_attribute._grouped_mm = by_class._grouped_mm
    for experts, whose in ((by_class, "OwnSeam"), (by_attribute, "an attribute")):
        with pytest.warns(UserWarning, match=f"got a `_grouped_mm` of {whose}, expected that of S"):
            convert_to_float8_training(experts, module_filter_fn=all_linears)
        assert not isinstance(experts, Float8Experts)


def test_a_weight_may_have_its_two_projections_in_dims_of_their_own() -> None:
    """As in torchtitan's `FusedGroupedExperts`: such a weight is gathered in high precision."""
    experts = SeamExperts()
    experts.w1 = nn.Parameter(torch.zeros(4, HIDDEN, 2, DIM))
    config = of_recipe("rowwise", enable_fsdp_float8_all_gather=True)
    report = conversion_report(convert_to_float8_training(experts, config=config)).experts[0]
    assert (report.fqn, report.experts, report.out_features) == ("w1", 4, 2 * HIDDEN)
    assert type(experts.w1) is nn.Parameter
    assert isinstance(experts.w2, GatherExperts)


class NotTheSeam(nn.Linear):
    _grouped_mm = staticmethod(torch._grouped_mm)


def test_what_has_the_name_only_is_no_seam() -> None:
    model = nn.ModuleList([NotTheSeam(DIM, DIM), nn.Linear(DIM, DIM)])
    convert_to_float8_training(model, config="rowwise", module_filter_fn=all_linears)
    assert all(each.skip_reason is None for each in conversion_report(model).layers)


class Handling(SeamExperts):
    """Has what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = (i for i in ())

    def __getstate__(self) -> dict:
        return {name: x for name, x in vars(self).items() if name != "handle"}


def test_names_of_experts_stay_theirs() -> None:
    """Ours have one prefix."""
    experts = nn.ModuleDict({"experts": Handling()})
    convert_to_float8_training(experts, config="rowwise", module_filter_fn=all_linears)
    again = copy.deepcopy(experts)["experts"]
    assert isinstance(again, Float8Experts)
    assert not hasattr(again, "handle")
    run(again)
    assert all(name.startswith(PREFIX) for name in {*dir(again)} - {*dir(Handling())})
