"""Checkpointed Llama blocks under FSDP2: peak memory and time of a training step.

    torchrun --nproc-per-node 2 benchmarks/checkpointing.py --output benchmarks/results/NAME.json

Plain blocks that only called `convert_to_float8_training`, set up as torchtitan does: each block
under `torch.utils.checkpoint`, compiled by itself, sharded with float32 masters, a fused AdamW.
Every variant is checked against bf16 before it is timed; the list runs twice, since a GPU does not
hold two of them, and times are medians over both passes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import itertools
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain import SHAPES, Block, Shape, plain_llama
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import float8
from float8_lab.bench.results import write_results
from float8_lab.bench.step import check
from float8_lab.trainer.environment import describe_environment

AT_LEAST = 7.0  # dB of output and gradient of the input against bf16
_AT = torch.ops.aten
_ATTENTION = (
    _AT._scaled_dot_product_flash_attention.default,
    _AT._scaled_dot_product_cudnn_attention.default,
    _AT._scaled_dot_product_flash_attention_for_cpu.default,
)
_CASTS = ("float8::cast", "float8::cast_axiswise", "float8::cast_blockwise")
WARMUP, STEPS = 3, 6


def keep_gemms(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """`save_gemm_outputs`, and what it is for a model in bf16."""
    if op is _AT.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return float8.save_gemm_outputs(ctx, op, *args, **kwargs)


def keep_gemms_and_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return keep_gemms(ctx, op, *args, **kwargs)


def keep_operands(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep casts, those of weights apart: their bf16 values are there again in backward."""
    if op.name().split(".")[0] in _CASTS and args[0].shape[0] == SHAPES["8b"].seq:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Callable[..., CheckpointPolicy]) -> dict[str, Any]:
    # Dynamo takes no closures.
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


HOW: dict[str, dict[str, Any]] = {
    "all": {},
    "gemms": selective(keep_gemms),
    "gemms+attention": selective(keep_gemms_and_attention),
    "operands": selective(keep_operands),
}


class Checkpointed(nn.Module):
    def __init__(self, block: Block, recompute: str) -> None:
        super().__init__()
        self.block, self.recompute = block, recompute

    def forward(self, *args: Tensor) -> Tensor:
        if self.recompute == "none":
            return self.block(*args)
        how = HOW[self.recompute]
        return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=False, **how)


def convert(model: nn.Module, recipe: str) -> None:
    name, _, peer = recipe.partition("@")
    if name == "bf16":
        return
    library = importlib.import_module("torchao.float8" if peer else "float8")
    config = library.Float8LinearConfig.from_recipe_name(name)
    if name == "tensorwise":
        config = library.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    library.convert_to_float8_training(model, config=config)


class Training:
    """One variant on this rank; ranks have data of their own."""

    def __init__(self, variant: str, shape: Shape, device: torch.device) -> None:
        recipe, _, recompute = variant.partition(", ")
        self.device = device
        model = plain_llama(shape, device).float()
        convert(model, recipe)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for i, block in enumerate(model.layers):
            block = Checkpointed(block, recompute)
            block.compile(fullgraph=True, dynamic=False)
            fully_shard(block, mp_policy=policy)
            model.layers[i] = block
        fully_shard(model, mp_policy=policy)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        if "torchao" in recipe:
            precompute = importlib.import_module("torchao.float8")
            self.after = precompute.precompute_float8_dynamic_scale_for_fsdp
        else:
            float8.attach_to_optimizer(model, self.optimizer)
            self.after = lambda model: None
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        size = (2, shape.batch, shape.seq, shape.dim)
        data = torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16)
        self.x, self.grad = data

    def forward(self) -> tuple[Tensor, Tensor]:
        x = self.x.detach().requires_grad_()
        return self.model(x), x

    def step(self) -> dict[str, Tensor]:
        y, x = self.forward()
        y.backward(self.grad)
        self.optimizer.step()
        self.after(self.model)
        self.optimizer.zero_grad()
        return {"output": y.detach(), "gradient": x.grad}


def measure(variant: str, shape: Shape, device: torch.device, reference: dict, row: dict) -> None:
    before = torch.cuda.memory_allocated(device)
    training = Training(variant, shape, device)
    first = training.step()
    reference = reference or (reference.setdefault("of", first) and reference)
    if "sqnr_db" not in row:
        row["sqnr_db"] = check(variant, reference["of"], first, AT_LEAST)
    del first
    for _ in range(WARMUP):
        training.step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    dist.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        training.step()
        mark.record()
    torch.cuda.synchronize(device)
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    row.setdefault("times", []).extend(times)
    row["peak_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--variants", default="")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch._dynamo.config.recompile_limit = 64
    shape = SHAPES["8b"]._replace(blocks=args.blocks)
    variants = args.variants.split(";") if args.variants else [
        "bf16, all", "tensorwise, all", "tensorwise, gemms", "tensorwise, gemms+attention",
        "tensorwise@torchao, all", "tensorwise@torchao, gemms", "tensorwise, operands",
        "bf16, gemms",
    ]  # fmt: skip
    rows: dict[str, dict[str, Any]] = {name: {"variant": name} for name in variants}
    reference: dict[str, Any] = {}
    for turn in range(args.passes):
        for name, row in rows.items():
            if "failed" in row:
                continue
            torch._dynamo.reset()
            try:
                measure(name, shape, device, reference, row)
            except Exception as error:
                if name.endswith("all") and "@" not in name:
                    raise
                row["failed"] = f"{type(error).__name__}: {error}"[:500]
            gc.collect()
            torch.cuda.empty_cache()
            if rank == 0:
                last = {k: v for k, v in row.items() if k != "times"}
                print(turn, last, f"{statistics.median(row.get('times', [0])):.1f} ms", flush=True)
    if rank:
        return
    base = None
    for row in rows.values():
        if "failed" in row:
            continue
        row["ms"] = statistics.median(row.pop("times"))
        row["tokens_per_s_per_gpu"] = shape.seq * shape.batch / row["ms"] * 1e3
        base = base or row
        row["speedup"], row["memory"] = base["ms"] / row["ms"], row["peak_gib"] / base["peak_gib"]
        print("  ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if args.output:
        environment = describe_environment(device)
        environment["commit"] = os.environ.get("FLOAT8_COMMIT") or environment.pop("git_commit")
        write_results(args.output, {"environment": environment, "rows": list(rows.values())})


if __name__ == "__main__":
    main()
