"""The shapes of linear layers that the benchmarks know by name."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import NamedTuple


class Shape(NamedTuple):
    """A linear layer at work: M tokens, K input features, N output features."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        return f"{self.M},{self.K},{self.N}"


GEMMS = "output", "grad_input", "grad_weight"


def _layers(tokens: int, *features: tuple[int, int]) -> tuple[Shape, ...]:
    return tuple(Shape(tokens, K, N) for K, N in features)


def _grid() -> tuple[Shape, ...]:
    """Sizes around those from which on layers gain, shuffled: any first part is a fair sample."""
    tokens = (512, 1024, 2048, 4096, 8192, 16384)
    features = (512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
    sizes = [Shape(*size) for size in itertools.product(tokens, features, features)]
    # Smaller layers lose under every recipe, larger ones gain.
    shapes = [shape for shape in sizes if 2e9 <= math.prod(shape) <= 1e11]
    random.Random(0).shuffle(shapes)
    return tuple(shapes)


SHAPE_SETS: dict[str, tuple[Shape, ...]] = {
    # Of one block: q, k and v as one; attention out; gate and up as one; down.
    "llama3-8b": _layers(8192, (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "llama3-70b": _layers(8192, (8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
    # Split over eight GPUs: columns of the first and third layer, rows of the others.
    "llama2-70b-tp": _layers(16384, (8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192)),
    "square": tuple(Shape(n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384)),
    "grid": _grid(),
}


def parse_shape(text: str) -> Shape:
    """Return `"M,K,N"` as a shape; a `ValueError` if it is not three positive multiples of 16."""
    parts = text.replace(" ", "").split(",")
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(parts) != 3 or len(numbers) != 3 or any(n < 16 or n % 16 for n in numbers):
        raise ValueError(
            f"shape: got {text!r}, expected M,K,N, each a positive multiple of 16, "
            "for example 8192,4096,14336"
        )
    return Shape(*numbers)


def select_shapes(sets: Sequence[str], given: Sequence[str]) -> dict[str, tuple[Shape, ...]]:
    """Return shapes by set: of the named `sets`, and those `given` one by one as `"M,K,N"`."""
    if unknown := [name for name in sets if name not in SHAPE_SETS]:
        raise ValueError(f"shapes: got {unknown[0]!r}, expected one of {', '.join(SHAPE_SETS)}")
    selected = {name: SHAPE_SETS[name] for name in sets}
    if given:
        selected["given"] = tuple(parse_shape(text) for text in given)
    if not selected:
        known = ", ".join(SHAPE_SETS)
        raise ValueError(f"no shapes: give --shapes ({known}) or --mkn M,K,N, or both")
    return selected
