"""What a Llama block costs besides its linear layers."""

from __future__ import annotations

from float8.cost.ceilings import Ceilings

# Fitted to one measured point: of four Llama-3-8B blocks at 8192 tokens on an H100, attention takes
# 16 ms and the other pointwise work 4.5 ms, forward and backward, compiled.
_ATTENTION_EFFICIENCY = 0.64  # of `Ceilings.bf16_tflops`
_DIM_PASSES = 23  # reads and writes of a [tokens, dim] bf16 tensor: norms, rotations, residuals
_FFN_PASSES = 8  # of a [tokens, ffn_dim] one: SwiGLU
_BF16_BYTES = 2


def rest_ms(
    tokens: int, seq_len: int, layers: int, dim: int, ffn_dim: int, ceilings: Ceilings
) -> float:
    """Milliseconds of attention and pointwise work of forward and backward, without the head.

    Args:
        tokens: Tokens per step.
        seq_len: Tokens that attend to each other, causally.
        layers: Number of blocks.
        dim: Width of the residual stream and of all query heads together.
        ffn_dim: Hidden width of the feed-forward.
        ceilings: What the device can do.
    """
    # Forward 2 GEMMs of 2 * tokens * seq_len * dim, half of it masked; backward 2.5 times that.
    flops = 3.5 * 2 * tokens * seq_len * dim
    attention = flops / (_ATTENTION_EFFICIENCY * ceilings.bf16_tflops * 1e9)
    moved = _BF16_BYTES * tokens * (_DIM_PASSES * dim + _FFN_PASSES * ffn_dim)
    return layers * (attention + moved / (ceilings.copy_tb_per_s * 1e9))
