"""Launching Triton kernels cheaply.

Triton's own launch inspects every argument, which costs several times what the launch does. Here
everything but the tensors of a launch is fixed when it is planned, so that all launches after the
first go straight to the compiled kernel, through PyTorch's launcher for code that Inductor makes.
Triton's launch hooks are not called then; ``FLOAT8_PLAIN_LAUNCH=1`` has them called.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.kernels.runtime import private
from float8.kernels.runtime.triton import HAS_TRITON, interpreting

_PLAIN = (Tensor, torch.nn.Parameter)
_CACHED = None not in (private.current_device, private.current_stream, private.launch_kernel)
_ALLOCATES = None not in (private.current_device, private.empty_strided_cuda) and not interpreting()
_DIRECT = HAS_TRITON and None not in (private.dispatch_modes, private.functorch_levels)


class _Binary(NamedTuple):
    """A compiled kernel as PyTorch's launcher wants it."""

    function: int
    num_warps: int
    shared: int
    types: str  # of its parameters, a letter each
    scratch: tuple[None, ...]  # its last parameters: memory for Triton itself, not used here
    owner: Any  # keeps the function loaded


_binaries: dict[tuple[object, ...], _Binary | None] = {}
"""The key is all that makes Triton compile a new kernel: shapes share kernels. None: only Triton
can launch it."""


class Launch:
    """A Triton kernel with all its arguments but the tensors.

    The kernel takes its parameters in this order: tensors (None for one that it does not touch),
    integers, constants. Who keeps a `Launch` must use it for tensors of one set of dtypes, None
    always in the same places. Triton specialises kernels on whether data starts at a multiple of 16
    bytes; the first `inputs` tensors (None is not counted) may be views that do not, all others are
    new allocations, which do, or the kernel does not specialise on them.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        device: torch.device,
        integers: tuple[int, ...],
        constants: tuple[object, ...],
        num_warps: int,
        *,
        inputs: int = 1,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.device = device
        self.integers = integers
        self.constants = constants
        self.num_warps = num_warps
        self.inputs = inputs
        self._binary: _Binary | None = None
        self._rest: tuple[int | None, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the device of the tensors, which need not be the current one."""
        device = self.device
        if not _CACHED or device.type != "cuda":
            self._plainly(tensors)
            return
        if device.index != private.current_device():
            with torch.cuda.device(device):
                self(*tensors)
            return
        # Addresses, since Triton would ask each tensor, and the driver about each answer.
        addresses = [x.data_ptr() for x in tensors if x is not None]
        binary = self._binary
        for address in addresses[: self.inputs]:
            if address & 15:  # Triton has another kernel for these
                self._plainly(tensors)
                return
        if binary is None:
            self._first(tensors)
            return
        private.launch_kernel(
            binary.function,
            self.programs,
            1,
            1,
            binary.num_warps,
            binary.shared,
            binary.types,
            (*addresses, *self._rest),
            private.current_stream(device.index),
        )

    def _plainly(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Launch as Triton documents it; returns the compiled kernel (None in its interpreter)."""
        run = self.kernel[(self.programs,)]
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return run(*tensors, *self.integers, *self.constants, num_warps=self.num_warps)

    def _first(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch with inputs that are aligned, and know the kernel from then on."""
        # As Triton types and specialises integers.
        integers = tuple((n == 1, n % 16 == 0, n >= 1 << 31) for n in self.integers)
        dtypes = tuple(None if x is None else x.dtype for x in tensors)
        kind = (self.kernel, self.device, integers, self.constants, self.num_warps, dtypes)
        binary = _binaries.get(kind)
        if binary is None:
            compiled = self._plainly(tensors)
            if kind not in _binaries:
                _binaries[kind] = _binary(compiled)
            return
        self._rest = (*(n for n in self.integers if n != 1), *binary.scratch)
        self._binary = binary
        self(*tensors)


_USUAL = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
_SCRATCH = ("global_scratch_size", "profile_scratch_size")
_LETTERS = {"i32": "i", "i64": "l"}


def _binary(compiled: Any) -> _Binary | None:
    """What PyTorch's launcher needs of a kernel; None where it cannot launch it.

    What Triton says of a kernel is private: where it says other things than known here, None.
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
    return _Binary(function, num_warps, shared, types, none, compiled)


def takes_triton_directly(*tensors: Tensor | None) -> bool:
    """Whether calling a Triton kernel on these does just what the registered op would do.

    Eager mode may then skip PyTorch's dispatcher, which costs more than a launch. Not under a
    compiler, a dispatch mode (fake tensors, tracing, counting) or a transform of torch.func, and
    not for tensor subclasses: these must see the op.
    """
    # A compiler must not see what follows, so this comes first.
    if not _DIRECT or torch.compiler.is_compiling():
        return False
    for x in tensors:
        # A lazily negated view (of a conjugate's imaginary part) is not what its memory says.
        if x is not None and not (x.is_cuda and type(x) in _PLAIN and not x.is_neg()):
            return False
    return private.dispatch_modes() == 0 and private.functorch_levels() is None


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised, contiguous, of at most two dims, on the device of `like`."""
    if _ALLOCATES and like.get_device() == private.current_device():  # the CPU's is -1
        strides = (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)
        # A tuple and no `torch.Size`, which this function refuses.
        result: Tensor = private.empty_strided_cuda(tuple(shape), strides, dtype)
        return result
    return torch.empty(shape, dtype=dtype, device=like.device)
