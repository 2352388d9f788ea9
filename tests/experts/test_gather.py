"""Weights of experts as FSDP2 shards and gathers them, on one device."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from float8.config import CastConfig, ScalingGranularity
from float8.experts import grouped_linear
from float8.experts.gather import GatheredExperts, GatherExperts
from float8.experts.grouped import quantize_experts
from float8.linear.plan import plan_linear
from sqnr import same_bits, sqnr
from support.configs import of_recipe
from support.devices import E4M3, on_devices
from support.models import seeded


def gathered(weight: Tensor, config: object) -> GatheredExperts:
    """As one gather makes it."""
    row = quantize_experts(weight, plan_linear(config).casts.weight, row=True).row
    covers, scale = plan_linear(config).casts.weight.config.scaling_granularity, row.scale
    if not covers.by_blocks:
        covers, scale = ScalingGranularity.AXISWISE, scale.unsqueeze(-1)
    data = row.data[..., : weight.shape[2]].contiguous()
    return GatheredExperts(data, scale, weight.dtype, covers).requires_grad_()


@on_devices
@pytest.mark.parametrize("shape", [(48, 80), (40, 70), (272, 384)], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_gathered_weights_multiply_as_others(
    device: str, recipe: str, shape: tuple[int, int]
) -> None:
    N, K = shape
    config = of_recipe(recipe, emulate=N % 16 > 0)
    offs = torch.tensor([5, 5, 40], dtype=torch.int32, device=device)
    x = seeded(0, 50, K, device=device).to(torch.bfloat16).requires_grad_()
    w = (seeded(1, 3, N, K, device=device) ** 3).to(torch.bfloat16).requires_grad_()
    g = seeded(2, 50, N, device=device).to(torch.bfloat16)
    made, kept = [], []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    for weight in (w, gathered(w.detach(), config)):
        kept.clear()
        with hooks:
            y = grouped_linear(x, weight, offs, config=config)
        made.append((y, *torch.autograd.grad(y, (x, weight), g)))
    for i, (want, got) in enumerate(zip(*made, strict=True)):
        if recipe == "rowwise" and i == 1:
            assert sqnr(want, got) > 30  # columns are cast again from rows
        else:
            assert same_bits(want, got), i
    # Of the weight nothing is kept but what somebody keeps anyway.
    there = [weight._data.data_ptr(), weight._scale.data_ptr()]
    assert [t.data_ptr() for t in kept if t.dim() == 3] == there
    none = grouped_linear(x[:0], weight, torch.zeros_like(offs), config=config)
    assert none.shape == (0, N)
    assert not torch.autograd.grad(none.sum(), weight)[0].any()


def test_its_views_and_copies_are_of_its_class() -> None:
    spec = CastConfig(target_dtype=E4M3, scaling_granularity=ScalingGranularity.AXISWISE)
    x = nn.Parameter(GatherExperts(seeded(0, 4, 6, 8), spec), requires_grad=False)
    torch.save(x, file := io.BytesIO())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for y in (x.detach(), x.clone(), x[1:3], x.view(-1), copy.deepcopy(x), saved):
        assert (type(y), y.how) == (GatherExperts, spec)
    assert same_bits(saved.high_precision, x.high_precision)
    assert type(x + 1) is Tensor
