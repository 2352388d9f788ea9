"""`torch.utils.checkpoint` around float8 layers: the same values, less kept, nothing recorded
twice."""

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
from support.configs import MIXES, delayed, mixed, tensorwise
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


def pair(mix, kind: str, device: str) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = FeedForward(32, 64).to(device)
        models.append(convert_to_float8_training(model, config=mixed(*mix)))
    return models[0], Checkpointed(models[1], kind)


@on_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", MIXES)
def test_results_and_state_equal_those_without(device: str, mix, kind: str) -> None:
    model, checkpointed = pair(mix, kind, device)
    for step in range(3):
        for microbatch in range(2):
            seed = 10 * step + microbatch
            x, g = (seeded(seed + i, 8, 32, device=device) for i in (0, 5))
            wanted, got = forward_backward(model, x, g), forward_backward(checkpointed, x, g)
            for name in wanted:
                inner = name if name in ("output", "input") else f"inner.{name}"
                assert same_bits(got[inner], wanted[name]), name
        for name, buffer in fp8_state(model).items():
            assert torch.equal(fp8_state(checkpointed)[f"inner.{name}"], buffer), name
        sync_float8_amax_and_scale_history(model)
        sync_float8_amax_and_scale_history(checkpointed)


@on_devices
@pytest.mark.parametrize(
    ("kind", "gemms"), [("reentrant", 12), ("non-reentrant", 12), ("selective", 9)]
)
@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
def test_the_recomputed_gemms_are_those_asked_for(
    device: str, config, kind: str, gemms: int
) -> None:
    """9 GEMMs without checkpointing, 3 more to recompute the forward."""
    model = convert_to_float8_training(FeedForward(32, 64).to(device), config=config)
    checkpointed = Checkpointed(model, kind)
    with OpCounter() as counter:
        forward_backward(checkpointed, seeded(0, 8, 32, device=device), seeded(1, 8, 32).to(device))
    assert counter.gemms == gemms


@on_devices
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_only_the_input_is_kept(device: str, kind: str) -> None:
    model = convert_to_float8_training(FeedForward(32, 64).to(device), config=delayed())
    x = seeded(0, 8, 32, device=device).requires_grad_()
    with saved_tensors() as saved:
        Checkpointed(model, kind)(x)
    assert all(s.data_ptr() == x.data_ptr() or s.numel() == 0 for s in saved)
