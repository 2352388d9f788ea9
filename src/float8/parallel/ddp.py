"""Tell `DistributedDataParallel` which tensors of float8 layers it must ignore."""

from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.conversion import Feature
from float8.linear import Float8Module

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute: names that DDP does not communicate
_ADDED = "_float8_names_that_ddp_ignores"  # attribute: names in `_IGNORED` that are not the user's


class DataParallel(Feature):
    """Tells `DistributedDataParallel`, after each conversion, which tensors it must ignore."""

    def after_conversion(self, model: nn.Module, config: Float8LinearConfig | None) -> None:
        """Exclude amax buffers and weights that exist in float8 only from DDP's communication."""
        tell_ddp_what_to_ignore(model)


def tell_ddp_what_to_ignore(module: nn.Module) -> None:
    """Exclude amax buffers and weights that exist in float8 only from DDP's communication.

    Marks `module` and its submodules, any of which DDP may wrap. Otherwise DDP would overwrite the
    amaxes of other ranks with rank 0's in each forward. It still broadcasts histories and scales of
    delayed scaling; so only rank 0 must load a checkpoint, unless weights exist in float8 only.
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
