"""Configuration: names, defaults, and that every field takes effect or raises."""

import copy
import dataclasses
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    Float8Weights,
    ScalingGranularity,
    ScalingType,
    convert_to_float8_training,
    linear,
    linear_requires_sync,
)
from float8.config import GEMM_OPERANDS, CastSite
from support.configs import DELAYED, DISABLED, DYNAMIC, MIXES, mixed, of_recipe
from support.devices import E4M3, E5M2
from support.errors import require_errors

ROLES = ["input", "weight", "grad_output"]
SECOND_USES = ["input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight"]


def cast_of(config: Float8LinearConfig, site: str) -> Any:
    return getattr(config, f"cast_config_{site}")


# ---------------------------------------------------------------- defaults


def test_defaults() -> None:
    config = Float8LinearConfig()
    e4m3, e5m2 = CastConfig(target_dtype=E4M3), CastConfig(target_dtype=E5M2)
    assert [cast_of(config, role) for role in ROLES] == [e4m3, e4m3, e5m2]
    assert [cast_of(config, site) for site in SECOND_USES] == [None] * 3
    assert config.gemm_config_output == Float8GemmConfig(use_fast_accum=True)
    assert config.gemm_config_grad_input == config.gemm_config_grad_weight == Float8GemmConfig()
    on = {name for name, value in vars(config).items() if value is True}
    assert on == {"pad_inner_dim", "enable_amax_init", "enable_pre_and_post_forward"}
    assert (
        config.delayed_scaling_config == DelayedScalingConfig() == DelayedScalingConfig(16, "max")
    )
    assert CastConfig() == CastConfig(ScalingType.DYNAMIC, ScalingGranularity.TENSORWISE, None)
    assert Float8GemmConfig() == Float8GemmConfig(use_fast_accum=False)
    assert Float8LinearConfig.from_recipe_name("tensorwise") == config
    assert Float8LinearConfig.from_recipe_name("delayed") == mixed(DELAYED, DYNAMIC, DELAYED)


# ---------------------------------------------------------------- frozen, shared, replaced


@pytest.mark.parametrize(
    "config", [CastConfig(), DelayedScalingConfig(), Float8GemmConfig(), Float8LinearConfig()]
)
def test_configs_are_frozen_hashable_and_picklable(config: Any) -> None:
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, None)
    assert hash(config) == hash(copy.deepcopy(config))
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("shared", [DYNAMIC, DELAYED], ids=["dynamic", "delayed"])
def test_one_shared_cast_config_keeps_every_roles_default_dtype(shared: CastConfig) -> None:
    sites = [*ROLES, *SECOND_USES]
    config = Float8LinearConfig(**{f"cast_config_{site}": shared for site in sites})
    assert shared.target_dtype is None  # the object that came in is not touched
    casts = [cast_of(config, site) for site in sites]
    assert [cast.target_dtype for cast in casts] == 2 * [E4M3, E4M3, E5M2]
    assert {cast.scaling_type for cast in casts} == {shared.scaling_type}


def test_replace_changes_one_field_and_checks_again() -> None:
    before = mixed(DELAYED, DYNAMIC, DYNAMIC, round_scales_to_power_of_2=True)
    after = dataclasses.replace(before, emulate=True)
    assert (before.emulate, after.emulate) == (False, True)
    assert dataclasses.replace(after, emulate=False) == before
    other = dataclasses.replace(Float8LinearConfig(), cast_config_input=DELAYED)
    assert other == mixed(DELAYED, DYNAMIC, DYNAMIC)
    assert other.cast_config_input_for_grad_weight is None  # which goes on as the input
    with pytest.raises(ValueError, match="expected both operands in float8"):
        dataclasses.replace(Float8LinearConfig(), cast_config_input=DISABLED)


# ---------------------------------------------------------------- combinations


@pytest.mark.parametrize("mix", MIXES)
def test_dynamic_and_delayed_mix_freely(mix: tuple[CastConfig, ...]) -> None:
    config = mixed(*mix)
    assert linear_requires_sync(config) == (DELAYED in mix)


@pytest.mark.parametrize("off", [*ROLES, *SECOND_USES])
def test_one_operand_alone_in_high_precision_is_refused(off: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)got .*{off}.*expected both.*set both or neither"):
        Float8LinearConfig(**{f"cast_config_{off}": DISABLED})


def test_two_e5m2_operands_are_refused_unless_emulated() -> None:
    e5m2 = CastConfig(target_dtype=E5M2)
    with pytest.raises(ValueError, match=r"(?s)'grad_weight'.*expected at least one.*emulate=True"):
        Float8LinearConfig(cast_config_input=e5m2)
    assert Float8LinearConfig(cast_config_input=e5m2, emulate=True).emulate


@pytest.mark.parametrize(
    "own",
    [DelayedScalingConfig(history_len=4), DelayedScalingConfig(scale_fn_name="most_recent")],
    ids=["history_len", "scale_fn_name"],
)
def test_what_only_delayed_scaling_uses_is_refused_without_it(own: DelayedScalingConfig) -> None:
    for cast in (DYNAMIC, DISABLED):
        with pytest.raises(ValueError, match=r"(?s)delayed_scaling_config: got .*leave it out"):
            mixed(cast, cast, cast, delayed_scaling_config=own)
    for site in ("input", "grad_output", "input_for_grad_weight"):
        fields = {f"cast_config_{site}": DELAYED, "delayed_scaling_config": own}
        assert Float8LinearConfig(**fields).delayed_scaling_config == own


def test_what_asks_for_nothing_is_accepted() -> None:
    for name in ("enable_amax_init", "enable_pre_and_post_forward"):  # but for delayed scaling
        config = Float8LinearConfig(**{name: False})
        assert getattr(config, name) is False
        assert list(Float8Linear(32, 16, config=config).state_dict()) == ["weight", "bias"]
    for value in (False, True):  # weights are always cast again
        config = Float8LinearConfig(force_recompute_fp8_weight_in_bwd=value, emulate=True)
        assert config == Float8LinearConfig(emulate=True)
        assert dataclasses.replace(config, emulate=False) == Float8LinearConfig()


def test_a_disabled_cast_has_no_dtype() -> None:
    config = mixed(DISABLED, DISABLED, DISABLED)
    assert config.float8_gemms == ()
    assert {cast_of(config, role).target_dtype for role in ROLES} == {None}
    assert dataclasses.replace(config) == config
    for dtype in (E4M3, E5M2):
        assert CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=dtype) == DISABLED
    with pytest.raises(ValueError, match=r"target_dtype: got torch.float16, expected"):
        CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=torch.float16)


@pytest.mark.parametrize("gemm", ["output", "grad_input"])
def test_float8_all_gather_needs_the_gemms_of_the_weight_in_float8(gemm: str) -> None:
    off, on = {  # second uses would follow suit
        "output": (["input", "weight"], SECOND_USES),
        "grad_input": (["grad_output", "weight_for_grad_input"], ["grad_output_for_grad_weight"]),
    }[gemm]
    fields = {f"cast_config_{site}": DISABLED for site in off}
    fields |= {f"cast_config_{site}": DYNAMIC for site in on}
    Float8LinearConfig(**fields)
    with pytest.raises(ValueError, match=rf"high precision for {gemm}.*set it to False"):
        Float8LinearConfig(**fields, enable_fsdp_float8_all_gather=True)


def test_float8_all_gather_needs_one_cast_of_the_weight() -> None:
    for other in (DELAYED, CastConfig(target_dtype=E5M2)):
        fields = {
            "cast_config_weight_for_grad_input": other,
            "cast_config_grad_output": CastConfig(target_dtype=E4M3),
        }
        Float8LinearConfig(**fields)
        with pytest.raises(ValueError, match=r"got True .*expected one cast in float8 for both"):
            Float8LinearConfig(**fields, enable_fsdp_float8_all_gather=True)
    same = CastConfig(target_dtype=E4M3)
    Float8LinearConfig(cast_config_weight_for_grad_input=same, enable_fsdp_float8_all_gather=True)


# ---------------------------------------------------------------- wrong values


ROWS, RUNS = (
    CastConfig(scaling_granularity=each)
    for each in (ScalingGranularity.AXISWISE, ScalingGranularity.BLOCK_1x128)
)


def test_wrong_values_are_refused() -> None:
    dtype, length = r"got .*expected torch.float8_e4m3fn or", "expected an int >= 1"
    scale_fn = r"got .*expected 'max' or 'most_recent'"
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("TypeError: got 'dynamic', expected a Scaling", CastConfig, {"scaling_type": "dynamic"}),
        ("TypeError: got .*expected a Scal", CastConfig, {"scaling_granularity": "tensorwise"}),
        (f"ValueError: {dtype}", CastConfig, {"target_dtype": torch.bfloat16}),
        (f"ValueError: {dtype}", CastConfig, {"target_dtype": torch.float8_e4m3fnuz}),
        (f"ValueError: got 0, {length}", DelayedScalingConfig, {"history_len": 0}),
        (f"TypeError: got .*{length}", DelayedScalingConfig, {"history_len": 1.0}),
        (f"TypeError: got .*{length}", DelayedScalingConfig, {"history_len": True}),
        (f"ValueError: {scale_fn}", DelayedScalingConfig, {"scale_fn_name": "mean"}),
        ("TypeError: got 'no', expected a bool", Float8GemmConfig, {"use_fast_accum": "no"}),
        ("ValueError: got False, expected True", Float8LinearConfig, {"pad_inner_dim": False}),
    ]
    for expected, config, field in refused:
        kind, _, told = expected.partition(": ")
        require_errors((f"{kind}: {next(iter(field))}: {told}", partial(config, **field), ()))
    axiswise, run = ScalingGranularity.AXISWISE, ScalingGranularity.BLOCK_1x128
    both = partial(Float8LinearConfig, cast_config_input=ROWS, cast_config_weight=RUNS)
    gathered = partial(mixed, enable_fsdp_float8_all_gather=True)  # whose bytes fit not
    require_errors(
        ("ValueError: AXISWISE with ScalingType.DELAYED, expected TENSOR", CastConfig,
         (ScalingType.DELAYED, axiswise)),
        ("ValueError: BLOCK_1x128 with ScalingType.DISABLED, expected TENSOR", CastConfig,
         (ScalingType.DISABLED, run)),
        ("ValueError: 'output'.*axiswise and block_1x128, expected one of", both, ()),
        ("ValueError: got True with a weight under .*AXISWISE", gathered, [ROWS] * 3),
        ("ValueError: got True with a weight under .*BLOCK_1x128", gathered, [RUNS] * 3),
    )  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Float8LinearConfig)])
def test_every_field_refuses_another_type(field: str) -> None:
    for wrong, named in (("x", "'x'"), (1, "1")):
        with pytest.raises(TypeError, match=f"{field}: got {named}, expected a"):
            Float8LinearConfig(**{field: wrong})


# ---------------------------------------------------------------- recipes


def test_what_is_written_into_a_recipe_s_config_does_not_stay_in_the_recipe() -> None:
    config = Float8LinearConfig.from_recipe_name("rowwise")
    object.__setattr__(config, "emulate", True)
    object.__setattr__(config.cast_config_input, "target_dtype", E5M2)
    config = Float8Linear(16, 16, config="rowwise").config
    assert not config.emulate
    assert config.cast_config_input.target_dtype is E4M3


@pytest.mark.parametrize("name", ["", "TENSORWISE", None, 3])
def test_unknown_recipe_lists_the_known_ones(name: Any) -> None:
    with pytest.raises(ValueError, match=r"got .*, expected one of 'tensorwise', 'delayed'"):
        Float8LinearConfig.from_recipe_name(name)


# ---------------------------------------------------------------- wherever a config is taken


TAKERS = {
    "convert": lambda config: convert_to_float8_training(nn.Linear(16, 16), config=config),
    "Float8Linear": lambda config: Float8Linear(16, 16, config=config),
    "from_float": lambda config: Float8Linear.from_float(nn.Linear(16, 16), config),
    "linear": lambda config: linear(torch.ones(16, 16), torch.ones(16, 16), config=config),
    "linear_requires_sync": lambda config: linear_requires_sync(config),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_recipe_s_name_is_taken_wherever_a_config_is(taker: str) -> None:
    take = TAKERS[taker]
    for name in ("rowwise", Float8LinearRecipeName.ROWWISE):
        wanted, got = take(Float8LinearConfig.from_recipe_name("rowwise")), take(name)
        if isinstance(got, Float8Linear):
            assert got.config == wanted.config
        else:
            assert torch.equal(torch.as_tensor(got), torch.as_tensor(wanted))
    with pytest.raises(ValueError, match=r"recipe: got 'row', expected one of 'tensorwise', 'del"):
        take("row")
    with pytest.raises(TypeError, match="config: got dict, expected a Float8LinearConfig or the n"):
        take({})


@pytest.mark.xdist_group("compilers")
def test_a_recipe_is_made_before_features_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `RECIPES` are: Dynamo cannot fill a `cached_property` (Python 3.11)."""
    monkeypatch.setattr("float8.config.CONFIG_CHECKS", [])
    config, x, weight = Float8LinearConfig(), torch.randn(16, 32), torch.randn(48, 32)
    run = torch.compile(linear, backend="eager", fullgraph=True)
    assert torch.equal(run(x, weight, config=config), linear(x, weight, config=config))


@pytest.mark.xdist_group("compilers")
def test_a_recipe_s_name_is_taken_by_compiled_code() -> None:
    x, weight, results = torch.randn(16, 32), torch.randn(48, 32), []
    for run in (linear, torch.compile(linear, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = run(*leaves, config="rowwise")
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("name", [recipe.value for recipe in Float8LinearRecipeName])
def test_a_config_says_its_recipe_in_a_word(name: str) -> None:
    config = Float8LinearConfig.from_recipe_name(name)
    assert config.short_str() == name
    assert dataclasses.replace(config, emulate=True).short_str() == f"{name}, emulate"
    rounds = not config.round_scales_to_power_of_2
    other = dataclasses.replace(config, round_scales_to_power_of_2=rounds)
    switch = "round_scales_to_power_of_2" + ("" if rounds else "=False")
    assert other.short_str() == f"{name}, {switch}"
    of_rows = mixed(ROWS, CastConfig(), CastConfig(target_dtype=E5M2)).short_str()
    assert of_rows.startswith("input=axiswise/e4m3, weight=dynamic/e4m3")


def test_only_needs_row_data_that_column_data_can_be_made_of() -> None:
    of_recipe("rowwise", float8_weights=Float8Weights.ONLY)
    with pytest.raises(ValueError, match=r"float8_weights: got .*ONLY.*AXISWISE, expected"):
        of_recipe("rowwise", float8_weights=Float8Weights.ONLY, round_scales_to_power_of_2=False)


CASTS_OF_RECIPES = {
    # input, weight; grad_output, weight for grad_input; grad_output and input for grad_weight
    "tensorwise": ["tensorwise"] * 6,
    "delayed": ["delayed", "tensorwise", "delayed", "tensorwise", "delayed", "delayed"],
    "rowwise": ["axiswise"] * 6,
    "rowwise_with_gw_hp": ["axiswise"] * 3 + ["tensorwise", "disabled", "disabled"],
    "blockwise": ["block_1x128", "block_128x128"] * 3,
    "mxfp8": ["block_1x32"] * 6,
    "mxfp8_with_gw_hp": ["block_1x32"] * 4 + ["disabled"] * 2,
}


@pytest.mark.parametrize("recipe", Float8LinearRecipeName)
def test_each_recipe_casts_as_documented(recipe: Float8LinearRecipeName) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)

    def word(site: CastSite) -> str:
        cast = config.cast_config(site)
        dynamic = cast.scaling_type is ScalingType.DYNAMIC
        return (cast.scaling_granularity if dynamic else cast.scaling_type).value

    sites = [site for pair in GEMM_OPERANDS.values() for site in pair]
    assert [*map(word, sites)] == CASTS_OF_RECIPES[recipe.value]
