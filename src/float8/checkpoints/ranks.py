"""Models that ranks share: work that they do together, and weights of which each has a part."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8.checkpoints.layouts import Layout
from float8.formats import FLOAT8_MAX
from float8.tensor import dtensor_like, is_dtensor
from float8.tensor.ranks import amax_over, ranks_of_dims, sharding_groups

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

    def amax_of_all(self, x: Any) -> Callable[[Tensor], Tensor]:
        """Return a function that makes amaxes those of all of a DTensor; collective."""
        reduce = amax_over(sharding_groups(x))

        def of_all(amax: Tensor) -> Tensor:
            self.agree()
            return reduce(amax)

        return of_all


def parts_have_own_scales(weight: Any, layout: Layout) -> bool:
    """Whether no scale of a DTensor covers parts of two ranks; or there is one for all of them."""
    if weight.dim() == 3:  # experts, each of which has scales of its own
        return has_whole_experts(weight)
    granularity, even = layout.granularity, True
    for dim, ranks in ranks_of_dims(weight).items() if not granularity.one_scale else ():
        size, block = weight.shape[dim], (granularity.height, granularity.width)[dim]
        # Torch's chunks of chunks are whole blocks only where all are of one size.
        uneven = size % ranks and weight.device_mesh.ndim > 1
        even &= block == 1 or (block is not None and -(-size // ranks) % block == 0 and not uneven)
    return even


def has_whole_experts(weight: Any) -> bool:
    """Whether each rank has whole experts of a DTensor [E, N, K]."""
    return all(each.is_replicate() or each.is_shard(0) for each in weight.placements)


def whole_of(part: Tensor, weight: Any, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of which each rank has a part, as it has one of `weight`; collective."""
    sent = part.view(torch.uint8) if part.dtype in FLOAT8_MAX else part  # Gloo knows no float8
    whole = dtensor_like(sent, weight, torch.Size(shape)).full_tensor()
    return whole.view(part.dtype)  # type: ignore[no-any-return]
