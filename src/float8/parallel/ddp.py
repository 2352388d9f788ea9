"""Settings and checks for models under `DistributedDataParallel`."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from float8.experts import Float8Experts, names_to_gather
from float8.kernels.runtime.private import goes_on_without_inputs
from float8.linear import Float8Linear

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of the wrapped module with names that DDP neither broadcasts nor reduces."""
_OURS = "_float8_names_that_ddp_ignores"


def tell_ddp_what_to_ignore(module: nn.Module) -> None:
    """Exclude amax buffers, and weights in float8 only, from DDP's broadcasts and reductions.

    Marks `module` and its submodules, any of which DDP may wrap. DDP broadcasts rank 0's buffers in
    each forward, which would lose other ranks' amaxes. Histories and scales are still broadcast: a
    sync leaves them equal, and rank 0 may load a checkpoint alone. Each rank loads float8 weights.
    """
    for root in module.modules():
        names = [
            f"{prefix}.{name}" if prefix else name
            for prefix, layer in root.named_modules()
            if isinstance(layer, Float8Linear | Float8Experts)
            for name in (
                *[site.amax for site in layer._float8_stateful],
                *(names_to_gather(layer) if layer._float8_keeps_no_master else ()),
            )
        ]
        ours_before = root.__dict__.pop(_OURS, [])
        if names or ours_before:
            users = [name for name in getattr(root, _IGNORED, ()) if name not in ours_before]
            ours = [name for name in names if name not in users]
            root.__dict__[_IGNORED] = [*users, *ours]
            if ours:
                root.__dict__[_OURS] = ours


def require_no_join(model: nn.Module) -> None:
    """Raise `RuntimeError` if a `DistributedDataParallel` in `model` is within its `join()`.

    In `join()` a rank without inputs only shadows the collectives of DDP, and would crash in the
    all-reduce of a sync. `join(throw_on_early_termination=True)` stops all ranks and is allowed.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and goes_on_without_inputs(module):
            raise RuntimeError(
                "float8: got a sync of delayed scaling within DDP's join(), expected as many steps "
                "on each rank: a rank without inputs cannot take part in it; use "
                "join(throw_on_early_termination=True), or a recipe without delayed scaling"
            )
