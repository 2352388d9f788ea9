"""Plain models that only called `convert_to_float8_training`, beside bf16 and torchao.

    python benchmarks/plain.py --what stack,small,linear,cast --fuse --output results/plain.json

Nothing here calls the fused functions: the model is written as its users would write it; `--fuse`
also measures what `convert_to_float8_training(fuse=True)` makes of it. Every variant is checked
against bf16 before it is timed; times are medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8
from float8 import kernels
from float8_lab.bench.linear import Layer
from float8_lab.bench.step import WARMUP, Row, Step, compare
from float8_lab.bench.timing import issue_microseconds, steady_sampler
from float8_lab.bench.variants import COMPILED, EAGER, Variant, many_compilations, recipe_config
from float8_lab.trainer.environment import describe_environment

AT_LEAST = 7.0  # dB of output and gradients against bf16
BF16 = torch.bfloat16
Make = Callable[[], nn.Module]


class Shape(NamedTuple):
    """A Llama without embedding and head."""

    blocks: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    batch: int = 1


SHAPES = {
    "8b": Shape(blocks=4, dim=4096, heads=32, kv_heads=8, ffn=14336, seq=8192),
    "70b": Shape(blocks=1, dim=8192, heads=64, kv_heads=8, ffn=28672, seq=8192),
    "1b": Shape(blocks=8, dim=2048, heads=16, kv_heads=8, ffn=8192, seq=8192),
    "150m": Shape(blocks=12, dim=1024, heads=16, kv_heads=8, ffn=3072, seq=2048, batch=4),
    "tiny": Shape(blocks=2, dim=64, heads=4, kv_heads=2, ffn=96, seq=32),
}


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.head = s.dim // s.heads
        self.wq = nn.Linear(s.dim, s.heads * self.head, bias=False)
        self.wk = nn.Linear(s.dim, s.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(s.dim, s.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(s.heads * self.head, s.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(s.dim, s.ffn, bias=False)
        self.w3 = nn.Linear(s.dim, s.ffn, bias=False)
        self.w2 = nn.Linear(s.ffn, s.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(s.dim, eps=1e-5), nn.RMSNorm(s.dim, eps=1e-5)
        self.attention, self.feed_forward = Attention(s), FeedForward(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(s) for _ in range(s.blocks))
        head = s.dim // s.heads
        inverse = 500_000.0 ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
        angle = torch.outer(torch.arange(s.seq, dtype=torch.float32), inverse)[:, None, :]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return x


def plain_llama(s: Shape, device: torch.device) -> Llama:
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(s)
        for p in model.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
    cos, sin = model.cos, model.sin
    model = model.to(torch.bfloat16)
    model.cos, model.sin = cos, sin
    return model


def plain_variant(recipe: str, mode: str, every_layer: bool) -> Variant:
    """Converted as a user would; `every_layer` takes those too that float8 makes slower.

    `recipe` may end with `@torchao`, or with `@fused`: ours with `fuse=True`.
    """
    name, _, how = recipe.partition("@")
    if name == "bf16":
        return Variant(recipe, mode)
    take = float8.all_linears if every_layer else None
    if how == "torchao":
        import torchao.float8 as torchao

        config = torchao.Float8LinearConfig.from_recipe_name(name)
        convert = torchao.convert_to_float8_training
        return Variant(
            recipe, mode, functools.partial(convert, config=config, module_filter_fn=take)
        )
    config = recipe_config(name)
    arguments: dict[str, Any] = {"config": config, "module_filter_fn": take}
    if how == "fused":
        arguments["fuse"] = True
    convert = functools.partial(float8.convert_to_float8_training, **arguments)
    return Variant(recipe, mode, convert, config=config)


def plain_step(
    variant: Variant,
    make: Make,
    shape: tuple[int, ...],
    device: torch.device,
    microbatches: int = 1,
) -> Step:
    """Forward and backward on the same random data at every call; input and output of one shape."""
    torch.manual_seed(0)
    model = make()
    generator = torch.Generator(device).manual_seed(1)
    data = torch.randn((2, *shape), device=device, dtype=BF16, generator=generator)
    return Step(variant, model, data[0], data[1], microbatches=microbatches, sync=True)


def compared(
    what: str,
    make: Make,
    shape: tuple[int, ...],
    variants: list[tuple[str, str]],
    device: torch.device,
    rounds: int,
    every_layer: bool = False,
    microbatches: int = 1,
) -> list[Row]:
    """Rows of all variants; their memory is the peak of a step, with their own model.

    A step casts held weights once: `refresh_ms` of its time, less with several microbatches.
    """

    def size(step: Step) -> Row:
        held = [y.held.operand for y in step.model.modules() if getattr(y, "held", None)]
        parts = [part.data.nbytes for each in held for part in (each.row, each.col) if part]
        row: Row = {"model_gib": sum(p.nbytes for p in step.model.parameters()) / 2**30}
        if held:
            row["held_gib"] = sum(parts) / 2**30
            refresh = functools.partial(float8.update_float8_weights, step.model)
            row["refresh_ms"] = steady_sampler(refresh, device)()
        return row

    made = (plain_variant(recipe, mode, every_layer) for recipe, mode in variants)
    steps = (plain_step(variant, make, shape, device, microbatches) for variant in made)
    *_, rows = compare(what, steps, device, rounds, at_least=AT_LEAST, measure=size)
    bf16 = {}
    for row in rows:
        own = row.pop("model_gib")
        row["sqnr_db"] = round(row["sqnr_db"], 1) if row["sqnr_db"] < 999 else None
        if row["peak_gib"] is not None:
            row["peak_gib"] += own + row.get("held_gib", 0.0)
            row["memory"] = row["peak_gib"] / bf16.setdefault(row["mode"], row["peak_gib"])
    return [{"what": what, **row} for row in rows]


def issue_cast(device: torch.device) -> list[Row]:
    """CPU microseconds per cast: 100 casts of small tensors in one compiled function."""
    xs = [torch.randn(256, 256, device=device, dtype=BF16) for _ in range(100)]
    scale = torch.tensor(0.01, device=device)

    def casts(xs: list[Tensor]) -> list[Any]:
        return [kernels.cast(x, scale, torch.float8_e4m3fn, row=True, col=True) for x in xs]

    call = functools.partial(torch.compile(casts, fullgraph=True, dynamic=False), xs)
    us = issue_microseconds(call, device, calls=1, samples=20) / len(xs)
    return [{"what": "compiled cast", "recipe": "-", "mode": COMPILED, "us": us}]


def profile(make: Make, shape: tuple[int, ...], recipe: str, device: torch.device) -> None:
    """Print the compiled kernels of two steps by time."""
    step = plain_step(plain_variant(recipe, COMPILED, False), make, shape, device)
    for _ in range(WARMUP):
        step()
    with torch.profiler.profile() as profiled:
        for _ in range(2):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profiled.key_averages().table(sort_by=by, row_limit=45, max_name_column_width=110)
    print(f"--- {recipe} compiled: two steps\n{table}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", default="stack,small,linear,cast")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--recipes", default="tensorwise,delayed", help="besides bf16")
    parser.add_argument(
        "--torchao", nargs="?", const="tensorwise", default="", help="its recipes to measure, too"
    )
    parser.add_argument("--fuse", action="store_true", help="the recipes with fuse=True, too")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step of a stack")
    parser.add_argument("--compiled", action="store_true", help="no stacks in eager mode")
    parser.add_argument("--tiny", action="store_true", help="a model for a laptop")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peers = [f"{name}@torchao" for name in args.torchao.split(",") if name]
    recipes = ["bf16", *args.recipes.split(",")]
    if args.fuse:
        recipes += [f"{name}@fused" for name in recipes[1:]]
    compiled = [(recipe, COMPILED) for recipe in [*recipes, *peers]]
    eager = [(recipe, EAGER) for recipe in recipes]
    both = compiled if args.compiled else [*compiled, *eager]
    rows: list[Row] = []

    def llama(name: str) -> tuple[Make, tuple[int, ...]]:
        s = SHAPES["tiny" if args.tiny else name]
        return (lambda: plain_llama(s, device)), (s.batch, s.seq, s.dim)

    def linear() -> nn.Module:
        return Layer(torch.randn(4096, 4096, device=device, dtype=BF16) * 4096**-0.5)

    def measured(what: str) -> list[Row]:
        if what in ("stack", "70b", "1b"):
            name = "8b" if what == "stack" else what
            title = f"{'tiny' if args.tiny else '8B' if what == 'stack' else what} stack"
            if (many := args.microbatches) > 1:
                title += f", {many} microbatches"
            return compared(title, *llama(name), both, device, args.rounds, microbatches=many)
        if what == "small":
            title = f"{'tiny' if args.tiny else '150m'}, every layer"
            return compared(title, *llama("150m"), compiled, device, args.rounds, True)
        if what == "linear":
            title = "linear 8192,4096,4096"
            alone = [each for each in compiled if not each[0].endswith("@fused")]
            return compared(title, linear, (8192, 4096), alone, device, args.rounds, True)
        if what == "cast":
            return issue_cast(device)
        for recipe in [*recipes, *peers]:  # profile
            profile(*llama("8b"), recipe, device)
        return []

    known = ("stack", "70b", "1b", "small", "linear", "cast", "profile")
    wanted = args.what.split(",")
    if unknown := [what for what in wanted if what not in known]:
        raise SystemExit(f"--what: got {unknown[0]!r}, expected some of {', '.join(known)}")
    for what in wanted:
        torch._dynamo.reset()
        with many_compilations():
            new = measured(what)
        rows += new
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for row in new:
            cells = (f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
            print("  ".join(cells), flush=True)
    if args.output:
        environment = describe_environment(device)
        commit = os.environ.get("FLOAT8_COMMIT") or environment.pop("git_commit")
        results = {"environment": {**environment, "commit": commit}, "rows": rows}
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
