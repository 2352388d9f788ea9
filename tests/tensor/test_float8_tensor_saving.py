"""Copying, pickling and saving a Float8Tensor, alone and as a Parameter."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from float8 import Float8Tensor
from sqnr import same_bits
from support.devices import E4M3, E5M2, on_devices
from support.models import seeded


def through_pickle(x):
    return pickle.loads(pickle.dumps(x))


def through_save(x):
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_unsafe_save(x):
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "save": through_save,
    "save-unsafe": through_unsafe_save,
}
LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t(),
    "slice": lambda t: t[2:5],
    "strided": lambda t: t[::2, 1:7:3],
    "empty": lambda t: t[:0],
}


@on_devices
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_equal_and_apart(device: str, way: str, layout: str, format) -> None:
    x = seeded(0, 12, 8, dtype=torch.bfloat16, device=device)
    t = LAYOUTS[layout](Float8Tensor.from_high_precision(x, format))
    got = WAYS[way](t)
    assert type(got) is Float8Tensor
    assert (got.dtype, got.shape, got.device) == (t.dtype, t.shape, t.device)
    assert got._granularity is t._granularity
    assert same_bits(got._data, t._data)
    assert same_bits(got._scale, t._scale)
    if t.numel():
        assert got._data.data_ptr() != t._data.data_ptr()
    assert got._scale.data_ptr() != t._scale.data_ptr()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_requires_grad_is_kept(way: str, requires_grad: bool) -> None:
    t = Float8Tensor.from_high_precision(seeded(0, 12, 8)).detach().requires_grad_(requires_grad)
    assert WAYS[way](t).requires_grad == requires_grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_stays_a_parameter(way: str, requires_grad: bool) -> None:
    t = nn.Parameter(Float8Tensor.from_high_precision(seeded(0, 12, 8)), requires_grad)
    got = WAYS[way](t)
    assert isinstance(got, nn.Parameter)
    assert isinstance(got, Float8Tensor)
    assert got.requires_grad == requires_grad
    assert same_bits(got._data, t._data)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_module_with_a_float8_parameter_can_be_copied(way: str) -> None:
    module = nn.Linear(8, 12, bias=False)
    module.weight = nn.Parameter(Float8Tensor.from_high_precision(module.weight.detach()))
    clone = WAYS[way](module)
    x = seeded(1, 4, 8)
    assert isinstance(clone.weight, nn.Parameter)
    assert same_bits(clone(x), module(x))


def test_state_dict_round_trip() -> None:
    def module(seed: int) -> nn.Module:
        m = nn.Module()
        m.weight = nn.Parameter(Float8Tensor.from_high_precision(seeded(seed, 12, 8)))
        m.register_buffer("mask", Float8Tensor.from_high_precision(seeded(seed + 1, 4)))
        return m

    source, target = module(0), module(10)
    target.load_state_dict(through_save(source.state_dict()))
    for name, value in source.state_dict().items():
        got = target.state_dict()[name]
        assert isinstance(got, Float8Tensor)
        assert same_bits(got._data, value._data)
        assert same_bits(got._scale, value._scale)


def test_two_names_of_one_tensor_stay_one_in_a_copy() -> None:
    t = Float8Tensor.from_high_precision(seeded(0, 12, 8))
    for way in WAYS.values():
        a, b = way([t, t])
        assert a is b
