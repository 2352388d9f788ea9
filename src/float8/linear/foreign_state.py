"""Delayed-scaling state of another library or configuration, as a layer can load it."""

import warnings
from typing import Any

import torch

from float8.config import CastSite

_FIRST_NAMES = {"x": CastSite.INPUT, "w": CastSite.WEIGHT, "dL_dY": CastSite.GRAD_OUTPUT}
"""The names that float8_experimental gave the sites until July 2024."""


def as_loadable(
    layer: Any, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> dict[str, Any]:
    """Return a copy of `state_dict` with the state that `layer`, a `StatefulLayer`, can load.

    Of the sites that both have it is taken, with as much of the histories as fits; the rest is
    dropped or starts anew, and a warning says so, the same for all layers: Python shows it once.
    """
    loaded, told = dict(state_dict), []
    for first, site in _FIRST_NAMES.items():
        for name in site.buffers:
            if (old := prefix + name.removesuffix(site.value) + first) in loaded:
                loaded[prefix + name] = loaded.pop(old)
    there = {site: [prefix + x for x in site.buffers if prefix + x in loaded] for site in CastSite}
    ours = [key for keys in there.values() for key in keys]
    if not ours:
        return loaded
    device = loaded[ours[0]].device
    for site in sorted(CastSite, key=lambda site: site.value):
        delayed = site in layer._float8_delayed
        if there[site] and not delayed:
            told.append(f"dropped the state of {site.value}, which is not delayed here")
            for key in there[site]:
                del loaded[key]
        elif delayed and not there[site]:
            told.append(f"found no state of {site.value}, which starts anew")
            # Beside what is loaded: the layer may be on the meta device, and take it as it is.
            for name, value in layer._float8_fresh_state(site, device).items():
                loaded[prefix + name] = value
        elif there[site]:
            _take_scale(layer, loaded, prefix, site, error_msgs)
            history = loaded.get(prefix + site.history)
            if not isinstance(history, torch.Tensor) or history.dim() != 1:
                continue
            steps, found = layer._float8_config.delayed_scaling_config.history_len, len(history)
            if found > steps:
                told.append(f"dropped all but the last {steps} of {found} steps of {site.value}")
            missing = history.new_zeros(max(steps - found, 0))
            loaded[prefix + site.history] = torch.cat([history[:steps], missing])
    if told:
        got = "float8: the checkpoint has delayed scaling of another configuration"
        warnings.warn(f"{got}: {'; '.join(told)}", stacklevel=2)
    return loaded


def _take_scale(
    layer: Any, loaded: dict[str, Any], prefix: str, site: CastSite, error_msgs: list[str]
) -> None:
    """Put amax and scale of a site, as we keep them, into `loaded`.

    Float8Linear of float8_experimental and of torchao <= 0.9 has both of shape [1], and encode
    scales: 1 / ours. Torch would load an element of any vector for a scalar.
    """
    amax, history, scale = (prefix + name for name in site.buffers)
    both = [key for key in (amax, scale) if key in loaded]
    shapes = {key: list(getattr(loaded[key], "shape", ())) for key in both}
    if all(shape == [1] for shape in shapes.values()):
        if amax in loaded:  # the history has it
            loaded[amax] = torch.zeros_like(loaded[amax]).reshape(())
        if scale in loaded:
            known = history not in loaded or bool((loaded[history] > 0).any())
            decode = loaded[scale].double().reciprocal().float().reshape(())
            loaded[scale] = decode if known else torch.full_like(decode, layer._float8_first_scale)
        return
    for key, shape in shapes.items():
        if any(shapes.values()):
            error_msgs.append(
                f"size mismatch for {key}: got shape {shape} in the checkpoint, expected [], "
                f"or [1] for both amax and scale (float8_experimental, torchao <= 0.9)"
            )
            loaded[key] = layer.get_buffer(key.removeprefix(prefix))
