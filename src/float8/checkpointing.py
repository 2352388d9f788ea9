"""Memory of activations: kept in float8, or made again but for the outputs of GEMMs."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from float8.formats import E4M3, FLOAT8_MAX
from float8.gemm import GEMM_OPS
from float8.kernels.grouped_matmul import GROUPED_GEMM
from float8.weights.held import TIMES_HELD

_KEPT = {*GEMM_OPS, GROUPED_GEMM, TIMES_HELD}


def activations_in_float8(*, min_mib: float = 1.0, dtype: torch.dtype = E4M3) -> dict[str, Any]:
    """Return options of `torch.compile` that keep activations in float8 until backward.

    Of what a compiled block of Llama keeps for backward under `tensorwise`, 0.62 of the bytes are
    left. Forward computes with the exact values. A model in bfloat16 need not be converted:

        block.compile(options=float8.activations_in_float8())

    A bfloat16 or float16 activation is rounded to `dtype` if all that backward does with it is one
    of these: multiply it with a gradient for the gradient of a Parameter, derive the SiLU or GELU
    (of `torch.nn.functional`, also gated) of a linear layer's output, or derive an RMSNorm. All
    else keeps its dtype: attention, softmax, losses, LayerNorm, other gates, comparisons.

    Each 128 elements along the last dim share a float32 scale, a power of two; all elements of that
    dim do, if it is no multiple of 128. Backward reads the rounded values in their own dtype. An
    infinite value or NaN makes NaN of the elements that share its scale. What is kept anyway is not
    rounded: outputs, Parameters, inputs without gradients, and what shares their storage; nor is
    what is in inner graphs (`nested_compile_region`).

    Args:
        min_mib: tensors of fewer MiB stay as they are. Sizes are those at hand while the graph is
            compiled.
        dtype: `torch.float8_e4m3fn`, or `torch.float8_e5m2` with one bit less.

    Returns:
        A new dict, to which other options may be added, such as `{"triton.cudagraphs": True}` for
        what `mode="reduce-overhead"` does: torch takes no mode beside options. Inductor alone
        reads it. Other backends warn of it, or ignore it without a word (`aot_eager`).

    Raises:
        TypeError: `min_mib` is no number, or `dtype` no dtype.
        ValueError: `min_mib` is negative or not finite, or `dtype` is no float8 format.
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
    # Imports Inductor, which `import float8` is not to.
    from float8.kernels.runtime.partition import Float8Partitioner

    return {"custom_partitioner_fn": Float8Partitioner(min_mib * 2**20, dtype)}


def save_gemm_outputs(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of float8 GEMMs, and have all else computed again in backward.

    A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`, in eager mode and
    under `torch.compile`:

        contexts = functools.partial(create_selective_checkpoint_contexts, save_gemm_outputs)
        y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    Kept are the [tokens, out_features] that layers return, in the compute dtype; in compiled code
    those that backward reads. Their GEMMs take most of the time of a recomputation. Casts, norms,
    activation functions and attention run again, and so do GEMMs in high precision and emulated
    ones, but for those of experts, and those of held weights in compiled code.

    Returns:
        `MUST_SAVE` if `op`, the `OpOverload` that is about to run, is a float8 GEMM, else
        `PREFER_RECOMPUTE`. Nothing else is read.
    """
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
