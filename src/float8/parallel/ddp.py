"""Tell `DistributedDataParallel` which tensors of float8 layers it must ignore."""

from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.conversion import Feature
from float8.linear import Float8Module

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute: names that DDP does not communicate
_ADDED = "_float8_names_that_ddp_ignores"  # attribute: names in `_IGNORED` that are not the user's


class DataParallel(Feature):
    """Has each conversion tell `DistributedDataParallel` (DDP) which tensors it must ignore."""

    def after_conversion(self, model: nn.Module, config: Float8LinearConfig | None) -> None:
        """Have DDP ignore amax buffers, and weights in float8 only, whatever `config` is."""
        tell_ddp_what_to_ignore(model)


def tell_ddp_what_to_ignore(module: nn.Module) -> None:
    """Have DDP neither broadcast nor reduce amax buffers, and weights that exist in float8 only.

    Sets an attribute that DDP reads when it wraps `module` or a submodule. By default DDP would
    overwrite amaxes by rank 0's in forwards. It broadcasts other tensors when it wraps, so that
    only rank 0 needs to load them; weights in float8 only must be loaded on each rank.
    """
    for root in module.modules():
        names = [
            f"{prefix}.{name}" if prefix else name
            for prefix, layer in root.named_modules()
            if isinstance(layer, Float8Module)
            for name in layer._float8_of_this_rank
        ]
        added_before = root.__dict__.pop(_ADDED, [])  # by an earlier conversion
        if names or added_before:
            by_user = [name for name in getattr(root, _IGNORED, ()) if name not in added_before]
            added = [name for name in names if name not in by_user]
            root.__dict__[_IGNORED] = [*by_user, *added]
            if added:
                root.__dict__[_ADDED] = added
