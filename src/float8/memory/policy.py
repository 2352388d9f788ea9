"""Save memory of activations: store them in float8, or recompute all but outputs of GEMMs."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from float8.formats import E4M3, FLOAT8_MAX
from float8.gemm import GEMM_OPS


def activations_in_float8(*, min_mib: float = 1.0, dtype: torch.dtype = E4M3) -> dict[str, Any]:
    """Return options of `torch.compile` that store activations for backward in float8.

    A compiled block of Llama with the recipe `tensorwise` then stores 0.62 of the bytes. Forward
    computes with the exact values. The model may be in bfloat16, without float8 layers:

        block.compile(options=float8.activations_in_float8())

    A bfloat16 or float16 activation is rounded to `dtype` if backward uses it for nothing but
    these: the GEMM that computes the gradient of a Parameter, the derivative of SiLU or GELU (of
    `torch.nn.functional`, gated or not) at a linear layer's output, or that of RMSNorm. Activations
    of attention, softmax, losses, LayerNorm, other gates and comparisons keep their dtype. So do
    tensors with one dim or a last dim below 32, those in inner graphs (`nested_compile_region`),
    and those in memory anyway: outputs, Parameters, inputs without gradients, views of these.

    Each 128 elements along the last dim share a float32 scale, a power of two; unless that dim is
    known to be a multiple of 128, each row has one scale. Backward dequantizes to the original
    dtype. An infinite or NaN element turns all elements with the same scale into NaN.

    Args:
        min_mib: size in MiB below which no tensor is rounded; dynamic sizes count by hint, if any.
        dtype: `torch.float8_e4m3fn`, or `torch.float8_e5m2` with one mantissa bit less.

    Returns:
        A new dict, to which other options may be added, such as `{"triton.cudagraphs": True}` for
        `mode="reduce-overhead"`: torch accepts either a mode or options. Only Inductor reads these
        options; other backends warn about them, or ignore them silently (`aot_eager`).

    Raises:
        TypeError: `min_mib` is not a number, or `dtype` is not a dtype.
        ValueError: `min_mib` is negative or not finite, or `dtype` is not a float8 format.
    """
    if isinstance(min_mib, bool) or not isinstance(min_mib, int | float):
        raise TypeError(f"activations_in_float8: got min_mib={min_mib!r}, expected a number of MiB")
    if not 0 <= min_mib < float("inf"):
        raise ValueError(f"activations_in_float8: got min_mib={min_mib}, expected at least 0")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"activations_in_float8: got dtype={dtype!r}, expected a torch.dtype")
    if dtype not in FLOAT8_MAX:
        expected = " or ".join(map(str, FLOAT8_MAX))
        raise ValueError(f"activations_in_float8: got dtype={dtype}, expected {expected}")
    from float8.memory.partition import Float8Partitioner  # imports Inductor, so not at the top

    return {"custom_partitioner_fn": Float8Partitioner(min_mib * 2**20, dtype)}


def save_gemm_outputs(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save outputs of float8 GEMMs, recompute all else: a policy of selective checkpointing.

    Pass this function to `torch.utils.checkpoint.create_selective_checkpoint_contexts`, in eager
    mode or under `torch.compile`:

        contexts = functools.partial(create_selective_checkpoint_contexts, save_gemm_outputs)
        y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    Saved are layer outputs [tokens, out_features] in the compute dtype; in compiled code only those
    that backward reads. Casts, norms, activation functions, attention and GEMMs in high precision
    are recomputed. So are emulated GEMMs (`emulate=True`, or on CPUs scales finer than one per
    tensor), except of experts and, in compiled code, of `HELD` weights or some padded or dynamic
    sizes. Looks at `op` only: returns `MUST_SAVE` for a float8 GEMM, else `PREFER_RECOMPUTE`.
    """
    return CheckpointPolicy.MUST_SAVE if op in GEMM_OPS else CheckpointPolicy.PREFER_RECOMPUTE
