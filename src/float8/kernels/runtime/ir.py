"""Inductor's tensors, dressed as torch's: so the code that launches kernels also lowers ops.

Compiled code that called an op of ours through PyTorch's dispatcher and Python would take three
times as long to issue it as a kernel that Inductor launches itself. So Inductor is told, when it
first meets one of our ops, to run the op's own Triton code on these: what it would allocate and
launch becomes part of the generated program. `torch.library.triton_op` does the same earlier, where
it keeps the compiler from merging equal casts (q/k/v read one tensor).
"""

from collections.abc import Callable
from typing import Any

import torch


class NotLoweredError(Exception):
    """The op stays opaque here: symbolic sizes, or an operation that an `IRTensor` has not."""


class IRTensor:
    """What launching code asks of a tensor, answered from Inductor's representation."""

    def __init__(self, box: Any, result: Any = None) -> None:
        self.box = box
        """What a kernel reads and writes."""

        self.result = box if result is None else result
        """What the op returns."""

        box.freeze_layout()
        self.dtype: torch.dtype = box.get_dtype()
        self.device: torch.device = box.get_device()
        self.shape = _static(box.get_size())
        self._strides = _static(box.get_stride())

    def stride(self) -> tuple[int, ...]:
        """In elements."""
        return self._strides

    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def contiguous(self) -> "IRTensor":
        """Itself, or a contiguous copy."""
        return IRTensor(_inductor("ir").ExternKernel.require_contiguous(self.box))

    def new_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Uninitialised and contiguous, on the same device."""
        lowering = _inductor("lowering")
        # Inductor would fill an empty scalar: so a view of one element.
        size = list(shape) or [1]
        box = lowering.empty_strided(size, None, dtype=dtype, device=self.device)
        return IRTensor(box, None if shape else lowering.lowerings[torch.ops.aten.view](box, []))

    def sum(self, dim: int) -> "IRTensor":
        """As of a tensor."""
        return self._realised(_inductor("lowering").lowerings[torch.ops.aten.sum](self.box, [dim]))

    def to(self, dtype: torch.dtype) -> "IRTensor":
        """As of a tensor."""
        return self._realised(_inductor("lowering").to_dtype(self.box, dtype))

    @staticmethod
    def _realised(box: Any) -> "IRTensor":
        box.realize()
        return IRTensor(box)

    def __getattr__(self, name: str) -> Any:
        raise NotLoweredError(name)

    @staticmethod
    def emit(launch: Any, tensors: tuple[Any, ...]) -> None:
        """Make `launch` a part of the program that Inductor generates."""
        import triton
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        configured = triton.autotune([triton.Config({}, num_warps=launch.num_warps)], key=[])
        boxes = [None if tensor is None else tensor.box for tensor in tensors]
        _inductor("ir").UserDefinedTritonKernel(
            kernel_idx=kernel_side_table.add_kernel(configured(launch.kernel)),
            grid=[(launch.programs, 1, 1)],
            tma_descriptor_metadata={},
            kernel_args=dict(zip(launch.kernel.arg_names, (*boxes, *launch.rest), strict=True)),
        )


def lower(op: Any, body: Callable[..., Any]) -> None:
    """Have Inductor run `body` where it meets `op` on a GPU.

    Args:
        op: an overload, `torch.ops.float8.….default`.
        body: takes and returns what the op does, tensors as `IRTensor`.
    """
    lowering, ir = _inductor("lowering"), _inductor("ir")
    opaque = lowering.fallback_handler(op, add_to_fallback_set=False)

    def to_ir(x: Any) -> Any:
        if isinstance(x, ir.TensorBox):
            realised = ir.ExternKernel.realize_input(x)
            return IRTensor(
                realised if isinstance(realised, ir.TensorBox) else ir.TensorBox(realised)
            )
        return [to_ir(item) for item in x] if isinstance(x, (list, tuple)) else x

    def from_ir(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(from_ir(item) for item in x)
        return x.result if isinstance(x, IRTensor) else x

    def lowered(*args: Any) -> Any:
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if first.get_device().type != "cuda":
            return opaque(*args)
        try:
            return from_ir(body(*(to_ir(arg) for arg in args)))
        except NotLoweredError:
            return opaque(*args)

    lowering.register_lowering(op, type_promotion_kind=None)(lowered)


def _static(sizes: Any) -> tuple[int, ...]:
    numbers = []
    for size in sizes:
        if not isinstance(size, int) and not getattr(size, "is_Integer", False):
            raise NotLoweredError(f"symbolic size {size}")
        numbers.append(int(size))
    return tuple(numbers)


def _inductor(name: str) -> Any:
    import torch._inductor.ir
    import torch._inductor.lowering

    return getattr(torch._inductor, name)
