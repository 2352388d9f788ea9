"""A linear layer whose input somebody else keeps for backward anyway."""

from torch import Tensor, nn

from float8.fused.reasons import is_float8_linear


def linear_keeping_input(x: Tensor, layer: nn.Module) -> Tensor:
    """`layer(x)`, saving x itself for backward rather than a float8 copy of it.

    For an x that is saved anyway by the operation that made it, as attention saves its output:
    the copy's memory is saved, for reading x once more in backward. Layers that are no
    `Float8Linear` are just called, so a model can use it whether it is converted or not.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        layer: K -> N.

    Returns:
        [..., N], as `layer` returns it.

    Raises:
        TypeError, ValueError, RuntimeError: as `Float8Linear.forward`.
    """
    keeps = is_float8_linear(layer) and "forward" not in layer.__dict__
    return layer(x, keep_input=True) if keeps else layer(x)  # type: ignore[no-any-return]
