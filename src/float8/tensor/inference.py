"""What tensor subclasses must do by themselves about inference mode."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def as_inference_as(source: Tensor) -> AbstractContextManager[object]:
    """A context for making what is derived from `source`: inference tensors only if it is one.

    Torch's own views of normal tensors are normal in inference mode, too; of a subclass they must
    be, or they raise ("Cannot set version_counter for inference tensor").
    """
    if not torch.is_inference_mode_enabled() or source.is_inference():
        return nullcontext()
    return torch.inference_mode(False)
