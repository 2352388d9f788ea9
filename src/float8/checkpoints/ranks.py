"""Models that ranks share: work that they do together, and weights of which each has a part."""

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8.checkpoints.layouts import Layout
from float8.formats import FLOAT8_MAX
from float8.tensor import is_dtensor
from float8.tensor.ranks import ranks_of_dims

_KINDS = (FileNotFoundError, OSError, ImportError, TypeError, ValueError)


def this_rank() -> int:
    """Return the number of this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Together:
    """Work that the ranks that share a model do together: an error of one is raised on all.

    As a context it ends with `agree`. Within it ranks call `agree` before each collective of
    theirs: one that failed on its own is there, too, and no other waits for it in a collective.

    Args:
        model: the ranks are those of its meshes; nobody waits for a model that is whole.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        self.meshes = [*{x.device_mesh: None for x in tensors if is_dtensor(x)}]
        groups = [mesh.get_group(dim) for mesh in self.meshes for dim in range(mesh.ndim)]
        self._groups = [*{group.group_name: group for group in groups}.values()]
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
        heard: list[Any] = []
        if not self._groups or self._failed:
            return heard
        failure: Any = None
        if error is not None:
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
            why = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
            failure = kind, f"rank {this_rank()}: {why}"
        for group in self._groups:  # each hears of what the one before has heard
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, (failure, said), group)
            heard += [value for _, value in told]
            failure = next((each for each, _ in told if each is not None), failure)
        self._failed = failure is not None
        if self._failed and error is None:
            kind, why = failure
            raise kind(why)
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


# ---------------------------------------------------------------- parts of a weight


def parts_have_own_scales(weight: Any, layout: Layout) -> bool:
    """Whether no scale of a DTensor covers parts of two ranks; or there is one for all.

    Of experts [E, N, K] each has scales of its own, so these are parts of whole experts.
    """
    if weight.dim() == 3:
        return has_whole_experts(weight)
    granularity = layout.granularity
    if granularity.one_scale:
        return True
    for dim, ranks in ranks_of_dims(weight).items():
        size, block = weight.shape[dim], (granularity.height, granularity.width)[dim]
        if block is None:
            return False
        # Torch's chunks of chunks are whole blocks only where all are of one size.
        uneven = size % ranks and weight.device_mesh.ndim > 1
        if block > 1 and (-(-size // ranks) % block or uneven):
            return False
    return True


def has_whole_experts(weight: Any) -> bool:
    """Whether each rank has whole experts of a DTensor [E, N, K]."""
    return all(each.is_replicate() or each.is_shard(0) for each in weight.placements)


def whole_of(part: Tensor, weight: Any, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of which each rank has a part, as it has one of `weight`; collective."""
    if part.dtype in FLOAT8_MAX:  # Gloo knows no float8
        return whole_of(part.view(torch.uint8), weight, shape).view(part.dtype)
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = weight.device_mesh, weight.placements
    return whole(
        type(weight).from_local(
            part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    )


def whole(x: Any) -> Tensor:
    """Return a tensor of which ranks may have parts; collective if they do."""
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[no-any-return]
