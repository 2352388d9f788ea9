"""`torch.utils.checkpoint` around float8 layers: the same values, less kept, nothing recorded
twice."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from float8 import (
    convert_to_float8_training,
    save_gemm_outputs,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits
from support.configs import RECIPES, delayed, of_recipe
from support.devices import on_devices
from support.models import FeedForward, forward_backward, fp8_state, seeded
from support.spies import OpCounter, saved_tensors

KINDS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_gemm_outputs),
    },
}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, **KINDS[self.kind])


@on_devices
@pytest.mark.parametrize(
    ("kind", "gemms"), [("reentrant", 12), ("non-reentrant", 12), ("selective", 9)]
)
@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise"])
def test_results_and_state_equal_those_without(
    device: str, recipe: str, kind: str, gemms: int
) -> None:
    """9 GEMMs without checkpointing, 3 more to recompute the forward."""
    is_emulated = device == "cpu" and recipe == "rowwise"
    model = convert_to_float8_training(FeedForward(32, 64).to(device), config=of_recipe(recipe))
    checkpointed = Checkpointed(copy.deepcopy(model), kind)
    for step in range(3):
        for microbatch in range(2):
            seed = 10 * step + microbatch
            x, g = (seeded(seed + i, 8, 32, device=device) for i in (0, 5))
            wanted = forward_backward(model, x, g)
            with OpCounter() as counter:
                got = forward_backward(checkpointed, x, g)
            assert counter.gemms == (0 if is_emulated else gemms)
            for name in wanted:
                inner = name if name in ("output", "input") else f"inner.{name}"
                assert same_bits(got[inner], wanted[name]), name
        for name, buffer in fp8_state(model).items():
            assert torch.equal(fp8_state(checkpointed)[f"inner.{name}"], buffer), name
        sync_float8_amax_and_scale_history(model)
        sync_float8_amax_and_scale_history(checkpointed)


@on_devices
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_only_the_input_is_kept(device: str, kind: str) -> None:
    model = convert_to_float8_training(FeedForward(32, 64).to(device), config=delayed())
    x = seeded(0, 8, 32, device=device).requires_grad_()
    with saved_tensors() as saved:
        Checkpointed(model, kind)(x)
    assert all(s.data_ptr() == x.data_ptr() or s.numel() == 0 for s in saved)
