"""Which weights of a model are gathered in float8."""

import warnings

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.linear import Float8Linear
from float8.parallel.weight import FSDPFloat8Weight
from float8.tensor import Float8GatherWeight, GatherPlan


def check_gatherable(linear: nn.Linear, fqn: str) -> None:
    """Raise a `ValueError` if the weight of a layer to be converted is sharded or has hooks."""
    if hasattr(linear.weight, "device_mesh"):
        raise ValueError(
            f"layer {fqn or '(root)'!r}: got a DTensor as weight, expected a plain tensor with "
            f"enable_fsdp_float8_all_gather=True; convert the model first, then call fully_shard"
        )
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(linear.weight, name, None):
            raise ValueError(
                f"layer {fqn or '(root)'!r}: got a weight with gradient hooks, which would be "
                f"lost, expected none with enable_fsdp_float8_all_gather=True; register them on "
                f"the weight after the conversion"
            )


def enable_float8_all_gather(module: nn.Module) -> None:
    """Make the weights of converted layers whose configuration asks for it gather in float8.

    The Parameters become Parameters of a subclass over the same memory. They stay the same objects,
    for optimizers and ties, unless torch cannot swap them (a weak reference to one exists, or a
    graph that used it); then they are replaced, tied ones alike, with a warning.

    A weight that something else than `Float8Linear` uses too, such as an embedding, stays plain:
    what is gathered in float8 cannot be looked up in.
    """
    users = _users(module)
    replaced: dict[Tensor, nn.Parameter] = {}
    new_objects: list[str] = []
    for name, layer in module.named_modules():
        if not isinstance(layer, Float8Linear) or not layer.config.enable_fsdp_float8_all_gather:
            continue
        weight = layer._parameters["weight"]
        if weight is None or isinstance(weight, Float8GatherWeight):
            continue
        if weight not in replaced:
            if not all(_gathers_alike(user, own, layer.config) for user, own in users[weight]):
                continue
            replaced[weight] = _converted(weight, layer)
            if replaced[weight] is not weight:
                new_objects.append(name or "(root)")
        layer._parameters["weight"] = replaced[weight]
    if new_objects:
        warnings.warn(
            f"float8: the weights of {len(new_objects)} layer(s) are new Parameters, because "
            f"something refers to the old ones (a compiled forward, a graph, a weakref): "
            f"{', '.join(new_objects[:3])}{', ...' if len(new_objects) > 3 else ''}. An optimizer "
            f"made before the conversion does not train them: make it afterwards",
            stacklevel=3,
        )


def _users(module: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    users: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((part, name))
    return users


def _gathers_alike(user: nn.Module, name: str, config: Float8LinearConfig) -> bool:
    return isinstance(user, Float8Linear) and name == "weight" and user.config == config


def _converted(weight: nn.Parameter, layer: Float8Linear) -> nn.Parameter:
    cast = layer.plan.weight
    plan = GatherPlan(cast.dtype, cast.delayed, cast.round_to_power_of_2)
    wrapped = FSDPFloat8Weight(weight.data, plan)  # `.data`: no view that refers to the weight
    new = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
    new.grad = weight.grad
    new.__dict__.update(weight.__dict__)  # what users and optimizers wrote on it
    try:
        torch.utils.swap_tensors(weight, new)  # type: ignore[no-untyped-call]
    except RuntimeError:  # nothing has changed then
        return new
    return weight
