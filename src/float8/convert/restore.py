"""The way back: layers in high precision again."""

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from float8.arguments import require_module
from float8.convert.encoder import leave_fast_path
from float8.convert.fuse import Fused, unfuse_modules
from float8.linear import Float8Layer, replaced_forward
from float8.parallel.ddp import tell_ddp_what_to_ignore
from float8.parallel.fsdp import disable_float8_all_gather
from float8.tensor import Float8GatherWeight, Float8Tensor, is_fsdp_module, local_tensor


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Turn each `Float8Linear` of `module` back into what it was made of, in place.

    An `nn.Linear`, a subclass of it, or a `Conv1D`. Layers stay the same objects, as do their
    Parameters, hooks, training mode and attributes, so optimizers and wrappers of the model keep
    working. A weight that was in float8 only becomes a new Parameter, which stays frozen. Fused
    modules get their own forward back. The state of delayed scaling is dropped. Does nothing for a
    model in high precision.

    Args:
        module: the model, or a single `Float8Linear`.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is no `nn.Module`.
        ValueError: a layer has a weight that FSDP2 gathers in float8, or is itself sharded, or
            parametrized; or one, or a fused module, has a `forward` of its own as attribute.
            Nothing is changed then.
    """
    require_module(module, "module")
    layers = {layer: fqn for fqn, layer in module.named_modules() if isinstance(layer, Float8Layer)}
    for layer, fqn in layers.items():
        require_changeable(layer, fqn)
    for fqn, part in module.named_modules():
        if isinstance(part, Fused) and replaced_forward(part):
            raise _unchangeable(fqn, *_OWN_FORWARD)
    disable_float8_all_gather(layers)
    unfuse_modules(module)
    for layer in layers:
        layer.become_high_precision()
    leave_fast_path(module)
    tell_ddp_what_to_ignore(module)
    return module


def require_changeable(layer: Float8Layer, fqn: str) -> None:
    """Raise a `ValueError` if somebody relies on what `layer` is."""
    if is_fsdp_module(layer):
        got = "a layer that fully_shard was applied to"
        do = "apply it to the block around it"
    elif replaced_forward(layer):
        got, do = _OWN_FORWARD
    elif is_parametrized(layer):
        got, do = "a layer that is parametrized", "remove the parametrization first"
    elif _fsdp_has_weight(layer):
        got = "a weight that FSDP2 gathers in float8"
        do = "make the change before fully_shard, or load a state dict of it into a new model"
    else:
        return
    raise _unchangeable(fqn, got, do)


_OWN_FORWARD = (
    "a layer with a `forward` of its own as attribute, which holds that of float8",
    "remove it first: accelerate's, by accelerate.hooks.remove_hook_from_submodules(model)",
)


def _unchangeable(fqn: str, got: str, do: str) -> ValueError:
    return ValueError(f"layer {fqn or '(root)'!r}: got {got}, expected one to change; {do}")


def _fsdp_has_weight(layer: Float8Layer) -> bool:
    """Whether the weight is one that FSDP2 gathers in float8: a shard, or gathered now."""
    weight = layer.weight
    local = local_tensor(weight)
    shard = isinstance(local, Float8GatherWeight) and local is not weight
    return shard or (isinstance(local, Float8Tensor) and not layer.keeps_no_master)
