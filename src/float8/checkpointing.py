"""Memory of activations: kept in float8, or made again but for the outputs of GEMMs."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from float8.formats import E4M3, FLOAT8_MAX
from float8.gemm import GEMM_OPS
from float8.kernels.grouped_matmul import GROUPED_GEMM
from float8.linear.weight import TIMES_HELD

_KEPT = {*GEMM_OPS, GROUPED_GEMM, TIMES_HELD}


def activations_in_float8(*, min_mib: float = 1.0, dtype: torch.dtype = E4M3) -> dict[str, Any]:
    """Return options of `torch.compile` that keep activations in float8 until backward.

    Of what a compiled block of Llama keeps for backward under `tensorwise`, 0.62 of the bytes are
    left. Forward computes with the exact values. A model in bfloat16 need not be converted:

        block.compile(options=float8.activations_in_float8())

    What Inductor keeps of bfloat16 and float16 activations is rounded to `dtype`, with a float32
    scale, a power of two, for each 128 elements along the last dim (for all of it, if it is no
    multiple of 128). Backward reads the rounded values in their own dtype. Infinite values, and
    NaN, make NaN of the elements that share their scale. These stay as they are:

    - Parameters, buffers, and what is made of them alone, such as weights that autocast rounds;
    - all with which backward does more than is known to be harmless. It may multiply, add, take
      means and maxima, derive activation functions and norms, and cast to float8. Errors grow in
      fused attention, softmaxes, differences of a loss, comparisons, quotients, custom ops;
    - what is kept anyway: outputs, what shares their storage, and inputs without gradients;
    - the inputs of inner graphs (`nested_compile_region`), of which nothing is known.

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
