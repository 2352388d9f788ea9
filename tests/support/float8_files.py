"""Float8 checkpoints: a model to be written, files read and damaged by safetensors."""

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from float8 import Float8LinearConfig, Float8Weights, convert_to_float8_training
from float8.config import as_config
from support.models import FeedForward

ROUNDED = replace(as_config("blockwise"), round_scales_to_power_of_2=True)


class Layout(NamedTuple):
    """A format and a strategy, and the recipe or configuration that trains so."""

    format: str
    strategy: str | None
    recipe: Any

    @property
    def how(self) -> dict[str, Any]:
        """What the functions of float8.checkpoints take."""
        return {"format": self.format, "strategy": self.strategy}


LAYOUTS = [
    Layout("fine-grained-fp8", None, "blockwise"),
    Layout("fine-grained-fp8", "tensor", "tensorwise"),
    Layout("compressed-tensors", "channel", "rowwise"),
    Layout("compressed-tensors", "tensor", "tensorwise"),
    Layout("fine-grained-fp8", "block_ue8m0", ROUNDED),
    Layout("fine-grained-fp8", "mxfp8", "mxfp8"),
    Layout("compressed-tensors", "mxfp8", "mxfp8"),
    Layout("compressed-tensors", "block", "blockwise"),
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.format}-{x.strategy}")
INDEX = "model.safetensors.index.json"


class Model(nn.Module):
    """Odd shapes, blocks that overhang, a head tied to the embedding, a buffer, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 200)
        self.ffn = FeedForward(200, 300, bias=True)
        self.lm_head = nn.Linear(200, 50, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.ffn(self.embed(ids)))


def only(recipe: Any) -> Float8LinearConfig:
    return replace(as_config(recipe), float8_weights=Float8Weights.ONLY)


def built(config: Any = None, *, seed: int = 0) -> Any:
    """The model in bfloat16, converted if there is a config; frozen if that is `only`."""
    torch.manual_seed(seed)
    model = Model().bfloat16()
    if config is None:
        return model
    if getattr(config, "float8_weights", None) is Float8Weights.ONLY:
        model.requires_grad_(False)
    return convert_to_float8_training(model, config=config)


def in_files(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def same_bytes(a: Iterable[tuple[str, Tensor]], b: Iterable[tuple[str, Tensor]]) -> bool:
    first, second = dict(a), dict(b)
    return first.keys() == second.keys() and all(
        torch.equal(bits(x), bits(second[name])) for name, x in first.items()
    )


def rewrite(
    folder: Path,
    config: Callable[[dict[str, Any]], object] = lambda config: None,
    tensors: Callable[[dict[str, Tensor]], object] | None = None,
) -> None:
    """Change what `config.json` says of quantization, or the tensors of the one file."""
    from safetensors.torch import load_file, save_file

    text = json.loads((folder / "config.json").read_text())
    config(text["quantization_config"])
    (folder / "config.json").write_text(json.dumps(text))
    if tensors is not None:
        (path,) = folder.glob("*.safetensors")
        tensors(found := load_file(path))
        save_file(found, path)
        (folder / INDEX).unlink()


class Unchanged:
    """A block that must raise this, and leave a model as it was."""

    def __init__(self, model: nn.Module, match: str) -> None:
        self.model, self.before = model, copy.deepcopy(model.state_dict())
        self.raises = pytest.raises((ValueError, OSError), match=match)

    def __enter__(self) -> None:
        self.raises.__enter__()

    def __exit__(self, *error: Any) -> Any:
        assert same_bytes(self.model.state_dict().items(), self.before.items())
        return self.raises.__exit__(*error)
