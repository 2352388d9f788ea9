"""The private API of torch that float8 uses: all of it can be missing, or turned off."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen import custom_extern_kernel_codegen, wrapper
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

from float8 import kernels
from float8.config import CastConfig
from float8.kernels.runtime import private
from kernels.float8_codes import same_bytes
from support.forks import run_program

pytestmark = pytest.mark.xdist_group("programs")

NAMES = re.findall(r'^(\w+) = find\("([\w.]+)"\)', Path(private.__file__).read_text(), re.MULTILINE)

# Forward and backward in eager mode: on a GPU through Triton, where there is one.
TRAIN = """
import torch
import float8

gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
device = "cuda" if gpu else "cpu"

def step(run, layer):
    layer.zero_grad(set_to_none=True)
    x = torch.linspace(-1, 1, 20 * 32, device=device).view(20, 32).requires_grad_()
    run(x).square().sum().backward()
    return x.grad, layer.weight.grad

for recipe in ("tensorwise", "delayed"):
    torch.manual_seed(0)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    layer = float8.Float8Linear(32, 48, device=device, config=config)
    for _ in range(3):
        got = step(layer, layer)
        float8.sync_float8_amax_and_scale_history(layer)
    print([g.double().sum().item().hex() for g in got])
"""


def run(program: str, **env: str) -> str:
    done = run_program(program, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def usual() -> str:
    """What training gives with all of it."""
    return run(TRAIN)


@pytest.mark.skipif(private.PUBLIC_API_ONLY, reason="FLOAT8_PLAIN_LAUNCH=1: none is looked for")
def test_the_names_of_this_torch_are_found() -> None:
    assert len(NAMES) >= 5
    for name, path in NAMES:
        if "cuda" not in path.lower() or torch.backends.cuda.is_built():
            assert getattr(private, name) is not None, path


def test_one_variable_turns_all_of_it_off(usual: str) -> None:
    names = [name for name, _ in NAMES]
    check = f"""
from float8.kernels.runtime import launch, private
assert private.PUBLIC_API_ONLY
assert [getattr(private, name) for name in {names}] == [None] * {len(names)}
assert private.find("nn.Linear") is None
assert not launch.takes_triton_directly()
assert not launch._BYPASSES_TRITON
"""
    assert run(TRAIN + check, FLOAT8_PLAIN_LAUNCH="1") == usual


@pytest.mark.parametrize("value", ["", "0"])
def test_other_values_turn_nothing_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOAT8_PLAIN_LAUNCH", value)
    fresh = runpy.run_path(private.__file__)
    assert not fresh["PUBLIC_API_ONLY"]
    assert fresh["find"]("nn.Linear") is not None


@pytest.mark.parametrize("missing", [NAMES[::2], NAMES[1::2]], ids=["even", "odd"])
def test_a_torch_without_some_of_them_trains_the_same(
    missing: list[tuple[str, str]], usual: str
) -> None:
    """Gone before float8 is imported, and for float8 alone: torch itself needs some of them."""
    hide = f"""
import sys, types
import torch

def without(owner, names):
    class Without(types.ModuleType):
        def __getattr__(self, wanted):
            if wanted in names and sys._getframe(1).f_globals["__name__"].startswith("float8."):
                raise AttributeError(wanted)
            return getattr(owner, wanted)
    return Without("without")

parents = dict()
for path in {[path for _, path in missing]}:
    parent, _, last = path.rpartition(".")
    parents.setdefault(parent, []).append(last)
for path in sorted(parents, key=len, reverse=True):  # inner ones first
    holder, owner = torch, torch
    for part in path.split("."):
        holder, owner = owner, getattr(owner, part, None)
    setattr(holder, path.split(".")[-1], without(owner, parents[path]))
"""
    check = f"""
from float8.kernels.runtime import private
assert not any(getattr(private, name) for name in {[name for name, _ in missing]})
"""
    assert run(hide + TRAIN + check) == usual


def generated() -> str:
    """What Inductor makes of a cast, after checking its bits. Of nothing else, which takes C++."""
    torch._dynamo.reset()

    def cast(x: Tensor, scale: Tensor) -> tuple[Tensor | None, Tensor | None]:
        spec = CastConfig(target_dtype=torch.float8_e4m3fn)
        row, col = kernels.cast(x, spec, scale=scale, row=True, col=True)
        assert row is not None
        assert col is not None
        return row.data, col.data

    given = torch.rand(20, 40), torch.tensor(0.01)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled, code = run_and_get_code(torch.compile(cast, fullgraph=True), *given)
    for got, want in zip(compiled, cast(*given), strict=True):
        assert same_bytes(got, want)
    return "\n".join(line for line in code[0].splitlines() if "#" not in line)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Inductor's, without our ops."""
    empty: dict[str, object] = {}
    monkeypatch.setattr(custom_extern_kernel_codegen, "CUSTOM_EXTERN_KERNEL_CODEGEN", empty)
    monkeypatch.setattr(wrapper, "CUSTOM_EXTERN_KERNEL_CODEGEN", empty)
    return empty


def test_another_inductor_calls_ops_through_the_dispatcher(
    registry: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "PUBLIC_API_ONLY", False)
    monkeypatch.delattr(custom_extern_kernel_codegen, "CustomCodegen")
    code = generated()
    assert "float8_cpu" not in code
    assert " = torch.ops.float8.cast.default(" in code


def test_without_private_api_inductor_is_told_nothing(
    registry: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "PUBLIC_API_ONLY", True)
    assert "float8_cpu" not in generated()
    assert not registry


def test_only_the_first_forward_of_reentrant_checkpointing_is_told_apart() -> None:
    told = []

    def tell(x: Tensor) -> Tensor:
        told.append(private.in_reentrant_checkpoint())
        return x * x

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return tell(x)

    x = torch.ones(1, requires_grad=True)
    checkpoint(tell, x, use_reentrant=True).backward()
    assert told == [True, False]
    checkpoint(tell, x, use_reentrant=False).backward()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            tell(x)
    Other.apply(x)
    assert told == [True] + 6 * [False]
