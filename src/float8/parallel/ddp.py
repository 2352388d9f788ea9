"""What DistributedDataParallel must leave alone."""

from torch import nn

from float8.linear import Float8Layer

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of the wrapped module in which DDP looks up the names of what it leaves alone."""


def keep_amaxes_under_ddp(module: nn.Module) -> None:
    """Have DDP leave the amaxes of each rank alone, whichever part of `module` it wraps.

    At every forward DDP copies rank 0's buffers to all ranks. Histories and scales, which a sync
    leaves equal everywhere, may be copied (and shall be, where only rank 0 loads a checkpoint),
    but an amax that another rank recorded since the last sync would be lost. Nor can it send
    weights that are in float8 only: each rank must load them.
    """
    for root in module.modules():
        names = [
            f"{prefix}.{own}" if prefix else own
            for prefix, layer in root.named_modules()
            if isinstance(layer, Float8Layer)
            for own in (*(site.amax for site in layer.delayed), *["weight"] * layer.keeps_no_master)
        ]
        if names:
            ignored = [*getattr(root, _IGNORED, ())]
            ignored += [name for name in names if name not in ignored]
            setattr(root, _IGNORED, ignored)
