"""`cast_groups`: each group as a cast of its own, and the Triton kernels as their twin."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from float8.config import CastConfig, ScalingGranularity
from float8.experts.grouped import quantize_experts
from float8.experts.kernels import cast_groups as casts
from float8.experts.kernels import grouped_matmul as gemm
from float8.experts.kernels.cast_groups import cast_groups
from float8.formats import E4M3, ceil16
from float8.kernels import tiles
from float8.kernels.runtime import ops
from float8.quantize import Cast, quantize
from kernels.float8_codes import HIGH_PRECISION, assert_same, awkward
from kernels.interpreter import SLOW
from sqnr import sqnr


def ceil128(n: int) -> int:
    return (n + 127) // 128 * 128


MANY = 16  # groups, for which kernels want vectors of 32
SIZES = [[0, 1, 15, 16, 17], [70, 0, 0, 65], [0, 0, 33], [1] * MANY]
GRANULARITIES = [ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE]
BY_ROWS = "axiswise axiswise"  # the granularities, as `Gemm.packed` gives them
SHORT = (1, True), (2, False), (2, True)
cases = pytest.mark.parametrize(
    ("sizes", "of", "power_of_2"),
    [
        pytest.param(
            sizes, of, of.by_rows == (n != 2), marks=[] if (n, of.by_rows) in SHORT else SLOW
        )
        for n, sizes in enumerate(SIZES)
        for of in GRANULARITIES
    ],
)


def tensor(sizes: list[int], C: int, source: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Return a tensor with three rows behind the last group, and where groups end."""
    x = awkward((sum(sizes) + 3, C), source)
    return x, torch.tensor(sizes).cumsum(0).to(torch.int32)


def assert_alike(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Bit for bit, however they lie."""
    of = torch.contiguous_format
    assert_same(*([x.clone(memory_format=of) for x in each] for each in (got, want)))


@cases
def test_each_group_is_cast_by_itself(
    sizes: list[int], of: ScalingGranularity, power_of_2: bool
) -> None:
    spec = CastConfig(target_dtype=E4M3, scaling_granularity=of, power_of_2=power_of_2)
    C, at = 24, 0
    x, offs = tensor(sizes, C)
    made = cast_groups(x, Cast(spec), offs, row=True, col=True)
    groups = zip(x.split([*sizes, 3]), made.col.ends.tolist(), strict=False)
    for group, (rows, end) in enumerate(groups):
        if n := len(rows):
            alone = quantize(rows, Cast(spec), row=True, col=True)
            here = slice(int(offs[group]) - n, int(offs[group]))
            got = [made.row.data[here, :C], made.row.scale[here]]
            got += [made.col.data[:C, at : at + n], made.col.scale[group, :C]]
            want = [alone.row.data[:n, :C], alone.row.scale.flatten().expand(n)]
            want += [alone.col.data[:C, :n], alone.col.scale.flatten()[:C].expand(C)]
            assert_alike(got, want)
        assert end == at + ceil128(n)
        assert not made.col.data.view(torch.uint8)[:, at + n : end].any()
        at = end
    assert not made.row.data[offs[-1] :].view(torch.uint8).any()


@cases
def test_kernels_are_their_twin(
    triton_device: torch.device, sizes: list[int], of: ScalingGranularity, power_of_2: bool
) -> None:
    layouts = [(True, True), (True, False), (False, True)]
    few = len(sizes) < MANY
    pairs = [*zip(HIGH_PRECISION, layouts, strict=True)]
    if triton_device.type == "cpu":  # the interpreter takes its time
        pairs = [pairs[min(SIZES.index(sizes), 2)]]
    for source, (row, col) in pairs:
        x, offs = (t.to(triton_device) for t in tensor(sizes, 150 if few else 24, source))
        how = None, E4M3, row, col, sum(map(ceil128, sizes)), of.one_scale, power_of_2
        assert_same(ops.cuda.cast_groups(x, offs, *how), ops.cpu.cast_groups(x, offs, *how))
        if of.one_scale:  # as backward takes those of forward
            known = ops.cpu.cast_groups(x, offs, None, E4M3, False, True, *how[4:])[1][:, 0]
            made = [each.cast_groups(x, offs, *how, known) for each in (ops.cuda, ops.cpu)]
            want = ops.cpu.cast_groups(x, offs, *how)
            for got in made:
                if col:
                    got[-2], want[-2] = got[-2][:, : x.shape[1]], want[-2][:, : x.shape[1]]
                assert_same(got, want)


RUNS, SQUARES = ScalingGranularity.BLOCK_1x128, ScalingGranularity.BLOCK_128x128
RUNS_OF_32, SQUARES_OF_32 = ScalingGranularity.BLOCK_1x32, ScalingGranularity.BLOCK_32x32
SIZES_OF_RUNS = [*SIZES, [127, 0, 130], [127, 0, 128, 257]]


@pytest.mark.parametrize(("C", "of"), [(24, RUNS), (256, RUNS), (80, RUNS_OF_32)], ids=str)
@pytest.mark.parametrize("sizes", SIZES_OF_RUNS, ids=str)
def test_each_group_is_cast_by_itself_by_runs(
    sizes: list[int], C: int, of: ScalingGranularity
) -> None:
    """No run has tokens of two groups, and all of a group is as a linear layer casts it."""
    spec = CastConfig(target_dtype=E4M3, scaling_granularity=of, power_of_2=C == 24)
    x, offs = tensor(sizes, C)
    of_x = Cast(spec)
    both, row = (cast_groups(x, of_x, offs, row=True, col=col) for col in (True, False))
    assert_alike(both.row, row.row)
    at = 0
    for rows, behind, end in zip(x.split([*sizes, 3]), offs.tolist(), both.col.ends, strict=False):
        if n := len(rows):
            alone = quantize(rows, Cast(spec), row=True, col=True)
            here, width = slice(behind - n, behind), alone.col.data.shape[1]
            tokens, runs = slice(at, at + width), slice(at // of.width, (at + width) // of.width)
            assert_alike([x[here] for x in both.row], [x[:n] for x in alone.row])
            assert_alike([both.col.data[:, tokens], both.col.scale[:, runs]], alone.col)
            assert not both.col.data[:, at + n : at + ceil128(n)].view(torch.uint8).any()
        at += ceil128(n)
        assert end == at


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=[] if n == 3 else SLOW) for n, sizes in enumerate(SIZES_OF_RUNS)],
    ids=str,
)
def test_the_kernel_of_runs_is_its_twin(triton_device: torch.device, sizes: list[int]) -> None:
    at, slow = SIZES_OF_RUNS.index(sizes), triton_device.type == "cpu"
    for n, C in enumerate([24, 150, 256]):  # with masks and without
        if slow and n != at % 3 and (at < 4 or n == 0):  # groups longer than a run meet more
            continue
        x, offs = (t.to(triton_device) for t in tensor(sizes, C, HIGH_PRECISION[n]))
        for run in (128, 32) if n == 2 or not slow else ((128, 32)[at % 2],):
            how = run, E4M3, C != 24, True, sum(map(ceil128, sizes)), False, C == 150
            got, want = (o.cast_groups(x, offs, *how) for o in (ops.cuda, ops.cpu))
            assert_same(got, want)


@pytest.mark.parametrize("shape", [(3, 128, 256), (3, 48, 80), (2, 300, 144)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("of", [SQUARES, SQUARES_OF_32, RUNS_OF_32], ids=str)
def test_each_weight_is_cast_by_itself_by_blocks(
    of: ScalingGranularity, shape: tuple[int, int, int], transposed: bool
) -> None:
    """All that a linear layer has, but for rows of zeros below row data."""
    (_, N, K), spec = shape, Cast(CastConfig(target_dtype=E4M3, scaling_granularity=of))
    weights = torch.randn(shape).exp()
    weights = weights.mT.contiguous().mT if transposed else weights
    made = quantize_experts(weights, spec, row=True, col=True)
    below, right = -(-N // of.width), -(-K // of.width)
    for e, weight in enumerate(weights):
        alone = quantize(weight, spec, row=True, col=True)
        assert_alike([made.row.data[e], made.col.data[e]], [alone.row.data[:N], alone.col.data[:K]])
        rows, cols = (below, right) if of.square else (N, K)
        assert_alike([made.row.scale[e, :, :right]], [alone.row.scale[:rows, :right]])
        assert_alike([made.col.scale[e, :, :below]], [alone.col.scale[:cols, :below]])


@pytest.mark.parametrize("of", [GRANULARITIES[1], RUNS, SQUARES], ids=str)
def test_a_scale_for_each_group_is_refused_under_finer_scales(of: ScalingGranularity) -> None:
    given, refused = Cast(CastConfig(scaling_granularity=of), scale=torch.ones(2)), "expected none:"
    offs = torch.tensor([20, 64], dtype=torch.int32)
    for row, col in ((True, False), (False, True), (True, True)):
        with pytest.raises(ValueError, match=refused):
            quantize_experts(torch.randn(2, 64, 32), given, row=row, col=col)
        with pytest.raises(ValueError, match=refused):
            cast_groups(torch.randn(64, 32), given, offs, row=row, col=col)


@pytest.mark.parametrize("C", [128, pytest.param(256, marks=SLOW)])
@pytest.mark.parametrize(
    "of", [pytest.param(GRANULARITIES[0], marks=SLOW), GRANULARITIES[1]], ids=str
)
def test_programs_of_several_tiles_without_masks(
    triton_device: torch.device,
    of: ScalingGranularity,
    C: int,
    multiprocessors: Callable[[int], None],
) -> None:
    """As of large tensors; and the row before and behind a group is not finite."""
    multiprocessors(1)
    sizes = [300, 0, 129, 70]
    x, offs = torch.randn(sum(sizes) + 3, C), torch.tensor(sizes).cumsum(0).to(torch.int32)
    x[300], x[499] = float("nan"), float("inf")
    assert tiles.strips_of(len(x), C, x.dtype, x.device)[0] == C // 64 * tiles.STRIP_R
    x, offs = x.to(triton_device), offs.to(triton_device)
    how = None, E4M3, True, True, sum(map(ceil128, sizes)), of.one_scale, False
    got = ops.cuda.cast_groups(x, offs, *how)
    assert_same(got, ops.cpu.cast_groups(x, offs, *how))
    assert not got[0][:300].float().isnan().any()
    assert not got[0][429:499].float().isnan().any()


def operands(sizes: list[int], R: int, N: int, C: int, device: torch.device) -> list[tuple]:
    """Return arguments for groups of rows, of row data and of columns in memory; then of tokens."""
    E, make = len(sizes), partial(torch.randn, device=device)
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    rows = make(R, C).to(E4M3), make(R).exp()
    columns = make(C, E, ceil16(N)).to(E4M3).transpose(0, 1)
    padded = torch.tensor([*map(ceil128, sizes)], device=device).cumsum(0).to(torch.int32)
    tokens = [make(n, int(padded[-1]) + 128).to(E4M3) for n in (ceil16(N), C)]
    for each in tokens:
        each.view(torch.uint8)[:, padded[-1] :] = 127  # NaN, of which nothing may be read
    return [
        (*rows, make(E, N, C).to(E4M3), make(E, N).exp(), ends),
        (make(R, ceil16(N)).to(E4M3), make(R).exp(), columns, make(E, C).exp(), ends),
        (tokens[0], make(E, ceil16(N)).exp(), tokens[1], make(E, C).exp(), padded),
    ]


@pytest.mark.parametrize(
    "sizes",
    [SIZES[1], *(pytest.param(n, marks=SLOW) for n in (SIZES[0], SIZES[2], [0, 0], [290]))],
    ids=str,
)
def test_the_grouped_gemm_is_its_twin(
    triton_device: torch.device, sizes: list[int], multiprocessors: Callable[[int], None]
) -> None:
    if triton_device.type == "cpu":
        multiprocessors(2)  # each of whose programs takes its time
    for n, case in enumerate(operands(sizes, sum(sizes) + 5, 150, 176, triton_device)):
        fast = (n + len(sizes)) % 2 == 0
        how = None, f"{BY_ROWS} {fast} False False", torch.bfloat16 if fast else torch.float32
        got, want = ops.cuda.grouped_matmul(*case, *how), ops.cpu.grouped_matmul(*case, *how)
        assert got.dtype == want.dtype
        empty = [(x == 0).all(-1) for x in (got, want)]  # rows in no group, and all of empty groups
        assert torch.equal(*empty)
        # Tensor cores add with few bits, the interpreter rounds to bfloat16 towards zero.
        assert not want.any() or sqnr(want, got) > 45


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES[:3], [0, 0], [290], [1, 700, 0, 129]], ids=str)
def test_the_grouped_gemm_of_blocks_is_its_twin(
    triton_device: torch.device, sizes: list[int]
) -> None:
    """Scales of blocks lie far apart; those of rows in no group, and behind all runs, are NaN."""
    R, N, C, E = sum(sizes) + 5, 150, 384, len(sizes)
    make = partial(torch.randn, device=triton_device)
    spec = Cast(CastConfig(target_dtype=E4M3, scaling_granularity=SQUARES))
    w = quantize_experts(make(E, C, N) * make(E, C, N).mul(3).exp(), spec, row=True, col=True)
    rows, columns = ((make(R, n).to(E4M3), make(n // 128, R).mul(3).exp().t()) for n in (C, 256))
    padded = torch.tensor([*map(ceil128, sizes)], device=triton_device).cumsum(0)
    tokens = []
    for n in (N + 10, C):
        data, scale = make(n, int(padded[-1]) + 128).to(E4M3), make(int(padded[-1]) // 128 + 1, n)
        data.view(torch.uint8)[:, padded[-1] :], scale[-1] = 127, float("nan")
        tokens += [data, scale.mul(3).exp().t()]
    rows[1][sum(sizes) :] = float("nan")
    ends = torch.tensor(sizes, device=triton_device).cumsum(0).to(torch.int32)
    cases = [(*rows, *w.col, ends), (*columns, *w.row, ends), (*tokens, padded.to(torch.int32))]
    of = (RUNS.value, SQUARES.value), (RUNS.value, SQUARES.value), (RUNS.value, RUNS.value)
    for n, (case, covers) in enumerate(zip(cases, of, strict=True)):
        dtype = torch.float32 if n == len(sizes) % 3 else torch.bfloat16
        how = None, f"{' '.join(covers)} True False False", dtype
        got, want = ops.cuda.grouped_matmul(*case, *how), ops.cpu.grouped_matmul(*case, *how)
        assert torch.equal((got == 0).all(-1), (want == 0).all(-1))
        assert got.isfinite().all()
        # As above. Scales of neighbours would be a hundred times as large.
        assert not want.any() or sqnr(want, got) > 45


def test_no_tokens_at_all(triton_device: torch.device) -> None:
    x = torch.empty(0, 32, device=triton_device, dtype=torch.bfloat16)
    offs = torch.zeros(1, device=triton_device, dtype=torch.int32)
    for of in (*GRANULARITIES, RUNS):
        spec = CastConfig(target_dtype=E4M3, scaling_granularity=of)
        *col, ends, _ = cast_groups(x, Cast(spec), offs, col=True).col
        how = None, f"{of.value} {of.value} True False False", torch.bfloat16
        assert not ops.cuda.grouped_matmul(*col, *col, ends, *how).any()


MIN, MAX, T = -(2**31), 2**31 - 1, 140
WILD = [
    [10, 5, 130, T, 7],
    [-1, 15, T + 1, MAX - 126, MAX, MIN],
    [-1539066660, 255357750, -168753601, 20, -1944681763, -2017449976],
    [-53, 8, 81, 18, 59, 202, 60, 151, -110, 101, 79, 95, 145, 83, 159, 87],
]
MARGIN = 1 << 16


@pytest.mark.parametrize(
    "wild", [WILD[1], *(pytest.param(WILD[n], marks=SLOW) for n in (0, 2, 3))], ids=str
)
def test_no_offs_lead_out_of_the_tensors(
    triton_device: torch.device,
    wild: list[int],
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: Callable[[int], None],
) -> None:
    """All lie between bytes that are NaN in each format, and that nobody may read or write."""
    arenas = []
    if triton_device.type == "cpu":
        multiprocessors(1)

    def guarded(x: Tensor) -> Tensor:
        size = x.numel() * x.itemsize
        arena = torch.full((size + 2 * MARGIN,), 255, dtype=torch.uint8, device=x.device)
        arenas.append(arena[:MARGIN])
        arenas.append(arena[MARGIN + size :])
        return arena[MARGIN : MARGIN + size].view(x.dtype).view(x.shape).copy_(x)

    def guarded_all(made: list[Tensor]) -> list[Tensor]:
        strided = [x.t() if x.dim() == 2 and x.stride(0) == 1 else x for x in made]
        return [
            guarded(x) if x is y else guarded(x).t() for x, y in zip(strided, made, strict=True)
        ]

    matmul_fake = gemm.grouped_matmul_fake
    fake = casts.cast_groups_fake
    monkeypatch.setattr(casts, "cast_groups_fake", lambda *a: guarded_all(fake(*a)))
    monkeypatch.setattr(gemm, "grouped_matmul_fake", lambda *a: guarded(matmul_fake(*a)))

    def ends(numbers: list[int]) -> Tensor:
        return guarded(torch.tensor(numbers, device=triton_device, dtype=torch.int32))

    def clean(numbers: list[int], most: int) -> list[int]:
        return [*accumulate((min(max(n, 0), most) for n in numbers), max)]

    E, N, C, tame = len(wild), 16, 48, clean(wild, T)
    sizes = [end - begin for begin, end in zip([0, *tame], tame, strict=False)]
    x = guarded(torch.randn(T, C, device=triton_device))
    for one_scale in (False, True):
        how = None, E4M3, True, True, sum(map(ceil128, sizes)), one_scale, False
        made = ops.cuda.cast_groups(x, ends(wild), *how)
        for offs in (wild, tame):
            assert_same(made, casts.cast_groups_reference(x, ends(offs), *how))
    runs = 128, E4M3, True, True, sum(map(ceil128, sizes)), False, False
    by_runs = ops.cuda.cast_groups(x, ends(wild), *runs)
    for offs in (wild, tame):
        assert_same(by_runs, casts.cast_groups_reference(x, ends(offs), *runs))
    b = guarded(torch.randn(E, N, C, device=triton_device).to(E4M3))
    rows = *made[:2], b, guarded(torch.rand(E, N, device=triton_device))
    padded = [n if n in (MIN, MAX) else min(max(n * 128, MIN), MAX // 128 * 128) for n in wild]
    columns, reference = (*made[2:4], *made[2:4]), cast(Any, gemm.grouped_matmul_reference)
    squares = quantize_experts(
        b.float(), Cast(CastConfig(scaling_granularity=SQUARES)), row=True
    ).row
    squares = [*map(guarded, (squares.data.contiguous(), squares.scale.contiguous()))]
    width, of_runs = made[2].shape[1], f"{RUNS.value} {RUNS.value}"
    cases = [(rows, wild, T, BY_ROWS), (columns, padded, width, BY_ROWS)]
    if triton_device.type == "cuda":  # Gluon has no interpreter
        cases.append(((*by_runs[:2], *squares), wild, T, f"{RUNS.value} {SQUARES.value}"))
        cases.append(((*by_runs[2:4], *by_runs[2:4]), padded, width, of_runs))
    for case, offs, most, covers in cases:
        how = None, f"{covers} False False False", torch.float32
        got, want = (
            ops.cuda.grouped_matmul(*case, ends(numbers), *how)
            for numbers in (offs, clean(offs, most))
        )
        twin = reference(*case, ends(clean(offs, most)), *how)
        assert torch.equal(got, want)
        assert torch.equal((got == 0).all(-1), (twin == 0).all(-1))
        assert not twin.any() or sqnr(twin, got) > 45
    assert all(bool((arena == 255).all()) for arena in arenas)
