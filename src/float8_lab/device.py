"""From the name of a device to a device of this machine."""

import torch

from float8.formats import lacks_float8_gemm
from float8_lab.errors import ConfigError


def check_device(name: str) -> torch.device:
    """The device of that name; a `ConfigError` if it means nothing or is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use cpu, cuda or cuda:N") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = {"cpu": 1, "cuda": gpus}
    if device.type not in there:
        raise ConfigError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    if (device.index or 0) >= there[device.type]:
        hint = "there is one CPU device, use cpu"
        if device.type == "cuda":
            none = "no CUDA GPU here, use --device cpu"
            hint = f"PyTorch sees {gpus} CUDA device(s)" if gpus else none
        raise ConfigError(f"device {name!r} is not there: {hint}")
    return device


def float8_device(name: str) -> torch.device:
    """The device of that name, made the current one; a `ConfigError` if it has no float8 GEMMs."""
    device = check_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if reason := lacks_float8_gemm(device):
        raise ConfigError(reason)
    return device
