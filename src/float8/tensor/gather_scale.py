"""The scale that was computed ahead for a weight, and who may write the weight unseen."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.tensor.dtensor import local_tensor


class PrecomputedScale(NamedTuple):
    """The scale of the whole weight, of which this tensor may be a part."""

    scale: Tensor
    """0-dim float32 decode scale."""

    param_dtype: torch.dtype
    """The dtype that the weight was taken to be rounded to."""


class SharedScale:
    """What all views of the same memory have in common, so that a write into one tells all.

    Plain aliases, such as those in state dicts, tell by their version counters. One tensor of each
    kind is kept for that; what is handed out shares its counter. A DTensor has two: its own, which
    ops on it count up, and its shard's, for writes through `to_local()`.
    """

    def __init__(self, precomputed: PrecomputedScale | None = None, blank: bool = False) -> None:
        self.blank = blank  # all zeros: any scale covers it
        self._precomputed = precomputed
        self._aliases: dict[Hashable, Any] = {}
        self._handed_out: list[weakref.ref[Any]] = []
        self._watched: list[Tensor] = []
        self._seen: list[int] = []  # their versions
        self._copied_from: SharedScale | None = None

    @property
    def precomputed(self) -> PrecomputedScale | None:
        """The scale, until the memory is written."""
        if self._watched and self._precomputed is not None and self._seen != self._versions():
            self._precomputed = None
        return self._precomputed

    @precomputed.setter
    def precomputed(self, new: PrecomputedScale | None) -> None:
        self._precomputed, self._seen = new, self._versions()

    def alias(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A plain tensor over the memory, or a DTensor of one, whose writes are noticed.

        Args:
            key: what two calls for the same tensor have in common.
            make: makes a first one that shares the version counter of the memory it is made of.
        """
        known = self.precomputed
        if key not in self._aliases:
            self._aliases[key] = make()
            self._watch(known)
        kept = self._aliases[key]
        new = kept.detach()
        if local_tensor(kept) is not kept:
            new._local_tensor = kept._local_tensor.detach()  # DTensor's own has another counter
            self._handed_out = [ref for ref in self._handed_out if ref() is not None]
            self._handed_out.append(weakref.ref(new))
        result: Tensor = new
        return result

    def copied_from(self, source: "SharedScale") -> None:
        """Take the scale of a weight of which this is a copy into zeros, as FSDP pads shards."""
        self.precomputed = source.precomputed
        self._copied_from = source if source._handed_out else None

    def take_place(self, inner: Tensor) -> None:
        """Be what the weight has become; DTensors that alias what it was copied from follow it.

        For plain weights FSDP2 keeps the memory of state dicts taken before the first forward;
        shards of a class of their own it pads once more, and the weight moves.

        Args:
            inner: the memory it has now.
        """
        source, self._copied_from = self._copied_from, None
        if source is None or inner.is_inference():
            return
        known = self.precomputed
        handed_out = [x for ref in source._handed_out if (x := ref()) is not None]
        kept = [(key, x) for key, x in source._aliases.items() if local_tensor(x) is not x]
        for dtensor in (*handed_out, *(x for _, x in kept)):
            if dtensor._local_tensor.shape == inner.shape:
                dtensor._local_tensor = inner.detach()
        self._aliases.update(kept)
        self._handed_out += map(weakref.ref, handed_out)
        self._watch(known)

    def _watch(self, known: PrecomputedScale | None) -> None:
        self._watched = [y for x in self._aliases.values() for y in (x, local_tensor(x))]
        self.precomputed = known

    def _versions(self) -> list[int]:
        return [x._version for x in self._watched]
