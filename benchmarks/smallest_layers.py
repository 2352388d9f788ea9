"""Measures from which size on a linear layer gains, per recipe; writes the limits that fit.

    python benchmarks/smallest_layers.py measure --output h200-smallest-layers.json
    python benchmarks/smallest_layers.py fit benchmarks/results/h200-smallest-layers.json --write

`measure` takes GPU times of forward and backward: calls on different data, together larger than the
L2 cache, as one CUDA graph; medians of interleaved rounds, each result checked against bf16 first.
Eager mode goes over all sizes in an order by chance; compiled code, which takes seconds to make,
over those where eager mode decides nothing, from the closest on. Whenever the time is up, the file
has all that is done. `--tiny` tries it on a CPU.

`fit` chooses, for each recipe, the limits that cost the least: the sum over all measured layers of
how much slower each one becomes by what the limits decide for it, eager and compiled. With a file
of an H200 alone, the H100's are those of the same times with what the H100's slower memory adds to
casts, and none below those that were measured there before. `--write` puts both into
src/float8/convert/smallest.py and docs/measuring.md.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import math
import os
import random
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8 import sync_float8_amax_and_scale_history
from float8.convert.smallest import Smallest
from float8_lab.bench.linear import Layer
from float8_lab.bench.shapes import Shape
from float8_lab.bench.step import WARMUP, Row, check
from float8_lab.bench.timing import input_sets, kernel_sampler, take_turns
from float8_lab.bench.variants import (
    COMPILED,
    EAGER,
    HIGH_PRECISION,
    Variant,
    make_variants,
    many_compilations,
)
from float8_lab.trainer.environment import describe_environment

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "src" / "float8" / "convert" / "smallest.py"
PAGE = ROOT / "docs" / "measuring.md"

RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
AT_LEAST = 17.0  # dB of output and gradients against bf16
EAGER_SHARE = 0.5  # of the time
MOST_SETS = 16

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
FEATURES = (512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
PRODUCTS = 2e9, 1e11  # smaller layers lose under every recipe, larger ones gain


class Grid(NamedTuple):
    tokens: tuple[int, ...]
    features: tuple[int, ...]
    products: tuple[float, float]

    def shapes(self) -> list[Shape]:
        """In an order by chance, so that any first part is a fair sample."""
        least, most = self.products
        sizes = itertools.product(self.tokens, self.features, self.features)
        found = [Shape(*size) for size in sizes if least <= math.prod(size) <= most]
        random.Random(0).shuffle(found)
        return found


# ---------------------------------------------------------------- measure


def step(model: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()  # a new object: layers that read the same one share its cast
    output = model(x)
    grads = torch.autograd.grad(output, (x, model.linear.weight), grad)
    return {"output": output.detach(), "grad_input": grads[0], "grad_weight": grads[1]}


def measured(shape: Shape, variants: list[Variant], device: torch.device, rounds: int) -> list[Row]:
    """Rows of one shape; the first variant is bf16, all are of one mode."""
    M, K, N = shape
    sets = min(MOST_SETS, input_sets(2 * M * (K + N), device))
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    weight = make(N, K) * K**-0.5
    data = [(make(M, K), make(M, N)) for _ in range(sets)]
    reference: dict[str, Tensor] = {}
    qualities, samplers = {}, {}
    for variant in variants:
        model = variant.convert(Layer(weight))
        if variant.mode == COMPILED:
            model.compile(fullgraph=True, dynamic=False)
        for _ in range(WARMUP):
            step(model, *data[0])
        sync_float8_amax_and_scale_history(model)  # from here on delayed, if it is
        results = step(model, *data[0])
        reference = reference or results
        what = f"linear {shape} {variant.name}:"
        quality = check(what, reference, results, AT_LEAST)
        qualities[variant.recipe] = quality if math.isfinite(quality) else None
        del results
        calls = [functools.partial(step, model, *each) for each in data]
        samplers[variant.recipe] = kernel_sampler(calls, device, at_least_ms=1.0)
    times = take_turns(samplers, rounds)
    bf16 = times[HIGH_PRECISION]
    return [
        {
            "mode": variants[0].mode, "recipe": recipe, "M": M, "K": K, "N": N, "ms": ms,
            "speedup": bf16 / ms, "sqnr_db": qualities[recipe],
        }
        for recipe, ms in times.items()
    ]  # fmt: skip


def copy_tb_s(device: torch.device) -> float | None:
    """Bytes read and written per second by a copy on the device."""
    if device.type != "cuda":
        return None
    x = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    ms = take_turns({"copy": kernel_sampler([lambda: y.copy_(x)], device)}, 10)["copy"]
    return 2 * x.nbytes / ms / 1e9


def undecided(rows: Iterable[Row]) -> list[Shape]:
    """The shapes of these rows, from that on where the speedups of all recipes are closest to 1."""
    apart: dict[Shape, float] = {}
    for row in rows:
        shape = Shape(row["M"], row["K"], row["N"])
        apart[shape] = apart.get(shape, 0.0) + abs(math.log(row["speedup"]))
    return sorted(apart, key=lambda shape: apart[shape])


def groups(
    grid: Grid, recipes: list[str], device: torch.device, rounds: int, seconds: float
) -> Iterator[list[Row]]:
    """Rows of one shape after the other until the time is up."""
    began = time.monotonic()
    rows: list[Row] = []
    for mode, share in ((EAGER, EAGER_SHARE), (COMPILED, 1.0)):
        variants = make_variants(recipes, [mode])
        last = 0.0
        for shape in grid.shapes() if mode == EAGER else undecided(rows):
            start = time.monotonic()
            if start + last > began + share * seconds:
                break
            torch.compiler.reset()
            with many_compilations():
                new = measured(shape, variants, device, rounds)
            rows += new
            yield new
            gc.collect()  # models, graphs and their memory
            if device.type == "cuda":
                torch.cuda.empty_cache()
            last = time.monotonic() - start


def measure(args: argparse.Namespace) -> None:
    device = torch.device("cpu" if args.tiny else "cuda")
    grid, recipes = Grid(TOKENS, FEATURES, PRODUCTS), args.recipes.split(",")
    if args.tiny:
        grid = Grid((32, 128), (128, 256), (0, 1e12))
    torch.manual_seed(0)
    environment = describe_environment(device)
    environment["git_commit"] = os.environ.get("FLOAT8_COMMIT") or environment["git_commit"]
    copy = copy_tb_s(device)
    results: dict[str, Any] = {
        "benchmark": "smallest layers",
        "environment": environment,
        "settings": {"recipes": recipes, "seconds": args.seconds, "rounds": args.rounds},
        "copy_tb_s": copy,
        "rows": [],
    }
    print(f"{environment['device']}, torch {environment['torch']}, copy {copy} TB/s", flush=True)
    for new in groups(grid, recipes, device, args.rounds, args.seconds):
        results["rows"] += new
        speedups = "  ".join(f"{row['recipe']} {row['speedup']:.2f}" for row in new[1:])
        first = new[0]
        print(f"{first['mode']} {first['M']},{first['K']},{first['N']}: {speedups}", flush=True)
        part = args.output.with_suffix(".part")
        part.write_text(as_json(results))
        part.replace(args.output)


def as_json(results: dict[str, Any]) -> str:
    """One row in a line, numbers of six digits."""
    digits = {"parse_float": lambda text: float(f"{float(text):.6g}")}
    plain = json.loads(json.dumps(results), **digits)
    rows = ",\n  ".join(map(json.dumps, plain.pop("rows")))
    return f'{json.dumps(plain, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


# ---------------------------------------------------------------- fit

# What a recipe's casts read and write per element of input, weight and grad_output, with all
# layouts: 2 bytes to measure, where all is measured before the first byte is cast, 2 to cast, 1 for
# each layout. The weight is cast twice.
CAST_BYTES = {
    "tensorwise": (6, 8, 6),
    "delayed": (4, 6, 4),
    "rowwise": (6, 6, 6),
    "rowwise_with_gw_hp": (3, 8, 3),
    "blockwise": (4, 6, 4),
}
H100_COPY_TB_S = 3.02
H100_LEAST = Smallest(1024, 640, 32e9)
"""Limits of `tensorwise` that fit what was measured on an H100 (h100-linear-eager.json)."""


class Found(NamedTuple):
    """Limits, and what they decide."""

    limits: Smallest
    loss: float
    """Mean over all layers of how much more time they take than by the best choice."""

    right: float
    """Share of layers that take the least time."""

    worst: tuple[float, float]
    """Speedups of what is converted and loses most, and of what stays and would gain most."""


Cell = tuple[int, int, float, float]  # tokens, min(K, N), product, log of speedup


NO_LIMITS = Smallest(0, 0, 0.0)


def fit(cells: list[Cell], least: Smallest = NO_LIMITS) -> Found:
    """The limits of least loss, each of a measured layer; of several, those that convert more."""
    tokens, features = (sorted({c[i] for c in cells if c[i] >= least[i]}) for i in (0, 1))
    products = sorted({rounded(c[2]) for c in cells if rounded(c[2]) >= least.product})
    best: tuple[float, Smallest] | None = None
    for M, F in itertools.product(tokens, features):
        inside = sorted((c for c in cells if c[0] >= M and c[1] >= F), key=lambda c: c[2])
        left = sum(max(0.0, c[3]) for c in cells if c[0] < M or c[1] < F)
        # What converting all inside loses; then one after the other is left.
        loss = left + sum(max(0.0, -c[3]) for c in inside)
        done = 0
        for product in products:
            while done < len(inside) and inside[done][2] < product:
                loss += inside[done][3]
                done += 1
            if best is None or loss < best[0] - 1e-9:
                best = loss, Smallest(M, F, product)
    assert best is not None
    loss, limits = best
    taken, stay = [], []
    for M, F, product, gain in cells:
        large = all(a >= b for a, b in zip((M, F, product), limits, strict=True))
        (taken if large else stay).append(gain)
    right = sum(g >= 0 for g in taken) + sum(g <= 0 for g in stay)
    worst = math.exp(min([0.0, *taken])), math.exp(max([0.0, *stay]))
    return Found(limits, loss / len(cells), right / len(cells), worst)


def rounded(product: float) -> float:
    """Down to two digits."""
    size = 10 ** (math.floor(math.log10(product)) - 1)
    return float(math.floor(product / size) * size)


def cells_of(rows: list[Row], recipe: str, slower: float = 0.0) -> list[Cell]:
    """Those of one recipe, with `slower` ms per byte that casts move."""
    bf16 = {
        (r["mode"], r["M"], r["K"], r["N"]): r["ms"] for r in rows if r["recipe"] == HIGH_PRECISION
    }
    cells = []
    for row in rows:
        if row["recipe"] == recipe:
            M, K, N = row["M"], row["K"], row["N"]
            a, b, c = CAST_BYTES[recipe]
            ms = row["ms"] + slower * (a * M * K + b * K * N + c * M * N)
            gain = math.log(bf16[row["mode"], M, K, N] / ms)
            cells.append((M, min(K, N), float(M * K * N), gain))
    return cells


def fit_file(results: dict[str, Any]) -> dict[str, dict[str, Found]]:
    """Limits by GPU and recipe."""
    name = re.search(r"H\d+", results["environment"]["device"])
    if name is None or name[0] not in ("H100", "H200"):
        raise SystemExit(f"device: got {results['environment']['device']!r}, expected H100 or H200")
    rows = results["rows"]
    recipes = [r for r in CAST_BYTES if any(row["recipe"] == r for row in rows)]
    found = {name[0]: {recipe: fit(cells_of(rows, recipe)) for recipe in recipes}}
    if name[0] == "H200":
        slower = max(0.0, 1 / H100_COPY_TB_S - 1 / results["copy_tb_s"]) * 1e-9
        found["H100"] = {
            recipe: fit(
                cells_of(rows, recipe, slower),
                Smallest(*map(max, found["H200"][recipe].limits, H100_LEAST)),
            )
            for recipe in recipes
        }
    return dict(sorted(found.items()))


def measured_sizes(results: dict[str, Any]) -> tuple[int, int]:
    """How many sizes, in eager mode and compiled."""
    rows = [row for row in results["rows"] if row["recipe"] == HIGH_PRECISION]
    return sum(row["mode"] == EAGER for row in rows), sum(row["mode"] == COMPILED for row in rows)


def table(found: dict[str, dict[str, Found]], results: dict[str, Any], name: str) -> str:
    """The table as code, with where it comes from."""
    eager, compiled = measured_sizes(results)
    every = [each for recipes in found.values() for each in recipes.values()]
    right, loss = min(each.right for each in every), max(each.loss for each in every)
    lines = [
        f"# Fitted to {eager} sizes in eager mode and {compiled} compiled ({name}).",
        f"# Of each recipe, {right:.0%} or more are judged rightly; the others cost {loss:.1%} of",
        "# the time of all, or less. An H100 that was not measured: with its slower memory, and no",
        "# lower than what was measured there before (h100-linear-eager.json).",
        "SMALLEST = {",
    ]
    for gpu, recipes in found.items():
        lines.append(f'    "{gpu}": {{')
        for recipe, each in recipes.items():
            M, F, product = each.limits
            lines.append(f'        "{recipe}": Smallest({M}, {F}, {product / 1e9:g}e9),')
        lines.append("    },")
    return "\n".join([*lines, "}"])


def page(found: dict[str, dict[str, Found]], results: dict[str, Any], name: str) -> str:
    """The same for readers."""
    eager, compiled = measured_sizes(results)
    heads = ["GPU", "recipe", "tokens per forward", "K and N", "tokens x K x N"]
    cells = [
        [gpu, recipe, str(e.limits.tokens), str(e.limits.features), f"{e.limits.product / 1e9:g}e9"]
        for gpu, recipes in found.items()
        for recipe, e in recipes.items()
    ]
    lines = [heads, ["---"] * len(heads), *cells]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"{rows}\n\nFitted to the GPU time of {eager} sizes in eager mode and {compiled} compiled, "
        f"on one {results['environment']['device']}\n([{name}](../benchmarks/results/{name})).\n"
        f"An H100 was not measured: its slower memory is reckoned in, and no limit is below those\n"
        "measured before ([h100-linear-eager.json](../benchmarks/results/h100-linear-eager.json))."
    )


def replaced(path: Path, begin: str, end: str, text: str) -> None:
    """Write `text` between two lines of a file."""
    before, found, rest = path.read_text().partition(begin + "\n")
    _, found_end, after = rest.partition(end + "\n")
    if not found or not found_end:
        raise SystemExit(f"{path.name}: expected the lines {begin!r} and {end!r}")
    path.write_text(f"{before}{begin}\n{text}\n{end}\n{after}")


def report(args: argparse.Namespace) -> None:
    results = json.loads(args.results.read_text())
    found = fit_file(results)
    rows, name = results["rows"], args.results.name
    eager, compiled = measured_sizes(results)
    print(f"{results['environment']['device']}: {eager} sizes eager, {compiled} compiled")
    for gpu, recipes in found.items():
        for recipe, each in recipes.items():
            (lost, missed), limits = each.worst, each.limits
            print(
                f"{gpu} {recipe}: {tuple(limits)}: {each.right:.0%} right, {each.loss:.2%} lost; "
                f"converted from {lost:.2f} on, left up to {missed:.2f}"
            )
    for mode in (EAGER, COMPILED):
        for recipe in next(iter(found.values())):
            cells = cells_of([row for row in rows if row["mode"] == mode], recipe)
            if cells:
                limits = fit(cells).limits
                print(f"{mode} alone, {recipe}: {tuple(limits)}")
    code = table(found, results, name)
    print(code)
    if args.write:
        begin, end = "# begin: written by benchmarks/smallest_layers.py", "# end"
        replaced(TABLE, begin, end, code)
        begin = "<!-- limits: written by benchmarks/smallest_layers.py -->"
        replaced(PAGE, begin, "<!-- end of limits -->", f"\n{page(found, results, name)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    one.add_argument("--output", type=Path, required=True)
    one.add_argument("--recipes", default=",".join(RECIPES), help="besides bf16")
    one.add_argument("--seconds", type=float, default=280.0)
    one.add_argument("--rounds", type=int, default=8)
    one.add_argument("--tiny", action="store_true", help="a few small sizes on a CPU")
    one.set_defaults(run=measure)
    two = commands.add_parser("fit")
    two.add_argument("results", type=Path)
    two.add_argument("--write", action="store_true", help="into the library and its page")
    two.set_defaults(run=report)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
