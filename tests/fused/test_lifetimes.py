"""What fused functions keep from forward to backward; layers that do not fit together."""

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

FEED_FORWARD = (48, 80), (48, 80), (80, 48)


def layers(*shapes: tuple[int, int], device: str = "cpu") -> tuple[nn.Module, ...]:
    made = nn.ModuleList(nn.Linear(*shape, bias=False, device=device) for shape in shapes)
    return tuple(convert_to_float8_training(made, module_filter_fn=all_linears))


@on_devices
@pytest.mark.parametrize("fused", ["feed forward", "norm and feed forward", "norm and linear"])
def test_no_input_outlives_its_use(device: str, fused: str) -> None:
    """Not without a norm; with one, saved tensor hooks reach all that is kept.

    As activation checkpointing and offloading need it.
    """
    norm = nn.RMSNorm(48, device=device) if "norm" in fused else None
    x = seeded(0, 16, 48, device=device).requires_grad_() * 1
    alive = weakref.ref(x)

    def run(x: Tensor) -> Tensor:
        if fused == "norm and linear":
            return rms_norm_linear(x, norm, layers((48, 32), (48, 16), device=device))[0]
        return swiglu_feed_forward(x, *layers(*FEED_FORWARD, device=device), norm=norm)

    if norm is None:
        y = run(x)
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = run(x)
    del x
    assert alive() is None
    y.sum().backward()


@on_devices
def test_of_held_weights_column_data_alone_are_kept(device: str) -> None:
    """So row data end with the next update."""
    model = nn.ModuleList(layers(*FEED_FORWARD, device=device))
    convert_to_float8_training(model, config=with_weights(None), module_filter_fn=all_linears)
    update_float8_weights(model)
    x = seeded(0, 16, 48, device=device).requires_grad_()
    y = swiglu_feed_forward(x, *model)
    rows = [weakref.ref(layer.held[0].operand.row.data) for layer in model]
    update_float8_weights(model)
    assert [row() for row in rows] == [None] * 3
    y.sum().backward()


@pytest.mark.parametrize("shapes", [((48, 32), (40, 32)), ((40, 32), (48, 32))])
def test_layers_that_do_not_fit_raise_as_alone(shapes) -> None:
    """Padding to 16 must not hide it."""
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 40\]"):
        rms_norm_linear(seeded(0, 4, 48), nn.RMSNorm(48), layers(*shapes))


@pytest.mark.parametrize(
    ("shapes", "residual"),
    [
        (((48, 40), (48, 40), (48, 32)), False),
        (((48, 40), (40, 40), (40, 32)), False),
        (((48, 48), (48, 40), (48, 48)), False),
        (((48, 80), (48, 80), (80, 32)), True),
    ],
)
def test_feed_forward_layers_that_do_not_fit_raise_as_alone(shapes, residual: bool) -> None:
    norm = nn.RMSNorm(48) if residual else None
    with pytest.raises((ValueError, RuntimeError), match=r"expected \[|must match"):
        swiglu_feed_forward(seeded(0, 4, 48), *layers(*shapes), norm=norm, residual=residual)


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
