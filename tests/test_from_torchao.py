"""Code written for torchao.float8 or float8_experimental runs with another import."""

import dataclasses
import importlib
import inspect
from functools import partial

import pytest
import torch
from torch import nn

import float8
from float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    linear_requires_sync,
)
from float8.linear import Float8Linear
from sqnr import sqnr
from support.errors import require_errors
from support.models import seeded

CONVERT = "convert_to_float8_training"
NAMES = {
    "config": "e4m3_dtype e5m2_dtype CastConfig Float8LinearConfig ScalingType",
    "float8_linear": "Float8Linear",
    "float8_linear_utils": "_auto_filter_for_recipe convert_to_float8_training get_float8_layers "
    "linear_requires_sync swap_linear_layers swap_linear_with_float8_linear "
    "sync_float8_amax_and_scale_history",
    "float8_tensor": "Float8Tensor",
    "float8_tensor_parallel": "Float8ColwiseParallel Float8RowwiseParallel "
    "PrepareFloat8ModuleInput",
    "float8_training_tensor": "Float8TrainingTensor",
    "float8_utils": "FP8_TYPES compute_error e4m3_dtype e5m2_dtype",
    "fsdp_utils": "precompute_float8_dynamic_scale_for_fsdp",
}


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_found_by_their_old_names(name: str) -> None:
    module = importlib.import_module(f"float8.{name}")
    for each in NAMES[name].split():
        ours = getattr(module, each)
        assert not hasattr(float8, each) or getattr(float8, each) is ours


def test_helpers() -> None:
    from float8.float8_linear_utils import get_float8_layers, swap_linear_layers
    from float8.float8_utils import compute_error

    x = seeded(0, 16, 16)
    assert compute_error(x, x + 0.1).item() == pytest.approx(sqnr(x, x + 0.1), abs=1e-4)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    not_first = lambda mod, fqn: fqn != "0"  # noqa: E731
    make = lambda mod: float8.Float8Linear.from_float(mod)  # noqa: E731
    assert swap_linear_layers(model, make, module_filter_fn=not_first) is model
    assert get_float8_layers(model) == [model[2]]
    assert isinstance(swap_linear_layers(nn.Linear(16, 16), make), Float8Linear)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_automatic_filters_leave_names_small_layers_and_what_is_none(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from float8.convert import choice

    takes = float8._auto_filter_for_recipe(recipe, ["left"])
    layer, wide = nn.Linear(16, 16), nn.Linear(8192, 8192, device="meta")
    for mod, fqn, taken in (
        (layer, "a", True),
        (layer, "output", False),
        (layer, "b.left", False),
        (nn.ReLU(), "a", False),
        (dataclasses.make_dataclass("Config", ["in_features"])(16), "a", False),
    ):
        assert takes(mod, fqn) == taken, fqn
    monkeypatch.setattr(choice, "gpu_for", lambda device: "H100")
    assert (takes(wide, "wide"), takes(layer, "small")) == (True, False)
    with pytest.raises(ValueError, match="recipe: got 'mx', expected one of 'tensorwise'"):
        float8._auto_filter_for_recipe("mx", [])


def test_objects_of_torchao_are_told_by_the_import_to_change() -> None:
    theirs = pytest.importorskip("torchao.float8")
    config = {"config": theirs.Float8LinearConfig()}
    ours = "TypeError: config: got Float8LinearConfig.*this one is of torchao: `from float8"
    plain, x = nn.Linear(16, 16), torch.ones(16, 16)
    from_name, cast = Float8LinearConfig.from_recipe_name, theirs.CastConfig()
    recipe, dynamic = theirs.Float8LinearRecipeName.ROWWISE, theirs.ScalingType.DYNAMIC
    of_ours = partial(Float8LinearConfig, cast_config_input=cast)
    require_errors(
        (ours, partial(convert_to_float8_training, **config), [plain]),
        (ours, partial(float8.linear, **config), [x, x]),
        (ours, partial(float8.Float8Linear, **config), [16, 16]),
        (ours, linear_requires_sync, [*config.values()]),
        ("ValueError: `from float8 import Float8LinearRecipeName`", from_name, [recipe]),
        ("TypeError: cast_config_input.*`from float8 import CastConfig`", of_ours, []),
        ("TypeError: scaling_type: got .*`from float8 import ScalingType`", CastConfig, [dynamic]),
    )


def test_all_arguments_of_torchao_s_config_are_taken() -> None:
    theirs = pytest.importorskip("torchao.float8")
    for kind in ("Float8LinearConfig", "CastConfig", "Float8GemmConfig", CONVERT):
        names, ours = (inspect.signature(getattr(x, kind)).parameters for x in (theirs, float8))
        assert names.keys() <= ours.keys(), kind
    for kind in ("ScalingType", "ScalingGranularity", "Float8LinearRecipeName"):
        values, ours = ({(x.name, x.value) for x in getattr(y, kind)} for y in (theirs, float8))
        assert values <= ours, kind
    assert ScalingType("dynamic") is ScalingType.DYNAMIC
