"""The `Conv1D` of transformers (GPT2) converts; its checkpoints stay those of the original."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

from float8 import (
    Float8Linear,
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8 import sync_float8_amax_and_scale_history as sync
from float8.linear import Float8Layer
from sqnr import same_bits
from support.configs import FINER, RECIPES, delayed, tensorwise
from support.models import forward_backward, seeded

transformers = pytest.importorskip("transformers")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
hf = importlib.import_module("support.hugging_face")
gpt2, step = hf.gpt2, hf.step
CONFIGS = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])


def test_it_stays_what_it_is() -> None:
    model = gpt2()
    parameters = dict(model.named_parameters())
    layer = convert_to_float8_training(model).transformer.h[0].attn.c_attn
    assert conversion_report(model).others == ()
    assert isinstance(layer, Conv1D)
    assert isinstance(layer, Float8Layer)
    assert not isinstance(layer, nn.Linear)  # whose weight would be [N, K]
    assert layer.weight.shape == (layer.in_features, layer.out_features) == (64, 192)
    assert all(grad.is_contiguous() for grad in step(model).values())
    grad = layer.weight.grad
    convert_to_high_precision(model)
    assert model.transformer.h[0].attn.c_attn is layer
    assert type(layer) is Conv1D
    assert layer.weight.grad is grad
    assert all(p is parameters[name] for name, p in model.named_parameters())


@CONFIGS
def test_checkpoints_are_those_of_the_original_in_both_directions(config) -> None:
    plain, model = gpt2(), convert_to_float8_training(gpt2(), config=config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    incompatible = plain.load_state_dict(model.state_dict(), strict=config == tensorwise())
    assert not incompatible.missing_keys
    for assign in (False, True):
        other = convert_to_float8_training(gpt2(), config=config)
        other.load_state_dict(copy.deepcopy(plain.state_dict()), assign=assign)
        weight = other.transformer.h[0].attn.c_attn.weight
        assert torch.equal(weight, plain.transformer.h[0].attn.c_attn.weight)
        step(other)
    again = pickle.loads(pickle.dumps(model))
    assert type(again.transformer.h[0].attn.c_attn) is type(model.transformer.h[0].attn.c_attn)
    assert same_bits(step(again)["loss"], step(model)["loss"])


@pytest.mark.parametrize("recipe", RECIPES + FINER)
def test_it_computes_what_a_linear_of_the_transposed_weight_does(recipe: str) -> None:
    mine, linear = Conv1D(40, 24), nn.Linear(24, 40)
    with torch.no_grad():
        linear.weight.copy_(mine.weight.t())
        linear.bias.copy_(mine.bias.normal_())
    mine, linear = (convert_to_float8_training(x, config=recipe) for x in (mine, linear))
    for seed in range(3):
        results = []
        for layer in (mine, linear):
            x = seeded(seed, 2, 8, 24).requires_grad_()
            y = layer(x)
            y.backward(seeded(seed + 10, 2, 8, 40))
            sync(layer)
            results.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
        results[0][2] = results[0][2].t()
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_graph_and_an_optimizer_from_before_go_on() -> None:
    plain, model = gpt2(), gpt2()
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3) for each in (plain, model)]
    losses = []
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each)
        optimizer.step()
        each.zero_grad()
        losses.append(each(input_ids=hf.tokens(1), labels=hf.tokens(1)).loss)
    convert_to_float8_training(model)
    for loss, optimizer in zip(losses, optimizers, strict=True):
        loss.backward()
        optimizer.step()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert same_bits(p.grad, q.grad), name
        assert same_bits(p, q), name


def test_to_another_recipe() -> None:
    model = convert_to_float8_training(gpt2(), config=delayed())
    convert_to_float8_training(model)
    same = convert_to_float8_training(gpt2())
    assert same_bits(step(model)["loss"], step(same)["loss"])
    layer = same.transformer.h[0].attn.c_attn
    assert type(Float8Linear.from_float(layer, delayed())) is type(layer)


def test_the_report_lists_one_that_was_not_converted() -> None:
    model = nn.ModuleList([Conv1D(32, 16), Conv1D(16, 32), nn.Linear(16, 32)])
    convert_to_float8_training(model, module_filter_fn=lambda mod, fqn: fqn != "0")
    (layer,) = conversion_report(model).skipped
    assert (layer.fqn, layer.in_features, layer.out_features) == ("0", 16, 32)
    assert layer.skip_reason == "module_filter_fn returned False"
    assert conversion_report(model).share == pytest.approx(2 / 3)


def test_compiled() -> None:
    model = nn.Sequential(Conv1D(48, 32), nn.GELU(), Conv1D(32, 48))
    compiled = copy.deepcopy(convert_to_float8_training(model, config=delayed()))
    compiled.compile(backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x, grad = seeded(seed, 8, 32), seeded(seed + 10, 8, 32)
        wanted, got = (forward_backward(each, x, grad) for each in (model, compiled))
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


def test_one_as_root() -> None:
    layer = convert_to_float8_training(Conv1D(32, 16), module_filter_fn=all_linears)
    assert repr(layer).startswith("Float8Conv1D[Conv1D](in_features=16, out_features=32, ")
    assert layer(torch.randn(2, 3, 16)).shape == (2, 3, 32)


def test_a_class_of_that_name_from_elsewhere_is_none_of_ours() -> None:
    mine = type("Conv1D", (Conv1D,), {"forward": lambda self, x: x, "__module__": __name__})
    model = nn.Sequential(mine(16, 16), nn.Linear(16, 16))
    convert_to_float8_training(model)
    assert type(model[0]) is mine
    (other,) = conversion_report(model).others
    assert (other.fqn, other.shape, other.module) == ("0.weight", (16, 16), "Conv1D")
