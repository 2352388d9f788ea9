"""Each benchmark on tiny shapes: its rows are complete, and a wrong result ends it."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import Float8GemmConfig, Float8LinearConfig
from float8.convert.measure import WrongResultError
from float8.gemm import Gemm
from float8.quantize.spec import Part
from float8_lab.bench import cast, linear, matmul
from float8_lab.bench import step as step_module
from float8_lab.bench.block import StackSize, bench_block, stack_step
from float8_lab.bench.profile import kind_of, profile_block
from float8_lab.bench.shapes import Shape
from float8_lab.bench.step import Step, peak_bytes, saved_bytes
from float8_lab.bench.variants import Variant, make_variants, recipe_config
from sqnr import sqnr

CPU = torch.device("cpu")
SHAPE = Shape(32, 64, 48)
SHAPES = {"given": (SHAPE,)}
TINY = StackSize("tiny", 1, 32)
# Where these run: on the CPU always, and on a GPU where there is one.
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def flat(groups) -> list[dict]:
    return list(itertools.chain.from_iterable(groups))


@on_devices
def test_matmul(device: str) -> None:
    rows = flat(matmul.bench_matmul(SHAPES, torch.device(device), 2))
    assert [row["variant"] for row in rows] == ["bf16", "float8", "float8 fast accum"]
    for row in rows:
        assert (row["set"], row["gemm"]) == ("given", "output")
        assert (row["M"], row["K"], row["N"]) == SHAPE
        assert row["tflops"] == pytest.approx(2 * 32 * 64 * 48 / row["ms"] / 1e9)
        assert row["speedup"] == pytest.approx(rows[0]["ms"] / row["ms"])
        assert row["sqnr_db"] > 40


@on_devices
def test_matmul_of_gradients(device: str) -> None:
    rows = flat(matmul.bench_matmul(SHAPES, torch.device(device), 1, gradients=True))
    found = [(r["gemm"], r["M"], r["K"], r["N"], r["format_a"]) for r in rows if r["format_a"]]
    assert list(dict.fromkeys(found)) == [
        ("output", 32, 64, 48, "e4m3"),
        ("grad_input", 32, 48, 64, "e5m2"),
        ("grad_weight", 48, 32, 64, "e5m2"),
    ]
    assert min(row["sqnr_db"] for row in rows) > 40


def test_a_wrong_matmul_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(a: Part, b: Part, *, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
        product = (a.data.float() * a.scale) @ (b.data.float() * b.scale).t()
        if gemm.use_fast_accum:
            product[:, 0] = 0
        return product.to(out_dtype)

    monkeypatch.setattr(matmul, "matmul", wrong)
    with pytest.raises(WrongResultError, match="matmul output 32,64,48 float8 fast accum: SQNR"):
        flat(matmul.bench_matmul(SHAPES, CPU, 1))


@on_devices
def test_cast(device: str) -> None:
    tensors = cast.distinct_tensors(SHAPES)
    assert tensors == [(32, 48), (32, 64), (48, 64)]
    rows = flat(cast.bench_cast(tensors, torch.device(device), 2))
    assert list(dict.fromkeys((row["R"], row["C"]) for row in rows)) == tensors
    for row in rows:
        if row["case"] == "copy":
            assert row["of_copy"] == pytest.approx(1.0)
            assert row["gb_per_s"] == pytest.approx(4 * row["R"] * row["C"] / row["us"] / 1e3)


def test_a_cast_that_differs_in_one_bit_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*arguments, **options):
        row, col = cast_reference(*arguments, **options)
        if row is not None:
            row.view(torch.uint8)[-1, -1] ^= 1
        return row, col

    cast_reference = cast.cast_reference
    monkeypatch.setattr(cast.kernels, "cast", off)
    with pytest.raises(WrongResultError, match="not bitwise equal to its twin; nothing was timed"):
        flat(cast.bench_cast([(32, 48)], CPU, 1))


@on_devices
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_linear(device: str, mode: str) -> None:
    place = torch.device(device)
    shapes = {"two": (SHAPE, Shape(64, 32, 32))}
    variants = make_variants(["tensorwise", "delayed"], [mode], [])
    rows = flat(linear.bench_linear(shapes, variants, place, 2))
    assert [row["recipe"] for row in rows] == ["bf16", "tensorwise", "delayed"] * 3
    assert {row["mode"] for row in rows} == {mode}
    first, sums = rows[:3], rows[6:]
    assert [row["M"] for row in sums] == ["sum"] * 3
    for one, other, total in zip(first, rows[3:6], sums, strict=True):
        assert total["ms"] == one["ms"] + other["ms"]
        assert total["speedup"] == pytest.approx(sums[0]["ms"] / total["ms"])
        assert one["floor_ms"] > 0
    assert [row["saved_mib"] * 2**20 for row in first[:1]] == [2 * 32 * 64]  # the input
    for row in first[1:]:  # its float8 copy, and scales
        assert 32 * 64 <= row["saved_mib"] * 2**20 <= 32 * 64 + 64
        assert 17 < row["sqnr_db"] < 40
        assert (row["peak_gib"] is None) == (device == "cpu")
    if mode == "eager":
        host = linear.host_microseconds(variants, place)
        assert host.keys() == {"bf16", "tensorwise", "delayed"}
        assert min(host.values()) > 0


class CountCasts(TorchDispatchMode):
    casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.casts += func.namespace == "float8"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_no_call_that_is_timed_finds_its_casts_done(recipe: str) -> None:
    (variant,) = make_variants([recipe], ["eager"], [])[1:]
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    layer = Step(variant, linear.Layer(weight), x, torch.randn(32, 48).bfloat16())
    for step in (layer, stack_step(variant, TINY, CPU)):
        counts = []
        for _ in range(3):
            with CountCasts() as count:
                step()
            counts.append(count.casts)
        assert counts[0] > 0
        assert counts == counts[:1] * 3


def doubled(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, arguments, output: 2 * output)
    return model


def test_a_wrong_layer_is_not_timed() -> None:
    variants = [*make_variants([], ["eager"], []), Variant("wrong", "eager", doubled)]
    with pytest.raises(WrongResultError, match="linear 32,64,48 wrong, eager: output"):
        flat(linear.bench_linear(SHAPES, variants, CPU, 1))


@on_devices
def test_block(device: str) -> None:
    variants = make_variants(["tensorwise", "delayed"], ["eager"], [])
    groups = list(bench_block(TINY, variants, torch.device(device), 2))
    assert groups[:-1] == [[]] * len(variants)
    rows = groups[-1]
    assert [row["recipe"] for row in rows] == ["bf16", "tensorwise", "delayed"]
    assert [row["sqnr_db"] == float("inf") for row in rows] == [True, False, False]
    for row in rows:
        assert row["speedup"] == pytest.approx(rows[0]["ms"] / row["ms"])


@on_devices
def test_block_of_microbatches_with_and_without_held_weights(device: str) -> None:
    size, place = dataclasses.replace(TINY, microbatches=3), torch.device(device)
    variants = make_variants(["tensorwise", "delayed"], ["eager"], [], held=True)
    rows = list(bench_block(size, variants, place, 1))[-1]
    assert [row["recipe"] for row in rows] == [
        "bf16",
        "tensorwise",
        "tensorwise+held",
        "delayed",
        "delayed+held",
    ]
    if device == "cuda":  # attention's backward has not the same bits every time
        return
    once = stack_step(variants[0], TINY, place)()
    steps = {variant.recipe: stack_step(variant, size, place)() for variant in variants}
    for name, single in once.items():
        times = 1 if name in ("output", "gradient of input") else 3  # equal microbatches
        assert sqnr(times * single.float(), steps["bf16"][name].float()) > 40, name
    for recipe in ("tensorwise", "delayed"):
        for name, wanted in steps[recipe].items():
            assert torch.equal(steps[f"{recipe}+held"][name], wanted), (recipe, name)


def test_the_held_variant_casts_each_weight_once() -> None:
    size = dataclasses.replace(TINY, microbatches=3)
    _, plain, held = make_variants(["tensorwise"], ["eager"], [], held=True)
    casts = []
    for variant in (plain, held):
        step = stack_step(variant, size, CPU)
        with CountCasts() as count:
            step()
        casts.append(count.casts)
    assert casts[0] - casts[1] == 7 * (2 * 3 - 1)


@pytest.mark.parametrize(
    ("recipe", "due"), [("tensorwise", 0), ("blockwise", 0), ("delayed", 1), ("rowwise+held", 1)]
)
def test_a_step_syncs_where_something_is_due(
    recipe: str, due: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, variant = make_variants([recipe], ["eager"])
    once = stack_step(variant, TINY, CPU)
    calls: list[object] = []
    monkeypatch.setattr(step_module, "sync_float8_amax_and_scale_history", calls.append)
    once()
    assert len(calls) == due


def test_recipes_with_switches() -> None:
    config = recipe_config("delayed+emulate+fast_accum")
    fast = Float8GemmConfig(use_fast_accum=True)
    assert config == dataclasses.replace(
        Float8LinearConfig.from_recipe_name("delayed"),
        emulate=True,
        gemm_config_grad_input=fast,
        gemm_config_grad_weight=fast,
    )
    variants = make_variants(["tensorwise", "tensorwise+emulate"], ["eager"], [])
    assert [variant.recipe for variant in variants] == ["bf16", "tensorwise", "tensorwise+emulate"]
    with pytest.raises(ValueError, match=r"switch 'pad_inner_dim', expected one of .*emulate"):
        recipe_config("tensorwise+pad_inner_dim")  # on already


def test_a_block_with_one_wrong_gradient_is_not_timed() -> None:
    def convert(stack: nn.Module) -> nn.Module:
        stack.layers[0].feed_forward.up.weight.register_hook(lambda grad: 0.5 * grad)
        return stack

    variants = [*make_variants([], ["eager"], []), Variant("wrong", "eager", convert)]
    message = "block wrong, eager: gradient of layers.0.feed_forward.up.weight: SQNR"
    with pytest.raises(WrongResultError, match=message):
        list(bench_block(TINY, variants, CPU, 1))


@on_devices
def test_profile(device: str, tmp_path: Path) -> None:
    variant = make_variants(["tensorwise"], ["eager"], [])[-1]
    rows = profile_block(TINY, variant, torch.device(device), tmp_path / "traces")
    for which in ("forward", "backward"):
        shares = [row["share"] for row in rows if row["pass"] == which]
        assert sum(shares) == pytest.approx(1.0)
        assert json.loads((tmp_path / "traces" / f"{which}.json").read_text())["traceEvents"]
    gemms = [row["calls"] for row in rows if row["kind"] == "GEMM"]
    assert gemms[0] >= 7
    assert gemms[1] >= 14
    assert {row["kind"] for row in rows} >= {"GEMM", "cast/amax", "other"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_coopB_TNT", "GEMM"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel>", "GEMM"),
        ("aten::mm", "GEMM"),
        ("aten::_scaled_mm", "GEMM"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("_cast_kernel", "cast/amax"),
        ("_amax_flat_kernel", "cast/amax"),
        ("triton_red_fused__to_copy_abs_amax_mul_3", "cast/amax"),
        ("float8::cast", "cast/amax"),
        ("triton_poi_fused_mul_silu_1", "other"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_saved_bytes_count_each_storage_once() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)

    def forward() -> Tensor:
        return (x @ weight).exp() + (x @ weight)

    # x (twice the same) and the result of exp; the weight needs no saving for x has no gradient.
    assert saved_bytes(forward, [weight]) == 4 * (4 * 8 + 4 * 8)
    assert saved_bytes(forward, [weight, x]) == 4 * (4 * 8)
    assert peak_bytes(forward, CPU) is None
