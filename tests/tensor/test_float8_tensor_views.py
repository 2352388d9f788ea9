"""Ops that move the values of a Float8Tensor: views, taking apart, joining."""

import pytest
import torch

from float8 import Float8Tensor, ScalingGranularity
from sqnr import same_bits
from support.devices import E4M3, E5M2, on_devices
from support.models import seeded
from support.tensors import assert_same, fields, float8, full

VIEWS = {
    "view": lambda t: t.view(6, 16),
    "view-minus-one": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(3, 4, 8),
    "reshape-with-copy": lambda t: t.t().reshape(6, 16),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 4)),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.unsqueeze(1).squeeze(1),
    "expand": lambda t: t[:1].expand(5, 8),
    "slice": lambda t: t[2:7],
    "slice-columns": lambda t: t[:, 1:5],
    "slice-with-step": lambda t: t[::3, ::2],
    "select": lambda t: t[4],
    "select-element": lambda t: t[4, 5],
    "narrow": lambda t: t.narrow(0, 1, 3),
    "as_strided": lambda t: t.as_strided((3, 4), (8, 2)),
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.t().contiguous(),
    "view_as": lambda t: t.view_as(torch.empty(24, 4)),
    "alias": torch.ops.aten.alias.default,
    "to": lambda t: t.to(t.dtype, copy=True),
}


@on_devices
@pytest.mark.parametrize("amax", [3.0, None])
@pytest.mark.parametrize("name", VIEWS)
def test_moving_values_around(device: str, name: str, amax: float | None) -> None:
    t = full(amax=amax, device=device)
    plain = t.to_original_precision()
    got, wanted = VIEWS[name](t), VIEWS[name](plain)
    assert isinstance(got, Float8Tensor)
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert got.storage_offset() == wanted.storage_offset()
    assert got.is_contiguous() == wanted.is_contiguous()
    assert same_bits(got.to_original_precision(), wanted)
    assert got._data.stride() == wanted.stride()
    assert fields(got) == fields(t)


PIECES = {
    "split": lambda t: t.split(5),
    "split-columns": lambda t: t.split(3, dim=1),
    "split-sizes": lambda t: t.split([2, 4, 6]),
    "tensor_split": lambda t: t.tensor_split(3),
    "chunk": lambda t: t.chunk(5),
    "unbind": lambda t: t.unbind(1),
    "iter": list,
}


@on_devices
@pytest.mark.parametrize("amax", [3.0, None])
@pytest.mark.parametrize("name", PIECES)
def test_taking_apart_and_joining(device: str, name: str, amax: float | None) -> None:
    t = full(amax=amax, device=device)
    got, wanted = PIECES[name](t), PIECES[name](t.to_original_precision())
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert isinstance(a, Float8Tensor)
        assert same_bits(a.to_original_precision(), b)
        assert fields(a) == fields(t)
    for dim in (0, 1):
        assert_same(torch.cat(t.split(3, dim), dim), t)


def test_amaxes_of_what_is_joined() -> None:
    others = [full(amax=amax) for amax in (3.0, 5.0, None)]
    assert torch.cat(others[:2])._amax == 5  # of the whole
    assert torch.cat(others)._amax is None  # unknown, as that of a piece is


def test_cat_of_equal_scales_held_by_different_tensors() -> None:
    scale = torch.tensor(0.5)
    a, b = (Float8Tensor.from_high_precision(seeded(i, 4, 8), scale=scale.clone()) for i in (0, 1))
    joined = torch.cat([a, b]).to_original_precision()
    assert same_bits(joined, torch.cat([a.to_original_precision(), b.to_original_precision()]))


def test_cat_refuses_what_it_cannot_join() -> None:
    a = float8(0, 4, 8)
    with pytest.raises(ValueError, match=r"(?s)different scales.*to_original_precision\(\)"):
        torch.cat([a, float8(1, 4, 8)])
    with pytest.raises(ValueError, match=r"(?s)high-precision tensor.*to_original_precision\(\)"):
        torch.cat([a, torch.ones(4, 8)])
    with pytest.raises(ValueError, match=r"(?s)high-precision tensor.*to_original_precision\(\)"):
        torch.cat([torch.ones(4, 8), a])
    e5m2 = Float8Tensor(torch.zeros(4, 8).to(E5M2), a._scale, torch.float32)
    with pytest.raises(ValueError, match=r"(?s)got Float8Tensors of .*expected equal"):
        torch.cat([a, e5m2])


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
    for part, expected in ((x[1:3], values[1:3]), (x[2], values[2]), (x.unbind()[3], values[3])):
        assert torch.equal(part.to_original_precision(), expected)
    for wrong in (
        lambda: x.view(4, 48),
        lambda: x[:, :, :4],
        lambda: x.transpose(0, 1),
        lambda: x.split(2, dim=1),
        lambda: torch.cat([x, x], dim=-1),
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
    for wrong in (lambda: y[:4], lambda: torch.cat([y, y]), lambda: y.split(2), lambda: y.view(-1)):
        with pytest.raises(ValueError, match="AXISWISE by columns"):
            wrong()
    with pytest.raises(ValueError, match=r"cat: got Float8Tensors of .*expected equal"):
        torch.cat([x.t().t(), y])
