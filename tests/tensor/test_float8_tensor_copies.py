"""Viewing, joining, copying, casting, comparing, saving a Float8Tensor; what else it refuses."""

import itertools
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from float8 import Float8Tensor, ScalingGranularity
from sqnr import same_bits
from support.copies import COPIES, through_file
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.errors import require_errors
from support.tensors import assert_same, fields, float8, full

# ---------------------------------------------------------------- copies


@on_devices
def test_a_clone_shares_nothing_and_detach_everything(device: str) -> None:
    t = float8(0, 4, 8, device=device)
    before = t.to_original_precision()
    for clone, other in (
        (t.clone(), float8(1, 4, 8, device=device)),
        (full(device=device), full(1, amax=5.0, device=device)),
    ):
        assert clone.copy_(other) is clone
        assert_same(clone, other)
    assert same_bits(t.to_original_precision(), before)
    detached = t.detach()
    assert not detached.requires_grad
    assert detached._data.data_ptr() == t._data.data_ptr()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_into_a_high_precision_tensor_dequantises(device: str, dtype: torch.dtype) -> None:
    source = float8(0, 4, 8, device=device)
    target = torch.zeros(4, 8, dtype=dtype, device=device)
    assert target.copy_(source) is target
    assert type(target) is torch.Tensor
    assert same_bits(target, source.to_original_precision().to(dtype))


def test_copy_refuses_what_would_change_the_meaning() -> None:
    copy_ = float8(0, 4, 8).copy_
    require_errors(
        (r"ValueError: (?s)high-precision tensor.*from_high_precision", copy_, [torch.ones(4, 8)]),
        (r"ValueError: got shape \(8, 4\).*ed shape \(4, 8\)", copy_, [float8(1, 8, 4)]),
        (
            r"ValueError: _e4m3fn .*_e5m2.*expected tensors of one kind",
            copy_,
            [float8(1, 4, 8, format=E5M2)],
        ),
        ("ValueError: without an amax to record, expected", full().copy_, [full(amax=None)]),
    )


def test_copy_into_a_part_of_a_float8_tensor_keeps_the_rest() -> None:
    """A view shares the scale: writing another one would change the values of all the rest."""
    whole = float8(0, 8, 8)
    rest = whole[4:].to_original_precision()
    with suppress(ValueError):  # refusing is as good
        whole[:4].copy_(float8(1, 4, 8))
    assert same_bits(whole[4:].to_original_precision(), rest)


# ---------------------------------------------------------------- dtype and device


@on_devices
def test_another_dtype_dequantises_and_its_own_stays_float8(device: str) -> None:
    t = float8(0, 4, 8, device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        got = t.to(dtype)
        assert type(got) is torch.Tensor
        assert same_bits(got, t.to_original_precision().to(dtype))
    assert t.to(torch.float32) is t
    copy = t.to(torch.float32, copy=True)
    assert isinstance(copy, Float8Tensor)
    assert copy._data.data_ptr() != t._data.data_ptr()


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


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_tensor_like_it_is_a_plain_one(device: str, dtype: torch.dtype) -> None:
    for t in (whole := float8(0, 6, 8, device=device, dtype=dtype), whole.t(), whole[1:3, ::2]):
        for like in (torch.zeros_like, torch.ones_like):
            got, wanted = like(t), like(t.to_original_precision())
            assert type(got) is torch.Tensor
            assert got.device == wanted.device
            assert same_bits(got, wanted)
            if t.is_contiguous() or t.t().is_contiguous():
                assert got.stride() == t.stride()


def test_a_new_tensor_like_it_of_another_dtype_device_and_layout() -> None:
    t = float8(0, 6, 8).t()
    assert torch.zeros_like(t, dtype=torch.int64).dtype == torch.int64
    assert torch.ones_like(t, device="meta").device.type == "meta"
    assert torch.zeros_like(t, memory_format=torch.contiguous_format).is_contiguous()
    assert torch.zeros_like(t, requires_grad=True).requires_grad
    parameter = nn.Parameter(float8(0, 6, 8))  # as AdamW makes its state
    state = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    assert (type(state), state.requires_grad) == (torch.Tensor, False)


@on_devices
def test_an_empty_one_takes_what_is_copied_into_it(device: str) -> None:
    for t in (float8(0, 6, 8, device=device), float8(0, 6, 8, device=device).t()):
        got = torch.empty_like(t)
        assert type(got) is Float8Tensor
        assert (got.shape, got.dtype, got.stride()) == (t.shape, t.dtype, t.stride())
        got.copy_(t)
        assert_same(got, t)
        assert torch.empty_like(t, memory_format=torch.contiguous_format).is_contiguous()
        assert torch.empty_like(t, device="meta")._scale.is_meta
        assert type(torch.empty_like(t, dtype=torch.int64)) is torch.Tensor
        assert torch.empty_like(t, dtype=torch.int64).dtype == torch.int64
    with pytest.raises(ValueError, match=r"got a Float8Tensor of .* and a high-precision"):
        got.copy_(t.to_original_precision())


@on_devices
def test_equal_compares_values(device: str) -> None:
    t = float8(0, 6, 8, device=device)
    plain = t.to_original_precision()
    exact = Float8Tensor(torch.ones_like(t._data.float()).to(t._data.dtype), t._scale, t.dtype)
    doubled = Float8Tensor((exact._data.float() / 2).to(t._data.dtype), t._scale * 2, t.dtype)
    nan = Float8Tensor(t._data, t._scale * torch.nan, t.dtype)
    # The last are held otherwise, the same values.
    for a, b in ((t, t), (t, t.clone()), (t, plain), (plain, t), (exact, doubled)):
        assert torch.equal(a, b)
    twice = Float8Tensor(t._data, t._scale * 2, t.dtype)
    for a, b in ((t, float8(1, 6, 8, device=device)), (t, t[:4]), (t, t.t()), (t, twice)):
        assert not torch.equal(a, b)
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
        lambda t: torch.stack([t, t]),
        lambda t: t.view(torch.int32),
        lambda t: t.index_put_((torch.tensor([0, 2]),), t[:2]),
        lambda t: torch.ones(4, 8).index_put_((torch.tensor([0, 2]),), t[:2]),
    ],
)
def test_other_ops_name_the_way_out(op) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"to_original_precision\(\)"):
        op(float8(0, 4, 8))


def test_padding_is_zero() -> None:
    x = full()
    padded = nn.functional.pad(x, (0, 2))
    assert fields(padded) == fields(x)
    assert torch.equal(padded.to_original_precision()[:, :8], x.to_original_precision())
    assert not padded.to_original_precision()[:, 8:].any()
    with pytest.raises(ValueError, match="a padding other than 0"):
        nn.functional.pad(x, (0, 2), value=3.0)


def through_parts(x):
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    return x.__tensor_unflatten__(inner, context, x.shape, x.stride())


WAYS = {**COPIES, "weights only": through_file}
OF_ONE = {"clone": torch.clone, "to": lambda t: t.to(t.dtype, copy=True)}
LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t(),
    "slice": lambda t: t[2:5],
    "strided": lambda t: t[::2, 1:7:3],
    "empty": lambda t: t[:0],
    "e5m2": lambda t: Float8Tensor(t._data.view(E5M2), t._scale, t.dtype, amax=t._amax),
}


@on_devices
@pytest.mark.parametrize("way", WAYS | OF_ONE)
def test_a_copy_is_equal_and_apart(device: str, way: str) -> None:
    for layout, amax in itertools.product(LAYOUTS.values(), (3.0, None)):
        t = layout(full(amax=amax, device=device))
        got, before = (WAYS | OF_ONE)[way](t), fields(t)
        assert type(got) is Float8Tensor
        assert got.device == t.device
        assert_same(got, t)
        if t.numel():
            assert got._data.data_ptr() != t._data.data_ptr()
        for own in (got._scale, got._amax):
            if own is not None:
                own.fill_(7.0)
        assert fields(t) == before


def test_every_field_is_kept() -> None:
    compiled = torch.compile(lambda y: y.t(), backend="aot_eager")
    for x in (full(), full(amax=None)):
        assert_same(through_parts(x), x)
        assert_same(compiled(x).t(), x)
        assert_same(nn.Parameter(x, requires_grad=False), x)


def test_moving_moves_all_fields() -> None:
    x = full().to("meta")
    assert {v.device.type for v in vars(x).values() if isinstance(v, Tensor)} == {"meta"}


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
    module = nn.ParameterDict({"p": nn.Parameter(float8(1, 12, 8), requires_grad)})
    module.load_state_dict(WAYS[way]({"p": p.detach()}))
    assert_same(module["p"], p)


VIEWS = {
    "view": lambda t: t.view(6, 16),
    "reshape": lambda t: t.reshape(3, 4, 8),
    "reshape-with-copy": lambda t: t.t().reshape(6, 16),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "flatten": lambda t: t.flatten(),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.unsqueeze(1).squeeze(1),
    "expand": lambda t: t[:1].expand(5, 8),
    "slice": lambda t: t[2:7],
    "slice-columns": lambda t: t[:, 1:5],
    "slice-with-step": lambda t: t[::3, ::2],
    "select": lambda t: t[4],
    "select-element": lambda t: t[4, 5],
    "as_strided": lambda t: t.as_strided((3, 4), (8, 2)),
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.t().contiguous(),
    "view_as": lambda t: t.view_as(torch.empty(24, 4)),
    "alias": torch.ops.aten.alias.default,
    "to": lambda t: t.to(t.dtype, copy=True),
    "split": lambda t: t.split(5),
    "split-sizes": lambda t: t.split([2, 4, 6]),
    "tensor_split": lambda t: t.tensor_split(3),
    "unbind": lambda t: t.unbind(1),
}


@on_devices
@pytest.mark.parametrize("name", VIEWS)
def test_moving_values_around_and_taking_them_apart(device: str, name: str) -> None:
    for t in (full(amax=3.0, device=device), full(amax=None, device=device)):
        found = VIEWS[name](t), VIEWS[name](t.to_original_precision())
        for got, wanted in zip(*([x] if isinstance(x, Tensor) else x for x in found), strict=True):
            assert isinstance(got, Float8Tensor)
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            assert got.stride() == got._data.stride() == wanted.stride()
            assert got.storage_offset() == wanted.storage_offset()
            assert got.is_contiguous() == wanted.is_contiguous()
            assert same_bits(got.to_original_precision(), wanted)
            assert fields(got) == fields(t)


@on_devices
@pytest.mark.parametrize("amax", [3.0, None])
def test_joining(device: str, amax: float | None) -> None:
    t = full(amax=amax, device=device)
    for dim in (0, 1):
        assert_same(torch.cat(t.split(3, dim), dim), t)
    if amax:
        other = full(amax=5.0, device=device)  # an equal scale, of another tensor
        joined = torch.cat([t, other])
        assert joined._amax == 5  # of the whole
        values = [x.to_original_precision() for x in (t, other)]
        assert same_bits(joined.to_original_precision(), torch.cat(values))


def test_cat_refuses_what_it_cannot_join() -> None:
    a, plain = float8(0, 4, 8), torch.ones(4, 8)
    e5m2 = Float8Tensor(plain.to(E5M2), a._scale, torch.float32)
    amaxes = [full(amax=amax) for amax in (3.0, None)]
    way_out = r".*to_original_precision\(\)"
    require_errors(
        (f"ValueError: (?s)different scales{way_out}", torch.cat, [[a, float8(1, 4, 8)]]),
        (f"ValueError: (?s)high-precision tensor{way_out}", torch.cat, [[a, plain]]),
        (f"ValueError: (?s)high-precision tensor{way_out}", torch.cat, [[plain, a]]),
        ("ValueError: (?s)got a Float8Tensor of .*one kind", torch.cat, [[a, e5m2]]),
        ("ValueError: with an amax to record and .* without an amax", torch.cat, [amaxes]),
    )


def by_rows(*shape: int) -> Float8Tensor:
    x = torch.randn(shape)
    scale = torch.rand(*shape[:-1], 1) + 0.5
    return Float8Tensor(x.to(E4M3), scale, torch.float32, ScalingGranularity.AXISWISE)


def test_rows_keep_their_scales() -> None:
    torch.manual_seed(0)
    x = by_rows(4, 6, 8)
    values = x.to_original_precision()
    assert torch.equal(values, x._data.float() * x._scale)
    for shape in ((24, 8), (2, 2, 6, 8), (24, 1, 8)):
        view = x.view(shape)
        assert torch.equal(view.to_original_precision(), values.view(shape))
    for pieces, expected in ((x.split(3), values.split(3)), (x.chunk(2), values.chunk(2))):
        for a, b in zip(pieces, expected, strict=True):
            assert torch.equal(a.to_original_precision(), b)
        for dim in (0, 1, -2):
            joined = torch.cat(pieces[:1] * 2, dim=dim)
            assert torch.equal(joined.to_original_precision(), torch.cat(expected[:1] * 2, dim=dim))
    for take in (
        lambda t: t[1:3],
        lambda t: t[2],
        lambda t: t.unbind()[3],
        lambda t: t[:, 1:5:2],
        lambda t: t.select(-2, 3),
        lambda t: t.unbind(1)[4],
        lambda t: t.split([4, 2], dim=1)[1],
        lambda t: t.chunk(4, dim=1)[2],
    ):
        assert torch.equal(take(x).to_original_precision(), take(values))
    for wrong in (
        lambda: x.view(4, 48),
        lambda: x[:, :, :4],
        lambda: x.split(2, dim=2),
        lambda: x[1:].as_strided((3, 6, 8), (48, 8, 1), 0),  # other rows than those of the scales
        lambda: torch.cat([x, x], dim=-1),
        lambda: torch.cat([x.permute(2, 0, 1)] * 2),  # along what shares scales
        lambda: nn.functional.pad(x.permute(2, 0, 1), (0, 0, 0, 0, 0, 1)),
        lambda: Float8Tensor(x._data, x._scale[0], torch.float32, x._granularity),
        lambda: Float8Tensor(x._data[0, 0], x._scale[0, 0], torch.float32, x._granularity),
    ):
        with pytest.raises(ValueError, match="AXISWISE"):
            wrong()


def test_scales_of_columns_are_those_of_the_rows_of_the_transpose() -> None:
    torch.manual_seed(0)
    x = by_rows(6, 8)
    values = x.to_original_precision()
    # As torchao's, cast with `axiswise_dim=0`: contiguous, one scale for each column.
    y = Float8Tensor(x._data.t().contiguous(), x._scale.t(), torch.float32, x._granularity)
    for turned in (x.t(), x.mT, x.transpose(0, 1), x.permute(1, 0), y, y.clone(), x.t().detach()):
        assert (turned._has_column_scales, turned._scale.shape) == (True, (1, 6))
        assert torch.equal(turned.to_original_precision(), values.t())
        assert not turned.t()._has_column_scales
        assert torch.equal(turned.t().to_original_precision(), values)
    assert torch.equal(y[:, 1:4].to_original_precision(), values.t()[:, 1:4])
    for wrong in (lambda: y[:4], lambda: torch.cat([y, y]), lambda: y.split(2), lambda: y.view(-1)):
        with pytest.raises(ValueError, match="AXISWISE by columns"):
            wrong()
    with pytest.raises(ValueError, match=r"cat: got a Float8Tensor of .*one kind"):
        torch.cat([x.t().t(), y])
