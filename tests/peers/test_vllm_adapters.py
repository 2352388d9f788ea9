"""Weights for vLLM's weight transfer of a model with adapters: merged, as a checkpoint has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from float8 import convert_to_float8_training
from float8.checkpoints import float8_weights
from float8.tensor import Float8Tensor
from peers.test_expert_checkpoints import MODELS, built
from peers.test_vllm import same_as_files
from support.float8_files import LAYOUTS, Layout, only
from support.lazily import Lazily
from support.ranks import on
from support.sharded import mesh_of
from support.weight_transfer import hashes, source_class, told

pytest.importorskip("peft")
hf = Lazily("support.hugging_face")

BLOCKS, CHANNELS = LAYOUTS[0], LAYOUTS[2]
CASES = [("Llama", BLOCKS), ("Llama", CHANNELS), ("Mixtral", CHANNELS)]


def adapted(name: str, layout: Layout, config: Any = None) -> nn.Module:
    """A converted base with adapters at its linear layers that have an effect."""
    base = built(name, **MODELS[name], num_hidden_layers=1).requires_grad_(False)
    config = config or layout.recipe
    body = lambda mod, fqn: fqn != "lm_head"  # noqa: E731
    convert_to_float8_training(base, config=config, module_filter_fn=body)
    model = hf.with_lora(base, target_modules=["q_proj", "o_proj"])
    torch.manual_seed(1)
    for key, x in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(x, std=0.05)
    return model


def merged(name: str, layout: Layout) -> list[tuple[Any, ...]]:
    """Hashes of what a model has whose adapters PEFT merged in float32, and that was cast then."""
    model: Any = adapted(name, layout)
    for layer in [x for x in model.modules() if hasattr(x, "lora_A")]:
        layer.float()
    return hashes(float8_weights(model.merge_and_unload(), **layout.how, dtype=torch.bfloat16))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_adapters_are_merged_on_the_way(name: str, layout: Layout, tmp_path: Path) -> None:
    """Under the names of the base; the model that trains stays as it is."""
    model = adapted(name, layout)
    before = hashes(model.state_dict().items())
    source = source_class()(model, **layout.how)
    same_as_files(source, model, layout, tmp_path)
    assert hashes(source.iter_full()) == merged(name, layout)
    assert not any("lora" in key or "base" in key for key, *_ in told(source))
    assert hashes(model.state_dict().items()) == before
    base = hashes(float8_weights(model.unload(), **layout.how))
    assert sum(x != y for x, y in zip(base, merged(name, layout), strict=True)) >= 2


def test_adapters_are_merged_into_weights_in_float8_alone(tmp_path: Path) -> None:
    model = adapted("Llama", BLOCKS, only(BLOCKS.recipe))
    assert any(isinstance(x, Float8Tensor) for x in model.parameters())
    same_as_files(source_class()(model, **BLOCKS.how), model, BLOCKS, tmp_path)


@pytest.mark.xdist_group("ranks")
@on("two")
def test_ranks_merge_adapters_as_one_rank(tmp_path: Path) -> None:
    for name, layout in CASES:
        model: Any = adapted(name, layout)
        fully_shard(model.base_model.model.model.layers[0], mesh=mesh_of())
        fully_shard(model, mesh=mesh_of())
        source = source_class()(model, **layout.how)
        same_as_files(source, model, layout, tmp_path / f"{name} {layout.strategy}")
        assert hashes(source.iter_full()) == merged(name, layout)
