"""`torch.export` and AOTInductor take a converted model."""

from pathlib import Path

import pytest
import torch
from torch import nn

from float8 import all_linears, convert_to_float8_training


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_an_exported_model_computes_the_same_bits(recipe: str, tmp_path: Path) -> None:
    """As torch.export gives it, and as AOTInductor compiles it.

    One layer: between several Inductor rounds less, which the casts magnify by as much as the data
    happen to lie near the middle between two float8 numbers.
    """
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(64, 128)).to(torch.bfloat16),
        config=recipe,
        module_filter_fn=all_linears,
    ).eval()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), model(x))
        assert any(node.target is torch.ops.float8.cast.default for node in exported.graph.nodes)
        # Before, AOTInductor hands the dtype of a custom op on wrongly.
        if recipe == "tensorwise" and torch.__version__ >= "2.13":
            path = str(tmp_path / "model.pt2")
            torch._inductor.aoti_compile_and_package(exported, package_path=path)
            assert torch.equal(torch._inductor.aoti_load_package(path)(x), model(x))
