"""From the name of a device to a device of this machine."""

from __future__ import annotations

import torch

from float8.formats import lacks_float8_gemm
from float8_lab.errors import ConfigError


def check_device(name: str) -> torch.device:
    """Turn a device name into a device that this machine has.

    Raises:
        ConfigError: (a `ValueError`) if the name means nothing or the device is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    if device.type == "cpu" and device.index:
        raise ConfigError(f"device {name!r} is not there: there is one CPU device, use cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} is not there: no CUDA GPU here, use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(f"device {name!r} is not there: PyTorch sees {found} CUDA device(s)")
    return device


def float8_device(name: str) -> torch.device:
    """The device of that name with its number, made the current one, to measure float8 on.

    Raises:
        ConfigError: (a `ValueError`) if it is not there, or has no float8 GEMMs.
    """
    device = check_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if reason := lacks_float8_gemm(device):
        raise ConfigError(reason)
    return device
