"""From the name of a device to a device of this machine."""

from __future__ import annotations

import torch

from float8_lab.trainer.errors import ConfigError


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
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(f"device {name!r} is not there: PyTorch sees {found} CUDA device(s)")
    return device
