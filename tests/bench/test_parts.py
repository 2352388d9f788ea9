"""Benchmarks of GEMMs, casts, layers and experts on tiny shapes; wrong results end it."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from float8_lab.bench import cast, experts, linear, matmul
from float8_lab.bench.experts import Experts, bench_experts, expert_variants, select_experts
from float8_lab.bench.shapes import Shape
from float8_lab.bench.variants import Variant, make_variants
from float8_lab.errors import WrongResultError
from support.devices import on_devices

CPU = torch.device("cpu")
SHAPE = Shape(32, 64, 48)
SHAPES = {"given": (SHAPE,)}


def flat(groups) -> list[dict]:
    return list(itertools.chain.from_iterable(groups))


@on_devices
def test_matmul(device: str) -> None:
    rows = flat(matmul.bench_matmul([SHAPE], torch.device(device), 1))
    assert [row["variant"] for row in rows] == ["bf16", "float8", "float8 fast accum"]
    for row in rows:
        assert (row["M"], row["K"], row["N"]) == SHAPE
        assert row["tflops"] == pytest.approx(2 * 32 * 64 * 48 / row["ms"] / 1e9)
        assert row["sqnr_db"] > 40
    assert rows[1]["speedup"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"])


@on_devices
def test_cast(device: str) -> None:
    tensors = cast.distinct_tensors([SHAPE])
    assert tensors == [(32, 48), (32, 64), (48, 64)]
    rows = flat(cast.bench_cast(tensors, torch.device(device), 1))
    assert list(dict.fromkeys((row["R"], row["C"]) for row in rows)) == tensors
    for row in rows:
        if row["case"] == "copy":
            assert row["of_copy"] == pytest.approx(1.0)
            assert row["gb_per_s"] == pytest.approx(4 * row["R"] * row["C"] / row["us"] / 1e3)


def test_a_cast_that_differs_in_one_bit_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(x: Tensor) -> Tensor:
        found = right(x)
        found.view(torch.uint8)[-1, -1] ^= 1
        return found

    right = cast.kernels.transpose_bytes
    monkeypatch.setattr(cast.kernels, "transpose_bytes", off)
    with pytest.raises(WrongResultError, match="not bitwise equal to its twin; nothing was timed"):
        flat(cast.bench_cast([(32, 48)], CPU, 1))


@on_devices
@pytest.mark.parametrize("gpu_time", [False, True])
def test_linear(device: str, gpu_time: bool) -> None:
    shapes = {"two": (SHAPE, Shape(64, 32, 32))}
    variants = make_variants(["tensorwise", "delayed"], ["eager"])
    rows = flat(linear.bench_linear(shapes, variants, torch.device(device), 1, gpu_time=gpu_time))
    assert [row["recipe"] for row in rows] == ["bf16", "tensorwise", "delayed"] * 3
    first, sums = rows[:3], rows[6:]
    assert [row["M"] for row in sums] == ["sum"] * 3
    for one, other, total in zip(first, rows[3:6], sums, strict=True):
        assert total["ms"] == one["ms"] + other["ms"]
        assert total["speedup"] == pytest.approx(sums[0]["ms"] / total["ms"])
        assert one["floor_ms"] > 0
    for row in first[1:]:
        assert 17 < row["sqnr_db"] < 40
        assert (row["peak_gib"] is None) == (device == "cpu")


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        pytest.param("cuda", "compiled", marks=pytest.mark.gpu),
        pytest.param("cuda", "graphed", marks=pytest.mark.gpu),
        ("cpu", "graphed"),  # as it is compiled
    ],
)
def test_a_compiled_layer(device: str, mode: str) -> None:
    variants = make_variants(["tensorwise"], [mode])
    rows = flat(linear.bench_linear(SHAPES, variants, torch.device(device), 1))
    assert [row["mode"] for row in rows] == [mode] * 2
    assert [row["sqnr_db"] == float("inf") for row in rows] == [True, False]


def doubled(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, arguments, output: 2 * output)
    return model


def test_a_wrong_layer_is_not_timed() -> None:
    reference, ours = make_variants(["tensorwise"], ["eager"])
    wrong = Variant("wrong", "eager", doubled, config=ours.config)
    message = "linear 32,64,48 wrong, eager: output: SQNR .* nothing was timed"
    with pytest.raises(WrongResultError, match=message):
        flat(linear.bench_linear(SHAPES, [reference, wrong], CPU, 1))
    peer = Variant("peer", "eager", doubled)  # of others only the reason is told
    bf16, left_out = flat(linear.bench_linear(SHAPES, [reference, peer], CPU, 1))
    assert "WrongResultError: linear 32,64,48 peer, eager: output" in left_out["left_out"]
    assert "ms" in bf16
    assert "ms" not in left_out


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


def test_wrong_experts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
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
