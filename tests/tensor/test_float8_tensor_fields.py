"""Each op of a Float8Tensor keeps each field, or says here why not."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from float8 import Float8Tensor
from float8.tensor.float8_tensor import OP_HANDLERS
from support.tensors import float8

aten = torch.ops.aten

KEEPING = {
    aten.view.default: ((96,),),
    aten._unsafe_view.default: ((96,),),
    aten.t.default: (),
    aten.transpose.int: (0, 1),
    aten.permute.default: ((1, 0),),
    aten.slice.Tensor: (0, 2, 7),
    aten.select.int: (0, 4),
    aten.expand.default: ((2, 12, 8),),
    aten.unsqueeze.default: (1,),
    aten.squeeze.dim: (0,),
    aten.as_strided.default: ((3, 4), (8, 2)),
    aten.alias.default: (),
    aten.detach.default: (),
    aten.split.Tensor: (5,),
    aten.split_with_sizes.default: ([4, 8],),
    aten.unbind.int: (),
    aten.chunk.default: (3,),
    aten.clone.default: (),
    aten._to_copy.default: (),
    aten.constant_pad_nd.default: ((0, 0, 0, 4),),
}
"""Their further arguments; those that take more than one tensor have tests of their own."""

OTHERS = {
    aten.cat.default: "see test_cat",
    aten.copy_.default: "see test_copy",
    aten.index_put_.default: "see test_index_put",
    aten._foreach_lerp_.Scalar: "see tests/held_weights/test_only.py",
    aten.new_zeros.default: "refused, with what to do under FSDP2",
    aten.zeros_like.default: "makes a plain tensor, of other values",
    aten.ones_like.default: "makes a plain tensor, of other values",
    aten.empty_like.default: "has no values yet",
    aten.equal.default: "makes a bool",
    aten.is_same_size.default: "makes a bool",
    aten.is_pinned.default: "makes a bool",
    aten.mm.default: "makes a plain tensor, of other values",
    aten.addmm.default: "makes a plain tensor, of other values",
    torch.ops.c10d.broadcast_.default: "see tests/distributed",
    torch.ops.c10d.scatter_.default: "see tests/distributed",
    torch.ops.c10d.gather_.default: "see tests/distributed",
    torch.ops.c10d.allgather_.default: "see tests/distributed",
    torch.ops.c10d.alltoall_.default: "see tests/distributed",
    torch.ops._c10d_functional.all_gather_into_tensor.default: "see tests/distributed",
    torch.ops._c10d_functional.all_to_all_single.default: "see tests/distributed",
    torch.ops._c10d_functional.wait_tensor.default: "see tests/distributed",
    "_c10d_functional::_wrap_tensor_autograd": "see tests/distributed",
}


def full(seed: int = 0, amax: float | None = 3.0) -> Float8Tensor:
    """With something in each field that is not its default."""
    x = float8(seed, 12, 8, dtype=torch.bfloat16)
    known = None if amax is None else torch.tensor(amax)
    return Float8Tensor(x._data, x._scale, torch.bfloat16, x._granularity, known)


def fields(x: Float8Tensor) -> dict[str, object]:
    """All attributes but the data and a Parameter's: those that no test knows of yet, too."""
    others = ("_data", "_is_param", "_columns")  # the last is of the data
    rest = {name: v for name, v in vars(x).items() if name not in others}
    return {n: v.item() if isinstance(v, Tensor) else v for n, v in rest.items()}


def test_every_op_is_listed_here() -> None:
    assert OP_HANDLERS.keys() == KEEPING.keys() | OTHERS.keys()


@pytest.mark.parametrize("amax", [3.0, None])
@pytest.mark.parametrize("op", KEEPING, ids=str)
def test_every_field_is_kept(op, amax: float | None) -> None:
    x = full(amax=amax)
    got = op(x, *KEEPING[op])
    for piece in got if isinstance(got, (list, tuple)) else [got]:
        assert type(piece) is Float8Tensor
        assert fields(piece) == fields(x)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "parts": lambda x: x.__tensor_unflatten__(
        {name: getattr(x, name) for name in x.__tensor_flatten__()[0]},
        x.__tensor_flatten__()[1],
        x.shape,
        x.stride(),
    ),
    "compiled": lambda x: torch.compile(lambda y: y.t(), backend="aot_eager")(x).t(),
    "Parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@pytest.mark.parametrize("amax", [3.0, None])
@pytest.mark.parametrize("way", WAYS)
def test_every_field_is_kept_by_what_is_no_op(way: str, amax: float | None) -> None:
    x = full(amax=amax)
    got = WAYS[way](x)
    assert isinstance(got, Float8Tensor)
    assert fields(got) == fields(x)


def test_copies_share_no_field() -> None:
    for make in (torch.clone, copy.deepcopy, lambda x: x.to(torch.bfloat16, copy=True)):
        x = full()
        got = make(x)
        got._amax.fill_(7.0)
        got._scale.fill_(7.0)
        assert fields(x) == fields(full())


def test_moving_moves_all_fields() -> None:
    x = full().to("meta")
    assert {v.device.type for v in vars(x).values() if isinstance(v, Tensor)} == {"meta"}


def test_cat() -> None:
    x = full()
    assert torch.cat(x.split(5))._amax is x._amax
    others = [full(amax=amax) for amax in (3.0, 5.0, None)]
    assert torch.cat(others[:2])._amax == 5  # of the whole
    assert torch.cat(others)._amax is None  # unknown, as that of a piece is


def test_copy() -> None:
    x, y = full(), full(1, amax=5.0)
    x.copy_(y)
    assert fields(x) == fields(y)
    with pytest.raises(ValueError, match=r"without an amax to record, expected .* with an amax"):
        x.copy_(full(amax=None))


def test_the_cache_key_of_compiled_graphs_knows_all_fields() -> None:
    assert full()._stable_hash_for_caching() != full(amax=None)._stable_hash_for_caching()
