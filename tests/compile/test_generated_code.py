"""Code that Inductor generates calls each op itself, and computes its bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from float8 import kernels
from float8.kernels.runtime import private
from float8.quantize.history import DelayedScale
from float8.quantize.spec import CastSpec
from sqnr import same_bits
from support.devices import E4M3, E5M2, on_devices

SPEC = CastSpec(E4M3)


def scale(x: Tensor) -> Tensor:
    return x[0, 0].abs().float() + 0.01


OPS: dict[str, Callable[..., Any]] = {
    "cast": lambda x, w, r: kernels.cast(x * 2, scale(x), E4M3, row=True, col=True),
    "cast of x.t()": lambda x, w, r: kernels.cast(
        x.t(), scale(x), E5M2, row=True, col=False, pad_rows=True, after=r
    ),
    "cast_dynamic": lambda x, w, r: kernels.cast_dynamic(x * 2, SPEC, row=True, col=True),
    "transpose": lambda x, w, r: kernels.transpose_bytes(x.view(torch.uint8)),
    "swiglu_cast": lambda x, w, r: kernels.swiglu_cast(x, x + 1, SPEC),
    "swiglu_backward_cast": lambda x, w, r: kernels.swiglu_backward_cast(
        x, x + 1, x + 2, scale(x), E4M3, SPEC
    ),
    "rms_norm_cast": lambda x, w, r: kernels.rms_norm_cast(x, w, 1e-5, SPEC),
    "rms_norm_recast": lambda x, w, r: kernels.rms_norm_recast(x, w, r, scale(x), E4M3),
    "rms_norm_backward": lambda x, w, r: kernels.rms_norm_backward([x, x + 1], x, w, r),
}


EACH = [pytest.param(op, True, id=f"{op}-dynamic") for op in OPS]
STATIC = [
    pytest.param(
        op, False, id=f"{op}-static", marks=[] if op == "cast" else [pytest.mark.exhaustive]
    )
    for op in OPS
]


@on_devices
@pytest.mark.parametrize(("op", "dynamic"), EACH + STATIC)
def test_an_op(op: str, dynamic: bool, device: str) -> None:
    x = torch.randn(40, 72, dtype=torch.bfloat16, device=device)
    w, r = x[0].clone(), torch.rand(40, device=device)
    torch._dynamo.reset()
    got, code = compiled_once(OPS[op], x, w, r, dynamic=dynamic)
    assert f" = {called(op.split()[0], device)}(" in code
    for a, b in zip(flat(got), flat(OPS[op](x, w, r)), strict=True):
        assert same_bits(a, b)


@on_devices
@pytest.mark.parametrize("known", [0.0, 0.03])
def test_an_op_that_writes_its_argument(known: float, device: str) -> None:
    def cast(x: Tensor, state: DelayedScale) -> Any:
        return kernels.cast_delayed(x * 2, SPEC, state, row=True, col=True)

    x = torch.randn(40, 72, dtype=torch.bfloat16, device=device)
    states = [
        DelayedScale(torch.tensor(known, device=device), torch.tensor(0.5, device=device))
        for _ in range(2)
    ]
    torch._dynamo.reset()
    got, code = compiled_once(cast, x, states[0], dynamic=False)
    assert f" = {called('cast_delayed', device)}(" in code
    want = cast(x, states[1])
    for a, b in zip([*flat(got), states[0].amax], [*flat(want), states[1].amax], strict=True):
        assert same_bits(a, b)


def called(op: str, device: str) -> str:
    return f"torch.ops.float8.{op}.default" if private.PLAIN_LAUNCH else f"float8_{device}.{op}"


def compiled_once(function: Callable[..., Any], *args: Any, dynamic: bool) -> tuple[Any, str]:
    with torch._inductor.config.patch(force_disable_caches=True):
        got, code = run_and_get_code(
            torch.compile(function, fullgraph=True, dynamic=dynamic), *args
        )
    return got, "\n".join(code)


def flat(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [] if x is None else [tensor for item in x for tensor in flat(item)]
