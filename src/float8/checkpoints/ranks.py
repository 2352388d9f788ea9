"""Raise the error of one rank on all ranks that share a model."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from float8.config import require_module
from float8.tensor import is_dtensor, reshard

_ERRORS = (FileNotFoundError, OSError, ImportError, TypeError, ValueError)


class ModelRanks:
    """Context manager that raises an error of one rank on all ranks that share a model's DTensors.

    Other ranks raise it at the end of the `with` block, or in it at their next call of `agree`:
    call that before each collective, so that no rank waits for a failed one. Without DTensors,
    ranks do not wait for each other. FSDP2 modules are resharded when the manager is created.
    """

    def __init__(self, model: nn.Module) -> None:
        require_module(model, "model")
        reshard(model)
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        self.meshes = [*{x.device_mesh: None for x in tensors if is_dtensor(x)}]
        groups = [mesh.get_group(dim) for mesh in self.meshes for dim in range(mesh.ndim)]
        self._groups = [*{group.group_name: group for group in groups}.values()]
        self.number = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def agree(self, value: Any = None, error: BaseException | None = None) -> list[Any]:
        """All-gather `value` over each process group of the model's DTensors; return all values.

        The values from all groups are in one list, which is [] without DTensors. If a rank passes
        an `error`, all ranks that pass none raise an error with its text here. On ranks that pass
        one this method returns, and the caller must raise it.
        """
        cls = next((cls for cls in _ERRORS if isinstance(error, cls)), RuntimeError)
        text = str(error) if cls is not RuntimeError else f"{type(error).__name__}: {error}"
        failure = None if error is None else (cls, f"rank {self.number}: {text}")
        values: list[Any] = []
        for group in self._groups:
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, (failure, value), group)
            values += [value for _, value in gathered]
            # Report a failure in this group to the next group, too.
            failure = next((failure for failure, _ in gathered if failure is not None), failure)
        if failure is not None and error is None:
            self._groups = []  # `__exit__` need not report it again
            raise failure[0](failure[1])
        return values

    def __enter__(self) -> "ModelRanks":
        return self

    def __exit__(self, cls: Any, error: BaseException | None, trace: Any) -> None:
        if cls is not GeneratorExit:  # all ranks stop iterating at the same tensor
            self.agree(error=error)

    def gather(self, x: Any) -> Tensor:
        """Call `agree`, then return DTensor `x` all-gathered; return any other `x` unchanged."""
        if is_dtensor(x):
            self.agree()
            x = x.full_tensor()
        return x  # type: ignore[no-any-return]
