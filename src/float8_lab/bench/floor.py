"""The least that a step could take: its GEMMs and casts, at the rates that a device reaches."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.config import CastConfig, Float8LinearConfig, Float8Weights, ScalingType
from float8.gemm import Gemm, matmul
from float8.linear.plan import plan_linear
from float8.quantize import Cast, quantize
from float8_lab.bench.step import Step
from float8_lab.bench.timing import kernel_sampler
from float8_lab.bench.variants import Variant
from float8_lab.trainer.recipes import recipe_config

# Short samples after rests, the best of which counts: clocks drop under GEMMs alone, much less in
# a step, which has other kernels between them.
_BURSTS, _BURST_MS, _REST_S = 5, 5.0, 0.05


class Rates(NamedTuple):
    """What a device reaches, per ms."""

    flops: Mapping[Gemm | None, float]
    """By how a GEMM runs; None: in bf16."""
    copied: float
    """Bytes read and written by a copy."""


class Work(NamedTuple):
    """What the linear layers of a step have to do."""

    flops: Counter[Gemm | None]
    """By how a GEMM runs."""
    cast_bytes: int

    def floor(self, rates: Rates) -> dict[str, float]:
        """Return the ms of both as columns."""
        gemms = sum(flops / rates.flops[gemm] for gemm, flops in self.flops.items())
        return {"floor_gemms_ms": gemms, "floor_casts_ms": self.cast_bytes / rates.copied}


def variant_config(variant: Variant) -> Float8LinearConfig | None:
    """Return how layers run: those of a peer as ours of that recipe; None: in bf16."""
    if variant.config is not None or variant.is_reference:
        return variant.config
    return recipe_config(variant.recipe.split()[-1])


def measure_rates(configs: Iterable[Float8LinearConfig | None], device: torch.device) -> Rates:
    """Measure one large GEMM of each kind that these run, and a copy of one of its operands."""
    side = 8192 if device.type == "cuda" else 256
    x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    calls: dict[Any, Callable[[], Tensor]] = {"copy": x.clone}
    for config in configs:
        for gemm in _gemms(config):
            if gemm is None:
                calls[gemm] = functools.partial(torch.mm, x, x.t())
                continue
            of: Any = gemm.granularities
            casts = (Cast(CastConfig(scaling_granularity=each)) for each in of)
            a, b = (quantize(x, cast, row=True).row for cast in casts)
            calls[gemm] = functools.partial(matmul, a, b, gemm=gemm, out_dtype=x.dtype)
    best = {}
    for key, call in calls.items():
        sample, times = kernel_sampler([call], device, at_least_ms=_BURST_MS), []
        for _ in range(_BURSTS):
            time.sleep(_REST_S)
            times.append(sample())
        best[key] = min(times)
    copy_ms = best.pop("copy")
    return Rates({gemm: 2 * side**3 / ms for gemm, ms in best.items()}, 2 * x.nbytes / copy_ms)


class Read(NamedTuple):
    """What a linear layer reads."""

    tensor: int
    """Its number: layers may read the same one."""
    tokens: int
    needs_grad: bool


def linear_inputs(step: Step) -> dict[str, Read]:
    """Run forward in eager mode, and return what each linear layer reads, by its name."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
        for name, layer in step.model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    with torch.compiler.set_stance("force_eager"):
        step.forward()
    for hook in hooks:
        hook.remove()
    return {
        name: Read(id(x), x.numel() // x.shape[-1], x.requires_grad) for name, x in inputs.items()
    }


def least_work(
    model: nn.Module, config: Float8LinearConfig | None, inputs: Mapping[str, Read]
) -> Work:
    """Count what the linear layers of a model have to do in one step, each as it runs.

    A layer that is no plain `nn.Linear` any more runs as `config` says. Its casts are kernels of
    their own, of 16-bit tensors. Each reads its tensor once, and writes a byte per element for row
    data and one for column data. It reads the tensor once more to find a scale beforehand: one of
    the whole tensor that is not known, or those of columns, next to rows or alone. So per element:

    - both layouts: 6 bytes, 4 under delayed scaling or block scales;
    - row data alone: 5 under one scale that is not known, else 3;
    - column data alone: 5 under scales of columns, else 3, as the scale is known from forward.

    Input and grad_output are cast in both layouts at once, where one configuration serves both, and
    an input once for all layers that read it, as in compiled code. Weights are cast in forward to
    rows and in backward to columns; those that are held, once per step to both.
    """
    flops: Counter[Gemm | None] = Counter()
    cast_bytes, cast_inputs = 0, set()
    for name, read in inputs.items():
        layer: Any = model.get_submodule(name)
        own = None if type(layer) is nn.Linear else config
        (N, K), M = layer.weight.shape, read.tokens
        needed = True, read.needs_grad, layer.weight.requires_grad
        for gemm, need in zip(_gemms(own), needed, strict=True):
            flops[gemm] += need * 2 * M * N * K
        if own is None:
            continue
        plan, held = plan_linear(own), own.float8_weights is Float8Weights.HELD
        x, w, g, x_again, w_again, g_again = (cast.how for cast in plan.casts)
        output, grad_input, grad_weight = (
            need and gemm is not None for gemm, need in zip(_gemms(own), needed, strict=True)
        )
        if read.tensor not in cast_inputs:
            cast_inputs.add(read.tensor)
            cast_bytes += M * K * _both(x, x_again, plan.share_input, output, grad_weight)
        cast_bytes += M * N * _both(g, g_again, plan.share_grad_output, grad_input, grad_weight)
        if held:
            cast_bytes += N * K * _bytes(w, output, grad_input)
        else:
            known = output and plan.share_weight
            cast_bytes += N * K * (_bytes(w, output) + _bytes(w_again, False, grad_input, known))
    return Work(flops, cast_bytes)


def _gemms(config: Float8LinearConfig | None) -> tuple[Gemm | None, ...]:
    """Return how output, grad_input and grad_weight run."""
    if config is None:
        return None, None, None
    plan = plan_linear(config)
    return plan.output, plan.grad_input, plan.grad_weight


def _both(first: CastConfig, other: CastConfig, at_once: bool, row: bool, col: bool) -> int:
    return _bytes(first, row, col) if at_once else _bytes(first, row) + _bytes(other, False, col)


def _bytes(spec: CastConfig, row: bool, col: bool = False, known: bool = False) -> int:
    """Return the bytes that a cast moves for each element of a 16-bit tensor."""
    of = spec.scaling_granularity
    measured = (
        col
        if of.by_rows
        else of.one_scale and not (known or spec.scaling_type is ScalingType.DELAYED)
    )
    return 2 * (1 + measured) + row + col if row or col else 0
