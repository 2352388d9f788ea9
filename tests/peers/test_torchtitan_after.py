"""Our converter and torchtitan after 0.3.0, by a stand-in: see `support.titan_after`."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import float8
import tolerances
from float8 import Float8Linear, conversion_report, convert_to_high_precision
from sqnr import sqnr
from support import titan_after as theirs
from support.models import fp8_state, gradients, seeded
from support.rings import short

FILE = Path(float8.__file__).parent / "integrations" / "torchtitan.py"


@pytest.fixture(scope="module")
def titan() -> Any:
    """Our module, imported where the stand-in is torchtitan."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
            patch.delitem(sys.modules, name)
        for name, module in theirs.modules().items():
            patch.setitem(sys.modules, name, module)
        spec = importlib.util.spec_from_file_location("titan_after_ours", FILE)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def built(titan: Any, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model, and one that the converter made, with the same weights."""
    torch.manual_seed(0)
    plain = theirs.model_config().build()
    converter = titan.Float8Converter.Config(**settings).build()
    with torch.device("meta"):
        model = converter.convert(theirs.model_config()).build()
    model.to_empty(device="cpu").load_state_dict(plain.state_dict(), strict=False)
    return plain, model


def step(call: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    loss = call(seeded(1, 32, 64)).square().mean()
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    short(
        range(3), [*((x, False) for x in ("tensorwise", "delayed", "blockwise")), ("delayed", True)]
    ),
)
def test_stacked_and_parallel_layers_train(titan: Any, recipe: str, compiled: bool) -> None:
    experts = {"experts_recipe_name": "rowwise"} if recipe == "delayed" else {}
    plain, model = built(titan, recipe_name=recipe, **experts)
    kinds = [isinstance(layer, Float8Linear) for layer in (*model.layers, model.lm_head)]
    assert kinds == [True, True, False, False]
    assert isinstance(model.layers[0], theirs.ColumnParallelLinear)
    assert {x.fqn for x in conversion_report(model).converted} == {"layers.0", "layers.1"}
    model._parallelize(SimpleNamespace(tp_enabled=False))
    optim = titan.attached(theirs.Optim.Config()).build(model_parts=[model], training_steps=2)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    wanted, got = step(plain, plain), step(call, model)
    for name, value in wanted.items():
        assert tolerances.MODEL < sqnr(value, got[name]) < (60 if name != "loss" else 1e9), name
    optim.optimizers[0].step()
    histories = [x for name, x in fp8_state(model).items() if "history" in name]
    assert len(histories) == (4 if recipe == "delayed" else 0)
    assert all((x > 0).sum() == 1 for x in histories)  # by `attached`
    old = [type(x) for x in plain.modules()]
    model.experts = plain.experts  # no report lists them, and none converts them back
    assert [type(x) for x in convert_to_high_precision(model).modules()] == old


def test_apply_transforms_takes_it(titan: Any) -> None:
    converter = titan.Float8Converter.Config(filter_fqns=["experts"]).build()
    assert isinstance(converter, theirs.ModelConfigTransform)
    model = converter.transform(theirs.model_config(), context=SimpleNamespace()).build()
    assert isinstance(model.layers[0], Float8Linear)
    assert type(model.experts) is theirs.GroupedLinear
    with pytest.raises(ValueError, match="got tensor parallel with spmd_backend='spmd_types'"):
        model._parallelize(SimpleNamespace(tp_enabled=True))


def test_what_is_refused(titan: Any) -> None:
    config = theirs.model_config()
    lora = type("Config", (theirs.Linear.Config,), {})(in_features=64, out_features=64)
    config.layers, config.experts = [lora], lora
    converter = titan.Float8Converter.Config().build()
    with pytest.raises(ValueError, match=r"got 3 linear layers .* none of which .* before LoRA"):
        converter.convert(config)
    type(lora).__module__ = "torchtitan.quantization.mxfp8.linear"
    with pytest.raises(ValueError, match="another converter quantized"):
        converter.convert(config)
    graphs = titan.attached(theirs.Optim.Config(enable_cuda_graph=True))
    with pytest.raises(ValueError, match="got enable_cuda_graph=True"):
        graphs.build(model_parts=[])
