"""What each op does to a Float8Tensor: the same as to its dequantised values, or a clear error."""

import pytest
import torch

import tolerances
from float8 import Float8Tensor
from sqnr import same_bits, sqnr
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded
from support.spies import OpCounter


def float8(seed: int, *shape: int, device: str = "cpu", dtype=torch.float32, format=E4M3):
    return Float8Tensor.from_high_precision(
        seeded(seed, *shape, device=device, dtype=dtype), format
    )


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
}


@on_devices
@pytest.mark.parametrize("name", VIEWS)
def test_moving_values_around(device: str, name: str) -> None:
    t = float8(0, 12, 8, device=device, dtype=torch.bfloat16)
    plain = t.to_original_precision()
    got, wanted = VIEWS[name](t), VIEWS[name](plain)
    assert isinstance(got, Float8Tensor)
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert got.storage_offset() == wanted.storage_offset()
    assert got.is_contiguous() == wanted.is_contiguous()
    assert same_bits(got.to_original_precision(), wanted)
    assert got._data.stride() == wanted.stride()


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
@pytest.mark.parametrize("name", PIECES)
def test_taking_apart_and_joining(device: str, name: str) -> None:
    t = float8(0, 12, 8, device=device)
    got, wanted = PIECES[name](t), PIECES[name](t.to_original_precision())
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert isinstance(a, Float8Tensor)
        assert same_bits(a.to_original_precision(), b)


@on_devices
@pytest.mark.parametrize("dim", [0, 1])
def test_cat_of_pieces_gives_the_whole(device: str, dim: int) -> None:
    t = float8(0, 12, 8, device=device)
    whole = torch.cat(t.split(3, dim), dim)
    assert isinstance(whole, Float8Tensor)
    assert same_bits(whole._data, t._data)
    assert same_bits(whole._scale, t._scale)


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
    with pytest.raises(ValueError, match=r"(?s)high-precision source.*from_high_precision"):
        t.copy_(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"of shape \(8, 4\).*of shape \(4, 8\), expected equal"):
        t.copy_(float8(1, 8, 4))
    with pytest.raises(ValueError, match=r"float8_e5m2 .*float8_e4m3fn.*expected equal"):
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


# ---------------------------------------------------------------- products


PRODUCTS = {
    "mm": (lambda a, b: torch.mm(a, b), (16, 32), (32, 48)),
    "matmul": (lambda a, b: a @ b, (16, 32), (32, 48)),
    "odd-dims": (lambda a, b: a @ b, (5, 33), (33, 7)),
    "one-row": (lambda a, b: a @ b, (1, 16), (16, 1)),
    "transposed": (lambda a, b: a.t() @ b.t(), (32, 16), (48, 32)),
    "matmul-3d": (lambda a, b: torch.matmul(a, b), (2, 8, 32), (32, 48)),
    "linear": (lambda a, b: torch.nn.functional.linear(a, b), (16, 32), (48, 32)),
    "linear-3d": (lambda a, b: torch.nn.functional.linear(a, b), (2, 8, 32), (48, 32)),
}


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_two_run_as_one_float8_gemm(device: str, name: str, dtype: torch.dtype) -> None:
    product, shape_a, shape_b = PRODUCTS[name]
    a = float8(0, *shape_a, device=device, dtype=dtype)
    b = float8(1, *shape_b, device=device, dtype=dtype)
    with OpCounter() as counter:
        got = product(a, b)
    assert counter.gemms == 1
    assert type(got) is torch.Tensor
    assert got.dtype == dtype
    wanted = product(*(t._data.double() * t._scale.double() for t in (a, b)))
    assert sqnr(wanted, got) > tolerances.GEMM


@on_devices
@pytest.mark.parametrize(("format_a", "format_b"), [(E4M3, E5M2), (E5M2, E4M3)])
def test_products_of_different_formats(device: str, format_a, format_b) -> None:
    a, b = float8(0, 16, 32, device=device, format=format_a), float8(1, 32, 16, device=device)
    b = float8(1, 32, 16, device=device, format=format_b)
    wanted = a.to_original_precision().double() @ b.to_original_precision().double()
    assert sqnr(wanted, a @ b) > tolerances.GEMM


@on_devices
@pytest.mark.parametrize("float8_side", ["left", "right"])
def test_products_with_a_high_precision_tensor_dequantise(device: str, float8_side: str) -> None:
    a, b = float8(0, 16, 32, device=device), float8(1, 32, 48, device=device)
    wanted = a.to_original_precision() @ b.to_original_precision()
    mixed = (
        (a, b.to_original_precision())
        if float8_side == "left"
        else (
            a.to_original_precision(),
            b,
        )
    )
    with OpCounter() as counter:
        got = mixed[0] @ mixed[1]
    assert counter.gemms == 0
    assert same_bits(got, wanted)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2), (0, 1)])
def test_addmm(device: str, dtype: torch.dtype, beta: float, alpha: float) -> None:
    a = float8(0, 16, 32, device=device, dtype=dtype)
    b = float8(1, 32, 48, device=device, dtype=dtype)
    bias = seeded(2, 48, device=device, dtype=dtype)
    got = torch.addmm(bias, a, b, beta=beta, alpha=alpha)
    assert got.dtype == dtype
    wanted = torch.addmm(
        bias.double(),
        *(t._data.double() * t._scale.double() for t in (a, b)),
        beta=beta,
        alpha=alpha,
    )
    assert sqnr(wanted, got) > tolerances.GEMM


def test_addmm_with_beta_zero_ignores_nan_in_the_bias() -> None:
    a, b = float8(0, 16, 32), float8(1, 32, 48)
    got = torch.addmm(torch.full((48,), torch.nan), a, b, beta=0)
    assert bool(got.isfinite().all())


@on_devices
def test_linear_with_bias(device: str) -> None:
    x, w = float8(0, 4, 8, 32, device=device), float8(1, 48, 32, device=device)
    bias = seeded(2, 48, device=device)
    got = torch.nn.functional.linear(x, w, bias)
    wanted = x.to_original_precision() @ w.to_original_precision().t() + bias
    assert got.shape == (4, 8, 48)
    assert sqnr(wanted, got) > tolerances.GEMM


def test_products_refuse_different_original_dtypes() -> None:
    with pytest.raises(ValueError, match=r"bfloat16 and .*float32, expected equal"):
        float8(0, 4, 16, dtype=torch.bfloat16) @ float8(1, 16, 4)


def test_products_refuse_two_e5m2_operands() -> None:
    """Tensor cores have no e5m2 x e5m2: the CPU must not quietly compute what a GPU cannot."""
    a, b = float8(0, 16, 32, format=E5M2), float8(1, 32, 16, format=E5M2)
    with pytest.raises(ValueError, match=r"(?s)e5m2.*expected"):
        a @ b


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
