"""Float8 tensors to do things to."""

import torch
from torch import Tensor

from float8 import Float8Tensor
from sqnr import same_bits
from support.devices import E4M3
from support.models import seeded


def float8(seed: int, *shape: int, device: str = "cpu", dtype=torch.float32, format=E4M3):
    return Float8Tensor.from_high_precision(
        seeded(seed, *shape, device=device, dtype=dtype), format
    )


def full(seed: int = 0, amax: float | None = 3.0, device: str = "cpu") -> Float8Tensor:
    """[12, 8], with something in each field that is not its default."""
    x = float8(seed, 12, 8, dtype=torch.bfloat16, device=device)
    known = None if amax is None else torch.tensor(amax, device=device)
    return Float8Tensor(x._data, x._scale, torch.bfloat16, x._granularity, known)


def fields(x: Float8Tensor) -> dict[str, object]:
    """All attributes but the data and a Parameter's: those that no test knows of yet, too."""
    rest = {name: v for name, v in vars(x).items() if name not in ("_data", "_is_param")}
    return {n: v.item() if isinstance(v, Tensor) else v for n, v in rest.items()}


def assert_same(got: Tensor, wanted: Float8Tensor) -> None:
    """The same bytes and fields; strides and devices are not compared."""
    assert isinstance(got, Float8Tensor)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert same_bits(got._data, wanted._data)
    assert fields(got) == fields(wanted)
