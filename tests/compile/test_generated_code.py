"""Code that Inductor generates calls each op itself, and computes its bits; `torch.export`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from float8 import all_linears, convert_to_float8_training, kernels
from float8.config import CastConfig
from float8.delayed.cast import DelayedScale
from float8.kernels.runtime import private
from float8.quantize import Cast, scale_of
from float8.scales import amax_to_scale
from sqnr import same_bits
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded
from support.rings import short

SPEC, OTHER = CastConfig(target_dtype=E4M3), CastConfig(target_dtype=E5M2)


def scale(x: Tensor) -> Tensor:
    return x[0, 0].abs().float() + 0.01


OPS: dict[str, Callable[..., Any]] = {
    "cast": lambda x, after: kernels.cast(x * 2, SPEC, scale=scale(x), row=True, col=True),
    "cast of x.t()": lambda x, after: kernels.cast(
        x.t(), OTHER, scale=scale(x), row=True, col=False, pad_rows=True, after=after
    ),
    "cast under its own scale": lambda x, after: kernels.cast(x * 2, SPEC, row=True, col=True),
    "transpose": lambda x, after: kernels.transpose_bytes(x.view(torch.uint8)),
}


@on_devices
@pytest.mark.exhaustive
def test_each_op(device: str) -> None:
    def all_ops(*args: Tensor) -> list[Any]:
        return [op(*args) for op in OPS.values()]

    x = torch.randn(40, 72, dtype=torch.bfloat16, device=device)
    after = torch.rand(40, device=device)
    got, code = compiled_once(all_ops, x, after, dynamic=True)
    for (name, op), result in zip(OPS.items(), got, strict=True):
        assert f" = {called(name.split()[0], device)}(" in code
        assert all(same_bits(*both) for both in zip(flat(result), flat(op(x, after)), strict=True))


@on_devices
def test_an_op_that_writes_its_argument(device: str) -> None:
    def casts(x: Tensor, *states: DelayedScale) -> Any:
        return [y.cast(x * 2, SPEC, row=True, col=True) for y in states]

    def states() -> list[DelayedScale]:  # whose scale is not known yet, and is
        pairs = [torch.tensor([known, 0.5], device=device).unbind() for known in (0.0, 0.03)]
        return [DelayedScale(scale.clone(), amax.clone(), True) for scale, amax in pairs]

    x = torch.randn(40, 72, dtype=torch.bfloat16, device=device)
    (one, other) = states(), states()
    got, code = compiled_once(casts, x, *one, dynamic=False)
    assert code.count(f" = {called('cast_delayed', device)}(") == 2
    made = [*flat(got), *(y.amax for y in one)]
    wanted = [*flat(casts(x, *other)), *(y.amax for y in other)]
    assert all(same_bits(*both) for both in zip(made, wanted, strict=True))


def called(op: str, device: str) -> str:
    return f"torch.ops.float8.{op}.default" if private.PUBLIC_API_ONLY else f"float8_{device}.{op}"


def compiled_once(function: Callable[..., Any], *args: Any, dynamic: bool) -> tuple[Any, str]:
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        got, code = run_and_get_code(compiled, *args)
    return got, "\n".join(code)


def flat(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [] if x is None else [tensor for item in x for tensor in flat(item)]


KINDS = [(format, to_power_of_2) for format in (E4M3, E5M2) for to_power_of_2 in (False, True)]


@on_devices
def test_scales_under_inductor(device: str) -> None:
    def scales(inputs: list[Tensor], amax: Tensor) -> list[Tensor]:
        casts = [CastConfig(target_dtype=format, power_of_2=rounded) for format, rounded in KINDS]
        found = [scale_of(x, Cast(cast)) for x in inputs for cast in casts]
        return found + [amax_to_scale(amax, *kind) for kind in KINDS]

    special = [0.0, 1e-45, 2.0**-101, 2.0**-100, 1 / 3, 448.0, 57344.0, 3.4e38]
    amax = torch.tensor([*special, torch.inf, torch.nan], device=device)
    random = torch.exp(20 * seeded(0, 10_000, device=device)).clamp(max=3e38)
    amax, compiled = torch.cat([amax, random]), torch.compile(scales, fullgraph=True)
    for seed, factor in enumerate((1.0, 1e-3, 300.0)):
        inputs = [seeded(seed, 65, 33, device=device).mul(factor).to(dtype) for dtype in DTYPES]
        for wanted, got in zip(scales(inputs, amax), compiled(inputs, amax), strict=True):
            assert same_bits(got.nan_to_num(-1.0), wanted.nan_to_num(-1.0))


@pytest.mark.parametrize("recipe", short({"delayed"}, ["tensorwise", "delayed"]))
def test_an_exported_model_computes_the_same_bits(recipe: str, tmp_path: Path) -> None:
    """As torch.export gives it, and as AOTInductor compiles it.

    One layer: between several Inductor rounds less, which the casts magnify by as much as the data
    happen to lie near the middle between two float8 numbers.
    """
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(64, 128)).to(torch.bfloat16),
        config=recipe,
        module_filter_fn=all_linears,
    ).eval()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), model(x))
        assert any(node.target is torch.ops.float8.cast.default for node in exported.graph.nodes)
        # Before, AOTInductor hands the dtype of a custom op on wrongly.
        if recipe == "tensorwise" and torch.__version__ >= "2.13":
            path = str(tmp_path / "model.pt2")
            options = {"compile_wrapper_opt_level": "O0", "precompile_headers": False}
            quickly = {f"aot_inductor.{name}": value for name, value in options.items()}
            torch._inductor.aoti_compile_and_package(
                exported, package_path=path, inductor_configs=quickly
            )
            assert torch.equal(torch._inductor.aoti_load_package(path)(x), model(x))
