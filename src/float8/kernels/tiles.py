"""Tiles of a matrix: how many a kernel takes, in which order, and where they are loaded."""

from typing import Any

import torch

from float8.formats import ceil16
from float8.kernels.runtime.device import sm_count
from float8.kernels.runtime.launch import Launch, Slot
from float8.kernels.runtime.triton import jit, tl

Tile = tuple[int, int, int]
"""Its rows and columns, powers of two from 16 on, and the warps of the program that takes it."""

ALONG_AND_ACROSS: tuple[Tile, ...] = ((128, 128, 8), (64, 64, 4), (32, 64, 4))
"""For kernels that write a transposed copy: 128 x 128 writes whole 128-byte lines in both."""

GROUP = 8
"""Tiles follow each other down this many tiles of R, then along C."""


def tiled(
    kernel: Any,
    tiles: tuple[Tile, ...],
    device: torch.device | None,
    slots: tuple[Slot | None, ...],
    integers: tuple[int, ...],
    constants: tuple[object, ...] = (),
) -> Launch:
    """Plan the launch of a kernel each of whose programs takes one tile of a matrix.

    It takes the first of ``tiles``, largest first, that gives each multiprocessor two programs, or
    the last. Its first integers are R and C of the matrix, which is padded to 16; its last
    constants EVEN (the tiles fill the matrix exactly: no masks), BLOCK_R, BLOCK_C and GROUP.
    """
    (R, C, *_), sms = integers, sm_count(device)
    for tile in tiles:
        block_r, block_c, num_warps = tile
        programs = -(-ceil16(R) // block_r) * -(-ceil16(C) // block_c)
        if programs >= 2 * sms:
            break
    even = R % block_r == 0 and C % block_c == 0
    constants = (*constants, even, block_r, block_c, GROUP)
    return Launch(kernel, programs, slots, integers, constants, num_warps)


@jit
def tile_of_program():  # type: ignore[no-untyped-def]
    """Number the tile of this program, where there are as many programs as tiles.

    Backwards, since whoever wrote or measured the matrix just before left its end in the L2
    cache.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@jit
def tile_at(  # type: ignore[no-untyped-def]
    tile, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr
):
    """Place the tile of this number: its (row, column), counted in tiles.

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
    """Pack four uint8 tensors into uint32, the first one lowest, as memory has it."""
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
    """Return ``v`` where ``inside``, zero elsewhere; all of it if ``EVEN``."""
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
