"""Compiled code makes again in backward what it can make from tensors that it keeps anyway."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code

import tolerances
from float8 import convert_to_float8_training
from float8.quantize.quantize import recast
from float8.quantize.spec import CastSpec
from sqnr import same_bits, sqnr
from support.configs import delayed, tensorwise
from support.devices import E4M3, E5M2, on_devices
from support.models import NormedFeedForward
from support.spies import saved_tensors


@pytest.mark.parametrize(
    ("config", "fuse"),
    [
        pytest.param(tensorwise(), False, id="dynamic"),
        pytest.param(delayed(), True, id="delayed-fused"),
    ],
)
def test_inputs_are_not_kept_in_float8(config, fuse: bool) -> None:
    """Layers that read one tensor share what is cast, and what is made again."""
    model = NormedFeedForward(32, 96).bfloat16()
    convert_to_float8_training(model, config=config, fuse=fuse)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved, torch._inductor.config.patch(force_disable_caches=True):
        _, (forward, backward) = run_fw_bw_and_get_code(lambda: compiled(x))
    parameters = {p.data_ptr() for p in model.parameters()}
    kept = sorted(
        (tuple(t.shape), t.dtype)
        for t in saved
        if t.numel() > 48 and t.data_ptr() not in parameters
    )
    assert kept == [((48, 32), torch.bfloat16), *2 * [((48, 96), torch.bfloat16)]]
    if not fuse:
        known_scale, transposes = r"float8_cpu\.cast\(\w+, (?!None)", "float8_cpu.transpose("
        assert (len(re.findall(known_scale, forward)), forward.count(transposes)) == (2, 0)
        # Three weights.
        assert (len(re.findall(known_scale, backward)), backward.count(transposes)) == (3, 2)


class WritesIntoItsInput(nn.Module):
    """What a layer has read is written into, before its backward reads it."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.layer, self.residual = nn.Linear(32, 32, bias=False), residual

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        y = self.layer(h)
        return h.add_(y) if self.residual else y + h.add_(1).sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(("config", "residual"), [(tensorwise(), True), (delayed(), False)])
def test_inputs_may_be_written_into_afterwards(config, residual: bool, backend: str) -> None:
    torch.manual_seed(0)
    model = convert_to_float8_training(WritesIntoItsInput(residual), config=config)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)
    x = torch.randn(48, 32)
    for run in (model, compiled):
        run(x.detach().requires_grad_()).square().sum().backward()
    wanted, got = (next(m.parameters()).grad for m in (model, compiled))
    assert wanted is not None
    assert got is not None
    assert sqnr(wanted, got) > tolerances.COMPILED


@on_devices
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_what_is_made_again_has_the_same_bits(dtype: torch.dtype, device: str) -> None:
    every_number = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every_number.view(256, 256).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(recast, fullgraph=True, dynamic=False)
    for scale in (1.0, 0.0123, 3.3e5, 2.0**-108, float("inf"), float("nan")):
        args = (x, CastSpec(dtype), torch.tensor(scale, device=device))
        assert same_bits(compiled(*args).data, recast(*args).data), scale
    odd = (x[:19, :37], CastSpec(dtype), torch.tensor(0.01, device=device))
    assert compiled(*odd).data.shape == (48, 32)
    assert same_bits(compiled(*odd).data, recast(*odd).data)
