"""Time a stack of Llama blocks, forward and backward: bf16 and float8, eager and compiled.

All variants run in one process, interleaved, on random data; medians of CUDA-event times; memory is
the peak over the resting state. Correctness comes first: the gradients of the input and of every
weight of each variant are compared with bf16's before anything is timed.

    python benchmarks/stack.py --shape 8b --blocks 4 -o results.json
"""

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.models.llama import Block, rope_table
from float8.models.presets import preset

SHAPES = {"8b": "llama3-8b", "70b": "llama3-70b"}
Step = Callable[[], list[Tensor]]


class Stack(nn.Module):
    """Llama blocks without embedding and head."""

    def __init__(self, blocks: int, shape: str, seq_len: int) -> None:
        super().__init__()
        config = replace(preset(SHAPES[shape]).model, n_layers=blocks)
        self.layers = nn.ModuleList(Block(config) for _ in range(blocks))
        cos, sin = rope_table(config.head_dim, seq_len, config.rope_theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


def build(args: argparse.Namespace) -> Stack:
    torch.manual_seed(0)
    with torch.device("cuda"):
        stack = Stack(args.blocks, args.shape, args.seq_len)
    cos, sin = stack.cos, stack.sin
    stack = stack.to(torch.bfloat16)
    stack.cos, stack.sin = cos, sin
    return stack


def make_step(name: str, stack: nn.Module, x: Tensor, grad: Tensor) -> Step:
    recipe, _, mode = name.partition("/")
    if recipe.startswith("torchao_"):
        from torchao import float8 as torchao_float8

        config = torchao_float8.Float8LinearConfig.from_recipe_name(recipe.split("_", 1)[1])
        torchao_float8.convert_to_float8_training(stack, config=config)
    elif recipe != "bf16":
        convert_to_float8_training(stack, config=Float8LinearConfig.from_recipe_name(recipe))
    if mode == "compiled":
        for layer in stack.layers:
            layer.compile(fullgraph=not recipe.startswith("torchao_"), dynamic=False)

    def step() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        stack(leaf).backward(grad)
        if recipe == "delayed":
            sync_float8_amax_and_scale_history(stack)
        gradients = [leaf.grad]
        for parameter in stack.parameters():
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    return step


def timed(step: Step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def sqnr(reference: Tensor, x: Tensor) -> float:
    noise = (reference.double() - x.double()).norm()
    return (20 * torch.log10(reference.double().norm() / noise)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--variants", nargs="*", default=[
        "bf16/eager", "bf16/compiled", "tensorwise/eager", "tensorwise/compiled",
        "delayed/eager", "delayed/compiled",
    ])  # fmt: skip
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()

    dim = preset(SHAPES[args.shape]).model.dim
    torch.manual_seed(1)
    x = torch.randn(1, args.seq_len, dim, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)

    steps: dict[str, Step] = {}
    rows: list[dict[str, Any]] = []
    reference = None
    for name in args.variants:
        steps[name] = make_step(name, build(args), x, grad)
        for _ in range(3):
            result = steps[name]()
        reference = result if reference is None else reference
        quality = min(map(sqnr, reference, result)) if result is not reference else float("inf")
        assert quality > 10, f"{name}: a gradient has an SQNR of only {quality:.1f} dB"
        del result
        torch.cuda.synchronize()
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[name]()
        peak = torch.cuda.max_memory_allocated() - resting
        rows.append({"variant": name, "sqnr_db": quality, "peak_gib": peak / 2**30})

    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(timed(step))
    base = {name: statistics.median(values) for name, values in times.items()}
    for row in rows:
        name = row["variant"]
        row["ms"] = base[name]
        in_same_mode = "bf16/" + name.partition("/")[2]
        row["speedup"] = base.get(in_same_mode, base[args.variants[0]]) / base[name]
        print(
            f"{name:<22} {row['ms']:8.2f} ms  x{row['speedup']:.3f} vs bf16  "
            f"{row['peak_gib']:6.2f} GiB  {row['sqnr_db']:5.1f} dB"
        )
    if args.output:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        args.output.write_text(json.dumps({
            "rows": rows,
            "environment": {
                "command": shlex.join(["python", *sys.argv]), "commit": commit.stdout.strip(),
                "torch": torch.__version__, "python": platform.python_version(),
                "device": torch.cuda.get_device_name(),
            },
        }, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
