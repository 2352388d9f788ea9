"""What fused functions keep from forward to backward: what autograd saves, and nothing besides."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    all_linears,
    convert_to_float8_training,
    rms_norm_linear,
    swiglu_feed_forward,
    update_float8_weights,
    why_not_fused,
)
from support.devices import on_devices
from support.microbatches import with_weights
from support.models import seeded


def layers(*shapes: tuple[int, int], device: str = "cpu") -> tuple[nn.Module, ...]:
    made = nn.ModuleList(nn.Linear(*shape, bias=False, device=device) for shape in shapes)
    return tuple(convert_to_float8_training(made, module_filter_fn=all_linears))


def feed_forward(x: Tensor, norm: nn.Module | None = None) -> Tensor:
    return swiglu_feed_forward(x, *layers((48, 80), (48, 80), (80, 48), device=x.device), norm=norm)


@on_devices
def test_an_input_in_float8_is_not_kept_in_high_precision(device: str) -> None:
    x = seeded(0, 16, 48, device=device).requires_grad_() * 1
    alive = weakref.ref(x)
    y = feed_forward(x)
    del x
    assert alive() is None
    y.sum().backward()


@on_devices
@pytest.mark.parametrize("fused", ["feed forward", "norm and linear"])
def test_saved_tensor_hooks_reach_all_that_is_kept(device: str, fused: str) -> None:
    """As activation checkpointing and offloading need it."""
    norm = nn.RMSNorm(48, device=device)
    x = seeded(0, 16, 48, device=device).requires_grad_() * 1
    alive = weakref.ref(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        if fused == "feed forward":
            y = feed_forward(x, norm)
        else:
            y, *_ = rms_norm_linear(x, norm, layers((48, 32), (48, 16), device=device))
    del x
    assert alive() is None
    y.sum().backward()


@on_devices
def test_row_data_of_held_weights_end_with_the_next_update(device: str) -> None:
    """Those of columns are kept for backward."""
    model = nn.ModuleList(layers((48, 80), (48, 80), (80, 48), device=device))
    convert_to_float8_training(model, config=with_weights(None), module_filter_fn=all_linears)
    update_float8_weights(model)
    x = seeded(0, 16, 48, device=device).requires_grad_()
    y = swiglu_feed_forward(x, *model)
    row, col = (weakref.ref(part.data) for part in model[0].held.operand[:2])
    update_float8_weights(model)
    assert row() is None
    assert col() is not None
    y.sum().backward()


@pytest.mark.parametrize("shapes", [((48, 32), (40, 32)), ((40, 32), (48, 32))])
def test_layers_that_do_not_fit_raise_as_alone(shapes) -> None:
    """Padding to 16 must not hide it."""
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 40\]"):
        rms_norm_linear(seeded(0, 4, 48), nn.RMSNorm(48), layers(*shapes))


@pytest.mark.parametrize(
    "shapes",
    [
        ((48, 40), (48, 40), (48, 32)),
        ((48, 40), (40, 40), (40, 32)),
        ((48, 48), (48, 40), (48, 48)),
    ],
)
def test_feed_forward_layers_that_do_not_fit_raise_as_alone(shapes) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"expected \[|must match"):
        swiglu_feed_forward(seeded(0, 4, 48), *layers(*shapes))


def test_a_residual_of_another_width_raises() -> None:
    made = layers((48, 80), (48, 80), (80, 32))
    with pytest.raises(RuntimeError, match="must match"):
        swiglu_feed_forward(seeded(0, 4, 48), *made, norm=nn.RMSNorm(48), residual=True)


@on_devices
def test_tied_weights_are_computed_one_by_one_and_compile(device: str) -> None:
    torch._dynamo.reset()
    first, second = layers((48, 48), (48, 48), device=device)
    second.weight = first.weight
    norm = nn.RMSNorm(48, device=device)
    assert why_not_fused(first, second) == "two layers share a weight"
    x = seeded(0, 16, 48, device=device)
    run = torch.compile(
        lambda x: rms_norm_linear(x, norm, (first, second)), fullgraph=True, backend="aot_eager"
    )
    a, b = run(x)
    assert torch.equal(a, b)
