"""Pre-train a language model in float8 with FSDP2: a script to start a real run from.

Run it with `torchrun --nproc-per-node 8 examples/pretrain_fsdp2.py *.txt`; the same command resumes
from the newest checkpoint. Needs torch and float8 only; runs on CPUs, too. Put your model into
`make_model` and `share_layers`, your tokens into `Tokens`.
"""

import argparse
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.utils.data import DataLoader, Dataset

import float8
from float8_lab.models.llama import Llama
from float8_lab.models.presets import preset


def make_model(args: argparse.Namespace) -> Any:
    """Build the whole model in the memory of the CPU, alike on all ranks; `.layers` are blocks."""
    with torch.device("meta"):
        model = Llama(preset(args.model).model, args.seq_len)
    model.to_empty(device="cpu").init_weights(seed=0)
    return model


def share_layers(model: Any, mesh: Any) -> None:
    """Apply tensor and sequence parallel to the layers of `make_model`, by their names."""

    def gather(*inputs: Any) -> Any:
        outputs = tuple(x and whole for x in inputs)
        return float8.PrepareFloat8ModuleInput(input_layouts=inputs, desired_input_layouts=outputs)

    tokens, whole, norm = Shard(1), Replicate(), parallel.SequenceParallel()
    first, last = float8.Float8ColwiseParallel(), float8.Float8RowwiseParallel
    plan = {f"layers.*.attention.{name}": first for name in ("query", "key", "value")}
    plan |= {f"layers.*.feed_forward.{name}": first for name in ("gate", "up")} | {
        "embedding": parallel.RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "layers.*.*_norm": norm,
        "layers.*.attention": gather(tokens, None, None),  # tables of positions stay whole
        "layers.*.attention.out": last(output_layouts=tokens),
        "layers.*.feed_forward": gather(tokens),
        "layers.*.feed_forward.down": last(output_layouts=tokens),
        "norm": norm,
        "output": parallel.ColwiseParallel(input_layouts=tokens, output_layouts=whole),
    }
    parallel.parallelize_module(model, mesh, plan)
    model.tie_head()


class Tokens(Dataset[Tensor]):
    """Bytes of text files: item i, [length + 1] int64, begins at a place that i decides."""

    def __init__(self, files: list[Path], length: int) -> None:
        text = bytearray(b"\0".join(file.read_bytes() for file in files))
        self.bytes, self.length = torch.frombuffer(text, dtype=torch.uint8), length

    def __getitem__(self, index: int) -> Tensor:
        start = random.Random(index).randrange(len(self.bytes) - self.length)
        return self.bytes[start : start + self.length + 1].long()


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, or go on, on all ranks; return the losses that were printed."""
    parser = argparse.ArgumentParser(description="Pre-train a language model in float8.")
    parser.add_argument("files", nargs="+", type=Path, help="texts to train on")
    parser.add_argument("--folder", type=Path, default="run", help="of checkpoints")
    parser.add_argument("--model", default="tiny", help="tiny, 150m, llama3-1b, llama3-8b, ...")
    parser.add_argument("--recipe", default="tensorwise", help="rowwise, blockwise, ...")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    numbers = {"replicate": 1, "tensor-parallel": 1, "batch-size": 1, "watch-every": 100}
    numbers |= {"steps": 1000, "warmup": 100, "log-every": 10, "seq-len": 2048, "save-every": 200}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # before the conversion, which counts ranks
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    groups = dist.get_world_size() // args.tensor_parallel  # of ranks that share layers
    sizes, dims = (args.replicate, groups // args.replicate), ("replicate", "shard", "tensor")
    mesh = dist.init_device_mesh(device, (*sizes, args.tensor_parallel), mesh_dim_names=dims)
    sharding = mesh["shard"] if args.replicate == 1 else mesh[dims[:2]]

    model = make_model(args)
    tokens = args.batch_size * args.seq_len
    config = float8.Float8LinearConfig.from_recipe_name(args.recipe)
    config = replace(config, enable_fsdp_float8_all_gather=True)
    float8.convert_to_float8_training(model, config=config, tokens_per_step=tokens)  # 1. convert
    say(float8.conversion_report(model))
    if args.tensor_parallel > 1:
        share_layers(model, mesh["tensor"])  # 2. tensor parallel
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for part in (*model.layers, model):
        if part is not model:
            part.compile()  # 3. compile
        fully_shard(part, mesh=sharding, mp_policy=policy)  # 4. shard
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)  # 5. optimizer
    float8.attach_to_optimizer(model, optimizer)  # casts all shards after each step
    watch = float8.Watch(model, args.watch_every)

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))

    done = 0  # steps
    if saved := sorted(args.folder.glob("step-*/.metadata")):  # a save that was cut short has none
        dcp.load(loaded := state(), checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, **{f"{k}_state_dict": x for k, x in loaded.items()})
        done = int(saved[-1].parent.name.removeprefix("step-"))
        say(f"resumed from {saved[-1].parent}, after step {done} of {args.steps}")
    first, end = (n * args.batch_size * groups for n in (done, args.steps))
    samples = range(first + dist.get_rank() // args.tensor_parallel, end, groups)
    loader = DataLoader(Tokens(args.files, args.seq_len), args.batch_size, sampler=samples)
    losses, underflow = [], ""
    for step, batch in enumerate(loader, done + 1):
        logits = model(batch[:, :-1].to(device)).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten().to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1, step / max(1, args.warmup))
        optimizer.step()
        optimizer.zero_grad()
        if numbers := watch.step():
            most, name = max((x, name) for name, x in numbers.items() if "/underflow" in name)
            underflow = f"; most underflow: {most:.2%}, {name}"
        if step % args.log_every == 0:
            dist.all_reduce(loss := loss.detach() / dist.get_world_size())
            losses.append(loss.item())
            say(f"step {step}: loss {losses[-1]:.4f}{underflow}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            dcp.save(state(), checkpoint_id=args.folder / f"step-{step:08d}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
