"""The page that explains float8 computes what the library computes."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import float8
from float8 import kernels
from kernels.float8_codes import around_every_tie
from sqnr import same_bits
from support.devices import E4M3, E5M2, on_devices
from support.models import seeded
from support.samples import ROOT

FILE = ROOT / "examples" / "float8_in_250_lines.py"
PAGE = SimpleNamespace(**runpy.run_path(str(FILE)))
INF, NAN, TINY = float("inf"), float("nan"), 2.0**-120


def steps(layer: nn.Module, x: Tensor, g: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All that the three GEMMs read and how it lies, then the output and the gradients."""
    x, seen, multiply = x.clone().requires_grad_(), [], torch._scaled_mm

    def noted(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum=False):
        fast = use_fast_accum and a.is_cuda  # a CPU takes no notice of it
        seen.extend((a, b, scale_a, scale_b, torch.tensor([*a.stride(), *b.stride(), fast])))
        how = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        return multiply(a, b, scale_a, scale_b, **how)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", noted)
        y = layer(x)
        y.backward(g)
    assert len(seen) == 3 * 5
    return [*seen, y, x.grad, layer.weight.grad, layer.bias.grad]


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether the dtype and all bits are the same, and NaN where NaN is."""
    return a.dtype == b.dtype and same_bits(*(t.float().where(~t.isnan(), NAN) for t in (a, b)))


CASES = [
    *((tokens, K, N, 1.0, "x") for tokens, K, N in (((5, 7), 33, 130), ((1,), 5, 3))),
    *(((48,), 32, 16, size, role) for size in (0.0, TINY, INF, NAN) for role in "xwg"),
]


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "K", "N", "size", "role"), CASES)
def test_the_page_is_the_library(
    tokens, K, N, size, role, dtype, device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`size` multiplies one of the tensors, or its first element becomes that, if not finite."""
    made = {"x": seeded(0, K, *tokens), "w": seeded(1, N, K), "g": seeded(2, N, *tokens)}
    if size * 0 == 0:
        made[role] *= size
    else:
        made[role].flatten()[0] = size
    x, w, g = (made[name].to(device, dtype) for name in "xwg")
    given = x.movedim(0, -1), g.movedim(0, -1), monkeypatch  # [*tokens, K], [*tokens, N], strided
    plain = nn.Linear(K, N, device=device, dtype=dtype)
    plain.weight = nn.Parameter(w)
    wanted = steps(float8.Float8Linear.from_float(plain, "tensorwise"), *given)
    plain.zero_grad()
    (layer,) = PAGE.convert(nn.Sequential(plain))
    assert all(map(alike, steps(layer, *given), wanted))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_page_rounds_as_the_library_does(dtype: torch.dtype) -> None:
    scale = torch.tensor(0.3)
    x = (around_every_tie(dtype).double() * scale.double()).float()
    assert same_bits(PAGE.to_float8(x, scale, dtype), kernels.to_float8(x, scale, dtype))


def test_the_page_keeps_its_promises() -> None:
    text, library = FILE.read_text(), Path(float8.__file__).parent
    assert len(text.splitlines()) <= 250
    assert not re.search(r"^\s*(import|from) float8", text, re.MULTILINE)
    assert all((library / name).exists() for name in PAGE.LIBRARY)
    assert {file.parent.name for file in library.glob("*/__init__.py")} <= PAGE.LIBRARY.keys()
