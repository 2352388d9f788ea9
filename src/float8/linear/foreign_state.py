"""Delayed-scaling state of another library or configuration, as a layer can load it.

Of the sites that both have it is taken, with as much of the histories as fits; the rest is dropped
or starts anew, and a warning says so: the same for all layers, so that Python shows it once.
"""

import warnings
from typing import Any

import torch

from float8.config import CastSite

_FIRST_NAMES = {"x": "input", "w": "weight", "dL_dY": "grad_output"}
"""What float8_experimental called the sites until July 2024."""


# In what follows `layer` is a `StatefulLayer`, which stands above this module.


def as_loadable(
    layer: Any, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> dict[str, Any]:
    """`state_dict` with the state that `layer` has, if it has any of that; not changed itself."""
    for first, name in _FIRST_NAMES.items():
        if f"{prefix}fp8_scale_{first}" in state_dict:
            new = dict(zip(state_keys(prefix, first), state_keys(prefix, name), strict=True))
            state_dict = {new.get(key, key): x for key, x in state_dict.items()}
    there = {
        site.value
        for site in CastSite
        if not state_dict.keys().isdisjoint(state_keys(prefix, site.value))
    }
    if not there:
        return state_dict
    loaded = _with_our_scales(layer, state_dict, prefix, error_msgs)
    here = {site.name: site for site in layer.delayed}
    told = []
    for name in sorted(there - here.keys()):
        told.append(f"dropped the state of {name}, which is not delayed here")
        for key in state_keys(prefix, name):
            loaded.pop(key, None)
    for name, site in here.items():
        own = layer.get_buffer(site.history)
        if name not in there:
            told.append(f"found no state of {name}, which starts anew")
            # Beside what is loaded: the layer may be on the meta device, and take it as it is.
            others = (key for other in there for key in state_keys(prefix, other))
            device = next(state_dict[key].device for key in others if key in state_dict)
            fresh = (
                torch.zeros((), device=device),
                torch.zeros(own.shape, device=device),
                torch.tensor(layer.first_scale, device=device),
            )
            loaded.update(zip(state_keys(prefix, name), fresh, strict=True))
        history = loaded.get(prefix + site.history)
        if not isinstance(history, torch.Tensor) or history.dim() != 1:
            continue
        steps, missing = len(history), len(own) - len(history)
        if missing > 0:
            loaded[prefix + site.history] = torch.cat([history, history.new_zeros(missing)])
        elif missing < 0:
            told.append(f"dropped all but the last {len(own)} of {steps} steps of {name}")
            loaded[prefix + site.history] = history[: len(own)]
    if told:
        warnings.warn(
            f"float8: the checkpoint has delayed scaling of another configuration: "
            f"{'; '.join(told)}",
            stacklevel=2,
        )
    return loaded


def state_keys(prefix: str, site: str) -> list[str]:
    """The names of a site's buffers: of the amax, the history and the scale."""
    return [f"{prefix}fp8_{kind}_{site}" for kind in ("amax", "amax_history", "scale")]


def _with_our_scales(
    layer: Any, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> dict[str, Any]:
    """A copy of `state_dict` with amaxes and scales of `layer` as we keep them.

    Float8Linear of float8_experimental and of torchao <= 0.9 has buffers of the same names for
    all three roles, amaxes and scales of shape [1], and encode scales: 1 / ours. Torch would
    load an element of any vector for a scalar.
    """
    loaded = dict(state_dict)
    scalars = [prefix + name for site in layer.delayed for name in (site.amax, site.scale)]
    shapes = {key: list(getattr(loaded[key], "shape", ())) for key in scalars if key in loaded}
    if not any(shapes.values()):
        return loaded
    for key, shape in shapes.items():
        if any(other != [1] for other in shapes.values()):
            error_msgs.append(
                f"size mismatch for {key}: got shape {shape} in the checkpoint, expected [], "
                f"or [1] for all of this layer (float8_experimental, torchao <= 0.9)"
            )
            loaded[key] = layer.get_buffer(key.removeprefix(prefix))
        elif "fp8_amax" in key:  # the history has it
            loaded[key] = torch.zeros_like(loaded[key]).reshape(())
        else:
            history = loaded.get(key.replace("fp8_scale", "fp8_amax_history"))
            known = history is None or bool((history > 0).any())
            decode = loaded[key].double().reciprocal().float().reshape(())
            loaded[key] = decode if known else torch.full_like(decode, layer.first_scale)
    return loaded
