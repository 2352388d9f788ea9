"""Tell `DistributedDataParallel` which tensors of float8 layers it must ignore."""

from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.conversion import Feature
from float8.linear import Float8Module

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of the wrapped module with names that DDP neither broadcasts nor reduces."""
_ADDED = "_float8_names_that_ddp_ignores"  # attribute: names in `_IGNORED` that are not the user's


class DataParallel(Feature):
    """The feature that names the tensors which `DistributedDataParallel` must ignore."""

    def after_conversion(self, model: nn.Module, config: Float8LinearConfig | None) -> None:
        """Exclude amax buffers, and weights in float8 only, of `model` from DDP's broadcasts."""
        tell_ddp_what_to_ignore(model)


def tell_ddp_what_to_ignore(module: nn.Module) -> None:
    """Exclude amax buffers, and weights in float8 only, from DDP's broadcasts and reductions.

    Marks `module` and its submodules, any of which DDP may wrap. DDP broadcasts rank 0's buffers in
    each forward, which would lose other ranks' amaxes. DDP still broadcasts histories and scales,
    so only rank 0 must load a checkpoint, unless weights are in float8 only.
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
