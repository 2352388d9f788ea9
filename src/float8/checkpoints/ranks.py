"""What several ranks do together: what one of them cannot do fails on all of them, at once."""

from types import TracebackType
from typing import Any

import torch.distributed as dist

_KINDS = (FileNotFoundError, OSError, ImportError, TypeError, ValueError)


def rank_and_size() -> tuple[int, int]:
    """Return the number of this rank, and how many there are; without a process group (0, 1)."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


class Together:
    """Work that all ranks of the process group do together: an error of one is raised on all.

    As a context it ends with `agree`. Within it ranks call `agree` before each collective of
    theirs: one that failed on its own is there, too, and no other waits for it in a collective.

    Args:
        needed: whether ranks wait for each other at all; the same on all of them.
    """

    def __init__(self, needed: bool = True) -> None:
        self._rank, size = rank_and_size()
        self._size = size if needed else 1
        self._failed = False

    def agree(self, error: BaseException | None = None, said: Any = None) -> list[Any]:
        """Wait for all ranks, and return what each of them said; collective.

        Args:
            error: why this rank cannot go on; the caller raises it.
            said: what this rank tells the others; pickled.

        Raises:
            OSError, ImportError, TypeError, ValueError, RuntimeError: the error of the first rank
                that had one, if this rank has none: of the same kind, as far as that is known.
        """
        if self._size == 1 or self._failed:
            return [said]
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        why = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
        mine = (None, said) if error is None else (kind, why)
        told: list[Any] = [mine] * self._size
        dist.all_gather_object(told, mine)
        failed = [(rank, *each) for rank, each in enumerate(told) if each[0] is not None]
        self._failed = bool(failed)
        if failed and error is None:
            rank, kind, why = failed[0]
            raise kind(f"rank {rank}: {why}")
        return [value for _, value in told]

    def __enter__(self) -> "Together":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.agree(error)
