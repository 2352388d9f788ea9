"""`float8 bench tp`: plain Llama blocks under tensor and sequence parallel on the GPUs of a host.

Float8 is held against the same recipe on one device first: scales of weights bit by bit, output
and gradients by what their SQNR against bf16 loses. Then all variants are timed in turn.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles

from float8.convert.measure import WrongResultError
from float8.gemm import matmul
from float8.linear import functional
from float8.parallel import tensor as own_styles
from float8.quantize.spec import Part
from float8_lab.bench.block import AT_LEAST, StackSize, bf16_stack, stack_data
from float8_lab.bench.fsdp import RanksStep, Results
from float8_lab.bench.step import Row, Step, check
from float8_lab.bench.variants import EAGER, HIGH_PRECISION, Variant
from float8_lab.errors import ConfigError
from float8_lab.models import llama
from float8_lab.models.presets import ModelConfig, preset

MORE_NOISE = 1.0
"""Upper bound in dB of what SQNRs against bf16 may lose by running on several devices. Results are
not equal: sums have another order, bfloat16 rounds otherwise then, and so do casts."""

Scales = list[tuple[Tensor, Tensor]]


def require_shares(size: StackSize, ranks: int) -> None:
    """Raise a `ConfigError` for blocks that so many ranks cannot share evenly."""
    if ranks < 2:
        raise ConfigError(f"ranks: got {ranks}, expected at least 2")
    preset(size.model).model.check_shares("ranks:", ranks, size.seq_len)


# ---------------------------------------------------------------- the model, as users write it


class Attention(llama.Attention):
    """Of normalised tokens."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        """[batch, seq, dim] -> the same."""
        mixed = self.mix(self.query(x), self.key(x), self.value(x), cos, sin)
        return self.out(mixed)  # type: ignore[no-any-return]


class FeedForward(llama.FeedForward):
    """Of normalised tokens."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[batch, seq, dim] -> the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(llama.Block):
    """Norms are called by themselves: what follows them gathers their results."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.attention, self.feed_forward = Attention(config), FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, dim] -> the same."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


def parallelized(stack: nn.Module, variant: Variant, mesh: DeviceMesh) -> nn.Module:
    """Each rank holds its part of weights and, between layers, of the tokens."""
    if variant.is_reference:
        styles: Any = torch_styles
    elif variant.ours:
        styles = own_styles
    else:
        library = variant.recipe.split()[0]
        styles = importlib.import_module(f"{library}.float8.float8_tensor_parallel")
    prefix = "" if variant.is_reference else "Float8"
    colwise, rowwise = (getattr(styles, f"{prefix}{way}Parallel") for way in ("Colwise", "Rowwise"))
    prepare = getattr(styles, f"Prepare{prefix}ModuleInput")
    tokens, whole = Shard(1), Replicate()
    plan: dict[str, Any] = {
        "attention_norm": torch_styles.SequenceParallel(),
        "feed_forward_norm": torch_styles.SequenceParallel(),
        "attention": prepare(
            input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)
        ),
        "feed_forward": prepare(input_layouts=(tokens,), desired_input_layouts=(whole,)),
    }
    inner = ("attention.query", "attention.key", "attention.value")
    plan |= {name: colwise() for name in (*inner, "feed_forward.gate", "feed_forward.up")}
    last = ("attention.out", "feed_forward.down")
    plan |= {name: rowwise(output_layouts=tokens) for name in last}
    for block in stack.get_submodule("layers").children():
        # All ranks have the same weights.
        torch_styles.parallelize_module(block, mesh, plan, src_data_rank=None)
    return stack


# ---------------------------------------------------------------- steps


class ParallelStep(RanksStep):
    """Forward and backward of a stack, whose tokens all ranks share, with the sync of scaling."""

    def __init__(self, variant: Variant, size: StackSize, device: torch.device) -> None:
        require_shares(size, dist.get_world_size())
        self._mesh = mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        shared = replace(
            variant, convert=lambda model: parallelized(variant.convert(model), variant, mesh)
        )
        super().__init__(shared, size, device, block=Block, sync=True)
        self._eager = replace(variant, mode=EAGER)  # on one device

    def data(self) -> Tensor:
        """Of each sequence the tokens of this rank."""
        whole = stack_data(self.size, self.device)
        return whole.chunk(self._mesh.size(), 2)[dist.get_rank()].contiguous()

    def results(self) -> Results:
        """Of one step, those of all ranks together."""
        found: dict[str, Any] = dict(self())
        for name in ("output", "gradient of input"):
            found[name] = DTensor.from_local(found[name], self._mesh, [Shard(1)])
        return {name: x.full_tensor() for name, x in found.items()}

    def check(self, references: dict[str, Results]) -> Row:
        """Hold results and scales of weights against those of the same recipe on one device.

        References are in host memory.
        """
        what, size, device = f"tp {self.variant.name}:", self.size, self.device
        self.warm_up()
        results = self.results()
        row: Row = {"same_scales": None, "more_noise_db": None}
        if self.variant.ours or not references:
            data = stack_data(size, device)
            alone = Step(self._eager, bf16_stack(size, device, Block), *data, sync=True)
            alone.warm_up()
            one, expected = with_scales(alone)
            if not references:
                references[HIGH_PRECISION] = {name: x.cpu() for name, x in one.items()}
        base = references[HIGH_PRECISION]
        if self.variant.ours:
            eager = ParallelStep(self._eager, size, device)
            eager.warm_up()
            got, scales = with_scales(eager.results)
            row["same_scales"] = check_scales(what, expected, scales, 7 * size.blocks)
            check_noise(what, base, one, got)
            row["more_noise_db"] = check_noise(what, base, one, results)
        return {"sqnr_db": check(what, base, results, AT_LEAST), **row}


def with_scales(run: Callable[[], Results]) -> tuple[Results, Scales]:
    """Results, and the scales of the operands of this library's GEMMs in eager mode."""
    scales: Scales = []

    def seen(a: Part, b: Part, **more: Any) -> Tensor:
        scales.append((a.scale.clone().squeeze(), b.scale.clone().squeeze()))
        return matmul(a, b, **more)

    with mock.patch.object(functional, "matmul", seen):
        return run(), scales


def check_scales(what: str, expected: Scales, got: Scales, weights: int) -> float | None:
    """The share of equal scales; a `WrongResultError` if one of `weights` weights is not.

    None where scales are finer than one per tensor: those are of what a rank holds. All ranks must
    call it.
    """
    if not expected or any(scale.numel() > 1 for pair in expected for scale in pair):
        return None
    a, b = (torch.stack([torch.stack(pair) for pair in each]) for each in (expected, got))
    same = (a == b).int()
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if not same[:weights, 1].all():
        raise WrongResultError(
            f"{what} got scales of weights {b[:weights, 1].tolist()}, expected those of one "
            f"device, {a[:weights, 1].tolist()}; nothing was timed"
        )
    return float(same.double().mean())


def check_noise(what: str, base: Results, one: Results, got: Results) -> float:
    """By how many dB a result is further away from `base`, at most, than that of one device.

    A `WrongResultError` if that is more than `MORE_NOISE`. All ranks must call it.
    """
    lost = {}
    for name, expected in base.items():
        a, b = (check(what, {name: expected}, {name: x[name]}, -math.inf) for x in (one, got))
        lost[name] = a - b
    name = max(lost, key=lambda each: lost[each])
    if not lost[name] <= MORE_NOISE:
        raise WrongResultError(
            f"{what} {name}: SQNR {lost[name]:.1f} dB lower than on one device, expected at most "
            f"{MORE_NOISE} dB; nothing was timed"
        )
    return lost[name]
