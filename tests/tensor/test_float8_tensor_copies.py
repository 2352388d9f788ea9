"""Copying, casting, comparing a Float8Tensor, and what it has no meaning for."""

import pytest
import torch
from torch import nn

from float8 import Float8Tensor, all_linears, convert_to_float8_training
from float8.tensor.float8_tensor import to_float8
from sqnr import same_bits
from support.devices import DTYPES, E5M2, on_devices
from support.models import seeded
from support.tensors import float8

# ---------------------------------------------------------------- copies


@on_devices
def test_a_clone_shares_nothing(device: str) -> None:
    t = float8(0, 4, 8, device=device)
    before = t.to_original_precision()
    clone = t.clone()
    clone.copy_(float8(1, 4, 8, device=device))
    assert same_bits(t.to_original_precision(), before)


@on_devices
def test_detach_shares_everything(device: str) -> None:
    t = float8(0, 4, 8, device=device)
    detached = t.detach()
    assert not detached.requires_grad
    assert detached._data.data_ptr() == t._data.data_ptr()


@on_devices
def test_copy_from_a_float8_tensor_takes_data_and_scale(device: str) -> None:
    target, source = float8(0, 4, 8, device=device), float8(1, 4, 8, device=device)
    assert target.copy_(source) is target
    assert same_bits(target._data, source._data)
    assert same_bits(target._scale, source._scale)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_into_a_high_precision_tensor_dequantises(device: str, dtype: torch.dtype) -> None:
    source = float8(0, 4, 8, device=device)
    target = torch.zeros(4, 8, dtype=dtype, device=device)
    assert target.copy_(source) is target
    assert type(target) is torch.Tensor
    assert same_bits(target, source.to_original_precision().to(dtype))


def test_copy_refuses_what_would_change_the_meaning() -> None:
    t = float8(0, 4, 8)
    with pytest.raises(ValueError, match=r"(?s)high-precision tensor.*from_high_precision"):
        t.copy_(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"got shape \(8, 4\).*expected shape \(4, 8\)"):
        t.copy_(float8(1, 8, 4))
    with pytest.raises(ValueError, match=r"float8_e4m3fn .*float8_e5m2.*expected equal"):
        t.copy_(float8(1, 4, 8, format=E5M2))


def test_copy_into_a_part_of_a_float8_tensor_keeps_the_rest() -> None:
    """A view shares the scale: writing another one would change the values of all the rest."""
    whole = float8(0, 8, 8)
    rest = whole[4:].to_original_precision()
    part = float8(1, 4, 8)
    try:
        whole[:4].copy_(part)
    except ValueError:
        return  # refusing is as good
    assert same_bits(whole[4:].to_original_precision(), rest)


# ---------------------------------------------------------------- dtype and device


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_to_another_dtype_dequantises(device: str, dtype: torch.dtype) -> None:
    t = float8(0, 4, 8, device=device)
    got = t.to(dtype)
    assert type(got) is torch.Tensor
    assert same_bits(got, t.to_original_precision().to(dtype))


@on_devices
def test_to_its_own_dtype_stays_float8(device: str) -> None:
    t = float8(0, 4, 8, device=device)
    assert t.to(torch.float32) is t
    copy = t.to(torch.float32, copy=True)
    assert isinstance(copy, Float8Tensor)
    assert copy._data.data_ptr() != t._data.data_ptr()


def test_to_the_meta_device() -> None:
    t = float8(0, 4, 8).to("meta")
    assert isinstance(t, Float8Tensor)
    assert t.device.type == t._data.device.type == t._scale.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("non_blocking", [False, True])
def test_to_a_gpu_and_back(non_blocking: bool) -> None:
    t = float8(0, 4, 8, dtype=torch.bfloat16)
    there = t.to("cuda", non_blocking=non_blocking)
    assert isinstance(there, Float8Tensor)
    assert there.device.type == there._data.device.type == there._scale.device.type == "cuda"
    back = there.cpu()
    assert same_bits(back._data, t._data)
    assert same_bits(back._scale, t._scale)
    assert back.dtype == torch.bfloat16


# ---------------------------------------------------------------- new tensors, comparing


LIKE = {"zeros": torch.zeros_like, "ones": torch.ones_like}


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIKE)
def test_a_new_tensor_like_it_is_a_plain_one(device: str, name: str, dtype: torch.dtype) -> None:
    for t in (whole := float8(0, 6, 8, device=device, dtype=dtype), whole.t(), whole[1:3, ::2]):
        got, wanted = LIKE[name](t), LIKE[name](t.to_original_precision())
        assert type(got) is torch.Tensor
        assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
        assert same_bits(got, wanted)
        if t.is_contiguous() or t.t().is_contiguous():
            assert got.stride() == t.stride()


def test_a_new_tensor_like_it_of_another_dtype_device_and_layout() -> None:
    t = float8(0, 6, 8).t()
    assert torch.zeros_like(t, dtype=torch.int64).dtype == torch.int64
    assert torch.ones_like(t, device="meta").device.type == "meta"
    assert torch.zeros_like(t, memory_format=torch.contiguous_format).is_contiguous()
    assert torch.zeros_like(t, requires_grad=True).requires_grad


@on_devices
def test_an_empty_one_takes_what_is_copied_into_it(device: str) -> None:
    for t in (float8(0, 6, 8, device=device), float8(0, 6, 8, device=device).t()):
        got = torch.empty_like(t)
        assert type(got) is Float8Tensor
        assert (got.shape, got.dtype, got.stride()) == (t.shape, t.dtype, t.stride())
        got.copy_(t)
        assert same_bits(got._data, t._data)
        assert same_bits(got._scale, t._scale)
        assert torch.empty_like(t, memory_format=torch.contiguous_format).is_contiguous()
        assert torch.empty_like(t, device="meta")._scale.is_meta
        assert type(torch.empty_like(t, dtype=torch.int64)) is torch.Tensor
        assert torch.empty_like(t, dtype=torch.int64).dtype == torch.int64
    with pytest.raises(ValueError, match="got a Float8Tensor and a high-precision tensor"):
        got.copy_(t.to_original_precision())


def test_adamw_keeps_its_state_of_a_float8_parameter_in_plain_tensors() -> None:
    parameter = torch.nn.Parameter(float8(0, 6, 8))
    state = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    assert type(state) is torch.Tensor
    assert not state.requires_grad


@on_devices
def test_equal_compares_values(device: str) -> None:
    t = float8(0, 6, 8, device=device)
    plain = t.to_original_precision()
    halved = Float8Tensor((t._data.float() / 2).to(t._data.dtype), t._scale * 2, t.dtype)
    exact = Float8Tensor(torch.ones_like(t._data.float()).to(t._data.dtype), t._scale, t.dtype)
    doubled = Float8Tensor((exact._data.float() / 2).to(t._data.dtype), t._scale * 2, t.dtype)
    assert torch.equal(t, t)
    assert torch.equal(t, t.clone())
    assert torch.equal(t, plain)
    assert torch.equal(plain, t)
    assert torch.equal(exact, doubled)  # held otherwise, the same values
    assert torch.equal(t, halved) == torch.equal(plain, halved.to_original_precision())
    assert not torch.equal(t, float8(1, 6, 8, device=device))
    assert not torch.equal(t, t[:4])
    assert not torch.equal(t, t.t())
    assert not torch.equal(t, Float8Tensor(t._data, t._scale * 2, t.dtype))
    nan = Float8Tensor(t._data, t._scale * torch.nan, t.dtype)
    assert not torch.equal(nan, nan.clone())


# ---------------------------------------------------------------- all the rest


@pytest.mark.parametrize(
    "op",
    [
        lambda t: t + 1,
        lambda t: t * t,
        lambda t: t.sum(),
        lambda t: t.relu(),
        lambda t: t.add_(1),
        lambda t: t.zero_(),
        lambda t: t.abs().max(),
        lambda t: t == t,
        lambda t: t[torch.tensor([0, 1])],
        lambda t: torch.bmm(t.view(1, 4, 8), t.view(1, 8, 4)),
        lambda t: torch.stack([t, t]),
        lambda t: t.view(torch.int32),
    ],
)
def test_other_ops_name_the_way_out(op) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"to_original_precision\(\)"):
        op(float8(0, 4, 8))


@on_devices
def test_index_put_writes_bytes_under_the_scale_of_the_target(device: str) -> None:
    target, rows = float8(0, 6, 8, device=device), torch.tensor([4, 1], device=device)
    before = target.to_original_precision()
    taken = Float8Tensor(target._data[:2].clone(), target._scale.clone(), target.dtype)
    target[rows] = taken
    wanted = before.clone()
    wanted[rows] = before[:2]
    assert torch.equal(target.to_original_precision(), wanted)
    plain = torch.zeros(6, 8, device=device)
    plain[rows] = taken
    assert torch.equal(plain[rows], before[:2])
    assert not plain[0].any()


def test_index_put_refuses_what_has_no_meaning_in_float8() -> None:
    target, rows = float8(0, 4, 8), (torch.tensor([0, 2]),)
    with pytest.raises(ValueError, match="index_put_: got Float8Tensors with different scales"):
        target.index_put_(rows, float8(1, 2, 8))
    with pytest.raises(ValueError, match="index_put_: got a Float8Tensor and a high-precision"):
        target.index_put_(rows, torch.ones(2, 8))
    same = Float8Tensor(target._data[:2].clone(), target._scale, target.dtype)
    with pytest.raises(ValueError, match=r"index_put_: got accumulate=True.*expected False"):
        target.index_put_(rows, same, accumulate=True)


def test_columns_of_what_was_written_over_are_forgotten() -> None:
    layers = [nn.Linear(32, 32, bias=False) for _ in range(2)]
    first, second = convert_to_float8_training(nn.Sequential(*layers), module_filter_fn=all_linears)
    a, b = (to_float8(seeded(n, 16, 32), first.plan.input) for n in range(2))
    expected = torch.autograd.grad(first(b).sum(), first.weight)[0]
    y, _unused = first(a), second(a)
    y.sum().backward()
    a.copy_(b)
    assert torch.equal(torch.autograd.grad(first(a).sum(), first.weight)[0], expected)


def test_padding_is_zero() -> None:
    x = Float8Tensor.from_high_precision(torch.ones(2, 16))
    assert torch.equal(
        nn.functional.pad(x, (0, 2)).to_original_precision()[:, 16:], torch.zeros(2, 2)
    )
    with pytest.raises(ValueError, match="a padding other than 0"):
        nn.functional.pad(x, (0, 2), value=3.0)
