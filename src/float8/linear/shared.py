"""One cast for all layers that read the same tensor (q/k/v, gate/up), in eager mode.

A compiler merges equal casts by itself. In eager mode the last operand is kept for as long as the
tensor that it was made of lives unchanged, as far as its version counter tells. Only results of
differentiable operations are shared, which is what such layers read in training: buffers that are
filled from outside (by a collective, through NumPy, before the replay of a CUDA graph) are leaves.
"""

import threading
import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from float8.cast import Operand


class _Last(threading.local):
    """The last operand of this thread."""

    source: "weakref.ref[Tensor] | None" = None
    key: Hashable = None
    operand: Operand | None = None


_last = _Last()


def last_operand(source: Tensor, options: Hashable) -> Operand | None:
    """The operand made of `source` with equal `options`, if it was the last and still holds."""
    if _last.source is None or _last.source() is not source or not _may_share(source):
        return None
    return _last.operand if _last.key == _key(source, options) else None


def keep_operand(source: Tensor, options: Hashable, operand: Operand) -> None:
    """Keep `operand` until another one is kept or `source` is freed."""
    if not _may_share(source):
        return
    _last.key, _last.operand = _key(source, options), operand
    last = _last.__dict__

    def forget(dead: "weakref.ref[Tensor]") -> None:
        if last.get("source") is dead:
            last.update(source=None, key=None, operand=None)

    _last.source = weakref.ref(source, forget)


def _may_share(source: Tensor) -> bool:
    return (
        source.grad_fn is not None
        # What is made in inference mode cannot be saved for backward; and what is traced or
        # captured must do all of its work itself.
        and not torch.is_inference_mode_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
        and not (source.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _key(source: Tensor, options: Hashable) -> Hashable:
    # On another stream the operand may not be there yet.
    stream = torch._C._cuda_getCurrentRawStream(source.device.index) if source.is_cuda else 0
    layout = (source.data_ptr(), source.shape, source.stride())
    return source._version, layout, stream, options
