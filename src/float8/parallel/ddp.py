"""Buffers and weights that DistributedDataParallel must leave alone."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from float8.experts import Float8Experts, names_to_gather
from float8.kernels.runtime.private import goes_on_without_inputs
from float8.linear import Float8Linear

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of the wrapped module in which DDP looks up the names of what it leaves alone."""
_OURS = "_float8_names_that_ddp_ignores"


def tell_ddp_what_to_ignore(module: nn.Module) -> None:
    """Have DDP leave the amaxes of each rank alone, whichever part of `module` it wraps.

    At every forward DDP copies rank 0's buffers to all ranks. Histories and scales, which a sync
    leaves equal everywhere, may be copied (and shall be, where only rank 0 loads a checkpoint),
    but an amax that another rank recorded since the last sync would be lost. Nor can it send
    weights that are in float8 only: each rank must load them.
    """
    for root in module.modules():
        names = [
            f"{prefix}.{name}" if prefix else name
            for prefix, layer in root.named_modules()
            if isinstance(layer, Float8Linear | Float8Experts)
            for name in (
                *[site.amax for site in getattr(layer, "_float8_delayed", ())],
                *(names_to_gather(layer) if layer._float8_keeps_no_master else ()),
            )
        ]
        before = root.__dict__.pop(_OURS, [])
        if names or before:
            theirs = [name for name in getattr(root, _IGNORED, ()) if name not in before]
            ours = [name for name in names if name not in theirs]
            root.__dict__[_IGNORED] = [*theirs, *ours]
            if ours:
                root.__dict__[_OURS] = ours


def require_no_join(model: nn.Module) -> None:
    """Raise a `RuntimeError` within `DistributedDataParallel.join()` in `model`.

    Ranks that have run out of inputs answer there what DDP sends, and nothing else: what they take
    for the amaxes of a sync would end the process. Not where all ranks stop with the first of them.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and goes_on_without_inputs(module):
            raise RuntimeError(
                "float8: got a sync of delayed scaling within DDP's join(), expected as many steps "
                "on each rank: a rank without inputs cannot take part in it; use "
                "join(throw_on_early_termination=True), or a recipe without delayed scaling"
            )
