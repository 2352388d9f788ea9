"""One layer whose weight FSDP2 gathers in float8: bytes and scales of one device, and its uses."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from float8 import linear
from float8.tensor import Float8Tensor
from sqnr import same_bits, sqnr
from support.configs import of_recipe
from support.models import seeded
from support.ranks import Ranks, on
from support.sharded import convert, here, mesh_of, whole
from support.spies import Traffic

K = 144


def one_layer(recipe: str, N: int) -> None:
    """The gathered weight is that of one device: scales and bytes, and so is the output."""
    torch.manual_seed(0)
    plain = nn.Linear(K, N, bias=False, dtype=torch.bfloat16).to(here())
    plain.weight.data *= torch.logspace(-2, 2, N, device=here()).unsqueeze(1)
    layer = convert(nn.Sequential(copy.deepcopy(plain)), recipe)[0]
    fully_shard(layer, mesh=mesh_of())
    x = seeded(1, 48, K, dtype=torch.bfloat16, device=here())
    alone, leaf = (x.clone().requires_grad_() for _ in range(2))
    wanted = linear(alone, plain.weight, config=of_recipe(recipe))
    with Traffic() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = layer(leaf)
    said = [str(w.message) for w in caught if "float8: a weight" in str(w.message)]
    rows = -(-N // dist.get_world_size())
    even = rows * dist.get_world_size() == N
    in_float8 = even and (recipe == "rowwise" or rows % 128 == 0)
    assert isinstance(layer.weight, Float8Tensor) == in_float8
    assert same_bits(y, wanted)
    if in_float8:
        assert not said
        assert seen.all_reduces == 0
        scales = rows * 4 if recipe == "rowwise" else rows // 128 * 4 * 4
        assert seen.sizes == [rows * K + scales]  # in the same collective
        assert sum(seen.sizes) <= 0.52 * rows * K * 2
    else:
        reason = "would cut blocks of 128 x 128" if even else "are not all of one size"
        assert reason in said[0]
    grad = seeded(2, 48, N, dtype=torch.bfloat16, device=here())
    wanted.backward(grad)
    y.backward(grad)
    assert same_bits(whole(layer.weight.grad), plain.weight.grad)
    if recipe == "rowwise" and in_float8:
        # Columns are cast again from rows. Powers of two as scales: few bits of few values go.
        assert sqnr(alone.grad, leaf.grad) > 35
    else:
        assert same_bits(alone.grad, leaf.grad)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_one_layer(either: Ranks, recipe: str) -> None:
    for N in (256, 33, 130):
        either.run(one_layer, recipe, N)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_ranks_without_rows(four: Ranks, recipe: str) -> None:
    for N in (3, 130):
        four.run(one_layer, recipe, N)


@on("two")
def test_a_cold_column() -> None:
    """What is tiny in its row is rounded before columns are cast again: docs/fsdp.md."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.eye(64).requires_grad_()
    weight[:, 5] *= 2.0**-14
    weight[:, 6] *= 2.0**-24
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model[0].weight.data.copy_(weight)
    fully_shard(convert(model, "rowwise"), mesh=mesh_of())(x).backward(torch.eye(64))
    columns = [sqnr(weight[:, k], x.grad[:, k]) for k in (4, 5, 6)]
    assert columns[0] > 28
    assert 15 < columns[1] < 28
    assert columns[2] == 0


class Absorbs(nn.Module):
    """Reads a weight by other ops than that of its layer, as some attention does."""

    def __init__(self, read: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.up = read, nn.Linear(K, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight, y = self.up.weight, self.up(x).sum()
        if self.read == "einsum":
            return y + torch.einsum("td,hvd->thv", x, weight.view(4, 16, K)).sum()
        if self.read == "bmm":
            return y + torch.bmm(x[None], weight.t()[None]).sum()
        return y + weight.pow(2).sum()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on("either")
def test_a_weight_that_a_forward_reads_itself(recipe: str) -> None:
    """The error names a way that works, and that way has the gradients of one without float8."""
    x = seeded(0, 16, K, device=here())
    for read in ("einsum", "pow", "bmm"):
        models = []
        for gathers in ((True,), (True, False), (False,)):
            models.append(Absorbs(read).to(here()))
            for gather in gathers:
                convert(models[-1], recipe, gather)
            fully_shard(models[-1], mesh=mesh_of())
        refused, *others = models
        with pytest.raises(
            (ValueError, NotImplementedError), match="its layer once more before fully_shard, with"
        ):
            refused(x)
        for model in others:
            model(x).backward()
        assert torch.equal(*(whole(model.up.weight.grad) for model in others))
