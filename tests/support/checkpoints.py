"""Reading a checkpoint of the trainer without the trainer."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors, whole and on the CPU, by names like `model/norm.weight`."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(checkpoint, whole)
        return dict(_flat("", torch.load(whole)))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
    else:
        for name, inner in value.items():
            yield from _flat(f"{prefix}/{name}".removeprefix("/"), inner)
