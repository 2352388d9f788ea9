"""`torch.export` and AOTInductor take a converted model."""

from pathlib import Path

import pytest
import torch
from torch import nn

import float8
from float8 import Float8LinearConfig


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_an_exported_model_computes_the_same_bits(recipe: str) -> None:
    model, x = _model(recipe)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), model(x))
    assert any(node.target is torch.ops.float8.cast.default for node in exported.graph.nodes)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="its AOTInductor hands the dtype of a custom op on wrongly"
)
def test_aot_inductor_compiles_it(tmp_path: Path) -> None:
    model, x = _model("tensorwise")
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        path = tmp_path / "model.pt2"
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
        compiled = torch._inductor.aoti_load_package(str(path))
        # Not with eager mode: Inductor rounds less between the layers, which the casts magnify
        # by as much as the data happen to lie near the middle between two float8 numbers.
        assert torch.equal(compiled(x), torch.compile(model)(x))


def _model(recipe: str) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(torch.bfloat16)
    config = Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=float8.all_linears)
    return model.eval(), torch.randn(32, 64, dtype=torch.bfloat16)
