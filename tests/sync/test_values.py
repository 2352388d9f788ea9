"""The sync of delayed scaling: its values, what it costs, and training from tiny weights."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import DELAYED, DYNAMIC, delayed, mixed, tensorwise
from support.devices import on_devices
from support.models import fp8_state, seeded
from support.simulation import SimulatedHistory
from support.spies import OpCounter
from support.stacks import stack, train

SCALE_FNS = pytest.mark.parametrize("scale_fn_name", ["max", "most_recent"])


@on_devices
@pytest.mark.parametrize("power_of_2", [False, True])
@SCALE_FNS
def test_twenty_training_steps_agree_with_the_simulation(
    device: str, scale_fn_name: str, power_of_2: bool
) -> None:
    config = delayed(
        delayed_scaling_config=DelayedScalingConfig(4, scale_fn_name),
        round_scales_to_power_of_2=power_of_2,
    )
    layer = Float8Linear(16, 32, bias=False, device=device, config=config)
    simulated = {
        role: SimulatedHistory(4, scale_fn_name, float8_max, power_of_2)
        for role, float8_max in (("input", 448.0), ("weight", 448.0), ("grad_output", 57344.0))
    }
    rng = np.random.default_rng(5)
    for step in range(20):
        size = {role: float(np.exp(rng.normal())) for role in simulated}
        x = size["input"] * seeded(step, 8, 16, device=device)
        g = size["grad_output"] * seeded(step + 100, 8, 32, device=device)
        with torch.no_grad():
            layer.weight.copy_(size["weight"] * seeded(step + 200, 32, 16, device=device))
        if step in (3, 4, 9):
            x[0, 0] = math.nan if step == 3 else math.inf
        if step in (4, 5, 6, 7, 8):
            g.zero_()  # longer than the history: the scale must stay
        layer(x).backward(g)
        sync_float8_amax_and_scale_history(layer)
        for role, tensor in (("input", x), ("weight", layer.weight), ("grad_output", g)):
            simulated[role].step(tensor.detach().abs().max().item())
            history = layer.get_buffer(f"fp8_amax_history_{role}")
            scale = layer.get_buffer(f"fp8_scale_{role}")
            assert history.tolist() == simulated[role].history, (role, step)
            assert scale.item() == (simulated[role].scale or 0), (role, step)
            assert layer.get_buffer(f"fp8_amax_{role}").item() == 0


def test_layers_of_different_settings_are_synced_each_by_its_own() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    configs = [
        delayed(delayed_scaling_config=DelayedScalingConfig(2, "most_recent")),
        delayed(round_scales_to_power_of_2=True),
        mixed(DELAYED, DYNAMIC, DYNAMIC),
        tensorwise(),
    ]
    for index, config in enumerate(configs):
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda mod, fqn, i=index: fqn == str(i)
        )
    train(model)
    sync_float8_amax_and_scale_history(model)
    train(model)
    amaxes = {name: b.item() for name, b in fp8_state(model).items() if b.dim() == 0}
    sync_float8_amax_and_scale_history(model)
    assert model[0].fp8_amax_history_weight.shape == (2,)
    for index, layer in enumerate(model[:3]):
        scale = amaxes[f"{index}.fp8_amax_input"] / 448
        expected = 2.0 ** math.ceil(math.log2(scale)) if index == 1 else np.float32(scale)
        assert layer.fp8_scale_input.item() == expected


@on_devices
@SCALE_FNS
def test_a_sync_of_nothing_changes_nothing(device: str, scale_fn_name: str) -> None:
    config = DelayedScalingConfig(3, scale_fn_name)
    model = stack(2, device, delayed_scaling_config=config)
    for step in range(2):
        train(model, step)
        sync_float8_amax_and_scale_history(model)
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    zeros = torch.zeros(4, 16, device=device)
    for between in ("nothing", "evaluation", "zeros"):
        for _ in range(4):  # more than the history is long
            if between == "evaluation":
                with torch.no_grad():
                    model.eval()(seeded(9, 4, 16, device=device))
            elif between == "zeros":
                with torch.no_grad():
                    torch._foreach_zero_([*model.parameters()])
                model.train()(zeros).backward(zeros)
            sync_float8_amax_and_scale_history(model)
            assert all(torch.equal(buffer, before[n]) for n, buffer in fp8_state(model).items())


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        ([], None, "model: got list, expected an nn.Module"),
        (nn.ReLU(), 3, "got a int of .*, expected a list of Float8Linear"),
        (nn.ReLU(), Float8Linear(16, 16), "got a Float8Linear of .*, expected a list of"),
        (nn.ReLU(), [nn.Linear(1, 1)], r"got a list of \['Linear'\], expected a list of"),
        (nn.ReLU(), "0", "got a str of .*, expected a list of"),
    ],
)
def test_arguments_of_a_wrong_type(model, layers, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        sync_float8_amax_and_scale_history(model, layers)


@on_devices
@SCALE_FNS
def test_the_number_of_kernels_does_not_grow_with_the_layers(
    device: str, scale_fn_name: str
) -> None:
    dynamic = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=tensorwise())
    config, ops = DelayedScalingConfig(scale_fn_name=scale_fn_name), []
    stacks = (stack(n, device, delayed_scaling_config=config) for n in (2, 20))
    for model in (dynamic, nn.Linear(16, 16), *stacks):
        if fp8_state(model):
            train(model)
        with OpCounter() as counter:
            sync_float8_amax_and_scale_history(model)
        ops.append(counter.ops)
    assert not ops[0]
    assert not ops[1]
    assert ops[2] == ops[3]
    views = sum(ops[2][f"aten.{view}"] for view in ("select", "slice", "unbind", "unsqueeze"))
    assert 0 < ops[2].total() - views < 28  # six of them tell whether amaxes have settled


@pytest.mark.gpu
def test_sync_does_not_wait_for_the_gpu() -> None:
    model = stack(4, "cuda")
    train(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sync_float8_amax_and_scale_history(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


DIM, WORDS, TOKENS, BATCH, STEPS = 64, 32, 32, 8, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Of two blocks, whose output projections begin tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, DIM), nn.Parameter(torch.zeros(TOKENS, DIM))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS)
        for block in self.blocks:
            for layer in (block.qkv, block.up, block.out, block.down):
                last = layer in (block.out, block.down)
                nn.init.normal_(layer.weight, std=1e-5 if last else 0.02)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(words) + self.position)))


def text() -> Tensor:
    """Words that tell of those one and two places further on."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(WORDS, WORDS, generator=generator) * x for x in (3, 2))
    words = torch.randint(WORDS, (STEPS * BATCH, TOKENS + 1), generator=generator)
    for i in range(2, TOKENS + 1):
        odds = (one[words[:, i - 1]] + two[words[:, i - 2]]).softmax(-1)
        words[:, i] = torch.multinomial(odds, 1, generator=generator)[:, 0]
    return words.unflatten(0, (STEPS, BATCH))


def losses(recipe: str | None) -> Tensor:
    """Of each step."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    if recipe is not None:
        convert_to_float8_training(model.blocks, config=recipe)
        attach_to_optimizer(model, optimizer)
    seen = []
    for words in text():
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return torch.tensor(seen)


def test_delayed_scaling_learns_as_fast_as_high_precision() -> None:
    gap = losses("delayed") - losses(None)
    assert gap[:10].mean() <= 0.003
    assert gap[10:].mean() <= 0.003
