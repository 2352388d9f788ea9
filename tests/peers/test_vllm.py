"""Weights for vLLM's weight transfer are those of a checkpoint: names, order, bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from float8 import convert_to_float8_training
from float8.checkpoints import float8_weights, load_float8_checkpoint, save_float8_checkpoint
from float8.linear import Float8Linear
from peers.test_expert_checkpoints import MODELS, NARROW, built, converted
from support.float8_files import INDEX, LAYOUTS, Layout, in_files, only
from support.lazily import Lazily, needs_installed
from support.parallel import STYLES
from support.ranks import on
from support.rings import short
from support.sharded import mesh_of
from support.spies import Traffic
from support.weight_transfer import VERSIONS, hashes, received, source_class, told

needs_installed("safetensors", "transformers")
hf = Lazily("support.hugging_face")

SHARED = NARROW | {"shared_expert_intermediate_size": 128}
FAMILIES = MODELS | {"Qwen2": {}, "Qwen3": {"head_dim": 64}, "Qwen2Moe": SHARED}
"""Seven; each with one of the layouts that vLLM reads."""
READ = [x for x in LAYOUTS if x.how != {"format": "fine-grained-fp8", "strategy": "tensor"}]
CASES = {name: READ[n % len(READ)] for n, name in enumerate(FAMILIES)}
ON_RANKS = pytest.mark.parametrize("name", short({"Llama", "Mixtral"}, CASES))


def model_of(name: str, layout: Layout, seed: int = 0) -> nn.Module:
    more = {"num_hidden_layers": 1 if "Deep" not in name else 2}
    return converted(built(name, seed, **FAMILIES[name] | more), layout.recipe)


def in_order(folder: Path) -> list[tuple[Any, ...]]:
    """Names, in the order in which they were written, and hashes of what files hold."""
    names, tensors = json.loads((folder / INDEX).read_text())["weight_map"], in_files(folder)
    return hashes((name, tensors[name]) for name in names)


def same_as_files(source: Any, model: nn.Module, layout: Layout, folder: Path) -> None:
    """All ranks of a model save it, and send it."""
    save_float8_checkpoint(model, folder, **layout.how)
    if dist.is_initialized():
        dist.barrier()
    assert hashes(received(source).items()) == in_order(folder)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_has_the_bytes_of_a_checkpoint(version: str, tmp_path: Path) -> None:
    """Of what the model is in each round; what was told before the first stays true."""
    for name, layout in [*CASES.items()][: 1 if version == VERSIONS[1] else None]:
        model = model_of(name, layout)
        source = source_class(version)(model, **layout.how)
        same_as_files(source, model, layout, tmp_path / name)
    layout = CASES["Llama"]
    model = model_of("Llama", layout)
    source = source_class(version)(model, **layout.how)
    before, first = told(source), hashes(received(source).items())
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) / 8)
    same_as_files(source, model, layout, tmp_path / "next step")
    second = hashes(received(source).items())
    assert told(source) == before
    assert [x[:3] for x in first] == [x[:3] for x in second] == before
    assert all(x != y for x, y in zip(first, second, strict=True))


@pytest.mark.xdist_group("ranks")
@ON_RANKS
@on("two")
def test_ranks_have_the_bytes_of_one_rank(name: str, tmp_path: Path) -> None:
    """FSDP2: what is told takes no collective; then each rank has all tensors, in one order."""
    layout = CASES[name]
    model = model_of(name, layout)
    alone = hashes(float8_weights(model, **layout.how))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh_of())
    fully_shard(model, mesh=mesh_of())
    source = source_class()(model, **layout.how)
    with Traffic() as seen:
        told(source)
    assert seen.seen == []
    same_as_files(source, model, layout, tmp_path / name)
    assert hashes(received(source).items()) == alone


@pytest.mark.xdist_group("ranks")
@ON_RANKS
@on("two")
def test_tensor_parallel_ranks_have_the_bytes_of_one_rank(name: str, tmp_path: Path) -> None:
    (colwise, rowwise, _), layout = STYLES["torch"], CASES[name]
    model = model_of(name, layout)
    alone = hashes(float8_weights(model, **layout.how))
    linears = [n for n, x in model.named_modules() if isinstance(x, Float8Linear)]
    styles = {n: rowwise() if n.endswith(("o_proj", "down_proj")) else colwise() for n in linears}
    parallelize_module(model, mesh_of(), styles)
    assert sum(isinstance(x, DTensor) for x in model.parameters()) >= len(linears)
    source = source_class()(model, **layout.how)
    same_as_files(source, model, layout, tmp_path / name)
    assert hashes(received(source).items()) == alone


def test_weights_in_float8_alone(tmp_path: Path) -> None:
    """A frozen model that was read from a file is sent as that file has it."""
    for name in ("Llama", "Mixtral"):
        for layout in READ[:2]:
            folder = tmp_path / f"{name} {layout.strategy}"
            save_float8_checkpoint(model_of(name, layout), folder, **layout.how)
            frozen = built(name, 1, **FAMILIES[name], num_hidden_layers=1).requires_grad_(False)
            convert_to_float8_training(
                frozen,
                config=only(layout.recipe),
                module_filter_fn=lambda mod, fqn: fqn != "lm_head",
            )
            load_float8_checkpoint(frozen, folder)
            source = source_class()(frozen, **layout.how)
            assert hashes(received(source).items()) == in_order(folder)


def test_what_vllm_does_not_read_is_refused_at_once() -> None:
    model = model_of("Llama", LAYOUTS[1])
    with pytest.raises(
        ValueError, match=r"another name in vLLM; expected 'tensor' of 'compressed-"
    ):
        source_class()(model, strategy="tensor")
    with pytest.raises(ValueError, match="format: got 'gguf'"):
        source_class()(model, "gguf")
