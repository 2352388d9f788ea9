"""The image encoder of SAM, which float8_experimental tested, trains as in high precision."""

import copy

import pytest
import torch
from torch import nn

import tolerances
from float8 import Float8LinearConfig, conversion_report, convert_to_float8_training
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import sqnr
from support.configs import RECIPES
from support.models import gradients, seeded

transformers = pytest.importorskip("transformers")


def encoder() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.SamConfig(
        vision_config={
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "output_channels": 32,
            "image_size": 64,
            "global_attn_indexes": [1],
            "window_size": 2,
            "mlp_dim": 128,
        },
    )
    model: nn.Module = transformers.SamModel(config).vision_encoder
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at zero stops gradients
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_in_high_precision(recipe: str) -> None:
    plain = encoder()
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = convert_to_float8_training(copy.deepcopy(plain), config=config)
    report = conversion_report(model)
    assert (len(report.converted), report.skipped) == (8, ())
    for seed in range(2):
        results = []
        for each in (plain, model):
            each.zero_grad()
            output = each(seeded(seed, 4, 3, 64, 64)).last_hidden_state
            (output * seeded(seed + 10, *output.shape)).mean().backward()
            sync(each)
            results.append({"output": output, **gradients(each)})
        wanted, got = results
        assert wanted.keys() == got.keys()
        for name, x in wanted.items():
            assert x.any(), name
            # The gradients of relative positions are differences of nearly equal numbers.
            if "rel_pos" not in name:
                assert sqnr(x, got[name]) > tolerances.MODEL, name
