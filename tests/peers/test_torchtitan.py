"""Our converter in torchtitan: its debug model, built, initialised and trained on the CPU.

Its `Trainer` needs a GPU, and its attention one for backward: here it is PyTorch's own.
"""

import copy
import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tolerances
from float8 import Float8Linear, conversion_report, convert_to_float8_training
from sqnr import sqnr
from support.configs import RECIPES
from support.models import fp8_state, gradients

pytest.importorskip("torchtitan")
titan = importlib.import_module("float8.integrations.torchtitan")
llama3 = pytest.importorskip("torchtitan.models.llama3")
registry = pytest.importorskip("torchtitan.models.llama3.config_registry")


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, **_: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=enable_gqa
        ).transpose(1, 2)


def built(**converter: object) -> tuple[nn.Module, object]:
    """The model, and its optimizers; as the `Trainer` makes them."""
    converters = [titan.Float8Converter.Config(**converter)] if converter else None
    spec = llama3.model_registry("debugmodel", converters=converters)
    config = registry.llama3_debugmodel()
    config.model_spec = spec
    config.optimizer.implementation = "foreach"
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    for layer in model.layers.values():
        layer.attention.inner_attention = Attention()
    optimizers = config.optimizer.build(model_parts=[model])
    spec.post_optimizer_build_fn = titan.attach_to_optimizers
    spec.post_optimizer_build_fn(optimizers, [model], None)
    return model, optimizers


def step(model: nn.Module, optimizers, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(2048, (1, 64), generator=torch.Generator().manual_seed(seed))
    optimizers.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])
    loss.backward()
    grads = copy.deepcopy(gradients(model))
    optimizers.step()
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_in_high_precision(recipe: str) -> None:
    (plain, optimizers), (model, ours) = built(), built(recipe_name=recipe)
    report = conversion_report(model)
    assert len(report.converted) == 30
    assert [layer.fqn for layer in report.skipped] == ["lm_head"]
    assert all(type(x) is titan.ConvertedLinear for x in model.modules() if hasattr(x, "plan"))
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name
    wanted, got = step(plain, optimizers, 0), step(model, ours, 0)
    assert got["loss"] == pytest.approx(wanted["loss"].item(), abs=0.02)
    for name, grad in wanted.items():
        assert sqnr(grad, got[name]) > tolerances.MODEL, name
    step(model, ours, 1)
    histories = [x for name, x in fp8_state(model).items() if "history" in name]
    assert len(histories) == {"tensorwise": 0, "delayed": 90}[recipe]
    assert all((x > 0).sum() == 2 for x in histories)


def test_layers_are_left_out_by_name_and_weights_gathered_in_float8() -> None:
    model, _ = built(
        recipe_name="tensorwise", filter_fqns=["attention"], enable_fsdp_float8_all_gather=True
    )
    layers = {name: x for name, x in model.named_modules() if isinstance(x, Float8Linear)}
    assert len(layers) == 18
    assert not any("attention" in name for name in layers)
    assert all(type(x.weight.data) is not Tensor for x in layers.values())
    assert all(x.config.enable_fsdp_float8_all_gather for x in layers.values())


@pytest.mark.parametrize("by", ["converter", "hand"])
def test_feed_forwards_are_fused(by: str) -> None:
    converter = {"recipe_name": "tensorwise"} if by == "converter" else {}
    (apart, optimizers), (fused, ours) = (built(**converter) for _ in range(2))
    for model in (apart, fused):
        convert_to_float8_training(model, fuse=model is fused)
    fates = {(each.module, each.reason) for each in conversion_report(fused).fused}
    assert fates == {("FeedForward", None)}
    assert len(conversion_report(fused).converted) == 30
    wanted, got = step(apart, optimizers, 0), step(fused, ours, 0)
    for name, value in wanted.items():
        assert sqnr(value, got[name]) > tolerances.COMPILED, name
