"""Selective activation checkpointing: a policy that keeps the outputs of float8 GEMMs."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from float8.gemm import GEMM_OPS
from float8.kernels.grouped_matmul import GROUPED_GEMM
from float8.linear.weight import TIMES_HELD

_KEPT = {*GEMM_OPS, GROUPED_GEMM, TIMES_HELD}


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
