"""A table of libraries that train a small converted model, are stopped and go on.

Each trains four optimizer steps of two microbatches and saves all before step 2, or goes on from
there. What every row promises is in peers/test_libraries.py. A row imports what it needs.
"""

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from float8 import attach_to_optimizer, convert_to_float8_training, float8_state_dict
from support.models import FeedForward, seeded

AdamW = partial(torch.optim.AdamW, lr=1e-2)


def feed_forwards(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(FeedForward(32, 64), nn.LayerNorm(32), FeedForward(32, 64))


def llama(seed: int = 0) -> nn.Module:
    from support import hugging_face as hf

    return hf.llama(seed, num_hidden_layers=1)


def converted(model: nn.Module, recipe: str = "delayed") -> nn.Module:
    """Convert all layers but a head."""
    return convert_to_float8_training(
        model, config=recipe, module_filter_fn=lambda mod, fqn: not fqn.endswith("lm_head")
    )


def loss_of(out: Any, x: Any) -> Tensor:
    """Return the loss that a language model gives, or that of what should be the input again."""
    loss: Tensor = out.loss if hasattr(out, "loss") else (out - x).square().mean()
    return loss


def loss_at(model: Any, index: int) -> Tensor:
    """Return the loss of a microbatch of either kind of model."""
    if hasattr(model, "config"):
        ids = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(index))
        return loss_of(model(input_ids=ids, labels=ids), None)
    return loss_of(model(x := seeded(index, 16, 32)), x)


def steps(folder: Path, resume: bool, save: Any, load: Any) -> Iterator[tuple[int, int]]:
    """Yield the microbatches of each step, as far as they are left."""
    if resume:
        load(folder)
    for step in range(2 * resume, 4):
        if step == 2 and not resume:
            save(folder)
        yield 2 * step, 2 * step + 1


def states(weights_only: bool = True, **parts: Any) -> tuple[Any, Any]:
    """Return functions that save and load the state dicts of these in one file."""

    def save(folder: Path) -> None:
        torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "all.pt")

    def load(folder: Path) -> None:
        for name, state in torch.load(folder / "all.pt", weights_only=weights_only).items():
            parts[name].load_state_dict(state)

    return save, load


def by_hand(model: nn.Module, optimizer: Any, *how: Any, after: Any = lambda model: None) -> None:
    """Train in a plain loop; `how`: the arguments of `steps`."""
    attachment = attach_to_optimizer(model, optimizer)
    for microbatches in steps(*how):
        optimizer.zero_grad()
        for index in microbatches:
            loss_at(model, index).backward()
        optimizer.step()
        after(model)
    attachment.remove()


# ---------------------------------------------------------------- rows


def by_accelerate(
    model: Any, folder: Path, resume: bool, order: str = "convert first", precision: str = "no"
) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # of another precision
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, project_dir=folder
    )
    if order == "convert first":
        converted(model)
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
    if order == "prepare first":
        converted(model)
    attachment = attach_to_optimizer(model, optimizer)
    for both in steps(folder, resume, accelerator.save_state, accelerator.load_state):
        for index in both:
            with accelerator.accumulate(model):
                accelerator.backward(loss_at(model, index))
                optimizer.step()
                optimizer.zero_grad()
    attachment.remove()
    return accelerator.unwrap_model(model)


def by_lightning(model: Any, folder: Path, resume: bool) -> nn.Module:
    from support import lightning_run as run

    trainer = run.trainer(folder, 2, accumulate_grad_batches=2)
    path = str(folder / "epoch=0.ckpt") if resume else None
    trainer.fit(run.Module(model), run.data(), run.data(), ckpt_path=path, weights_only=True)
    return model


def by_transformers(
    model: Any, folder: Path, resume: bool, recipe: str = "delayed", **more: Any
) -> nn.Module:
    from support import hugging_face as hf

    # Wrapped as compiled models are, but not traced, which takes long.
    with torch.compiler.set_stance("force_eager" if "torch_compile" in more else "default"):
        hf.train(hf.trainer(converted(model, recipe), folder, **more), folder, resume)
    return model


def by_trl(model: Any, folder: Path, resume: bool, lora: bool = False, **more: Any) -> nn.Module:
    from support import hugging_face as hf

    base = llama() if lora else model  # it saves no base
    trainer = hf.sft_trainer(converted(base), folder, lora, **more)
    hf.train(trainer, folder, resume)
    return trainer.model


def by_peft(model: Any, folder: Path, resume: bool) -> nn.Module:
    """PEFT saves what it trains; beside it lies the state of delayed scaling."""
    import peft
    from safetensors.torch import load_file, save_file

    from support import hugging_face as hf

    if resume:  # it saves no base
        model = peft.PeftModel.from_pretrained(llama(), folder, is_trainable=True)
    else:
        model = hf.with_lora(model)
    base = [name for name, _ in model.named_modules() if name.endswith("base_layer")]
    convert_to_float8_training(
        model.train(), config="delayed", module_filter_fn=lambda mod, fqn: fqn in base
    )
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        save_file(float8_state_dict(model), folder / "float8.safetensors")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def load(folder: Path) -> None:
        model.load_state_dict(load_file(folder / "float8.safetensors"), strict=False)
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    by_hand(model, optimizer, folder, resume, save, load)
    return model


def by_torch(model: Any, folder: Path, resume: bool, ema: bool) -> nn.Module:
    """The averages of torch."""
    average_of = get_ema_multi_avg_fn(0.9) if ema else None
    average = AveragedModel(converted(model), multi_avg_fn=average_of, use_buffers=not ema)
    optimizer = AdamW(model.parameters())
    how = states(model=model, average=average, optimizer=optimizer)
    by_hand(model, optimizer, folder, resume, *how, after=average.update_parameters)
    return nn.ModuleDict({"model": model, "average": average})


def by_torchao(
    model: Any, folder: Path, resume: bool, optimizer: str, recipe: str = "delayed"
) -> nn.Module:
    """Its low-bit optimizers; they compile each parameter's step, which takes long."""
    import torchao.optim

    with mock.patch.object(torch, "compile", lambda function, **_: function):
        parameters = converted(model, recipe).parameters()
        made = getattr(torchao.optim, optimizer)(parameters, lr=1e-2)
        by_hand(model, made, folder, resume, *states(False, model=model, optimizer=made))
    return model


class Row(NamedTuple):
    """A way to train."""

    train: Callable[[Any, Path, bool], nn.Module]
    needs: tuple[str, ...] = ()
    made: Callable[[int], nn.Module] = feed_forwards
    histories: int = 12
    """How many the model has under delayed scaling."""
    plain: Callable[..., torch.optim.Optimizer] | None = None
    """The optimizer with which a plain loop comes to the same losses."""

    def but(self, plain: Any = None, histories: int | None = None, **how: Any) -> "Row":
        """Return a row that trains otherwise, by these arguments of `train`."""
        count = self.histories if histories is None else histories
        return self._replace(train=partial(self.train, **how), plain=plain, histories=count)


ACCELERATE = Row(by_accelerate, ("accelerate",), plain=AdamW)
TRAINER = Row(by_transformers, ("transformers", "accelerate"), llama, 14)
TRL = Row(by_trl, ("trl", "datasets", "peft"), llama, 14)
AVERAGES, TORCHAO = Row(by_torch), Row(by_torchao, ("torchao.optim",))
CONSTANT = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 1e-2}
CONSTANT |= {"optim": "adamw_torch", "plain": partial(AdamW, weight_decay=0.0)}

ROWS = {
    "accelerate": ACCELERATE,
    "accelerate, prepared first": ACCELERATE.but(AdamW, order="prepare first"),
    "lightning": Row(by_lightning, ("lightning",), plain=AdamW),
    "transformers": TRAINER.but(**CONSTANT),
    "transformers, tensorwise": TRAINER.but(recipe="tensorwise", histories=0),
    "transformers, compiled": TRAINER.but(torch_compile=True, torch_compile_backend="eager"),
    "transformers, checkpointing in bf16": TRAINER.but(gradient_checkpointing=True, bf16=True),
    "transformers, sgd, callbacks anew": TRAINER.but(
        optim="sgd", restore_callback_states_from_checkpoint=True
    ),
    "trl": TRL,
    "trl, packing": TRL.but(packing=True, max_length=32),
    "trl, LoRA": TRL.but(lora=True),
    "trl, checkpointing": TRL.but(gradient_checkpointing=True),
    "peft": Row(by_peft, ("transformers", "peft"), llama, 14),
    "torch, EMA": AVERAGES.but(ema=True),
    "torch, SWA": AVERAGES.but(ema=False),
    "torchao, tensorwise": TORCHAO.but(optimizer="AdamW8bit", recipe="tensorwise", histories=0),
} | {
    f"torchao, {name}": TORCHAO.but(optimizer=name)
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW")
}


# ---------------------------------------------------------------- what is done with them


class Call(NamedTuple):
    """One forward of a training."""

    args: tuple[Any, ...]
    more: dict[str, Any]
    loss: Tensor


def run(name: str, folder: Path, resume: bool = False) -> tuple[nn.Module, list[Call]]:
    """Train the model of a row; other weights are there at first if it goes on."""
    model, calls = ROWS[name].made(int(resume)), []
    forward = model.forward

    @functools.wraps(forward)
    def noted(*args: Any, **more: Any) -> Any:
        out = forward(*args, **more)
        if model.training:
            loss = loss_of(out, args[0] if args else None).detach()
            calls.append(Call(args, more, loss))
        return out

    model.forward = noted
    return ROWS[name].train(model, folder, resume), calls


def resumed(name: str, folder: Path) -> dict[str, Tensor]:
    return run(name, folder, True)[0].state_dict()


def resumed_in_a_fresh_process(name: str, folder: Path) -> dict[str, Tensor]:
    """Return the state after the rest of a run, in a process that knows nothing of this one.

    It serves all tests of a session: it has seen rows that came before.
    """
    return _fresh_process().submit(resumed, name, folder).result()


@functools.cache
def _fresh_process() -> ProcessPoolExecutor:
    spawn, threads = multiprocessing.get_context("spawn"), (torch.get_num_threads(),)
    return ProcessPoolExecutor(1, spawn, torch.set_num_threads, threads)  # sums depend on them


def plain_losses(name: str, calls: list[Call]) -> list[Tensor]:
    """Return those of a plain loop over the same microbatches."""
    model = converted(ROWS[name].made(0)).train()
    optimizer = ROWS[name].plain(model.parameters())
    attach_to_optimizer(model, optimizer)
    losses = []
    for index, (args, more, _) in enumerate(calls):
        loss = loss_of(model(*args, **more), args[0] if args else None)
        (loss if "num_items_in_batch" in more else loss / 2).backward()
        losses.append(loss.detach())
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses
