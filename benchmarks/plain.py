"""Plain models that only called `convert_to_float8_training`, beside bf16 and torchao.

    python benchmarks/plain.py --what stack,small,linear,cast --output results/plain.json

Nothing here calls the fused functions: the model is written as its users would write it. Every
variant is checked against bf16 before it is timed; times are medians of interleaved rounds.
"""

from __future__ import annotations

# ruff: noqa: E501
import argparse
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
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


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(s.dim, eps=1e-5), nn.RMSNorm(s.dim, eps=1e-5)
        self.attention = Attention(s)
        self.w1 = nn.Linear(s.dim, s.ffn, bias=False)
        self.w3 = nn.Linear(s.dim, s.ffn, bias=False)
        self.w2 = nn.Linear(s.ffn, s.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.blocks))
        head = s.dim // s.heads
        inverse = 500_000.0 ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
        angle = torch.outer(torch.arange(s.seq, dtype=torch.float32), inverse)[:, None, :]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
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


def convert(model: nn.Module, recipe: str, every_layer: bool) -> nn.Module:
    """Convert as a user would; `every_layer` takes those too that float8 makes slower."""
    name, _, library = recipe.partition("@")
    take = (lambda mod, fqn: True) if every_layer else None
    if name == "bf16":
        return model
    if library == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(name)
        return convert_to_float8_training(model, config=config, module_filter_fn=take)
    config = float8.Float8LinearConfig.from_recipe_name(name)
    return float8.convert_to_float8_training(model, config=config, module_filter_fn=take)


class Step:
    """Forward and backward of one variant on fixed random data."""

    def __init__(
        self, make: Callable[[], nn.Module], shape: tuple[int, ...], recipe: str, mode: str,
        every_layer: bool, device: torch.device,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.model = convert(make(), recipe, every_layer)
        if mode == "compiled":  # each block by itself, as trainers do: they share one compilation
            for part in getattr(self.model, "blocks", [self.model]):
                part.compile(fullgraph=True, dynamic=False)
        generator = torch.Generator(device).manual_seed(1)
        options = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        self.data = torch.randn(shape, **options)
        with torch.no_grad():
            out = self.model(self.data)
        self.grad = torch.randn(out.shape, **options)

    def __call__(self) -> dict[str, Tensor]:
        x = self.data.detach().requires_grad_()
        self.model(x).backward(self.grad)
        float8.sync_float8_amax_and_scale_history(self.model)
        grads = {"input": x.grad}
        for name, parameter in self.model.named_parameters():
            grads[name], parameter.grad = parameter.grad, None
        return grads


def sqnr(a: Tensor, b: Tensor) -> float:
    signal = noise = 0.0
    for x, y in zip(a.detach().chunk(8), b.detach().chunk(8), strict=True):
        x, y = x.double(), y.double()
        signal, noise = signal + x.square().sum(), noise + (x - y).square().sum()
    return float(10 * torch.log10(signal / noise))


def timed(
    steps: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Median milliseconds of each, in interleaved rounds; a lead-in hides the first launch."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                step()
                start.record()
                step()
                end.record()
                end.synchronize()
                ms = start.elapsed_time(end)
            else:
                begin = time.perf_counter()
                step()
                ms = (time.perf_counter() - begin) * 1e3
            if turn >= 2:
                times[name].append(ms)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_gib(step: Callable[[], object], device: torch.device) -> float | None:
    """Peak of one step, what was allocated before it subtracted, its own model included again."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    model = sum(p.nbytes for p in step.model.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before + model) / 2**30


def compare(
    what: str, make: Callable[[], nn.Module], shape: tuple[int, ...], variants: list[tuple[str, str]],
    device: torch.device, rounds: int, every_layer: bool = False, at_least: float = 7.0,
) -> list[Row]:  # fmt: skip
    steps: dict[str, Step] = {}
    rows: list[Row] = []
    reference: dict[str, Tensor] | None = None
    for recipe, mode in variants:
        torch._dynamo.reset()
        step = Step(make, shape, recipe, mode, every_layer, device)
        for _ in range(3):
            grads = step()
        if reference is None:
            reference, quality = grads, float("inf")
        else:
            quality = min(sqnr(reference[k], g) for k, g in grads.items())
            assert quality >= at_least, f"{what} {recipe} {mode}: {quality:.1f} dB"
        del grads
        rows.append(
            {
                "what": what,
                "recipe": recipe,
                "mode": mode,
                "sqnr_db": round(quality, 1) if quality < 999 else None,
                "peak_gib": peak_gib(step, device),
            }
        )
        steps[f"{recipe} {mode}"] = step
    times = timed(steps, rounds, device)
    for row in rows:
        row["ms"] = times[f"{row['recipe']} {row['mode']}"]
    for row in rows:
        for base in rows:
            if base["recipe"] == "bf16" and base["mode"] == row["mode"]:
                row["speedup"] = base["ms"] / row["ms"]
                if row["peak_gib"]:
                    row["memory"] = row["peak_gib"] / base["peak_gib"]
    return rows


def issue_cast(device: torch.device) -> list[Row]:
    """CPU microseconds per cast: 100 casts of small tensors in one compiled function."""
    xs = [torch.randn(256, 256, device=device, dtype=torch.bfloat16) for _ in range(100)]
    scale = torch.tensor(0.01, device=device)
    from float8 import kernels

    def casts(xs: list[Tensor]) -> list[Any]:
        return [kernels.cast(x, scale, torch.float8_e4m3fn, row=True, col=True) for x in xs]

    fn = torch.compile(casts, fullgraph=True, dynamic=False)
    fn(xs)
    samples = []
    for _ in range(20):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        fn(xs)
        samples.append((time.perf_counter() - begin) * 1e6 / len(xs))
    return [
        {
            "what": "compiled cast",
            "recipe": "-",
            "mode": "compiled",
            "us": statistics.median(samples),
        }
    ]


def profile(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    recipe: str,
    mode: str,
    device: torch.device,
) -> None:
    torch._dynamo.reset()
    step = Step(make, shape, recipe, mode, False, device)
    for _ in range(3):
        step()
    with torch.profiler.profile() as prof:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total = totals.setdefault(event.name[:110], [0, 0.0])
            total[0] += 1
            total[1] += event.device_time
    print(f"--- {recipe} {mode}: kernels by time, us per step")
    for name, (count, us) in sorted(totals.items(), key=lambda kv: -kv[1][1])[:45]:
        print(f"{us / 2:10.0f} {count / 2:6.0f}  {name}")


def environment() -> dict[str, Any]:
    commit = (
        os.environ.get("FLOAT8_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "command": "python " + " ".join(sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", default="stack,small,linear,cast")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--torchao", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model for a laptop")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.config.recompile_limit = 256
    peers = ["tensorwise@torchao"] if args.torchao else []
    rows: list[Row] = []

    def llama(name: str) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
        s = SHAPES["tiny" if args.tiny else name]
        return (lambda: plain_llama(s, device)), (s.batch, s.seq, s.dim)

    both = [(r, m) for m in ("compiled", "eager") for r in ("bf16", "tensorwise", "delayed")]
    for what in args.what.split(","):
        if what == "stack":
            variants = [*both, *((p, "compiled") for p in peers)]
            rows += compare("8B stack", *llama("8b"), variants, device, args.rounds)
        elif what in ("70b", "1b"):
            variants = [*both, *((p, "compiled") for p in peers)]
            rows += compare(f"{what} stack", *llama(what), variants, device, args.rounds)
        elif what == "small":
            variants = [(r, "compiled") for r in ("bf16", "tensorwise", "delayed", *peers)]
            rows += compare(
                "150m, every layer", *llama("150m"), variants, device, args.rounds, True
            )
        elif what == "linear":
            make = functools.partial(
                nn.Linear, 4096, 4096, bias=False, device=device, dtype=torch.bfloat16
            )
            variants = [(r, "compiled") for r in ("bf16", "tensorwise", "delayed", *peers)]
            rows += compare(
                "linear 8192,4096,4096", make, (8192, 4096), variants, device, args.rounds, True
            )
        elif what == "cast":
            rows += issue_cast(device)
        elif what == "profile":
            profile(*llama("8b"), "tensorwise", "compiled", device)
            profile(*llama("8b"), "bf16", "compiled", device)
            if args.torchao:
                profile(*llama("8b"), "tensorwise@torchao", "compiled", device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for row in rows:
            if not row.get("printed"):
                row["printed"] = True
                print(
                    "  ".join(
                        f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}"
                        for k, v in row.items()
                        if k != "printed"
                    ),
                    flush=True,
                )
    for row in rows:
        row.pop("printed", None)
    if args.output:
        args.output.write_text(
            json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
