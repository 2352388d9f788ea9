"""The delayed-scaling buffers of a layer, and their stacking over all layers of a model.

Each cast site with delayed scaling owns three float32 buffers, named after it:
`fp8_amax_<site>` [], `fp8_amax_history_<site>` [history_len] and `fp8_scale_<site>` [].
Histories and scales are views of one stacked tensor per model, so that a sync takes a handful of
kernels for all layers together. The amaxes, which compiled graphs write, are tensors of their
own: with aliased ones, AOTAutograd compares each with each for overlap.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from float8.config import CastSite, Float8LinearConfig
from float8.formats import FLOAT8_MAX
from float8.quantize.history import UNKNOWN_SCALE


class DelayedLayer(Protocol):
    """What stacking needs to know of a layer."""

    config: Float8LinearConfig
    _buffers: dict[str, Tensor | None]


def amax_name(site: CastSite) -> str:
    """Name of the buffer that holds the amax since the last sync."""
    return f"fp8_amax_{site.value}"


def history_name(site: CastSite) -> str:
    """Name of the buffer that holds the amaxes of the last steps, most recent first."""
    return f"fp8_amax_history_{site.value}"


def scale_name(site: CastSite) -> str:
    """Name of the buffer that holds the decode scale of the next step."""
    return f"fp8_scale_{site.value}"


def amax_names(config: Float8LinearConfig) -> list[str]:
    """The buffers of a layer of this configuration that differ between ranks until a sync."""
    return [amax_name(site) for site in config.delayed_sites]


def buffer_names(config: Float8LinearConfig) -> list[str]:
    """All delayed-scaling buffers of a layer of this configuration."""
    return [
        name(site)
        for site in config.delayed_sites
        for name in (amax_name, history_name, scale_name)
    ]


def register_buffers(layer: nn.Module, config: Float8LinearConfig, device: torch.device) -> None:
    """Give `layer` the buffers its configuration needs, in their initial state."""
    history_len = config.delayed_scaling_config.history_len
    for site in config.delayed_sites:
        for name, shape in ((amax_name, ()), (history_name, (history_len,)), (scale_name, ())):
            empty = torch.empty(shape, dtype=torch.float32, device=device)
            layer.register_buffer(name(site), empty)
    reset_buffers(layer, config)


@torch.no_grad()
def reset_buffers(layer: nn.Module, config: Float8LinearConfig) -> None:
    """Set the buffers to their initial state, in place."""
    for site in config.delayed_sites:
        layer.get_buffer(amax_name(site)).zero_()
        layer.get_buffer(history_name(site)).zero_()
        first_scale = UNKNOWN_SCALE if config.enable_amax_init else 1.0
        layer.get_buffer(scale_name(site)).fill_(first_scale)


def repair_buffers(layer: nn.Module, config: Float8LinearConfig, device: torch.device) -> None:
    """Make the buffers float32 again, and real where the weights became so without them."""
    buffers = {name: layer.get_buffer(name) for name in buffer_names(config)}
    if device.type != "meta" and any(buffer.is_meta for buffer in buffers.values()):
        register_buffers(layer, config, device)
    elif any(buffer.dtype != torch.float32 for buffer in buffers.values()):
        for name, buffer in buffers.items():
            layer.register_buffer(name, buffer.to(torch.float32))


class StackedState(NamedTuple):
    """The delayed-scaling state of S cast sites: all sites of some layers, in order."""

    amaxes: list[Tensor]
    """S tensors [] float32."""

    history: Tensor
    """[S, history_len] float32; row s is the layer's own buffer."""

    scale: Tensor
    """[S] float32; element s is the layer's own buffer."""

    float8_max: Tensor
    """[S] float64, the largest value of each site's format."""

    views: list[tuple[Tensor, Tensor]]
    """The (history, scale) buffers handed out, to see whether they are still the layers' own."""


@torch.no_grad()
def stack_state(layers: Sequence[DelayedLayer]) -> StackedState:
    """Move the histories and scales of `layers` into stacked tensors, values unchanged.

    The layers must share one `DelayedScalingConfig` and one device.
    """
    sites = [(layer._buffers, site) for layer in layers for site in layer.config.delayed_sites]
    dtypes = [
        layer.config.cast_config(site).target_dtype
        for layer in layers
        for site in layer.config.delayed_sites
    ]
    history = torch.stack([_buffer(buffers, history_name(site)) for buffers, site in sites])
    scale = torch.stack([_buffer(buffers, scale_name(site)) for buffers, site in sites])
    maxima = [FLOAT8_MAX[dtype] for dtype in dtypes if dtype is not None]
    views = list(zip(history.unbind(), scale.unbind(), strict=True))
    for (buffers, site), (history_view, scale_view) in zip(sites, views, strict=True):
        buffers[history_name(site)] = history_view
        buffers[scale_name(site)] = scale_view
    return StackedState(
        amaxes=[_buffer(buffers, amax_name(site)) for buffers, site in sites],
        history=history,
        scale=scale,
        float8_max=torch.tensor(maxima, dtype=torch.float64, device=scale.device),
        views=views,
    )


def is_current(stacked: StackedState, layers: Sequence[DelayedLayer]) -> bool:
    """Whether `stacked` still is the state of `layers`.

    It no longer is after `.to(device)`, `load_state_dict(assign=True)` or a `deepcopy`, which
    give layers tensors of their own.
    """
    current = [
        (
            layer._buffers[amax_name(site)],
            layer._buffers[history_name(site)],
            layer._buffers[scale_name(site)],
        )
        for layer in layers
        for site in layer.config.delayed_sites
    ]
    return len(current) == len(stacked.amaxes) and all(
        mine[0] is amax and mine[1] is views[0] and mine[2] is views[1]
        for mine, amax, views in zip(current, stacked.amaxes, stacked.views, strict=True)
    )


def _buffer(buffers: dict[str, Tensor | None], name: str) -> Tensor:
    buffer = buffers[name]
    assert buffer is not None
    return buffer
