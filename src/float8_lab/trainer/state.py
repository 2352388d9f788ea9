"""What a run must remember to go on bit for bit: as a flat dict of tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from float8_lab.trainer.errors import CheckpointError

_MODEL = "model/"
_OPTIMIZER = "optimizer/"
_RNG = "rng/"


def capture_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Tensor]:
    """Collect weights, buffers, optimizer state and random-number state.

    Returns:
        Flat dict; optimizer state goes under its parameter's name, so it does not depend on the
        order of parameters. Tensors may share memory with the live ones. Those of sharded
        parameters are DTensors.
    """
    tensors = {_MODEL + name: value for name, value in model.state_dict().items()}
    for parameter_name, parameter in model.named_parameters():
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{parameter_name}/{name}"] = value
    tensors[_RNG + "cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors[_RNG + "cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def empty_state(model: nn.Module) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
    """How to make memory for what `capture_state` collected, sharded as `model` is now.

    Returns:
        A function of name, shape and dtype of a whole tensor. It gives a DTensor, on the device
        of the parameter that it belongs to, or for all else a whole tensor on the CPU.
    """
    named = model.named_parameters(remove_duplicate=False)  # a tied head has both names
    parameters: dict[str, Tensor] = dict(named)

    def empty(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        owner = name.removeprefix(_MODEL)
        if name.startswith(_OPTIMIZER):
            owner = name.removeprefix(_OPTIMIZER).rpartition("/")[0]
        parameter = parameters.get(owner)
        if isinstance(parameter, DTensor) and parameter.shape == shape:
            return torch.zeros_like(parameter, dtype=dtype)
        return torch.empty(shape, dtype=dtype)

    return empty


def restore_state(
    tensors: dict[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Put what `capture_state` collected back, in place.

    Raises:
        CheckpointError: If the tensors do not fit the model or the optimizer.
    """
    try:
        model.load_state_dict(_below(tensors, _MODEL))
    except RuntimeError as error:
        details = " ".join(str(error).split())
        raise CheckpointError(f"the checkpoint does not fit the model: {details}") from error
    names = {parameter: name for name, parameter in model.named_parameters()}
    saved = _below(tensors, _OPTIMIZER)
    state = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        values = _below(saved, names[parameter] + "/")
        if values:
            state[index] = values
    if len(saved) != sum(len(values) for values in state.values()):
        raise CheckpointError("the checkpoint has optimizer state of unknown parameters")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(tensors[_RNG + "cpu"].cpu())
    if device.type == "cuda" and _RNG + "cuda" in tensors:
        torch.cuda.set_rng_state(tensors[_RNG + "cuda"].cpu(), device)


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
