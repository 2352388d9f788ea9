"""When eager mode may skip PyTorch's dispatcher, which costs more than a launch."""

import torch
from torch import Tensor

from float8.kernels._triton import HAS_TRITON

_PLAIN = (Tensor, torch.nn.Parameter)


def takes_triton_directly(*tensors: Tensor | None) -> bool:
    """Whether calling a Triton kernel on these does just what the registered op would do.

    Not under a compiler, a dispatch mode (fake tensors, tracing, counting) or a transform of
    torch.func, and not for tensor subclasses: these must see the op.
    """
    # A compiler must not see what follows, so this comes first.
    if not HAS_TRITON or torch.compiler.is_compiling():
        return False
    for x in tensors:
        # A lazily negated view (of a conjugate's imaginary part) is not what its memory says.
        if x is not None and not (x.is_cuda and type(x) in _PLAIN and not x.is_neg()):
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )
