"""Delayed-scaling state of another configuration, as a layer can load it.

Of the sites that both have it is taken, with as much of the histories as fits; the rest is dropped
or starts anew, and a warning says so: the same for all layers, so that Python shows it once.
"""

import warnings
from typing import Any

import torch

from float8.config import CastSite
from float8.linear.delayed import StatefulLinear

_KINDS = ("amax", "amax_history", "scale")


def as_loadable(layer: StatefulLinear, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """`state_dict` with the state that `layer` has, if it has any of that; not changed itself."""

    def keys(site: str) -> list[str]:
        return [f"{prefix}fp8_{kind}_{site}" for kind in _KINDS]

    there = {site.value for site in CastSite if not state_dict.keys().isdisjoint(keys(site.value))}
    if not there:
        return state_dict
    loaded = dict(state_dict)
    here = {site.name: site for site in layer.delayed}
    told = []
    for name in sorted(there - here.keys()):
        told.append(f"dropped the state of {name}, which is not delayed here")
        for key in keys(name):
            loaded.pop(key, None)
    for name, site in here.items():
        own = layer.get_buffer(site.history)
        if name not in there:
            told.append(f"found no state of {name}, which starts anew")
            fresh = (torch.zeros(()), torch.zeros_like(own), torch.tensor(layer._first_scale))
            loaded.update(zip(keys(name), fresh, strict=True))
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
