"""How a model runs: `MODES[mode](model)` runs it, eager or compiled as one graph."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "aot_eager": partial(torch.compile, backend="aot_eager", fullgraph=True),
    "inductor": partial(torch.compile, fullgraph=True),
}
"""What `aot_eager` compiles has the bits of eager mode."""


def running(model: nn.Module, mode: str) -> nn.Module:
    """The model as it runs in this mode, with nothing compiled for another test."""
    torch._dynamo.reset()
    return MODES[mode](model)
