"""What fused kernels compute of a tensor before they cast it, in float32."""

from float8.kernels.runtime.triton import jit, tl


@jit
def swiglu(gate, up):  # type: ignore[no-untyped-def]
    """``silu(gate) * up``, float32."""
    return gate * tl.sigmoid(gate) * up


@jit
def swiglu_backward(grad, gate, up):  # type: ignore[no-untyped-def]
    """The gradients of ``gate`` and ``up``, and ``silu(gate) * up`` again; float32."""
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu, silu * up
