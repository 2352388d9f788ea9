"""Where the time of a step goes, and the least that it could take."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from float8 import convert_to_float8_training
from float8_lab.bench.floor import least_work, linear_inputs
from float8_lab.bench.model import Size, model_step
from float8_lab.bench.profile import ATTENTION, CASTS, ELSE, GEMMS, KINDS, bench_profile, kind_of
from float8_lab.bench.step import Step
from float8_lab.bench.variants import make_variants, recipe_config

TINY = Size("tiny", 1, 128)
RECIPES = ["tensorwise", "rowwise", "blockwise"]


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("cpu", "eager"),
        *[pytest.param("cuda", mode, marks=pytest.mark.gpu) for mode in ("compiled", "graphed")],
    ],
)
def test_each_variant_is_a_row_beside_its_floor(device: str, mode: str, tmp_path: Path) -> None:
    place, variants = torch.device(device), make_variants(RECIPES, [mode])
    groups = list(bench_profile(variants, TINY, place, tmp_path))
    rows = [row for group in groups for row in group]
    assert [len(group) for group in groups] == [1] * 4
    assert [row["recipe"] for row in rows] == ["bf16", *RECIPES]
    bf16 = rows[0]
    assert bf16[CASTS] == bf16["transposes"] == bf16["floor_casts_ms"] == 0
    for row in rows:
        assert row["sum_ms"] == pytest.approx(sum(row[kind] for kind in KINDS))
        assert row["floor_rest_ms"] == pytest.approx(bf16[ATTENTION] + bf16[ELSE])
        floors = row["floor_gemms_ms"] + row["floor_casts_ms"] + row["floor_rest_ms"]
        assert row["above_floor"] == pytest.approx(row["sum_ms"] / floors - 1)
        assert row[GEMMS] > 0
        assert row[ATTENTION] > 0
        assert row["launches"] >= 21 + row["transposes"]
        trace = tmp_path / f"{row['recipe']}-{mode}.json"
        assert json.loads(trace.read_text())["traceEvents"]
    for row in rows[1:]:
        assert row[CASTS] > 0
    casts = [row["floor_casts_ms"] for row in rows[1:]]
    assert casts[0] == casts[1] > casts[2]


class Three(nn.Module):
    """Two layers read the input, one of them frozen; one reads what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(32, 64, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.c = nn.Linear(64, 16, bias=False, dtype=torch.bfloat16)
        self.b.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) + self.b(x))


M, AB, C = 128, 32 * 64, 64 * 16
INPUTS, GRADS, WEIGHTS = M * (32 + 64), M * (64 + 64 + 16), 2 * AB + C
GEMMS_OF = 2 * M * (2 * AB + C), 2 * M * (2 * AB + C), 2 * M * (AB + C)  # b has no grad_weight


@pytest.mark.parametrize(
    ("recipe", "cast_bytes"),
    [  # grad_output of b is cast to rows only
        ("tensorwise", 6 * INPUTS + 6 * GRADS - M * 64 + (5 + 3) * WEIGHTS),
        ("delayed", 4 * INPUTS + 4 * GRADS - M * 64 + (5 + 3) * WEIGHTS),
        ("tensorwise+held", 6 * INPUTS + 6 * GRADS - M * 64 + 6 * WEIGHTS),
        ("rowwise", 6 * INPUTS + 6 * GRADS - 3 * M * 64 + (3 + 5) * WEIGHTS),
        ("rowwise_with_gw_hp", 3 * INPUTS + 3 * GRADS + (3 + 5) * WEIGHTS),
        ("blockwise", 6 * INPUTS + 4 * GRADS - M * 64 + (3 + 3) * WEIGHTS),
    ],
)
def test_work_is_that_of_the_layers_as_they_run(recipe: str, cast_bytes: int) -> None:
    data = torch.randn(M, 32, dtype=torch.bfloat16), torch.randn(M, 16, dtype=torch.bfloat16)
    compiled = make_variants([], ["compiled"])[0]  # whose forward is looked at in eager mode
    inputs, config = linear_inputs(Step(compiled, Three(), *data)), recipe_config(recipe)
    model = convert_to_float8_training(Three(), config=config, module_filter_fn=lambda *_: True)
    work = least_work(model, config, inputs)
    assert work.cast_bytes == cast_bytes
    assert sum(work.flops.values()) == sum(GEMMS_OF)
    in_bf16 = GEMMS_OF[2] if recipe == "rowwise_with_gw_hp" else 0
    assert work.flops[None] == in_bf16
    assert least_work(Three(), None, inputs) == ({None: sum(GEMMS_OF)}, 0)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            CASTS,
            "cast_kernel cast_rows_kernel _cast_groups_kernel _measure_groups_kernel "
            "measure_kernel _amax_kernel _transpose_kernel "
            "float8::cast_delayed triton_red_fused__to_copy_abs_add_amax_mean_mul_pow_rsqrt_view_0 "
            "triton_poi_fused__to_copy_clamp_mul_reciprocal_silu_where_3",
        ),
        (
            GEMMS,
            "nvjet_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT aten::_scaled_mm aten::mm "
            "void_cutlass::device_kernel<cutlass::gemm::GemmUniversal> triton_tem_fused_mm_1",
        ),
        (
            ATTENTION,
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16 "
            "pytorch_flash::flash_fwd_kernel aten::_scaled_dot_product_flash_attention_for_cpu",
        ),
        (
            ELSE,  # Inductor names what it lays out for others after them
            "triton_poi_fused__scaled_dot_product_flash_attention_backward_transpose_view_2 "
            "triton_poi_fused__to_copy_add_cast_mul_neg_slice_transpose_unsqueeze_view_3 "
            "triton_poi_fused__scaled_mm_t_1 "
            "at::native::(anonymous)::silu_backward_kernel",
        ),
    ],
)
def test_kernels_are_told_by_their_names(kind: str, names: str) -> None:
    assert {kind_of(name) for name in names.split()} == {kind}


def test_the_compiled_step_is_looked_at_by_layer() -> None:
    step = model_step(make_variants([], ["compiled"])[0], TINY, torch.device("cpu"))
    inputs = linear_inputs(step)
    assert len(inputs) == 7
    assert len({read.tensor for read in inputs.values()}) == 4  # query, key, value; gate, up
    assert {read.tokens for read in inputs.values()} == {128}
