"""Work that the ranks that share a model do together."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from float8.tensor import is_dtensor

_KINDS = (FileNotFoundError, OSError, ImportError, TypeError, ValueError)


class Together:
    """Work that the ranks that share a model do together: an error of one is raised on all.

    As a context it ends with `agree`, and within it ranks call `agree` before collectives: so one
    that failed on its own is there, too. Nobody waits for a model that is whole.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        self.meshes = [*{x.device_mesh: None for x in tensors if is_dtensor(x)}]
        groups = [mesh.get_group(dim) for mesh in self.meshes for dim in range(mesh.ndim)]
        self._groups = [*{group.group_name: group for group in groups}.values()]
        self._failed = False
        self.number = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def agree(self, error: BaseException | None = None, said: Any = None) -> list[Any]:
        """Wait for all ranks, and return what each of them `said`; collective.

        `error`: why this rank cannot go on; the caller raises it, others the first that they hear.
        """
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        why = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
        failure = None if error is None else (kind, f"rank {self.number}: {why}")
        heard: list[Any] = []
        for group in self._groups if not self._failed else ():
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, (failure, said), group)
            heard += [value for _, value in told]
            # Ranks in the next group hear of it, too.
            failure = next((each for each, _ in told if each is not None), failure)
        if failure is not None and error is None:
            self._failed = True
            raise failure[0](failure[1])
        return heard

    def __enter__(self) -> "Together":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if kind is not GeneratorExit:  # all stop to iterate alike
            self.agree(error)

    def whole(self, x: Any) -> Tensor:
        """Return a tensor of which ranks may have parts; collective if they do."""
        if is_dtensor(x):
            self.agree()
            x = x.full_tensor()
        return x  # type: ignore[no-any-return]
