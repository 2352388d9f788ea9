"""`Float8Weights.ONLY`: frozen weights without a high-precision master."""

import copy
import dataclasses
import gc
import importlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.utils import prune

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    Float8Weights,
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    high_precision_state_dict,
    linear,
)
from sqnr import assert_same_bits, same_bits
from support.configs import delayed, of_recipe, tensorwise
from support.copies import through_file
from support.devices import on_devices
from support.microbatches import ON_THE_FLY, layers_of, with_weights
from support.models import Adapted, FeedForward, forward_backward, seeded
from support.modes import running

ONLY, HELD = Float8Weights.ONLY, Float8Weights.HELD
ROWWISE, HIGH_PRECISION = (partial(of_recipe, x) for x in ("rowwise", "rowwise_with_gw_hp"))
CONFIGS = {
    "tensorwise": tensorwise(),
    "power of 2": tensorwise(round_scales_to_power_of_2=True),
    "delayed input": dataclasses.replace(delayed(), cast_config_weight=CastConfig()),
    "blockwise": of_recipe("blockwise"),
}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def only(
    model: nn.Module, config: Float8LinearConfig | None = None, weights: Float8Weights = ONLY
) -> nn.Module:
    """With frozen weights, kept in this way."""
    config = with_weights(config, weights)
    model.requires_grad_(False)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def model_of(config: Float8LinearConfig, weights: Float8Weights = ONLY, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return only(FeedForward(32, 48), config, weights)


def bytes_of(model: nn.Module) -> int:
    weights = [layer.weight for layer in layers_of(model)]
    assert all(isinstance(weight, Float8Tensor) for weight in weights)
    return sum(part.untyped_storage().nbytes() for w in weights for part in (w._data, w._scale))


def assert_same(one: nn.Module, other: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Output and gradient of the input, bit by bit."""
    weight: Tensor = layers_of(one)[0].weight
    x = seeded(1, 8, weight.shape[1], dtype=dtype, device=weight.device)
    grad = seeded(2, *x.shape, dtype=dtype, device=weight.device)
    wanted, got = (forward_backward(model, x, grad) for model in (one, other))
    assert {*wanted} == {"output", "input"}
    assert_same_bits(got, wanted)


# ---------------------------------------------------------------- the same bits


@on_devices
@EACH
def test_results_are_those_of_casts_on_the_fly(device: str, config) -> None:
    for dim, dtype in ((32, torch.bfloat16), (33, torch.float32)):
        model = FeedForward(dim, 41 if dim % 2 else 48).to(device, dtype)
        on_the_fly, alone = only(copy.deepcopy(model), config, ON_THE_FLY), only(model, config)
        for _ in range(2):
            assert_same(on_the_fly, alone, dtype)


def test_mxfp8_is_cast_from_its_values() -> None:
    """On the fly, output and gradient, bit by bit: columns are cast of the values of the rows."""
    for dim, dtype in ((64, torch.bfloat16), (33, torch.float32)):
        model = FeedForward(dim, 41 if dim % 2 else 96).to(dtype)
        for layer in model.children():
            layer.weight.data *= torch.randn(layer.weight.shape).mul(4).exp2()
        alone = only(copy.deepcopy(model), of_recipe("mxfp8"))
        plain = convert_to_high_precision(copy.deepcopy(alone))
        assert not same_bits(plain.w1.weight, model.w1.weight)
        assert_same(only(plain, of_recipe("mxfp8"), ON_THE_FLY), alone, dtype)


@pytest.mark.xdist_group("compilers")
@pytest.mark.parametrize(
    "mode", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_compiled(mode: str) -> None:
    compiled = running(model_of(tensorwise()), mode)
    assert_same(model_of(tensorwise(), ON_THE_FLY), compiled)


def bytes_alive() -> int:
    """Of all tensors of the process that are as large as a row of a weight, or larger."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(size for size in storages.values() if size >= 64)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_no_more_than_one_layer_is_in_memory_twice(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layers lose their masters, take another configuration, and get masters again."""
    n, seen, module = 8, list[int](), importlib.import_module("float8.weights.only")
    model = nn.Sequential(*(nn.Linear(128, 128, False, dtype=torch.bfloat16) for _ in range(n)))
    model.requires_grad_(False)
    layer, others = 128 * 128 * 2, bytes_alive() - n * 128 * 128 * 2

    def watched(name: str) -> None:
        fn = getattr(module, name)

        def watch(*args: object) -> Tensor:
            made: Tensor = fn(*args)
            seen.append(bytes_alive() - others)
            return made

        monkeypatch.setattr(module, name, watch)

    watched("in_float8_only")
    watched("dequantise")

    def peak(change: Callable[..., nn.Module], *args: str | None) -> float:
        seen.clear()
        more = {"config": with_weights(of_recipe(args[0]), ONLY)} if args else {}
        change(model, **more, **({"module_filter_fn": all_linears} if args else {}))
        return max(seen) / layer

    assert n < peak(convert_to_float8_training, recipe) < n + 0.6
    assert n / 2 < peak(convert_to_float8_training, "rowwise") < n / 2 + 2
    assert n < peak(convert_to_high_precision) < n + 0.6


def test_what_is_converted_in_inference_mode_trains() -> None:
    """There and back: what adapters read is no inference tensor."""
    for config in (CONFIGS["tensorwise"], CONFIGS["delayed input"]):
        with torch.inference_mode(False):
            model = nn.Sequential(Adapted())
        with torch.inference_mode():
            convert_to_float8_training(model, config=with_weights(config, ONLY))
        model(x := seeded(0, 16, 32).requires_grad_()).sum().backward()
        assert x.grad.isfinite().all()
        with torch.inference_mode():
            convert_to_high_precision(model)
        model(seeded(0, 16, 32).requires_grad_()).sum().backward()
    model, state = model_of(tensorwise()), FeedForward(32, 48).state_dict()
    with torch.inference_mode():
        model.load_state_dict(state, assign=True)
    model(seeded(0, 16, 32).requires_grad_()).sum().backward()


# ---------------------------------------------------------------- what cannot be


def test_trainable_weights_are_skipped_and_told() -> None:
    model = FeedForward(32, 48)
    model.w1.weight.requires_grad_(False)
    convert_to_float8_training(model, config=with_weights(None, ONLY))
    assert isinstance(model.w1.weight, Float8Tensor)
    assert type(model.w2) is type(model.w3) is nn.Linear
    reasons = {layer.skip_reason for layer in conversion_report(model).skipped}
    assert len(reasons) == 1
    assert "got a weight with requires_grad=True with float8_weights=ONLY" in reasons.pop()
    convert_to_float8_training(model, config=tensorwise())
    with pytest.raises(
        ValueError, match=r"layer 'w2'.*requires_grad=True with float8_weights=ONLY"
    ):
        convert_to_float8_training(model, config=with_weights(None, ONLY))


def test_other_reasons_come_before_those_of_weights_in_float8_only() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
    model[0].weight = None
    convert_to_float8_training(model, config=with_weights(None, ONLY))
    assert "weight of dtype None" in str(conversion_report(model).skipped[0].skip_reason)
    assert isinstance(model[1].weight, Float8Tensor)
    with pytest.raises(TypeError, match=r"weight of dtype torch\.float64"):
        Float8Linear.from_float(nn.Linear(32, 32).double(), with_weights(None, ONLY))


def test_computed_weights_are_skipped() -> None:
    model = nn.Sequential(prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5))
    model.requires_grad_(False)
    with pytest.warns(
        UserWarning, match="a weight that hooks compute with float8_weights=ONLY.*prune.rem"
    ):
        convert_to_float8_training(model, config=with_weights(None, ONLY))
    model(torch.randn(16, 32))


def test_configurations_that_ask_for_more_than_row_data_are_rejected() -> None:
    gather, exact = {"enable_fsdp_float8_all_gather": True}, {"round_scales_to_power_of_2": False}
    for match, make, weights, more in (
        ("got ONLY with a cast_config_weight that is DELAYED", delayed, ONLY, {}),
        ("got ONLY with enable_fsdp_float8_all_gather=True", tensorwise, ONLY, gather),
        (
            r"got Float8Weights\.ONLY with a weight under",
            partial(of_recipe, "rowwise"),
            ONLY,
            exact,
        ),
        *(("expected one cast in float8 for both", HIGH_PRECISION, x, {}) for x in (ONLY, HELD)),
    ):
        with pytest.raises(ValueError, match=match):
            make(float8_weights=weights, **more)


def test_a_write_into_the_weight_is_no_silent_loss() -> None:
    model = model_of(tensorwise())
    with torch.no_grad(), pytest.raises(NotImplementedError, match="to_original_precision"):
        model.w1.weight.add_(1)
    with pytest.raises(NotImplementedError, match=r"convert_to_high_precision\(model\)"):
        model.w1.reset_parameters()


# ---------------------------------------------------------------- moves and conversions


@EACH
def test_another_dtype_keeps_the_bytes(config) -> None:
    """Memory may be shared; there may be no rows."""
    model = model_of(config)
    weight = model.share_memory().w1.weight
    assert all(x.is_shared() for x in (weight, weight._data, weight._scale))
    assert model.w1(torch.empty(0, 32)).shape == (0, 48)
    before, data = bytes_of(model), model.w1.weight._data.clone()
    assert before <= 3 * 32 * 48 + (3 * 4 * 4 if config == CONFIGS["blockwise"] else 3 * 4)
    model.to(torch.bfloat16)
    assert model.w1.weight.dtype == torch.bfloat16
    assert same_bits(model.w1.weight._data, data)
    assert bytes_of(model) == before
    assert model(seeded(0, 8, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_it_tells_its_size_in_memory() -> None:
    for name in ("tensorwise", "blockwise", "mxfp8"):
        model = model_of(of_recipe(name)).bfloat16()
        for weight in (layer.weight for layer in layers_of(model)):
            assert weight.nbytes == weight._data.nbytes + weight._scale.nbytes
            assert (weight.element_size(), weight.dtype.itemsize) == (1, 2)
        assert sum(layer.weight.nbytes for layer in layers_of(model)) == bytes_of(model)


def test_to_another_recipe_and_back() -> None:
    model, wanted = model_of(tensorwise()), model_of(tensorwise())
    convert_to_float8_training(model, config=of_recipe("rowwise"))
    assert type(model.w1.weight) is nn.Parameter
    assert not model.w1.weight.requires_grad
    convert_to_float8_training(model, config=with_weights(None, ONLY))
    assert_same(wanted, model)
    assert "weight only in float8" in repr(model.w1)
    convert_to_high_precision(model)
    assert type(model.w1) is nn.Linear
    values = wanted.w1.weight._data.float() * wanted.w1.weight._scale
    assert same_bits(model.w1.weight.detach(), values)


def test_a_weight_that_somebody_sets_is_told() -> None:
    model = model_of(tensorwise())
    values = seeded(0, *model.w1.weight.shape, dtype=torch.bfloat16)
    model.w1.weight = nn.Parameter(values, requires_grad=False)
    assert "weight in high precision" in repr(model.w1)
    assert "weight only in float8" in repr(model.w2)
    x = seeded(1, 8, 32, dtype=torch.bfloat16)
    expected = linear(x, values)
    assert same_bits(model.w1(x), expected)


# ---------------------------------------------------------------- checkpoints


STATES: dict[str, Callable[[Float8LinearConfig], dict[str, Tensor]]] = {
    "own": lambda config: model_of(config).state_dict(),
    "high precision": lambda config: high_precision_state_dict(model_of(config)),
    "plain": lambda config: model_of(config, ON_THE_FLY).state_dict(),
}


@EACH
def test_each_state_dict_loads_into_each_model(config, tmp_path) -> None:
    wanted = model_of(config)
    states = {what: through_file(make(config)) for what, make in STATES.items()}
    assert [type(x["w1.weight"]) is Tensor for x in states.values()] == [False, True, True]
    dcp.save(wanted.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    dcp.load(state := model_of(config, seed=7).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    for each, assign in itertools.product((*states.values(), state), (False, True)):
        model = model_of(config, seed=7)
        model.load_state_dict(each, assign=assign)
        bytes_of(model)
        assert_same(wanted, model)
        # Those of what a cast pads, too.
        assert same_bits(model.w1.weight._scale, wanted.w1.weight._scale)
    values = wanted.w1.weight.to_original_precision()
    plain, trained = FeedForward(32, 48), model_of(config, ON_THE_FLY).requires_grad_()
    plain.load_state_dict(high_precision_state_dict(wanted))
    assert same_bits(plain.w1.weight.detach(), values)
    for model, assign in ((plain, False), (trained, False), (trained, True)):
        # More than weights, if delayed.
        model.load_state_dict(wanted.state_dict(), strict=False, assign=assign)
        assert same_bits(model.w1.weight.detach(), values)
        assert not isinstance(model.w1.weight, Float8Tensor)


def test_a_checkpoint_in_float32_is_rounded_to_the_dtype_of_the_model_first() -> None:
    state = {name: 1.1 * value for name, value in FeedForward(32, 48).state_dict().items()}
    models = [model_of(tensorwise(), weights).bfloat16() for weights in (ON_THE_FLY, ONLY)]
    for model in models:
        model.load_state_dict(state)
    assert_same(models[0], models[1], torch.bfloat16)


@pytest.mark.parametrize("how", ["to_empty", "assign"])
@EACH
def test_from_the_meta_device_and_a_checkpoint_in_parts(config, how: str) -> None:
    """The model is never whole in high precision: parts of the checkpoint come one by one."""
    source = model_of(config, ON_THE_FLY)
    with torch.device("meta"):
        model = only(FeedForward(32, 48), config)
    assert model.w1.weight._data.is_meta
    if how == "to_empty":
        model.to_empty(device="cpu")
    for name, value in source.state_dict().items():
        if "weight" in name:
            model.load_state_dict({name: value}, strict=False, assign=how == "assign")
    assert not any(p.is_meta or p.requires_grad for p in model.parameters())
    bytes_of(model)
    assert_same(source, model)


def test_a_state_dict_of_version_0_2_0_loads() -> None:
    saved = torch.load(Path(__file__).with_name("only_0_2_0.pt"))
    torch.manual_seed(0)
    model = only(nn.Sequential(nn.Linear(16, 32, bias=False)))
    want = model.state_dict()["0.weight"].to_original_precision()
    with torch.no_grad():
        model[0].weight.copy_(Float8Tensor.from_high_precision(torch.zeros(32, 16)))
    model.load_state_dict(saved)
    assert torch.equal(model.state_dict()["0.weight"].to_original_precision(), want)


def test_a_bias_that_a_layer_has_not_is_no_error_of_its_own() -> None:
    config = of_recipe("tensorwise", float8_weights=Float8Weights.ONLY)
    layer = nn.Sequential(nn.Linear(64, 48, bias=False)).requires_grad_(False)
    convert_to_float8_training(layer, config=config, module_filter_fn=all_linears)
    found = layer.load_state_dict(nn.Sequential(nn.Linear(64, 48)).state_dict(), strict=False)
    assert found.unexpected_keys == ["0.bias"]
