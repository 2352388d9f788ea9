"""The page that explains float8 computes what the library computes; a real run goes on."""

import contextlib
import io
import itertools
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import float8
from float8 import gemm, kernels
from kernels.float8_codes import around_every_tie
from sqnr import same_bits
from support.devices import E4M3, E5M2, on_devices
from support.graphs import make_no_code
from support.models import seeded
from support.ranks import Ranks
from support.samples import ROOT

FILE = ROOT / "examples" / "float8_in_250_lines.py"
PRETRAIN = ROOT / "examples" / "pretrain_fsdp2.py"
PAGE = SimpleNamespace(**runpy.run_path(str(FILE)))
INF, NAN, TINY = float("inf"), float("nan"), 2.0**-120


def steps(layer: nn.Module, x: Tensor, g: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All that the three GEMMs read and how it lies, then the output and the gradients."""
    x, seen, multiply = x.clone().requires_grad_(), [], torch._scaled_mm

    def noted(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum=False):
        fast = use_fast_accum and a.is_cuda  # a CPU takes no notice of it
        seen.extend((a, b, scale_a, scale_b, torch.tensor([*a.stride(), *b.stride(), fast])))
        if a.is_cpu:  # the library does not call torch there
            return gemm.scaled_mm(a, b.t(), scale_a, scale_b, out_dtype)
        return multiply(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)

    def on_cpu(a, b, scale_a, scale_b, out_dtype):
        return noted(a, b.t(), scale_a, scale_b, out_dtype=out_dtype)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", noted)
        patch.setattr(torch.ops.float8.scaled_mm, "default", on_cpu)
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


IN_PARTS = "--tensor-parallel", "2", "--batch-size", "2"


def pretrain(folder: Path, stop_at: int, *arguments: str) -> list[float]:
    """Run the script of a real run on this rank; its losses, or [] if it dies in a step."""
    make_no_code()
    compiled = "--replicate" in arguments  # the others take half of the time without
    script, clip = runpy.run_path(str(PRETRAIN)), nn.utils.clip_grad_norm_
    count = itertools.count(1)

    def dying(*args: Any) -> None:
        if next(count) == stop_at:
            raise KeyboardInterrupt
        clip(*args)

    resumes = dist.get_rank() == 0 and any(folder.glob("step-*/.metadata"))
    small = {"seq-len": 16, "warmup": 2, "log-every": 1, "watch-every": 2, "save-every": 2}
    sizes = [f"--{name}={value}" for name, value in small.items()]
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(nn.utils, "clip_grad_norm_", dying),
        torch._dynamo.config.patch(disable=not compiled),
        contextlib.redirect_stdout(io.StringIO()) as shown,
        contextlib.suppress(KeyboardInterrupt),
    ):
        losses = script["main"]([str(FILE), "--folder", str(folder), *sizes, *arguments])
        assert ("step-00000002, after step 2 of 4\n" in shown.getvalue()) == resumes
        return losses
    return []


@pytest.mark.xdist_group("ranks")
def test_the_script_of_a_real_run_resumes_with_the_same_losses(two: Ranks, tmp_path: Path) -> None:
    assert len(PRETRAIN.read_text().splitlines()) <= 150
    wanted, same = two.run(pretrain, tmp_path / "whole", 0, "--steps", "4")
    assert len(wanted) == 4
    assert wanted == same
    assert two.run(pretrain, tmp_path / "cut", 3, "--steps", "4") == [[], []]
    shutil.copytree(tmp_path / "cut/step-00000002", tmp_path / "cut/step-00000003")
    (tmp_path / "cut/step-00000003/.metadata").unlink()  # a save that was killed
    assert two.run(pretrain, tmp_path / "cut", 0, "--steps", "4") == [wanted[2:]] * 2
    losses, _ = two.run(pretrain, tmp_path / "tensor parallel", 0, "--steps", "1", *IN_PARTS)
    assert losses == pytest.approx(wanted[:1], rel=2e-3)  # of the same samples


@pytest.mark.exhaustive
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("other", [("--replicate", "2"), IN_PARTS], ids=str)
def test_the_script_of_a_real_run_shares_a_model_in_other_ways(
    two: Ranks, tmp_path: Path, other: tuple[str, ...]
) -> None:
    wanted, _ = two.run(pretrain, tmp_path / "whole", 0, "--steps", "3")
    losses, _ = two.run(pretrain, tmp_path / "other", 0, "--steps", "3", *other)
    assert losses == pytest.approx(wanted, rel=2e-3)
