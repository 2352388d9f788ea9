"""Under tensor parallel fused functions run layer by layer, and say so."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from float8 import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    conversion_report,
    rms_norm_linear,
    swiglu_feed_forward,
    why_not_fused,
)
from support.configs import RECIPES
from support.models import FeedForward, seeded
from support.parallel import DIM, HIDDEN, TOKENS, block_of, part, plan_of
from support.ranks import on
from support.sharded import convert, here, mesh_of, whole

REASON = "one weight is a DTensor: FSDP2's until it is gathered, or tensor parallel's"


class Calls(nn.Module):
    """A model that calls both functions, or computes the same layer by layer."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.norm, self.apart = nn.RMSNorm(DIM), apart
        self.q, self.k = (nn.Linear(DIM, DIM, bias=False) for _ in "qk")
        self.ffn = FeedForward(DIM, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.apart:
            normed = self.norm(x)
            return self.q(normed), self.k(normed), x + self.ffn(self.norm(x))
        q, k, x = rms_norm_linear(x, self.norm, (self.q, self.k), residual=True)
        layers = self.ffn.w1, self.ffn.w3, self.ffn.w2
        return q, k, swiglu_feed_forward(x, *layers, norm=self.norm, residual=True)


def parallel(recipe: str, how: str, apart: bool) -> nn.Module:
    """One whose feed-forward `fuse=True` found, or one with calls; its norm has a style, or none.

    Each rank has some tokens, between layers.
    """
    torch.manual_seed(0)
    plan: dict[str, Any] = {}
    if how == "found":
        model = block_of(recipe, fuse=not apart)
        plan = plan_of("float8", sequence=True, norms=True)
        del plan["ffn"]  # else the report names the forward that prepares its input
    else:
        model = convert(Calls(apart), recipe, all_gather=False).to(here())
        plan |= {name: Float8ColwiseParallel(input_layouts=Shard(1)) for name in "qk"}
    for name in ("ffn.w1", "ffn.w3"):
        plan[name] = Float8ColwiseParallel(input_layouts=Shard(1))
    plan["ffn.w2"] = Float8RowwiseParallel(output_layouts=Shard(1))
    if how == "norm with a style":
        plan["norm"] = SequenceParallel(use_local_output=True)
    return parallelize_module(model, mesh_of(), plan)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["found", "calls", "norm with a style"])
@on("either")
def test_a_model_with_fused_functions_has_the_bits_of_layer_by_layer(recipe: str, how: str) -> None:
    found: list[list[Tensor]] = []
    for apart in (True, False):
        model: Any = parallel(recipe, how, apart)
        assert why_not_fused(model.ffn.w1, model.ffn.w3, model.ffn.w2) == REASON
        reasons = [each.reason for each in conversion_report(model).fused]
        assert reasons == ([REASON] if how == "found" and not apart else [])
        x = part(seeded(1, 2, TOKENS, DIM, device=here()), 1).requires_grad_()
        y = model(x)
        outputs = y if isinstance(y, tuple) else (y,)
        sum((each * each.detach().cos()).sum() for each in outputs).backward()
        grads = (whole(parameter.grad) for parameter in model.parameters())
        found.append([*outputs, x.grad, *grads, *model.buffers()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
