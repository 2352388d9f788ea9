"""Tiles of a matrix: how many a kernel takes, in which order, and where they are loaded."""

import dataclasses

from float8.formats import ceil16
from float8.kernels.runtime.triton import jit, tl


@dataclasses.dataclass(frozen=True)
class TileLaunch:
    """Launch configuration: each program takes one tile of ``block_r`` x ``block_c`` elements."""

    block_r: int  # a power of two, at least 16
    block_c: int  # a power of two, at least 16
    num_warps: int
    group: int  # tiles follow each other down this many tiles of R, then along C
    even: bool  # the tiles fill the matrix exactly: no masks
    programs: int

    @property
    def constants(self) -> tuple[bool, int, int, int]:
        """The last parameters of a kernel that takes tiles: EVEN, BLOCK_R, BLOCK_C, GROUP."""
        return self.even, self.block_r, self.block_c, self.group


def tile_launch(
    R: int, C: int, block_r: int, block_c: int, num_warps: int, group: int = 8
) -> TileLaunch:
    """The launch configuration of given tiles for a matrix [R, C], padded to multiples of 16."""
    programs = -(-ceil16(R) // block_r) * -(-ceil16(C) // block_c)
    even = R % block_r == 0 and C % block_c == 0
    return TileLaunch(block_r, block_c, num_warps, group, even, programs)


def fitting(R: int, C: int, sms: int, tiles: tuple[tuple[int, int, int], ...]) -> TileLaunch:
    """The first of ``tiles`` that gives each of ``sms`` processors two programs, or the last.

    ``tiles`` are (block_r, block_c, num_warps), largest first.
    """
    for block_r, block_c, num_warps in tiles:
        config = tile_launch(R, C, block_r, block_c, num_warps)
        if config.programs >= 2 * sms:
            break
    return config


@jit
def tile_of_program():  # type: ignore[no-untyped-def]
    """The number of this program's tile, where there are as many programs as tiles.

    Backwards, since whoever wrote or measured the matrix just before left its end in the L2
    cache.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@jit
def tile_at(  # type: ignore[no-untyped-def]
    tile, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr
):
    """The (row, column), counted in tiles, of the tile of this number.

    In groups, so that programs at work together touch long runs of both copies.
    """
    tiles_r = tl.cdiv(R, BLOCK_R)
    tiles_c = tl.cdiv(C, BLOCK_C)
    group = tile // (GROUP * tiles_c)
    height = tl.minimum(tiles_r - group * GROUP, GROUP)
    within = tile - group * (GROUP * tiles_c)
    return group * GROUP + within % height, within // height


@jit
def pack_words(b0, b1, b2, b3):  # type: ignore[no-untyped-def]
    """Four uint8 tensors -> uint32, the first one lowest, as memory has it."""
    low = b0.to(tl.uint32) | (b1.to(tl.uint32) << 8)
    high = (b2.to(tl.uint32) << 16) | (b3.to(tl.uint32) << 24)
    return low | high


@jit
def load(ptrs, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load where ``inside``, zero elsewhere; everywhere, without a mask, if ``EVEN``."""
    if EVEN:
        values = tl.load(ptrs)
    else:
        values = tl.load(ptrs, mask=inside, other=0)
    return values


@jit
def or_zero(v, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """``v`` where ``inside``, zero elsewhere; all of it if ``EVEN``."""
    if not EVEN:
        v = tl.where(inside, v, 0.0)  # also where it is NaN
    return v


@jit
def store(ptrs, values, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store where ``inside``; everywhere, without a mask, if ``EVEN``."""
    if EVEN:
        tl.store(ptrs, values)
    else:
        tl.store(ptrs, values, mask=inside)
