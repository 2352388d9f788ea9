"""Running Triton kernels cheaply: all that does not depend on values is worked out once.

A `Program` is what an op does to tensors of one shape, layout and dtype: memory it allocates, and
kernels it launches one after the other. An op looks its program up and runs it, so that the way
from a tensor to a kernel is one function. Kernels that Triton compiled before are launched by
PyTorch's launcher for code that Inductor makes; Triton's own inspects every argument, which takes
several times as long. Triton's launch hooks are not called then; ``FLOAT8_PLAIN_LAUNCH=1`` has them
called.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from float8.kernels.runtime import private
from float8.kernels.runtime.device import launching_on
from float8.kernels.runtime.triton import HAS_TRITON

_PLAIN = (Tensor, torch.nn.Parameter)
_LAUNCHES = None not in (
    private.current_device,
    private.current_stream,
    private.launch_kernel,
    private.empty_strided_cuda,
)
_DIRECT = HAS_TRITON and None not in (private.dispatch_modes, private.functorch_levels)


@dataclasses.dataclass(eq=False, frozen=True)
class Slot:
    """A tensor that a program is given, or makes: what is known of it before it is there."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    device: torch.device | None = None
    zeroed: bool = False


_Way = TypeVar("_Way")


def planned(plan: Callable[..., _Way]) -> Callable[..., _Way]:
    """Make a function of tensors of ``plan``, one of slots: worked out once for all alike."""

    @functools.lru_cache(maxsize=4096)
    def known(
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        device: torch.device,
        *how: object,
    ) -> _Way:
        return plan(Slot(dtype, shape, strides, device), *how)

    def of(x: Tensor, *how: object) -> _Way:
        return known(x.dtype, x.shape, x.stride(), x.device, *how)

    of.cache_clear = known.cache_clear  # type: ignore[attr-defined]
    return of


def new(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
    *,
    zeroed: bool = False,
) -> Slot:
    """Describe memory to allocate, of at most two dims; contiguous without ``strides``."""
    if strides is None:
        strides = (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)
    return Slot(dtype, tuple(shape), strides, zeroed=zeroed)


def empty(x: Tensor, *slots: Slot | None) -> list[Tensor]:
    """Allocate what slots describe, but for the None, where ``x`` is; sizes may be symbolic."""
    there = [slot for slot in slots if slot is not None]
    return [x.new_empty_strided(slot.shape, slot.strides, dtype=slot.dtype) for slot in there]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel, whose parameters are tensors, then integers, then constants.

    Of tensors there are slots, None for one that the kernel does not touch.
    """

    kernel: Any
    programs: int
    slots: tuple[Slot | None, ...]
    integers: tuple[int, ...]
    constants: tuple[object, ...]
    num_warps: int

    def plainly(self, tensors: Sequence[Tensor | None]) -> Any:
        """Launch as Triton documents it; returns the compiled kernel (None in its interpreter)."""
        run = self.kernel[(self.programs,)]
        # The default of Triton 3.6, of which 3.9 warns that it is to change.
        options = {"num_warps": self.num_warps, "enable_fp_fusion": True}
        return run(*tensors, *self.integers, *self.constants, **options)

    @property
    def key(self) -> tuple[object, ...]:
        """Name all that makes Triton compile a new kernel: shapes share kernels."""
        # As Triton types and specialises integers.
        integers = tuple((n == 1, n % 16 == 0, n >= 1 << 31) for n in self.integers)
        dtypes = tuple(None if slot is None else slot.dtype for slot in self.slots)
        return self.kernel, integers, self.constants, self.num_warps, dtypes


class Program:
    """Launches on tensors of one shape, layout and dtype, and the memory that they need.

    Args:
        given: the tensors that are handed over when it runs, of one device, which need not be the
            current one; None for one that is not.
        results: the new ones that are returned, but for a None. What the launches need besides is
            allocated, too.
        launches: in their order.
        anywhere: how many of the last of ``given`` may start anywhere: the kernels must not be
            specialised on it. Where others do not start at multiples of 16 bytes Triton launches,
            which has other kernels for them.
    """

    def __init__(
        self,
        given: Sequence[Slot | None],
        results: Sequence[Slot | None],
        launches: Sequence[Launch],
        *,
        anywhere: int = 0,
    ) -> None:
        read = [slot for slot in given if slot is not None]
        made = [slot for slot in results if slot is not None]
        self._results = len(made)
        self._aligned = len(read) - anywhere
        self.device = device = next(slot.device for slot in read if slot.device is not None)
        self.launches = launches
        used = [slot for launch in launches for slot in launch.slots if slot is not None]
        made += [slot for slot in dict.fromkeys(used) if slot not in (*read, *made)]
        self._slots = (*read, *made)
        self._made = [(slot.shape, slot.strides, slot.dtype) for slot in made]
        self._zeroed = [at for at, slot in enumerate(made) if slot.zeroed]
        self._ready = device.type == "cuda" and _LAUNCHES  # else Triton launches
        self._steps: list[tuple[Any, ...]] | None = None

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Run on ``tensors``, those `given`; returns the new `results`."""
        steps, device = self._steps, self.device
        if steps is None:
            return self._first(tensors)
        if device.index != private.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        # Addresses, since Triton would ask each tensor, and the driver about each answer.
        addresses = [x.data_ptr() for x in tensors]
        for address in addresses[: self._aligned]:
            if address & 15:
                return self._plainly(tensors)
        allocate, launch = private.empty_strided_cuda, private.launch_kernel
        made: list[Tensor] = [allocate(*each) for each in self._made]
        for at in self._zeroed:
            made[at].zero_()
        addresses += [x.data_ptr() for x in made]
        stream = private.current_stream(device.index)
        for function, programs, num_warps, shared, types, take, rest in steps:
            arguments = (*take(addresses), *rest)
            launch(function, programs, 1, 1, num_warps, shared, types, arguments, stream)
        return made[: self._results]

    def _first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run once more by Triton, unless all kernels are known: then by PyTorch from now on."""
        if not self._ready or any(x.data_ptr() & 15 for x in tensors[: self._aligned]):
            return self._plainly(tensors)
        binaries = [_binaries.get((self.device, launch.key), _UNKNOWN) for launch in self.launches]
        if _UNKNOWN in binaries:
            return self._plainly(tensors)
        if None in binaries:
            self._ready = False
            return self._plainly(tensors)
        self._steps = list(map(self._step, self.launches, binaries))
        return self(*tensors)

    def _plainly(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run by Triton, and know its kernels from then on."""
        device = self.device
        with launching_on(device):
            made = [
                torch.empty_strided(shape, strides, dtype=dtype, device=device)
                for shape, strides, dtype in self._made
            ]
            for at in self._zeroed:
                made[at].zero_()
            there: dict[Slot | None, Tensor | None] = {None: None}
            there |= zip(self._slots, (*tensors, *made), strict=True)
            aligned = not any(x.data_ptr() & 15 for x in tensors[: self._aligned])
            for launch in self.launches:
                compiled = launch.plainly([there[slot] for slot in launch.slots])
                if self._ready and aligned:
                    _binaries.setdefault((device, launch.key), _binary(compiled))
        return made[: self._results]

    def _step(self, launch: Launch, binary: "_Binary") -> tuple[Any, ...]:
        """Gather what `__call__` needs of a launch."""
        at = [self._slots.index(slot) for slot in launch.slots if slot is not None]
        assert len(at) > 1  # of one the getter would return no tuple
        take = operator.itemgetter(*at)
        rest = (*(n for n in launch.integers if n != 1), *binary.scratch)
        about = binary.num_warps, binary.shared, binary.types
        return binary.function, launch.programs, *about, take, rest


class _Binary(NamedTuple):
    """A compiled kernel as PyTorch's launcher wants it."""

    function: int
    num_warps: int
    shared: int
    types: str  # of its parameters, a letter each
    scratch: tuple[None, ...]  # its last parameters: memory for Triton itself, not used here
    owner: Any  # keeps the function loaded


_binaries: dict[tuple[object, ...], _Binary | None] = {}
"""By device and the key of a launch. None: only Triton can launch it."""

_UNKNOWN: Any = object()

_USUAL = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
_SCRATCH = ("global_scratch_size", "profile_scratch_size")
_LETTERS = {"i32": "i", "i64": "l"}


def _binary(compiled: Any) -> _Binary | None:
    """Gather what PyTorch's launcher needs of a kernel; None where it cannot launch it.

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
    """Tell whether a Triton kernel called on these does just what the registered op would.

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
