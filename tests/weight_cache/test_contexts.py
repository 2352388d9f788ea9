"""Opening and closing `cached_weights`: what is there in between, and that nothing stays."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import float8
from float8 import Float8Linear, Float8Tensor, cached_weights
from float8.quantize.spec import Quantized
from sqnr import same_bits
from support.configs import delayed, tensorwise
from support.microbatches import (
    SHAPE,
    accumulate,
    assert_closed,
    by_hand,
    layers_of,
    model_of,
)
from support.models import seeded

BOTH = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])


def test_another_error_is_not_hidden() -> None:
    model = model_of()

    def use() -> None:
        with cached_weights(model):
            by_hand(model)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    assert_closed(model)


def test_a_write_by_hand_after_the_last_eager_use_is_fine() -> None:
    model = model_of()
    with cached_weights(model):
        accumulate(model, model, 0, SHAPE)
        by_hand(model)
    assert_closed(model)


def test_an_error_on_entry_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    calls = []

    def fails_at_last(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("full")
        return cast(*args, **kwargs)

    cast = float8.weight_cache.cast_weight
    monkeypatch.setattr(float8.weight_cache, "cast_weight", fails_at_last)
    with pytest.raises(MemoryError, match="full"), cached_weights(model):
        pass
    assert_closed(model)


def test_nothing_is_cached_outside() -> None:
    model = model_of()
    assert_closed(model)
    with cached_weights(model):
        assert all(layer.cached_weight is not None for layer in layers_of(model))
    assert_closed(model)


def test_contexts_within_contexts() -> None:
    model = model_of()
    whole, part = cached_weights(model), cached_weights(model.w1)
    with whole:
        outer = [layer.cached_weight for layer in layers_of(model)]
        with part, whole, cached_weights(model):
            inner = [layer.cached_weight for layer in layers_of(model)]
            assert all(a is b for a, b in zip(inner, outer, strict=True))
        assert all(layer.cached_weight is not None for layer in layers_of(model))
    assert_closed(model)
    with part:
        assert model.w1.cached_weight is not None
        assert model.w2.cached_weight is None
        with whole:
            assert model.w2.cached_weight is not None
        assert model.w1.cached_weight is not None
        assert model.w2.cached_weight is None
    assert_closed(model)


def tensors_of(operand: Quantized) -> list[Tensor]:
    tensors = [*operand.row, *operand.col]
    return tensors if operand.amax is None else [*tensors, operand.amax]


@BOTH
def test_entered_again_it_takes_the_same_memory_and_new_values(config) -> None:
    model = model_of(config)
    caching = cached_weights(model)
    seen = []
    for _ in range(2):
        with caching:
            operands = [layer.cached_weight for layer in layers_of(model)]
            seen.append([[t.data_ptr() for t in tensors_of(operand)] for operand in operands])
            rows = [operand.row.data.float() * operand.row.scale for operand in operands]
        for layer, row in zip(layers_of(model), rows, strict=True):
            torch.testing.assert_close(row, layer.weight.detach(), rtol=0.07, atol=1e-3)
        with torch.no_grad():  # outside, any write will do
            for layer in layers_of(model):
                layer.weight.data.mul_(-2)
    assert seen[0] == seen[1]


def test_a_backward_may_come_after() -> None:
    model, plain = model_of(), model_of()
    for module, around in ((model, cached_weights(model)), (plain, torch.enable_grad())):
        with around:
            y = module(seeded(0, *SHAPE))
        y.sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(a.grad, b.grad)


def test_inference_mode_inside_and_around() -> None:
    model, x = model_of(), seeded(0, *SHAPE)
    wanted = model(x)
    with cached_weights(model):
        with torch.inference_mode():
            assert same_bits(model(x), wanted)
        by_hand(model)
        with torch.inference_mode():
            model(x)  # casts again
        model(x.requires_grad_()).sum().backward()
    with torch.inference_mode():
        caching = cached_weights(model)
        caching.__enter__()
    model(x).sum().backward()
    caching.__exit__(None, None, None)


@BOTH
def test_copies_and_checkpoints_carry_nothing(config) -> None:
    model = model_of(config)
    names = list(model.state_dict())
    size = len(pickle.dumps(model))
    with cached_weights(model):
        assert list(model.state_dict()) == names
        assert [n for n, _ in model.named_buffers()] == [n for n in names if "fp8_" in n]
        copied = copy.deepcopy(model)
        pickled = pickle.dumps(model)
        converted = Float8Linear.from_float(model.w1, config)
        assert all(layer.cached_weight is not None for layer in layers_of(model))
    assert abs(len(pickled) - size) < 200
    for other in (copied, pickle.loads(pickled), converted):
        assert_closed(other)


def test_models_without_layers_to_cache() -> None:
    with cached_weights(nn.Linear(4, 4)):
        pass
    with pytest.raises(TypeError, match=r"model: got int, expected an nn\.Module"):
        cached_weights(3)  # type: ignore[arg-type]


class Sharded(torch.Tensor):
    """Stands for a DTensor."""


def test_weights_that_are_no_plain_tensors_are_named() -> None:
    model = model_of()
    model.w1.weight = nn.Parameter(model.w1.weight.detach().as_subclass(Sharded))
    caching = cached_weights(model)
    with pytest.warns(UserWarning, match=r"1 layer\(s\) cast .*: w1 \(Sharded\)"):
        caching.__enter__()
    assert model.w1.cached_weight is None
    assert model.w2.cached_weight is not None
    caching.__exit__(None, None, None)


def test_float8_weights_are_served_as_they_are(recwarn: pytest.WarningsRecorder) -> None:
    model = model_of()
    weight = Float8Tensor.from_high_precision(model.w1.weight.detach())
    model.w1.weight = nn.Parameter(weight, requires_grad=False)
    wanted = model(seeded(0, *SHAPE))
    with cached_weights(model):
        assert model.w1.cached_weight is None
        assert same_bits(model(seeded(0, *SHAPE)), wanted)
    assert not [w for w in recwarn if "cached_weights" in str(w.message)]
