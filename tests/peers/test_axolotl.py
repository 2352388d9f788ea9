"""Our plugin in axolotl: with its base class where it is installed, else one of the same methods.

axolotl pins other versions of transformers and torchao: `pip install --no-deps axolotl addict`.
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from float8 import Float8Linear, conversion_report
from support import libraries
from support.lazily import Lazily, needs_installed

pytest.importorskip("pydantic")
needs_installed("accelerate")
hf = Lazily("support.hugging_face")
PATH = "float8.integrations.axolotl.Float8Plugin"


class BasePlugin:
    """The methods of axolotl's, version 0.19.0, that ours has."""

    def get_input_args(self) -> str | None: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []


class Settings(dict):
    """As axolotl's `DictDefault`: None for a key that is not there."""

    __getattr__ = dict.get


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """By its path, as axolotl loads it."""
    try:
        base = importlib.import_module("axolotl.integrations.base")
    except ImportError:
        base = types.ModuleType("axolotl.integrations.base")
        vars(base)["BasePlugin"] = BasePlugin
        monkeypatch.setitem(sys.modules, base.__name__, base)
        monkeypatch.delitem(sys.modules, PATH.rpartition(".")[0], raising=False)
    module, _, name = PATH.rpartition(".")
    if hasattr(base, "load_plugin"):
        return base.load_plugin(PATH)
    return getattr(importlib.import_module(module), name)()


def settings(plugin: Any, **keys: Any) -> Settings:
    """What axolotl's validation makes of the keys: those that the plugin declares have defaults."""
    module, _, name = plugin.get_input_args().rpartition(".")
    declared = getattr(importlib.import_module(module), name)(**keys).model_dump()
    return Settings(keys | {"micro_batch_size": 4, "sequence_len": 32} | declared)


def float8_layers(model: nn.Module) -> list[str]:
    return [name for name, x in model.named_modules() if isinstance(x, Float8Linear)]


def test_the_trainer_of_axolotl_trains_a_converted_model(plugin: Any, tmp_path: Path) -> None:
    cfg = settings(plugin, float8_recipe="rowwise", float8_high_precision=["down_proj"])
    model = libraries.llama()
    (callback,) = plugin.add_callbacks_pre_trainer(cfg, model)
    trainer = hf.trainer(model, tmp_path, callback=callback, max_steps=1, save_strategy="no")
    assert len(float8_layers(model)) == 6
    assert not any("down_proj" in name for name in float8_layers(model))
    assert "weight axiswise" in str(conversion_report(model))
    before = [x.clone() for x in model.parameters()]
    trainer.train()
    assert not any(map(torch.equal, before, model.parameters()))


def test_keys_of_the_file(plugin: Any) -> None:
    (callback,) = plugin.add_callbacks_pre_trainer(settings(plugin, float8_all_gather=True), None)
    assert callback._config.enable_fsdp_float8_all_gather
    assert callback._config.short_str().startswith("tensorwise")
    assert callback._conversion["tokens_per_step"] == 128
    with pytest.raises(ValueError, match="fp8: true, which converts by torchao"):
        plugin.add_callbacks_pre_trainer(settings(plugin, fp8=True), None)
    with pytest.raises(ValueError, match="mxfp9"):
        plugin.add_callbacks_pre_trainer(settings(plugin, float8_recipe="mxfp9"), None)
