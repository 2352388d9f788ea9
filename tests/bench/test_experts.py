"""`bench experts` on tiny shapes: rows are complete, what is wrong is not timed."""

import itertools

import pytest
import torch

from float8.convert.measure import WrongResultError
from float8_lab.bench import experts
from float8_lab.bench.experts import Experts, bench_experts, expert_variants, select_experts
from support.devices import on_devices

GIVEN = {"given": Experts(4, 500, 32, 48)}


@on_devices
def test_layers_gemms_and_casts(device: str) -> None:
    variants = expert_variants(experts.RECIPES, ["torchao"])
    given = {"given": Experts(4, 2000, 32, 48)}
    groups = bench_experts(given, variants, torch.device(device), 1, microbatches=2, uneven=True)
    layers, gemms, casts = groups
    recipes = ["bf16", *experts.RECIPES]
    assert [row["recipe"] for row in layers][: len(recipes)] == recipes
    assert all("multiples of 16 rows" in row["left_out"] for row in layers[len(recipes) :])
    bf16, *ours = layers[: len(recipes)]
    for row in ours:
        assert row["sqnr_db"] > 20
        assert row["speedup"] == pytest.approx(bf16["ms"] / row["ms"])
        # Of input and product float8 data: between them all is as before.
        assert (row["kept_of_bf16"] < 0.9) == ("gw_hp" not in row["recipe"])
    names = itertools.product(("w13", "w2"), ("output", "grad_input", "grad_weight"))
    assert [row["case"] for row in gemms] == [" ".join(name) for name in names]
    assert all(row["sqnr_db"] > 27 and row["float8_tflops"] > 0 for row in gemms)
    assert [row["case"] for row in casts] == ["x", "gate and up", "w13", "w2"] * 2
    assert all(row["of_copy"] > 0 for row in casts)


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts.apply_grouped
    monkeypatch.setattr(experts, "apply_grouped", lambda *rest: 1.3 * right(*rest))
    groups = bench_experts(GIVEN, expert_variants(["rowwise"], []), torch.device("cpu"), 1)
    with pytest.raises(WrongResultError, match=r"experts rowwise, .*; nothing was timed"):
        next(groups)


def test_experts_by_name_and_by_size() -> None:
    assert select_experts([], []) == experts.EXPERTS
    assert select_experts([], ["4, 500,32,48"]) == {"4, 500,32,48": GIVEN["given"]}
    for names, given in ((["mixtral"], []), ([], ["4,100,32"]), ([], ["4,100,32,40"])):
        with pytest.raises(ValueError, match=r"got '.*', expected "):
            select_experts(names, given)
