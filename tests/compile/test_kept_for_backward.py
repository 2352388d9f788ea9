"""Compiled code makes again in backward what it can make from tensors that it keeps anyway."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code

import tolerances
from float8 import convert_to_float8_training
from float8.quantize.quantize import recast
from float8.quantize.spec import CastSpec
from sqnr import same_bits, sqnr
from support.configs import delayed, tensorwise
from support.devices import E4M3, E5M2, on_devices
from support.spies import saved_tensors


class FeedForward(nn.Module):
    """As its users write it: three layers read what a norm and an activation function made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.w1, self.w3 = nn.Linear(32, 96, bias=False), nn.Linear(32, 96, bias=False)
        self.w2 = nn.Linear(96, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def feed_forward(config) -> nn.Module:
    torch.manual_seed(0)
    return convert_to_float8_training(FeedForward().bfloat16(), config=config)


class Llama(FeedForward):
    """The feed-forward is a module of its own, which is fused."""

    class Swiglu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = nn.Linear(32, 96, bias=False), nn.Linear(32, 96, bias=False)
            self.w2 = nn.Linear(96, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.norm, self.feed_forward = nn.RMSNorm(32), self.Swiglu()

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.norm(x))


@pytest.mark.parametrize(
    ("config", "fuse"),
    [
        pytest.param(tensorwise(), False, id="dynamic"),
        pytest.param(delayed(), True, id="delayed-fused"),
        pytest.param(tensorwise(), True, id="dynamic-fused", marks=pytest.mark.exhaustive),
        pytest.param(delayed(), False, id="delayed", marks=pytest.mark.exhaustive),
    ],
)
def test_inputs_are_not_kept_in_float8(config, fuse: bool) -> None:
    plain = Llama().bfloat16() if fuse else FeedForward().bfloat16()
    model = convert_to_float8_training(plain, config=config, fuse=fuse)
    model = torch.compile(model, fullgraph=True)
    x = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved:
        model(x).sum().backward()
    parameters = {p.data_ptr() for p in model.parameters()}
    kept = sorted(
        (tuple(t.shape), t.dtype)
        for t in saved
        if t.numel() > 48 and t.data_ptr() not in parameters
    )
    assert kept == [((48, 32), torch.bfloat16), *2 * [((48, 96), torch.bfloat16)]]


def test_layers_that_read_one_tensor_share_what_is_made_again() -> None:
    model = torch.compile(feed_forward(tensorwise()), fullgraph=True)
    x = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        _, (forward, backward) = run_fw_bw_and_get_code(lambda: model(x))
    casts, transposes = "float8_cpu.cast(", "float8_cpu.transpose("
    assert (forward.count(casts), forward.count(transposes)) == (2, 0)
    assert (backward.count(casts), backward.count(transposes)) == (3, 2)  # three weights


class WritesIntoItsInput(nn.Module):
    """What a layer has read is written into, before its backward reads it."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.layer, self.residual = nn.Linear(32, 32, bias=False), residual

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        y = self.layer(h)
        return h.add_(y) if self.residual else y + h.add_(1).sum()


@pytest.mark.parametrize(
    ("config", "residual", "backend"),
    [
        *itertools.product((tensorwise(), delayed()), (False, True), ("eager", "aot_eager")),
        (tensorwise(), True, "inductor"),
        (delayed(), False, "inductor"),
        pytest.param(tensorwise(), False, "inductor", marks=pytest.mark.exhaustive),
        pytest.param(delayed(), True, "inductor", marks=pytest.mark.exhaustive),
    ],
)
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


def test_odd_shapes_are_padded_alike() -> None:
    x = torch.randn(19, 37)
    torch._dynamo.reset()
    compiled = torch.compile(recast, fullgraph=True, dynamic=True)
    for rows in (19, 5, 16):
        args = (x[:rows], CastSpec(E4M3), torch.tensor(0.01))
        assert compiled(*args).data.shape == (48, -(-rows // 16) * 16)
        assert same_bits(compiled(*args).data, recast(*args).data)
