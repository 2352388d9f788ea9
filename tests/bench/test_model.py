"""Models in several variants side by side, peers among them: compared, checked, timed.

And single layers and experts on tiny shapes.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from float8 import Float8GemmConfig, Float8Linear, Float8LinearConfig, update_float8_weights
from float8_lab.bench import experts, linear, model, step
from float8_lab.bench.experts import Experts, bench_experts, parse_experts
from float8_lab.bench.linear import LinearStep, measure_linear
from float8_lab.bench.model import Size, model_step
from float8_lab.bench.profile import ATTENTION, CASTS, ELSE, GEMMS, KINDS, ProfiledStep, kind_of
from float8_lab.bench.step import WARMUP, Step, bench_steps, check
from float8_lab.bench.variants import PEERS, Variant, make_variants, recipe_config
from float8_lab.errors import FailedError
from sqnr import same_bits, sqnr
from support.devices import on_devices
from support.rings import short
from support.saved import saved_bytes
from support.trainer import stopped_clock

CPU = torch.device("cpu")
TINY = Size("tiny", 1, 32)
RECIPES = ["tensorwise", "delayed", "delayed+held"]
VARIANTS = {v.recipe: v for v in make_variants(RECIPES, ["eager"])}


@on_devices
def test_rows(device: str) -> None:
    place = torch.device(device)
    make, variants = functools.partial(model_step, size=TINY, device=place), [*VARIANTS.values()]
    *_, rows = bench_steps(make, variants, place, 1, tokens={"tokens_per_s": 32})
    assert [row["recipe"] for row in rows] == ["bf16", *RECIPES]
    assert [row["sqnr_db"] == float("inf") for row in rows] == [True, *[False] * len(RECIPES)]
    for row in rows:
        assert row["speedup"] == rows[0]["ms"] / row["ms"]
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms"])
        assert row["drift_percent"] > -100
        assert ("peak_gib" in row) == (device == "cuda")
    if device == "cuda":  # without room for what others hold
        stack, _ = model.stack_and_data(TINY, CPU)
        weights = 2 * sum(p.numel() for p in stack.parameters())
        workspace = 2**27  # of cuBLAS, larger than all else here
        assert all(weights < row["peak_gib"] * 2**30 < 40 * weights + workspace for row in rows)


@pytest.mark.parametrize("how", step.CHECKPOINTING)
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_checkpointed_blocks_compute_the_same_and_keep_less(recipe: str, how: str) -> None:
    variant = VARIANTS[recipe]
    cut_variant = dataclasses.replace(variant, checkpointing=how)
    whole, cut = (model_step(v, TINY, CPU) for v in (variant, cut_variant))
    assert cut.variant.name == f"{recipe}, eager, {how}"
    layers = sum(isinstance(module, Float8Linear) for module in cut.model.modules())
    assert layers == (0 if recipe == "bf16" else 7)
    found = {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in cut().items()}
    for name, expected in whole().items():
        assert same_bits(expected, found[name]), name
    if how == "full":
        saved = [saved_bytes(each.forward, each.model.parameters()) for each in (whole, cut)]
        assert saved[1] < saved[0] / 2


@pytest.mark.parametrize("mode", ["eager", "compiled", "graphed"])
def test_blocks_are_compiled_one_by_one(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda x, **how: found.append(x))
    bf16, ours = make_variants(["tensorwise"], [mode], all_layers=False, tokens=2048)
    step = model_step(bf16, Size("tiny", 2, 32), CPU)
    assert found == ([] if mode == "eager" else step.parts)
    converting: Any = ours.convert
    assert converting.keywords["cuda_graphs"] == (mode == "graphed")
    assert converting.keywords["tokens_per_step"] == 2048


@pytest.mark.parametrize("transformers", short({0}, [False, True]))
def test_whole_models_start_as_those_of_torchtitan(
    transformers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no gradient of a deep model could be checked."""
    if transformers:
        pytest.importorskip("transformers")
        sizes = {"hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 4}
        monkeypatch.setitem(model.OF_TRANSFORMERS, "llama", sizes)
    size = Size("llama" if transformers else "tiny", 2, 32)
    whole = model.Whole(size, CPU, torch.float32)
    std = {name: p.std().item() for name, p in whole.model.named_parameters() if p.dim() == 2}
    (embedding,) = (x for name, x in std.items() if "embed" in name)
    assert embedding == pytest.approx(1, rel=0.05)
    names = ("q_proj", "o_proj", "down_proj") if transformers else ("query", "out", "down")
    first, *last = ([x for n, x in std.items() if n.endswith(f".{e}.weight")] for e in names)
    wider = 1.0 if transformers else 3**0.5  # ours go by their inputs
    for each, inputs in [(x, 1.0) for x in last[0]] + [(x, wider) for x in last[1]]:
        assert each == pytest.approx(first[0] / 2 / inputs, rel=0.05)  # 1 / sqrt(2 * layers)
    like = dataclasses.replace(Size("tiny", 1, 32).config(), tied_head=True)
    monkeypatch.setattr(Size, "config", lambda self: like)
    tied = model.Whole(Size("tiny", 1, 32), CPU, torch.float32)  # an embedding as its head
    assert tied.model.embedding.weight.std().item() == pytest.approx(like.dim**-0.5, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "tensorwise+held", "delayed+held"]
)
def test_a_graphed_step_has_the_results_of_a_compiled_one(recipe: str) -> None:
    torch.compiler.reset()
    size, device = Size("150m", 2, 512), torch.device("cuda")
    compiled, graphed = (
        model_step(variant, size, device)
        for variant in make_variants([recipe], ["compiled", "graphed"])
        if variant.ours
    )
    for _ in range(5):  # the third and later steps are replays, which read weights of now
        for each in (compiled, graphed):
            for parameter in each.model.parameters():
                parameter.data.mul_(1.1)
            update_float8_weights(each.model)
        found = graphed()
        for name, expected in compiled().items():  # attention's backward adds in any order
            assert sqnr(expected, found[name]) > 40, name


def test_a_step_may_end_with_the_optimizers() -> None:
    trained = model_step(VARIANTS["delayed"], TINY, CPU)
    trained.add_optimizer(1e-5)
    kinds = trained.model.parameters, trained.model.buffers  # those of scaling: synced by its hook
    before = [[x.clone() for x in kind()] for kind in kinds]
    trained()
    trained()
    for kind, was in zip(kinds, before, strict=True):
        assert not all(map(torch.equal, was, kind()))


def test_recipes_with_switches() -> None:
    config = recipe_config("delayed+emulate+fast_accum")
    fast = Float8GemmConfig(use_fast_accum=True)
    assert config == dataclasses.replace(
        Float8LinearConfig.from_recipe_name("delayed"),
        emulate=True,
        gemm_config_grad_input=fast,
        gemm_config_grad_weight=fast,
    )
    with pytest.raises(ValueError, match=r"switch 'pad_inner_dim', expected one of .*emulate"):
        recipe_config("tensorwise+pad_inner_dim")  # on already


@pytest.mark.parametrize(
    "recipe",
    [
        *("tensorwise+held+only", "tensorwise+only+held", "rowwise+held+emulate+only"),
        *("tensorwise+held+held", "delayed+emulate+emulate", "tensorwise+fast_accum+fast_accum"),
        *("rowwise+round_scales_to_power_of_2", "tensorwise+", "tensorwise++held"),
    ],
)
def test_switches_that_repeat_or_contradict_are_refused(recipe: str) -> None:
    last = recipe.split("+")[1] if "++" in recipe else recipe.rpartition("+")[2]
    with pytest.raises(ValueError, match=rf"with the switch '{last}', expected one of ") as error:
        recipe_config(recipe)
    others = str(error.value).partition("expected one of ")[2].partition(";")[0].split(", ")
    assert recipe_config(f"tensorwise+{others[0]}")
    assert not {"held", "only"} & {*others} or not {"held", "only"} & {*recipe.split("+")[:-1]}


X = torch.randn(64, 64)
AS_IT_IS = {"one": X, "two": X}


def test_the_lowest_ratio_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("it", AS_IT_IS, AS_IT_IS, 1e9) == float("inf")
    off = {"two": X * 1.1, "one": X * 1.01, "unasked": X / 0}
    assert check("it", AS_IT_IS, off, 19.9) == pytest.approx(20.0)
    monkeypatch.setattr(step, "_CHUNK", 640)  # in several parts
    assert check("it", AS_IT_IS, off, 19.9) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("expected", "wrong", "why"),
    [
        *((X, wrong, "SQNR .* at least 21 dB") for wrong in (X * 1.1, -X, X / 0, 0 * X)),
        (X / 0, X / 0, "SQNR nan dB"),
        (X, X[:1], r"shape \(1, 64\), expected \(64, 64\)"),
    ],
)
def test_wrong_results_say_which(expected: Tensor, wrong: Tensor, why: str) -> None:
    with pytest.raises(FailedError, match=rf"the thing two: {why}.*; nothing was timed"):
        check("the thing", {"one": X, "two": expected}, {"one": X, "two": wrong}, 21.0)


def test_an_installed_peer_becomes_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    torchao: Any = pytest.importorskip("torchao.float8")
    variants = make_variants(["tensorwise", "delayed"], ["eager", "compiled"], ["torchao"])
    assert [variant.name for variant in variants] == [
        f"{recipe}, {mode}"
        for mode in ("eager", "compiled")
        for recipe in ("bf16", "tensorwise", "delayed", "torchao tensorwise")  # it has no delayed
    ]

    def converted(variant: Variant) -> list[str]:
        with torch.device("meta"):
            layers = {"large": nn.Linear(8192, 8192), "small": nn.Linear(512, 512)}
            model = nn.ModuleDict({**layers, "lm_head": nn.Linear(8192, 8192)})
        children = variant.convert(model).named_children()
        return [name for name, layer in children if type(layer) is not nn.Linear]

    assert converted(variants[-1]) == ["large", "small", "lm_head"]
    both = make_variants(["tensorwise+held"], ["eager"], PEERS, all_layers=False)[-2:]
    assert [variant.recipe for variant in both] == [f"{peer} tensorwise" for peer in PEERS]
    assert [*map(converted, both)] == [["large", "small"], ["large"]]
    sharded = make_variants(["delayed"], ["eager"], ["torchao"], sharded=True)
    names = ["bf16, eager", "delayed, eager", "torchao tensorwise, eager"]
    assert [variant.name for variant in sharded] == names
    told: list[nn.Module] = []
    monkeypatch.setattr(torchao, "precompute_float8_dynamic_scale_for_fsdp", told.append)
    optimizer = torch.optim.SGD((layer := nn.Linear(2, 2)).parameters())
    sharded[-1].attach(layer, optimizer)
    optimizer.step()
    assert told == [layer]


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("cpu", "eager"),
        pytest.param("cuda", "compiled", marks=pytest.mark.gpu),
        pytest.param("cuda", "graphed", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.exhaustive
def test_where_the_time_goes(device: str, mode: str) -> None:
    variants = make_variants(["blockwise"], [mode])
    size = TINY if device == "cpu" else Size("tiny", 1, 128)
    make = functools.partial(model_step, size=size, device=torch.device(device), kind=ProfiledStep)
    *_, rows = bench_steps(make, variants, torch.device(device), 1, passes=1)
    assert [row["recipe"] for row in rows] == ["bf16", "blockwise"]
    for row in rows:
        assert row["sum_ms"] == pytest.approx(sum(row[kind] for kind in KINDS))
        assert (row[CASTS] > 0) == (row is not rows[0])
        assert min(row[GEMMS], row[ATTENTION]) > 0
        assert row["launches"] >= 21


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (CASTS, "cast_kernel cast_rows_kernel _cast_groups_kernel _measure_groups_kernel"),
        (CASTS, "measure_kernel _amax_kernel _transpose_kernel float8::cast_delayed"),
        (CASTS, "triton_red_fused__to_copy_abs_add_amax_mean_mul_pow_rsqrt_view_0"),
        (CASTS, "triton_poi_fused__to_copy_clamp_mul_reciprocal_silu_where_3"),
        (GEMMS, "nvjet_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT aten::_scaled_mm aten::mm"),
        (GEMMS, "void_cutlass::device_kernel<cutlass::gemm::GemmUniversal> triton_tem_fused_mm_1"),
        (ATTENTION, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16"),
        (ATTENTION, "pytorch_flash::flash_fwd_kernel"),
        (ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu"),
        # Inductor names what it lays out for others after them.
        (ELSE, "triton_poi_fused__scaled_dot_product_flash_attention_backward_transpose_view_2"),
        (ELSE, "triton_poi_fused__to_copy_add_cast_mul_neg_slice_transpose_unsqueeze_view_3"),
        (ELSE, "triton_poi_fused__scaled_mm_t_1 at::native::(anonymous)::silu_backward_kernel"),
    ],
)
def test_kernels_are_told_by_their_names(kind: str, names: str) -> None:
    assert {kind_of(name) for name in names.split()} == {kind}


# ---------------------------------------------------------------- single layers and experts

SHAPE = 32, 64, 48


def test_a_step_is_timed_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = stopped_clock(monkeypatch)
    bf16, *_ = linear.make_variants([], ["eager"])
    step = Step(bf16, nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), torch.ones(1, 2))
    durations = iter([5.0] * WARMUP + [0.001, 0.003])  # the first ones do not count
    monkeypatch.setattr(Step, "__call__", lambda self: sleep(next(durations)))
    assert step.times(2) == pytest.approx([1.0, 3.0])


def doubled(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, arguments, output: 2 * output)
    return model


def test_a_wrong_layer_is_not_timed() -> None:
    bf16, ours = linear.make_variants(["tensorwise"], ["eager"])
    message = "wrong, eager: output: SQNR .* nothing was timed"
    wrong = Variant("wrong", "eager", doubled, config=ours.config)
    make = partial(LinearStep, SHAPE, CPU)
    with pytest.raises(FailedError, match=message):
        list(bench_steps(make, [bf16, wrong], CPU, 1))
    peer = Variant("peer", "eager", doubled)  # of others only the reason is told
    *_, (reference, left_out) = bench_steps(make, [bf16, peer], CPU, 1)
    assert "FailedError: peer, eager: output" in left_out["left_out"]
    assert "ms" in reference
    assert "ms" not in left_out


@pytest.mark.gpu
def test_a_large_layer_gains_on_a_gpu() -> None:
    high, low = measure_linear((8192, 4096, 4096), "tensorwise", torch.device("cuda", 0))
    assert low < high


@pytest.mark.gpu  # tests/cli has them on a CPU
def test_layers_of_experts() -> None:
    shape = Experts(4, 199, 32, 48)  # groups of 49 and 50 rows
    (layers,) = bench_experts([shape], experts.RECIPES, torch.device("cuda"), 1, 2)
    assert [row["recipe"] for row in layers] == ["bf16", *experts.RECIPES]
    for row in layers[1:]:
        assert row["sqnr_db"] > 20
        assert row["speedup"] == pytest.approx(layers[0]["ms"] / row["ms"])


def test_wrong_experts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts.apply_grouped
    monkeypatch.setattr(experts, "apply_grouped", lambda *rest: 1.3 * right(*rest))
    with pytest.raises(FailedError, match=r"rowwise, .*; nothing was timed"):
        next(bench_experts([Experts(4, 500, 32, 48)], ["rowwise"], CPU, 1))


def test_experts_by_name_and_by_size() -> None:
    for name, each in experts.EXPERTS.items():
        assert parse_experts(name) == each
        assert str(each) == name
    assert parse_experts("4, 500,32,48") == (4, 500, 32, 48)
    for text in ("mixtral", "4,100,32", "4,100,32,40"):
        with pytest.raises(ValueError, match=r"got '.*', expected "):
            parse_experts(text)
