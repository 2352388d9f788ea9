"""Where groups of rows lie: the one reading of ``offs``, [E] int32, whatever they hold.

Group e is rows ``ends[e - 1]:ends[e]``, and ``ends`` are ``offs``, none below 0, above the number
of rows, or below the one before. So each row is in one group at most, and no kernel leaves its
tensors for offs that descend or are too large: on a GPU nobody sees those without waiting for them.
"""

from torch import Tensor

from float8.kernels.runtime.triton import jit, tl


def ends_of_groups(offs: Tensor, rows: int) -> Tensor:
    """Return ``ends`` [E] int32, without waiting for them: the plain-torch twin of `groups_of`."""
    return offs.clamp(0, rows).cummax(0).values


def check_offs(offs: Tensor, rows: int) -> None:
    """Raise ``ValueError`` unless ``offs`` ascend from 0 to ``rows`` at most; waits for them."""
    ends = [0, *offs.tolist(), rows]
    if ends != sorted(ends):
        raise ValueError(
            f"grouped_linear: got offs {ends[1:-1]} for {rows} rows, expected numbers from 0 to "
            f"{rows} that do not descend: the row behind the last one of each expert; make them "
            f"of the sizes of groups, by sizes.cumsum(0, dtype=torch.int32)"
        )


@jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@jit
def groups_of(offs_ptr, R, E, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where groups begin and end, [GROUPS] each; group E is of the rows in no other."""
    g = tl.arange(0, GROUPS)
    before = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= E), other=0)
    begins = tl.associative_scan(tl.minimum(tl.maximum(before, 0), R), 0, _larger)
    ends = tl.load(offs_ptr + g, mask=g < E, other=0)
    return begins, tl.where(g < E, tl.maximum(begins, tl.minimum(ends, R)), R)
