"""Models in several variants side by side: what is compared, checked, timed and profiled."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from float8 import Float8GemmConfig, Float8Linear, Float8LinearConfig, conversion_report
from float8.convert.measure import WrongResultError
from float8_lab.bench import model, step
from float8_lab.bench.model import AT_LEAST, Size, model_step
from float8_lab.bench.profile import profile_step
from float8_lab.bench.step import Row, check, compare
from float8_lab.bench.variants import Variant, make_variants, recipe_config
from sqnr import same_bits, sqnr
from support.saved import saved_bytes

CPU = torch.device("cpu")
TINY = Size("tiny", 1, 32)
RECIPES = ["tensorwise", "tensorwise+fuse", "delayed", "delayed+held"]
VARIANTS = {v.recipe: v for v in make_variants(RECIPES, ["eager"])}


def compared(variants: list[Variant], device: torch.device = CPU, **how: Any) -> list[Row]:
    make = lambda variant: model_step(variant, TINY, device, **how)  # noqa: E731
    *ready, rows = compare("model", make, variants, device, 1, at_least=AT_LEAST)
    assert ready == [[]] * len(variants)
    return rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows(device: str) -> None:
    rows = compared([*VARIANTS.values()], torch.device(device))
    assert [row["recipe"] for row in rows] == ["bf16", *RECIPES]
    assert [row["sqnr_db"] == float("inf") for row in rows] == [True, *[False] * len(RECIPES)]
    for row in rows:
        assert row["speedup"] == rows[0]["ms"] / row["ms"]
        assert (row["peak_gib"] is None) == (device == "cpu")
    if device == "cuda":  # without room for what others hold
        weights = 2 * sum(p.numel() for p in model.bf16_stack(TINY, CPU).parameters())
        workspace = 2**27  # of cuBLAS, larger than all else here
        assert all(weights < row["peak_gib"] * 2**30 < 40 * weights + workspace for row in rows)


def results(recipe: str, **how: Any) -> dict[str, Tensor]:
    return model_step(VARIANTS[recipe], TINY, CPU, **how)()


def test_models_are_converted_as_their_switches_say() -> None:
    for recipe, variant in VARIANTS.items():
        converted = model_step(variant, TINY, CPU).model
        layers = sum(isinstance(module, Float8Linear) for module in converted.modules())
        assert layers == (0 if recipe == "bf16" else 7)
        fused = [each.fqn for each in conversion_report(converted).fused if not each.reason]
        assert fused == (["layers.0.feed_forward"] if recipe.endswith("fuse") else [])


def test_gradients_of_microbatches_add_up_with_and_without_held_weights() -> None:
    once, plain, held = (
        results(r, microbatches=n) for r, n in (("bf16", 1), ("delayed", 3), ("delayed+held", 3))
    )
    for name, single in results("bf16", microbatches=3).items():
        times = 1 if name in ("output", "gradient of input") else 3  # equal microbatches
        assert sqnr(times * once[name].float(), single.float()) > 40, name
        assert torch.equal(plain[name], held[name]), name


@pytest.mark.parametrize("keep", ["nothing", "gemms", "gemms+attention"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_checkpointed_blocks_compute_the_same_and_keep_less(recipe: str, keep: str) -> None:
    variant = VARIANTS[recipe]
    whole, cut = (
        model_step(v, TINY, CPU) for v in (variant, dataclasses.replace(variant, keep=keep))
    )
    assert cut.variant.name == f"{recipe}, eager, {keep} kept"
    assert cut.variant.columns["keep"] == keep
    for name, expected in whole().items():
        assert same_bits(expected, cut()[name]), name
    if keep == "nothing":
        saved = [saved_bytes(each.forward, each.model.parameters()) for each in (whole, cut)]
        assert saved[1] < saved[0] / 2


def test_a_step_may_end_with_the_optimizers() -> None:
    trained = model_step(VARIANTS["delayed"], TINY, CPU)
    trained.add_optimizer()
    kinds = trained.model.parameters, trained.model.buffers  # those of scaling: synced by its hook
    before = [[x.clone() for x in kind()] for kind in kinds]
    trained()
    trained()
    for kind, was in zip(kinds, before, strict=True):
        assert not all(map(torch.equal, was, kind()))


def test_a_whole_model_of_transformers() -> None:
    pytest.importorskip("transformers")
    rows = compared([VARIANTS["bf16"], VARIANTS["tensorwise"]], transformers=True)
    assert [row["recipe"] for row in rows] == ["bf16", "tensorwise"]
    (chosen,) = make_variants(["tensorwise"], ["eager"], all_layers=False)[1:]
    llama = model_step(chosen, TINY, CPU, transformers=True).model
    assert not isinstance(llama.get_submodule("model.lm_head"), Float8Linear)
    assert sum(isinstance(module, Float8Linear) for module in llama.modules()) == 7


def test_recipes_with_switches() -> None:
    config = recipe_config("delayed+emulate+fast_accum+fuse")
    fast = Float8GemmConfig(use_fast_accum=True)
    assert config == dataclasses.replace(
        Float8LinearConfig.from_recipe_name("delayed"),
        emulate=True,
        gemm_config_grad_input=fast,
        gemm_config_grad_weight=fast,
    )
    with pytest.raises(ValueError, match=r"switch 'pad_inner_dim', expected one of .*emulate"):
        recipe_config("tensorwise+pad_inner_dim")  # on already


# ---------------------------------------------------------------- profiles


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_profile(device: str, tmp_path: Path) -> None:
    place = torch.device(device)
    once = model_step(VARIANTS["tensorwise"], TINY, place)
    rows = {row["kind"]: row for row in profile_step(once, place, tmp_path / "x.json")}
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert rows["GEMM"]["calls"] >= 21
    assert rows.keys() >= {"GEMM", "cast/amax", "other"}


# ---------------------------------------------------------------- checks

X = torch.randn(64, 64)
AS_IT_IS = {"one": X, "two": X}


def test_the_lowest_ratio_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("it", AS_IT_IS, AS_IT_IS, 1e9) == float("inf")
    off = {"two": X * 1.1, "one": X * 1.01, "unasked": X / 0}
    assert check("it", AS_IT_IS, off, 19.9) == pytest.approx(20.0)
    monkeypatch.setattr(step, "_CHUNK", 640)  # in several parts
    assert check("it", AS_IT_IS, off, 19.9) == pytest.approx(20.0)


@pytest.mark.parametrize("wrong", [X * 1.1, -X, X / 0, torch.zeros_like(X)])
def test_wrong_results_say_which(wrong: Tensor) -> None:
    with pytest.raises(WrongResultError, match=r"the thing two: SQNR .* at least 21 dB; nothing"):
        check("the thing", AS_IT_IS, {"one": X, "two": wrong}, 21.0)


def test_what_cannot_be_compared_is_wrong() -> None:
    with pytest.raises(WrongResultError, match="it x: SQNR nan dB"):
        check("it", {"x": X / 0}, {"x": X / 0}, 0.0)
    with pytest.raises(WrongResultError, match=r"it x: shape \(1, 64\), expected \(64, 64\)"):
        check("it", {"x": X}, {"x": X[:1]}, 0.0)
