"""Launching Triton kernels cheaply: what Triton compiled is kept in front of `kernel[grid]`.

The caller caches one `Launch` per shape, strides and dtype. Triton launches it first, and compiles
its kernel; from then on PyTorch's launcher for code that Inductor makes does so. Triton's own
inspects every argument, which takes several times as long, but calls Triton's launch hooks:
``FLOAT8_PLAIN_LAUNCH=1`` uses that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from float8.kernels.runtime import private
from float8.kernels.runtime.triton import HAS_TRITON

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""The shape, strides and dtype of a tensor."""

_PLAIN = (Tensor, torch.nn.Parameter)
_LAUNCHES = None not in (private.current_stream, private.launch_kernel)
_ASKED = private.current_device, private.dispatch_modes, private.functorch_levels
_DIRECT = HAS_TRITON and None not in _ASKED


class Launch:
    """A Triton kernel, whose parameters are tensors, integers and constants, without its tensors.

    They are on `device`, the current one at a launch: `ops.register` makes it that.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        programs: int,
        integers: tuple[int, ...],
        constants: tuple[object, ...],
        num_warps: int,
    ) -> None:
        self.kernel, self.programs = kernel, programs
        self._rest = (*integers, *constants)
        # The default of Triton 3.6, of which 3.9 warns that it is to change.
        self._options = {"num_warps": num_warps, "enable_fp_fusion": True}
        self._given = tuple(n for n in integers if n != 1)  # 1 is a constant for Triton
        self._device = device.index if device.type == "cuda" and _LAUNCHES else None
        self._compiled: tuple[Any, ...] | None = None

    def __call__(self, *tensors: Tensor | Any) -> None:
        """Launch on `tensors`, None for one that the kernel does not touch.

        The first may start anywhere; Triton has other kernels for those not at multiples of 16
        bytes. All others are new, hence aligned, or exempt by `do_not_specialize_on_alignment`.
        """
        # Addresses, since Triton would ask each tensor, and the driver about each answer.
        addresses = [x.data_ptr() for x in tensors if x is not None]
        if self._compiled is not None and not addresses[0] & 15:
            about, rest, _ = self._compiled
            stream = private.current_stream(self._device)
            private.launch_kernel(*about, (*addresses, *rest), stream)
            return
        made = self.kernel[(self.programs,)](*tensors, *self._rest, **self._options)
        if self._device is not None and not addresses[0] & 15:
            self._compiled = _for_pytorch(made, self.programs, self._given)
            if self._compiled is None:  # Triton launches it from now on
                self._device = None


_USUAL = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
_SCRATCH = ("global_scratch_size", "profile_scratch_size")  # memory for Triton itself
_LETTERS = {"i32": "i", "i64": "l"}


def _for_pytorch(compiled: Any, programs: int, integers: tuple[int, ...]) -> Any:
    """Gather what PyTorch's launcher is given besides addresses.

    None where it cannot launch the kernel, or Triton says other things of it than known here.
    """
    try:
        about, function, signature = compiled.metadata, compiled.function, compiled.src.signature
        num_warps, shared = about.num_warps, about.shared
    except AttributeError:
        return None
    scratch = [getattr(about, name) for name in _SCRATCH if hasattr(about, name)]
    unusual = [name for name, usual in _USUAL.items() if getattr(about, name, usual) != usual]
    kinds = [kind for kind in signature.values() if kind != "constexpr"]
    letters = ["O" if kind.startswith("*") else _LETTERS.get(kind, "") for kind in kinds]
    if any(scratch) or unusual or not all(letters):
        return None
    types, none = "".join(letters) + "O" * len(scratch), (None,) * len(scratch)
    # The last keeps the function loaded.
    return (function, programs, 1, 1, num_warps, shared, types), (*integers, *none), compiled


def allocator(device: torch.device) -> Callable[..., Tensor]:
    """Return what makes an uninitialised tensor of a `Spec` on a device, the current one."""
    if device.type == "cuda" and private.empty_strided_cuda is not None:
        return private.empty_strided_cuda  # type: ignore[no-any-return]
    return lambda shape, strides, of: torch.empty_strided(shape, strides, dtype=of, device=device)


def takes_triton_directly(*tensors: Tensor | None) -> bool:
    """Whether eager mode may call a kernel past PyTorch's dispatcher, which costs a launch more.

    Only for plain tensors on the current GPU, on which Triton launches. Not under a compiler, a
    dispatch mode (fake tensors, tracing, counting) or a transform of torch.func: these must see the
    op. Not for tensors of another GPU either: the op makes that the current one.
    """
    # A compiler must not see what follows, so this comes first.
    if not _DIRECT or torch.compiler.is_compiling():
        return False
    here = private.current_device()
    for x in tensors:
        # A lazily negated view (of a conjugate's imaginary part) is not what its memory says.
        if x is not None and not (type(x) in _PLAIN and x.get_device() == here and not x.is_neg()):
            return False
    return private.dispatch_modes() == 0 and private.functorch_levels() is None
