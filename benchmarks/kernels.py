"""Checks the Triton kernels bitwise against their twins, then times them against a device copy.

    python benchmarks/kernels.py [-o results.json] [--sweep] [--check-only]

Times are those of the GPU: each case is a CUDA graph of one call per input set, the sets together
several times the L2 cache; cases take turns, and medians are reported. GB/s counts what a call has
to read and write once; `of copy` is its share of the bandwidth of a device copy of the same input.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.kernels._device import sm_count
from float8.kernels._tiles import tile_launch
from float8.kernels.amax import (
    AmaxLaunch,
    amax_reference,
    amax_triton,
    collapse,
    launch_amax,
)
from float8.kernels.amax import launch_config as amax_config
from float8.kernels.cast import cast_reference, cast_triton, launch_cast
from float8.kernels.cast import launch_config as cast_config
from float8.kernels.transpose import launch_config as transpose_config
from float8.kernels.transpose import launch_transpose, transpose_reference, transpose_triton

SHAPES = [(8192, 4096), (8192, 14336), (28672, 8192)]
TILES = [
    (block_r, block_c, num_warps)
    for block_r in (64, 128, 256)
    for block_c in (64, 128, 256)
    for num_warps in (4, 8, 16)
    if 32 <= block_r * block_c // (32 * num_warps) <= 128
]
CHECKED_SHAPES = [(1, 1), (17, 33), (130, 7), (1000, 1048), (4096, 4096)]
USED_TILES = [(128, 128, 8), (64, 64, 8), (64, 64, 4), (32, 64, 4), (32, 256, 4), (16, 128, 2)]
PAIRS = [
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e5m2),
    (torch.float16, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e5m2),
]
DEVICE = "cuda"
L2_BYTES = 50 * 2**20


# --- Correctness -----------------------------------------------------------------------------


def awkward(shape: tuple[int, int], source: torch.dtype) -> Tensor:
    """Many magnitudes, with NaN, Inf, zeros of both signs and subnormals strewn in."""
    x = (torch.randn(shape, device=DEVICE) * torch.randn(shape, device=DEVICE).mul(5).exp()).to(
        source
    )
    tiny = torch.finfo(source).smallest_normal / 4
    for i, value in enumerate([float("nan"), float("inf"), -float("inf"), -0.0, tiny, -tiny]):
        x.view(-1)[i * 5 :: 173] = value
    return x


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype.itemsize == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a.cpu(), b.cpu())


def check(tiles: list[tuple[int, int, int]]) -> int:
    """Return how many comparisons were made; exit at the first difference."""
    count = 0

    def agree(what: str, got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> None:
        nonlocal count
        count += 1
        if not all(same(a, b) for a, b in zip(got, want, strict=True)):
            sys.exit(f"WRONG: {what}")

    scale = torch.tensor(0.0371, device=DEVICE)
    for shape in CHECKED_SHAPES:
        for source, dtype in PAIRS:
            x = awkward(shape, source)
            for y in (x, x.t(), x[:, ::2], x[:1].expand(40, -1)):
                kind = f"{source} {tuple(y.shape)} {y.stride()}"
                for row, col, pad_rows in (
                    (True, True, True),
                    (True, False, False),
                    (False, True, False),
                ):
                    flags = {"row": row, "col": col, "pad_rows": pad_rows}
                    twin = cast_reference(y, scale, dtype, **flags)
                    agree(
                        f"cast {kind} {dtype} {flags}", cast_triton(y, scale, dtype, **flags), twin
                    )
                if y.isnan().any():
                    agree(f"amax {kind}", (amax_triton(y).isnan(),), (torch.tensor(True),))
                finite = y.nan_to_num(1.0, 2.0, -2.0)
                agree(f"amax {kind}", (amax_triton(finite),), (amax_reference(finite),))
        data = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
        for part in (data, data.t(), data[:, ::2]):
            agree("transpose", (transpose_triton(part),), (transpose_reference(part),))
    for R, C in ((1024, 1024), (1000, 1050)):  # even, and with masks
        for source, dtype in PAIRS:
            x = awkward((R, C), source)
            twin = cast_reference(x, scale, dtype, row=True, col=True)
            for tile in tiles:
                config = tile_launch(R, C, *tile)
                out = launch_cast(x, scale, dtype, True, True, False, config)
                agree(f"cast {source} {dtype} {config}", out, twin)
            x = x.nan_to_num(1.0, 2.0, -2.0)
            for steps in (1, 2, 8):
                config = AmaxLaunch(1, 4096, steps, 8, -(-R * C // (4096 * steps)))
                got = launch_amax(x, collapse(x.shape, x.stride()), config)
                agree(f"amax {source} {config}", (got,), (amax_reference(x),))
        data = torch.randint(0, 256, (R, C), dtype=torch.uint8, device=DEVICE)
        for tile in tiles:
            config = tile_launch(R, C, *tile)
            out = launch_transpose(data, config)
            agree(f"transpose {config}", (out,), (transpose_reference(data),))
    return count


# --- Time ------------------------------------------------------------------------------------


@functools.cache
def graph_pool() -> Any:
    return torch.cuda.graph_pool_handle()


class Case:
    """One function over several input sets, as a CUDA graph."""

    def __init__(self, name: str, bytes_per_call: int, calls: list[Callable[[], object]]) -> None:
        self.name, self.bytes, self.calls = name, bytes_per_call, len(calls)
        for call in calls:
            call()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=graph_pool()):
            results = [call() for call in calls]  # all alive, so none reuses another's memory
        del results  # the next case's may
        self.us: list[float] = []

    def sample(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.us.append(start.elapsed_time(end) * 1e3 / self.calls)

    @property
    def median(self) -> float:
        return statistics.median(self.us)


def take_turns(cases: list[Case], rounds: int) -> None:
    for n in range(rounds + 3):
        for case in cases:
            case.sample()
            if n < 3:  # warm-up
                case.us.clear()


def inputs(shape: tuple[int, int]) -> list[Tensor]:
    sets = max(3, -(-4 * L2_BYTES // (shape[0] * shape[1] * 2)))
    return [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(sets)]


def each(function: Callable[..., object], items: list[Any]) -> list[Callable[[], object]]:
    return [lambda item=item: function(item) for item in items]


def cases_of(shape: tuple[int, int]) -> list[Case]:
    """The kernels as the library calls them, the copy first."""
    xs = inputs(shape)
    n = shape[0] * shape[1]
    scale = torch.tensor(0.01, device=DEVICE)
    e4m3 = torch.float8_e4m3fn
    data = [cast_triton(x, scale, e4m3, row=True, col=False)[0] for x in xs]
    targets = [torch.empty_like(x) for x in xs[:2]]

    def cast(x: Tensor, **flags: bool) -> object:
        return kernels.cast(x, scale, e4m3, **flags)

    def both(x: Tensor) -> object:
        return kernels.amax(x), cast(x, row=True, col=True)

    return [
        Case("copy", 4 * n, each(lambda i: targets[i % 2].copy_(xs[i]), list(range(len(xs))))),
        Case("amax", 2 * n, each(kernels.amax, xs)),
        Case("amax of x.t()", 2 * n, each(kernels.amax, [x.t() for x in xs])),
        Case("cast row+col", 4 * n, each(lambda x: cast(x, row=True, col=True), xs)),
        Case("cast row+col of x.t()", 4 * n, each(lambda x: cast(x.t(), row=True, col=True), xs)),
        Case("cast row", 3 * n, each(lambda x: cast(x, row=True, col=False), xs)),
        Case("cast col", 3 * n, each(lambda x: cast(x, row=False, col=True), xs)),
        Case("amax, cast row+col", 6 * n, each(both, xs)),
        Case("transpose", 2 * n, each(kernels.transpose_bytes, data)),
        Case("x.abs().max() in torch", 2 * n, each(lambda x: x.abs().max(), xs)),
    ]


def sweep_cases(shape: tuple[int, int]) -> list[Case]:
    """Launch configurations of the cast to both layouts, of the transpose, and of amax."""
    xs, (R, C) = inputs(shape), shape
    n = R * C
    scale = torch.tensor(0.01, device=DEVICE)
    e4m3 = torch.float8_e4m3fn
    targets = [torch.empty_like(x) for x in xs[:2]]
    copies = each(lambda i: targets[i % 2].copy_(xs[i]), list(range(len(xs))))
    cases = [Case("copy", 4 * n, copies)]
    data = [x.view(torch.uint8)[:, :C].contiguous() for x in xs]
    for tile in TILES:
        for group in (1, 8, 32):
            config = tile_launch(R, C, *tile, group=group)
            name = f"{tile[0]} x {tile[1]}, {tile[2]} warps, group {group}"

            def cast(x: Tensor, config: Any = config) -> object:
                return launch_cast(x, scale, e4m3, True, True, False, config)

            cases.append(Case(f"cast {name}", 4 * n, each(cast, xs)))
            if group == 8:

                def transpose(x: Tensor, config: Any = config) -> object:
                    return launch_transpose(x, config)

                cases.append(Case(f"transpose {name}", 2 * n, each(transpose, data)))
    for block in (4096, 8192, 16384):
        for warps in (4, 8, 16):
            for steps in (1, 4, 8, 16):
                launch = AmaxLaunch(1, block, steps, warps, -(-n // (block * steps)))

                def measure(x: Tensor, launch: AmaxLaunch = launch) -> object:
                    return launch_amax(x, ((n, 1),), launch)

                name = f"amax block {block}, {warps} warps, {steps} steps"
                cases.append(Case(name, 2 * n, each(measure, xs)))
    return cases


def report(shape: tuple[int, int], cases: list[Case]) -> list[dict[str, Any]]:
    copy = cases[0].bytes / cases[0].median
    rows = []
    print(f"\n{shape}, bfloat16{'':24}{'µs':>9}{'GB/s':>8}{'of copy':>9}")
    for case in cases:
        rate = case.bytes / case.median
        print(f"  {case.name:40}{case.median:9.1f}{rate / 1e3:8.0f}{rate / copy:9.1%}")
        rows.append(
            {
                "shape": list(shape),
                "case": case.name,
                "us": round(case.median, 2),
                "gb_per_s": round(rate / 1e3, 1),
                "of_copy": round(rate / copy, 4),
            }
        )
    return rows


def host_overhead() -> dict[str, float]:
    """µs of the calling thread per eager call, on a tensor too small to matter."""
    x = torch.randn(16, 16, dtype=torch.bfloat16, device=DEVICE)
    scale = torch.ones((), device=DEVICE)
    data = torch.zeros(16, 16, dtype=torch.uint8, device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "x.abs() in torch": x.abs,
        "amax": lambda: kernels.amax(x),
        "cast row+col": lambda: kernels.cast(x, scale, torch.float8_e4m3fn, row=True, col=True),
        "transpose": lambda: kernels.transpose_bytes(data),
    }
    result = {}
    print("\nhost µs per eager call")
    for name, call in calls.items():
        samples = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            samples.append((time.perf_counter() - start) * 1e4)
        result[name] = round(statistics.median(samples), 2)
        print(f"  {name:40}{result[name]:9.1f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write the results as JSON")
    parser.add_argument("--rounds", type=int, default=30, help="samples per case")
    parser.add_argument("--sweep", action="store_true", help="time many launch configurations")
    parser.add_argument("--check-only", action="store_true", help="stop before timing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA GPU")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    count = check([*USED_TILES, *TILES] if args.sweep else USED_TILES)
    print(f"{count} comparisons with the plain-torch twins: bitwise equal")
    if args.check_only:
        return
    rows = []
    for shape in SHAPES:
        sms = sm_count(torch.device("cuda", torch.cuda.current_device()))
        print(cast_config(*shape, across=True, sms=sms))
        print(transpose_config(*shape, sms=sms))
        print(amax_config(((shape[0] * shape[1], 1),), 2, sms))
        cases = sweep_cases(shape) if args.sweep else cases_of(shape)
        take_turns(cases, args.rounds)
        rows += report(shape, cases)
        del cases
        torch.cuda.empty_cache()
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "comparisons": count,
        "rows": rows,
        "host_us": host_overhead(),
    }
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
