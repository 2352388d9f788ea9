"""LoRA on a base that was published in float8: tokens per second, memory, gradients.

Blocks of a Llama, each with PEFT's adapters on all linear layers. Bases are read from float8
checkpoints of one model. Outputs and gradients are held against those of the bf16 base that has
the values of the blockwise file; other files have other values. Nothing is downloaded, but for
kernels of transformers where it can.

    python benchmarks/lora_float8_base.py --output benchmarks/results/h100-lora.json
    python benchmarks/lora_float8_base.py --preset tiny --blocks 2 --seq-len 64 --device cpu
"""

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from float8 import Float8LinearConfig, Float8Weights, all_linears, convert_to_float8_training
from float8.checkpoints import load_float8_checkpoint as load
from float8.checkpoints import read_float8_checkpoint, save_float8_checkpoint
from float8.tensor import Float8Tensor
from float8_lab.bench.fsdp import adapted
from float8_lab.bench.model import AT_LEAST, Size, bf16_stack, stack_data
from float8_lab.bench.results import write_results
from float8_lab.bench.step import Step, compare
from float8_lab.bench.variants import HIGH_PRECISION, MODES, Variant
from float8_lab.trainer.environment import describe_environment

STRATEGIES = {"blockwise": "block", "rowwise": "channel", "tensorwise": "tensor"}


def ours(files: Path, config: Float8LinearConfig | None, model: nn.Module) -> nn.Module:
    """Read the files into a model that is converted; None: into bf16."""
    if config is not None:
        model.requires_grad_(False)
        convert_to_float8_training(model, config=config, module_filter_fn=all_linears)
    return adapted(load(model, files).requires_grad_(False))


def theirs(files: Path, model: nn.Module) -> nn.Module:
    """Put transformers' own layers into place, with the bytes of the files."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    load(model, files)
    for name, x in read_float8_checkpoint(files, device=next(model.parameters()).device):
        if isinstance(x, Float8Tensor):
            layer: Any = FP8Linear(x.shape[1], x.shape[0], (128, 128))
            layer.weight = nn.Parameter(x._data, requires_grad=False)
            scale = x._scale[:, : -(-x.shape[1] // 128)].contiguous()
            layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
            model.set_submodule(name.removesuffix(".weight"), layer)
    return adapted(model.requires_grad_(False))


def variants(folder: Path, mode: str) -> list[Variant]:
    """Return the bf16 base first; then ours, with the base in float8 alone and in bf16; theirs."""
    of_blocks = folder / "blockwise"
    found = [Variant(HIGH_PRECISION, mode, partial(ours, of_blocks, None))]
    for recipe in STRATEGIES:
        config = Float8LinearConfig.from_recipe_name(recipe)
        only = replace(config, float8_weights=Float8Weights.ONLY)
        for name, each in ((recipe, only), (f"{recipe}, bf16 base", config)):
            found.append(Variant(name, mode, partial(ours, folder / recipe, each), each))
    return [*found, Variant("transformers", mode, partial(theirs, of_blocks))]


def base_gib(model: nn.Module) -> float:
    """Return what the frozen Parameters take."""
    frozen: list[Any] = [p for p in model.parameters() if not p.requires_grad]
    inside = (x for p in frozen for x in ((p._data, p._scale) if hasattr(p, "_data") else (p,)))
    return sum(x.nbytes for x in inside) / 2**30


def main() -> None:
    """Write the files, check and time all variants, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--mode", choices=MODES, default="compiled")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    size, rows, bases = Size(given.preset, given.blocks, given.seq_len), [], {}

    def make(variant: Variant) -> Step:
        data = stack_data(size, given.device)
        step = Step(variant, bf16_stack(size, given.device), *data, one_graph=False)
        bases[variant.name] = base_gib(step.model)
        return step

    with tempfile.TemporaryDirectory() as folder:
        for recipe, strategy in STRATEGIES.items():
            form = "fine-grained-fp8" if strategy == "block" else "compressed-tensors"
            model = bf16_stack(size, given.device)
            convert_to_float8_training(model, config=recipe, module_filter_fn=all_linears)
            how: Any = {"strategy": strategy, "dtype": torch.float32}  # buffers as they are
            save_float8_checkpoint(model, Path(folder, recipe), form, **how)
        del model
        for mode in MODES[given.mode]:
            every = [*variants(Path(folder), mode)]
            more: Any = {"at_least": AT_LEAST, "tokens": size.tokens}
            *_, found = compare("LoRA", make, every, given.device, 20, **more)
            rows += found
            for variant, row in zip(every, found, strict=True):
                row["base_gib"] = bases.get(variant.name)
                print(row)  # noqa: T201
    if given.output is not None:
        about = describe_environment(given.device) | {"peft": peft.__version__}
        write_results(given.output, {"benchmark": "lora", "environment": about, "rows": rows})


if __name__ == "__main__":
    main()
