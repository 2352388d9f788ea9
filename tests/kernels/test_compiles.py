"""Kernels compile for Hopper and Blackwell, and spill nothing but where `MAY_SPILL` says so.

Without a GPU: ops run on tensors without memory, and each launch compiles its kernel instead.
"""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from float8.config import ScalingGranularity
from float8.formats import ceil16
from float8.fsdp import foreach_cast
from float8.kernels.dequantize import dequantised_triton
from float8.kernels.runtime import ops, private
from float8.kernels.runtime.launch import Launch
from float8.kernels.runtime.triton import GluonDescriptor, TensorDescriptor
from float8.scales import Operand

triton = pytest.importorskip("triton")
GluonASTSource = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the GPU tests compile the kernels for the GPU there is"
)

BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
POINTERS = {BF16: "*bf16", FP32: "*fp32", E4M3: "*fp8e4nv", E5M2: "*fp8e5"}
POINTERS |= {torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}


def empty(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def source(kernel: Any, values: Sequence[Any]) -> Any:
    """What Triton compiles for a launch on these."""
    signature, constants, attributes = {}, {}, {}
    for at, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        aligned = isinstance(value, Tensor) and not parameter.do_not_specialize_on_alignment
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        elif isinstance(value, TensorDescriptor | GluonDescriptor):
            element, of = POINTERS[value.base.dtype].removeprefix("*"), value.block_shape
            layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
            signature[parameter.name] = f"tensordesc<{element}{of}{layout}>"
        elif not parameter.is_constexpr and value not in (None, 1):
            signature[parameter.name] = "i32"
            aligned = value % 16 == 0
        else:
            signature[parameter.name] = "constexpr"
            constants[(at,)] = value
        if aligned:
            attributes[(at,)] = [["tt.divisibility", 16]]
    of = GluonASTSource if kernel.is_gluon() else triton.compiler.ASTSource
    return of(kernel, signature, constants, attributes)


@pytest.fixture
def binaries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> list[bytes]:
    """What has been compiled in place of launches since the test began."""
    compiled = []
    capability = request.getfixturevalue("capability")
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def compile_it(self: Any, *values: Any, num_warps: int, num_stages: int = 3, **_: Any) -> None:
        options = {"num_warps": num_warps, "num_stages": num_stages}
        kernel = triton.compile(source(self, values), target=target, options=options)
        compiled.append(kernel.asm["cubin"])

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_it)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in [
        name
        for name in sys.modules
        if name.startswith(("float8.kernels.", "float8.experts.kernels.", "float8.fsdp.foreach"))
    ]:
        for asked, answer in (("sm_count", 132), ("has_float8_conversion", True)):
            if hasattr(sys.modules[name], asked):
                monkeypatch.setattr(sys.modules[name], asked, lambda device, answer=answer: answer)
    return compiled


def resources(binary: bytes, folder: Path) -> dict[str, int]:
    """Registers of a thread (REG) and bytes of memory of its own (STACK, LOCAL)."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", done.stdout)}


def cast_groups(source: torch.dtype, one_scale: bool, row: bool, col: bool, x: Tensor) -> None:
    ends, power_of_2 = empty(5, dtype=torch.int32), not (row and col)
    ops.cuda.cast_groups(x.to(source), ends, None, E4M3, row, col, 5120, one_scale, power_of_2)


def by_runs(source: torch.dtype, row: bool, run: int, x: Tensor) -> None:
    ends = empty(5, dtype=torch.int32)
    ops.cuda.cast_groups(x.to(source), ends, run, E4M3, row, True, 5120, False, not row)


def of_blocks(of_rows: bool, dtype: torch.dtype, x: Tensor) -> None:
    (R, C), ends = x.shape, empty(5, dtype=torch.int32)
    of_a, of_b = ((R, 2048), (5, 80, 2048)) if of_rows else ((R, 1280), (C, 1280))
    scales = empty(of_a[1] // 128, R).t(), empty(5, 1, 16) if of_rows else empty(10, C).t()
    given = empty(*of_a, dtype=E4M3), scales[0], empty(*of_b, dtype=E4M3), scales[1]
    covers = f"block_1x128 {'block_128x128' if of_rows else 'block_1x128'}"
    ops.cuda.grouped_matmul(*given, ends, None, f"{covers} True False False", dtype)


def grouped_matmul(of_rows: bool, fast: bool, dtype: torch.dtype, x: Tensor) -> None:
    R, C, ends = x.shape[0], ceil16(x.shape[1]), empty(5, dtype=torch.int32)
    if of_rows:
        given = empty(R, C, dtype=E4M3), empty(R), empty(5, 80, C, dtype=E4M3), empty(5, 80)
    else:
        given = empty(R, 1280, dtype=E4M3), empty(5, R), empty(C, 1280, dtype=E4M3), empty(5, C)
    ops.cuda.grouped_matmul(*given, ends, None, f"axiswise axiswise {fast} False False", dtype)


def cast(*how: Any, scaled: bool = False, source: torch.dtype = BF16) -> Callable[[Tensor], Any]:
    return lambda x: ops.cuda.cast(x.to(source), empty() if scaled else None, *how)


CASES: dict[str, Callable[[Tensor], Any]] = {
    "amax": ops.cuda.amax,
    "cast": cast(None, None, E4M3, True, True, scaled=True),
    "cast row": cast(None, None, E4M3, True, False, scaled=True),
    "cast of float32 by way of bfloat16": cast(
        None, None, E4M3, True, True, False, False, BF16, scaled=True, source=FP32
    ),
    "cast under its own scale": cast(None, None, E5M2, True, True, True, True),
    "cast_delayed": lambda x: ops.cuda.cast_delayed(
        x, empty(), empty(), E4M3, True, True, False, False, True
    ),
    "rows": cast(1, None, E4M3, True, False, False, True),
    "rows and columns": cast(1, None, E4M3, True, True),
    "columns": cast(1, None, E5M2, False, True, False, True),
    "1x128": cast(1, 128, E4M3, True, True),
    "1x128 columns": cast(1, 128, E4M3, False, True),
    "1x128 of float32": cast(1, 128, E4M3, True, True, source=FP32),
    "128x128": cast(128, 128, E4M3, True, True),
    "1x32": cast(1, 32, E4M3, True, True),
    "1x32 row": cast(1, 32, E4M3, True, False),
    "1x32 columns": cast(1, 32, E4M3, False, True),
    "32x32": cast(32, 32, E4M3, True, True),
    "transpose": lambda x: ops.cuda.transpose(empty(*x.shape, dtype=E4M3)),
}
BOOLS = False, True
LAYOUTS = (True, True), (False, True), (True, False)
BY_TRITON: dict[str, Callable[[Tensor], Any]] = {
    f"groups {of} {one_scale} {row} {col}": partial(cast_groups, of, one_scale, row, col)
    for of, one_scale, (row, col) in itertools.product((BF16, FP32), BOOLS, LAYOUTS)
}
BY_TRITON |= {
    f"grouped_matmul {' '.join(map(str, how))}": partial(grouped_matmul, *how)
    for how in itertools.product(BOOLS, BOOLS, (BF16, FP32))
}
for flag, of in itertools.product(BOOLS, (BF16, FP32)):
    BY_TRITON[f"groups by runs of 128 {of} {flag}"] = partial(by_runs, of, flag, 128)
    BY_TRITON[f"groups by runs of 32 {of} {flag}"] = partial(by_runs, of, flag, 32)
    BY_TRITON[f"grouped_matmul of blocks {of} {flag}"] = partial(of_blocks, flag, of)
BY_TRITON["foreach_cast"] = lambda x: foreach_cast._cast_triton(
    [x.to(FP32), x.to(FP32)], empty(2, 4)[0, 0], E4M3, rounds=True
)
BY_TRITON["dequantise"] = lambda x: dequantised_triton(
    Operand(empty(*x.shape, dtype=E4M3), empty(x.shape[0], -(-x.shape[1] // 32))),
    ScalingGranularity.BLOCK_1x32,
    BF16,
)
EVEN, UNEVEN = (4096, 2048), (100, 72)  # as tiles fill exactly, and not
WIDE_OF_FLOAT32 = [f"grouped_matmul {of_rows} True {FP32}" for of_rows in BOOLS]
MAY_SPILL = {(case, n): 16 if n == 90 else 24 for case in WIDE_OF_FLOAT32 for n in (90, 100)}
"""Wide tiles of float32, which gain more; and one of two halves of the GEMM of blocks."""
SHORT = {
    "cast under its own scale": (EVEN, 90),
    "cast_delayed": (EVEN, 100),
    "1x128": (EVEN, 90),
    "1x32": (EVEN, 90),
    "32x32": (UNEVEN, 100),
    "transpose": (EVEN, 100),
    f"groups {BF16} False True True": (EVEN, 90),
    f"groups by runs of 32 {FP32} True": (UNEVEN, 100),
    f"grouped_matmul False True {FP32}": (EVEN, 90),
    f"grouped_matmul of blocks {BF16} False": (EVEN, 90),
    "foreach_cast": (EVEN, 90),
    "dequantise": (EVEN, 90),
}
"""Each kernel once: what `make test` compiles."""
LAUNCHES = ((EVEN, 90), (UNEVEN, 100)), ((UNEVEN, 90), (EVEN, 100))


def ways(n: int, case: str) -> list[tuple[tuple[int, int], int]]:
    """Return in which of four ways to compile a case: two, or of products of flags one."""
    first = [SHORT[case]] if case in SHORT else []
    if "of blocks" in case:  # whose instructions are of Hopper alone
        return first or [(EVEN if n % 2 else UNEVEN, 90)]
    if case in BY_TRITON:
        return first or [LAUNCHES[n // 2 % 2][n % 2]]
    return [*dict.fromkeys((*first, *LAUNCHES[n % 2]))]


COMPILED = [
    pytest.param(case, *how, marks=[] if SHORT.get(case) == how else pytest.mark.exhaustive)
    for n, case in enumerate(CASES | BY_TRITON)
    for how in ways(n, case)
]
assert sum(not each.marks for each in COMPILED) == len(SHORT)


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_not_specialised_on_what_may_start_anywhere(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that was compiled for multiples of 16 bytes would read other tensors, too.

    The first tensor of a launch is looked at each time.
    """
    given, asked = [], []

    def recorded(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
        given.append(torch.empty(shape, dtype=dtype, device="meta"))
        return given[-1]

    def check(self: Launch, *tensors: Tensor | None) -> None:
        for parameter, x in zip(self.kernel.params[1:], tensors[1:], strict=False):
            if any(x is each for each in given):
                asked.append(parameter.do_not_specialize_on_alignment)

    monkeypatch.setitem(globals(), "empty", recorded)
    monkeypatch.setattr(Launch, "__call__", check)
    CASES[case](recorded(80, 48, dtype=BF16))  # of a shape that nobody else plans
    assert all(asked)
    assert bool(asked) == (case.startswith("cast") and case != "cast under its own scale")


@pytest.mark.parametrize(("case", "shape", "capability"), COMPILED)
def test_it_compiles_and_spills_nothing(
    case: str, shape: tuple[int, int], capability: int, binaries: list[bytes], tmp_path: Path
) -> None:
    (CASES | BY_TRITON)[case](empty(*shape, dtype=BF16))
    assert binaries
    for binary in binaries:
        used = resources(binary, tmp_path)
        assert used["REG"] > 0
        assert used["STACK"] <= MAY_SPILL.get((case, capability), 48 if "of blocks" in case else 0)
        assert used["LOCAL"] == 0


def test_groups_are_launched_where_their_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU, which layers of a model on several are not all on."""
    current, launched = [0], []

    @contextmanager
    def device(of: torch.device) -> Iterator[None]:
        current.append(of.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(private, "current_device", None)
    for name in ("experts.kernels.cast_groups", "experts.kernels.grouped_matmul", "kernels.tiles"):
        module = sys.modules[f"float8.{name}"]
        monkeypatch.setattr(module, "has_float8_conversion", lambda _: True, raising=False)
        monkeypatch.setattr(module, "sm_count", lambda _: 132, raising=False)
    run = lambda *args, **more: launched.append(current[-1])  # noqa: E731
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    with FakeTensorMode(), torch.device("cuda:1"):
        x, ends = torch.empty(64, 32, dtype=BF16), torch.empty(2, dtype=torch.int32)
        *col, ends = ops.cuda.cast_groups(x, ends, None, E4M3, True, True, 256, 0, 0)[2:]
        ops.cuda.grouped_matmul(*col, *col, ends, None, "axiswise axiswise True False False", BF16)
    assert launched == [1, 1, 1]
