"""The weights that modules hold in float8 until they are written, and the stamp that tells.

`update_float8_weights` casts each weight once, to both layouts in one read; forwards, backwards,
recomputation and microbatches of training read that. A stamp is noted on what was made: on data
that are held, and on the scale that a `Float8GatherWeight` knows of its next gather. It is the
version counter of the weight, the address of its memory and its strides. Each use compares. Eager
code casts again what does not match. (Not the scale of what is held: Inductor may hand on a copy of
it.) In compiled code the op that multiplies compares (`float8.linear.held_matmul`), and it must
find the stamp when it runs: an attribute of a tensor that it is given is all that reaches it. A
tensor on the CPU, which forward hands on to backward, CUDA graphs refuse; a number makes code
compile anew; the version counter of what is kept cannot say where the weight lies.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from float8.quantize import Cast, quantize
from float8.scales import Quantized

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Weights that are data in memory and nothing else: no shards, no wrappers."""

_DYNAMO_TELLS = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo knows export from compilation: that of torch 2.11 takes all for export."""


class HeldWeight(NamedTuple):
    """A weight in float8 that a module holds, to be read instead of a cast."""

    operand: Quantized
    """Both layouts."""

    weight: Any
    """The Parameter [N, K] beside which it is held."""

    memory: Any
    """The storage of that: as long as it is kept no other has its address."""


def stamp_of(*tensors: Any) -> tuple[int, ...]:
    """Return what changes when one of some tensors is written, as far as version counters tell.

    They count what ops write, and not what fused optimizers do, nor what goes through `weight.data`
    or a raw pointer. A DTensor counts the writes of ops on it and of compiled code; its shard those
    through `to_local()`, and of ops that take lists, as an optimizer's.
    """
    stamp: list[int] = []
    for x in tensors:
        stamp += x._version, x.data_ptr(), *x.stride()
    return tuple(stamp)


def mark(stamp: tuple[int, ...] | None, *made: Any) -> None:
    """Say of which values tensors are made; None: of none, so that the next use casts again."""
    for tensor in made:
        tensor.float8_stamp = stamp


def is_current(made: Tensor, stamp: tuple[int, ...]) -> bool:
    """Whether a tensor that was marked, no copy of it, is of the values that have this stamp."""
    return bool(getattr(made, "float8_stamp", None) == stamp)


# ---------------------------------------------------------------- held by modules


class Float8Module(nn.Module):
    """The base of linear layers and experts in float8: what they have from step to step."""

    _float8_held: tuple[HeldWeight, ...] = ()
    """The weights in float8, of those that `update_float8_weights` found can be held."""
    _float8_attached = 0
    """The number of optimizers it is attached to; if any is, no sync can be missing."""
    _float8_passing: ClassVar[frozenset[str]] = frozenset({"_float8_held", "_float8_attached"})
    """The attributes that copies do not have: of this training, and this optimizer."""

    def _float8_hold_weights(self, *held: HeldWeight) -> None:
        """Keep these in float8 until they are written; all others are cast on the fly."""
        self._float8_held = held

    def _float8_held_weight(
        self, weight: Any, again: Callable[[], HeldWeight]
    ) -> HeldWeight | None:
        """Return a Parameter in float8 as this call may read it; None: it is cast on the fly.

        In compiled code the GEMMs see for themselves if it is what the weight is then.

        Another weight than the Parameter is somebody else's: of FSDP, or of `functional_call`.
        Evaluation casts the weight as it is: averages are written into `weight.data`, past version
        counters.

        Args:
            weight: the Parameter.
            again: casts it again, to be held from now on. Not to where the old one lies, which a
                backward still to come may read.
        """
        if not self.training:
            return None
        for held in self._float8_held:
            if held.weight is weight:
                break
        else:
            return None
        if is_recording(weight):
            return None
        if torch.compiler.is_compiling() or is_current(held.operand.row.data, stamp_of(weight)):
            return held
        made = again()
        self._float8_held = tuple(made if each is held else each for each in self._float8_held)
        return made

    def _float8_expire_weights(self) -> None:
        """Have the next use cast held weights again, compiled or not."""
        for held in self._float8_held:
            mark(None, held.operand.row.data, held.operand.col.data)

    def _float8_attach(self) -> None:
        """Note that one more optimizer steps the module."""
        self._float8_attached += 1

    def _float8_detach(self) -> None:
        """End one attachment, and what is held."""
        self._float8_attached, self._float8_held = max(self._float8_attached - 1, 0), ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._float8_held = ()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> Any:
        theirs = getattr(super(), "__getstate__", None)  # Python 3.10 has none for all objects
        state = self.__dict__ if theirs is None else theirs()
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if name not in self._float8_passing}

    def __setstate__(self, pickled: Any) -> None:
        # What layers, and experts, had then; a state of the user's own has neither.
        before = {"plan", "float8_plan"}
        if isinstance(pickled, dict) and "_float8_plan" not in pickled and before & pickled.keys():
            raise ValueError(
                "float8: got a layer that version 0.2 or older has pickled, expected one of this "
                "version; load it with that version, and save model.state_dict()"
            )
        super().__setstate__(pickled)  # type: ignore[no-untyped-call]


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def hold(weight: Tensor, cast: Cast) -> HeldWeight:
    """Cast a weight [N, K] to both layouts in one read, to be read until the weight is written."""
    return until_written(quantize(weight, cast, row=True, col=True, pad_rows=True), weight)


def until_written(made: Quantized, weight: Tensor) -> HeldWeight:
    """Return both layouts of a Parameter as they are held."""
    mark(stamp_of(weight), made.row.data, made.col.data)
    return HeldWeight(made, weight, weight.untyped_storage())


def can_hold(weight: Any) -> bool:
    """Whether `weight` is data in memory with a version counter."""
    return type(weight) is nn.Parameter and not weight.is_meta and not weight.is_inference()


def still_holds(data: Tensor, weight: Tensor) -> bool:
    """Whether data that are held may be read for a weight by an op of compiled code.

    Not where a CUDA graph is recorded, in whose replays nobody compares.
    """
    return not _is_capturing(weight) and is_current(data, stamp_of(weight))


def is_recording(weight: Tensor) -> bool:
    """Whether operations go into a graph, or an exported program, which would keep float8 data."""
    exporting = torch.compiler.is_exporting()
    if torch.compiler.is_compiling():
        return exporting and (_DYNAMO_TELLS or not torch.compiler.is_dynamo_compiling())
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to import

    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return exporting or tracing or get_proxy_mode() is not None or _is_capturing(weight)


def _is_capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
