"""Reading a checkpoint of the trainer without the trainer."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten_with_path


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors, whole and on the CPU, by names like `model/norm.weight`."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(checkpoint, whole)
        found, _ = tree_flatten_with_path(torch.load(whole))
    return {"/".join(key.key for key in path): tensor for path, tensor in found}
