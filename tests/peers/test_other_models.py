"""Models of timm and diffusers: converted, trained, and back. No extra installs them.

timm needs torchvision, of which there is no build for CPUs alone.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

import tolerances
from float8 import conversion_report, convert_to_float8_training, high_precision_state_dict
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import sqnr
from support.models import seeded


def timm(name: str) -> nn.Module:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    library = pytest.importorskip("timm")
    return library.create_model(name, img_size=32, patch_size=8, depth=2, num_classes=16)


def flux() -> nn.Module:
    return pytest.importorskip("diffusers").FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def dit() -> nn.Module:
    return pytest.importorskip("diffusers").DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=16,
        norm_num_groups=4,
    )


def loss_of(model: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)  # DiT drops labels
    kind = type(model).__name__
    if kind == "DiTTransformer2DModel":
        given = {"timestep": torch.tensor([1, 5]), "class_labels": torch.tensor([1, 2])}
        (out,) = model(seeded(seed, 2, 4, 8, 8), **given, return_dict=False)
    elif kind == "FluxTransformer2DModel":
        given = {"encoder_hidden_states": seeded(1, 2, 16, 32), "txt_ids": torch.zeros(16, 3)}
        given |= {"img_ids": torch.zeros(16, 3), "timestep": torch.tensor([0.1, 0.5])}
        given["pooled_projections"] = seeded(2, 2, 32)
        (out,) = model(seeded(seed, 2, 16, 16), **given, return_dict=False)
    else:
        return nn.functional.cross_entropy(model(seeded(seed, 4, 3, 32, 32)), torch.arange(4))
    return out.square().mean()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    ("make", "name", "converted"),
    [
        (timm, "vit_tiny_patch16_224", 9),
        (timm, "eva02_tiny_patch14_224", 9),
        (dit, "", 20),
        (flux, "", 28),
    ],
)
def test_models_of_others(make, name: str, converted: int, recipe: str) -> None:
    plain = make(name) if name else make()
    model = convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    assert len(conversion_report(model).converted) == converted
    for seed in range(2):
        gradients = []
        for each in (plain, model):
            each.train().zero_grad()
            loss_of(each, seed).backward()
            sync(each)
            found = [p.grad.flatten() for p in each.parameters() if p.grad is not None]
            gradients.append(torch.cat(found))
        assert sqnr(*gradients) > tolerances.MODEL
    again = copy.deepcopy(plain)
    again.load_state_dict(high_precision_state_dict(model))
    assert torch.equal(loss_of(again.eval(), 2), loss_of(plain.eval(), 2))
