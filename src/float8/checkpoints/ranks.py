"""Work that several ranks do together: an error of one of them is raised on all, at once."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from float8.tensor import is_dtensor

_KINDS = (FileNotFoundError, OSError, ImportError, TypeError, ValueError)


def rank_and_size() -> tuple[int, int]:
    """Return the number of this rank, and how many there are; without a process group (0, 1)."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


class Together:
    """Work that ranks do together: an error of one of them is raised on all.

    As a context it ends with `agree`. Within it ranks call `agree` before each collective of
    theirs: one that failed on its own is there, too, and no other waits for it in a collective.

    Args:
        needed: whether ranks wait for each other at all; the same on all of them.
        groups: their process groups, such as one for each dim of a mesh; None: all ranks.
    """

    def __init__(self, needed: bool = True, groups: Sequence[Any] | None = None) -> None:
        self._rank, size = rank_and_size()
        default = [None] if size > 1 else []
        self._groups = [*(default if groups is None else groups)] if needed else []
        self._failed = False

    def agree(self, error: BaseException | None = None, said: Any = None) -> list[Any]:
        """Wait for all ranks, and return what each of them said; collective.

        Args:
            error: why this rank cannot go on; the caller raises it.
            said: what this rank tells the others in its groups; pickled.

        Raises:
            OSError, ImportError, TypeError, ValueError, RuntimeError: the error of the first rank
                that had one, if this rank has none: of the same kind, as far as that is known.
        """
        if not self._groups or self._failed:
            return [said]
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        why = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
        heard: list[Any] = []
        mine: tuple[int, Any, Any] = (self._rank, None, said)
        if error is not None:
            mine = (self._rank, kind, why)
        for group in self._groups:
            told: list[Any] = [mine] * dist.get_world_size(group)
            dist.all_gather_object(told, mine, group)
            heard += [value for *_, value in told]
            mine = next((each for each in told if each[1] is not None), mine)  # to the next group
        rank, kind, why = mine
        self._failed = kind is not None
        if self._failed and error is None:
            raise kind(f"rank {rank}: {why}")
        return heard

    def __enter__(self) -> "Together":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.agree(error)


def meshes_of(model: nn.Module) -> list[Any]:
    """Return the device meshes on which a model is sharded; one that is whole has none."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return [*{x.device_mesh: None for x in tensors if is_dtensor(x)}]


def groups_of(model: nn.Module) -> list[Any]:
    """Return the process groups of the ranks that share a model, each once."""
    groups = [mesh.get_group(dim) for mesh in meshes_of(model) for dim in range(mesh.ndim)]
    return [*{group.group_name: group for group in groups}.values()]
