"""Copying, pickling and saving a Float8Tensor, alone and as a Parameter: every field is kept."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from float8 import Float8Tensor
from sqnr import same_bits
from support.devices import E4M3, E5M2, on_devices
from support.models import seeded
from support.tensors import assert_same, fields, float8, full


def through_pickle(x):
    return pickle.loads(pickle.dumps(x))


def through_save(x, weights_only: bool = True):
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def through_parts(x):
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    return x.__tensor_unflatten__(inner, context, x.shape, x.stride())


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "save": through_save,
    "save-unsafe": lambda x: through_save(x, weights_only=False),
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
    x = float8(0, 12, 8, dtype=torch.bfloat16, device=device, format=format)
    t = LAYOUTS[layout](x)
    got = WAYS[way](t)
    assert type(got) is Float8Tensor
    assert got.device == t.device
    assert_same(got, t)
    if t.numel():
        assert got._data.data_ptr() != t._data.data_ptr()
    assert got._scale.data_ptr() != t._scale.data_ptr()


OTHERS = {
    "parts": through_parts,
    "compiled": lambda x: torch.compile(lambda y: y.t(), backend="aot_eager")(x).t(),
    "Parameter": lambda x: nn.Parameter(x, requires_grad=False),
}


@pytest.mark.parametrize("amax", [3.0, None])
@pytest.mark.parametrize("way", WAYS | OTHERS)
def test_every_field_is_kept(way: str, amax: float | None) -> None:
    assert_same((WAYS | OTHERS)[way](full(amax=amax)), full(amax=amax))


def test_copies_share_no_field() -> None:
    for make in (torch.clone, copy.deepcopy, lambda x: x.to(torch.bfloat16, copy=True)):
        x = full()
        got = make(x)
        got._amax.fill_(7.0)
        got._scale.fill_(7.0)
        assert fields(x) == fields(full())


def test_moving_moves_all_fields() -> None:
    x = full().to("meta")
    assert {v.device.type for v in vars(x).values() if isinstance(v, Tensor)} == {"meta"}


def test_the_cache_key_of_compiled_graphs_knows_all_fields() -> None:
    assert full()._stable_hash_for_caching() != full(amax=None)._stable_hash_for_caching()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradients_and_parameters_stay_what_they_are(way: str, requires_grad: bool) -> None:
    t = float8(0, 12, 8).detach().requires_grad_(requires_grad)
    p = nn.Parameter(float8(0, 12, 8), requires_grad)
    for x in (t, p):
        got = WAYS[way](x)
        assert got.requires_grad == requires_grad
        assert isinstance(got, nn.Parameter) == (x is p)
        assert_same(got, x)
    a, b = WAYS[way]([t, t])  # two names of one tensor
    assert a is b


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
        m.weight = nn.Parameter(float8(seed, 12, 8))
        m.register_buffer("mask", float8(seed + 1, 4))
        return m

    source, target = module(0), module(10)
    target.load_state_dict(through_save(source.state_dict()))
    for name, value in source.state_dict().items():
        assert_same(target.state_dict()[name], value)
