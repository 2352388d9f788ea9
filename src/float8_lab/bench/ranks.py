"""Steps of models that all ranks of a host hold together: `float8 bench train`, `tp`."""

import importlib
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from float8.parallel import tensor as own_styles
from float8_lab.bench.model import Size, Whole, model_step, stack_and_data
from float8_lab.bench.step import Results, Row, Step, check
from float8_lab.bench.variants import EAGER, HIGH_PRECISION, Variant
from float8_lab.errors import FailedError

_LEARNING = 9  # steps after the first one, which let a loss fall at this learning rate
_RATE = 1e-4


class TrainStep(Step):
    """A step of a whole model, as torchtitan trains it: the same tokens at each step.

    Masters are float32; on several ranks FSDP2 gathers them, on one autocast casts them. With
    `lora` a frozen model in bf16 has adapters of PEFT on all linear layers of its blocks. Steps
    that are timed add up gradients of `microbatches`; the last backward reduces them over ranks.
    """

    at_least = 3.0  # dB of gradients through many blocks; of zeros, or of twice as much, it is 0

    def __init__(
        self, variant: Variant, size: Size, device: torch.device, *, lora: bool, microbatches: int
    ) -> None:
        self._microbatches, self._timed_microbatches = 1, microbatches
        whole = Whole(size, device, torch.bfloat16 if lora else torch.float32)
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        shape = size.batch, size.seq_len + 1
        tokens = torch.randint(whole.vocabulary, shape, device=device, generator=generator)

        def convert(model: nn.Module) -> nn.Module:
            variant.convert(model.get_submodule("model"))  # where the head has its usual name
            return _adapted(model) if lora else model

        # FSDP2's hooks break graphs from torch 2.14 on.
        own, one = replace(variant, convert=convert), torch.ones(1, device=device)
        super().__init__(own, whole.requires_grad_(not lora), tokens, one, one_graph=False)
        ranks = dist.get_world_size()
        if ranks > 1:
            mesh = init_device_mesh(device.type, (ranks,))
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            for part in [*self.parts, *getattr(self.model, "ends", []), self.model]:
                fully_shard(part, mesh=mesh, mp_policy=policy)
        self.add_optimizer(_RATE)
        cast = ranks == 1 and not lora
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=cast)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The loss [1], and the tokens."""
        with self._autocast:
            return super().forward()

    def forward_backward(self) -> tuple[Tensor, Tensor]:
        """Forward and backward of each microbatch; ranks reduce gradients in the last backward."""
        for left in reversed(range(self._microbatches)):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(left == 0)
            results = super().forward_backward()
        return results

    def warm_up(self) -> None:
        """Compile by steps of one microbatch, then run one of all microbatches."""
        super().warm_up()
        if self._timed_microbatches > 1:
            self._microbatches = self._timed_microbatches
            self()

    def check(self, references: dict[str, Results]) -> Row:
        """Hold results of the first step, and the loss of a later one, against bf16's.

        The loss may be off by a tenth of what bf16's has fallen by, and a thousandth of bf16's.
        """
        began, name = time.perf_counter(), self.variant.name
        results = self()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        row: Row = {"first_step_s": time.perf_counter() - began}
        found = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in results.items()}
        if not references:
            references["first"] = {n: x.cpu() for n, x in found.items()}
        row["sqnr_db"] = check(f"{name}:", references["first"], found, self.at_least)
        del results, found  # gradients, for which later steps may have no memory
        for _ in range(_LEARNING):
            loss = self()["output"]
        losses = torch.cat([references["first"]["output"].to(loss), loss])
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        references.setdefault("loss", {"loss": losses})
        (first, wanted), last = references["loss"]["loss"].tolist(), losses[1].item()
        most = 0.1 * (first - wanted) + 1e-3 * wanted
        if not (abs(last - wanted) <= most and wanted < first):  # also if it is NaN
            got = f"loss {last:.4f} after {1 + _LEARNING} steps, expected {wanted:.4f} as of bf16"
            raise FailedError(f"{name}: {got}, which began at {first:.4f}; nothing was timed")
        return row | {"loss": last}


def _adapted(model: nn.Module) -> nn.Module:
    """Give every linear layer of the blocks adapters of PEFT: always the same ones, none zero."""
    peft = importlib.import_module("peft")
    blocks = model.get_submodule("layers").named_modules()
    names = {name.split(".")[-1] for name, each in blocks if isinstance(each, nn.Linear)}
    torch.manual_seed(2)
    lora = peft.LoraConfig(r=16, target_modules=sorted(names), init_lora_weights=False)
    return peft.inject_adapter_in_model(lora, model)  # type: ignore[no-any-return]


def _styles(variant: Variant) -> dict[str, Any]:
    """Return the styles by which ranks share the layers of a block, and tokens between them.

    Layers that read the same tokens gather them once.
    """
    package, prefix = (parallel, "") if variant.is_reference else (own_styles, "Float8")
    if not (variant.ours or variant.is_reference):
        library = variant.recipe.split()[0]
        package = importlib.import_module(f"{library}.float8.float8_tensor_parallel")
    names = f"{prefix}ColwiseParallel", f"{prefix}RowwiseParallel", f"Prepare{prefix}ModuleInput"
    first, last, gather = (getattr(package, name) for name in names)
    tokens, whole = Shard(1), Replicate()
    return {
        **dict.fromkeys(("attention_norm", "feed_forward_norm"), parallel.SequenceParallel()),
        **{f"attention.{name}": first() for name in ("query", "key", "value")},
        **{f"feed_forward.{name}": first() for name in ("gate", "up")},
        **{name: last(output_layouts=tokens) for name in ("attention.out", "feed_forward.down")},
        "attention": gather(
            input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)
        ),
        "feed_forward": gather(input_layouts=(tokens,), desired_input_layouts=(whole,)),
    }


class ParallelStep(Step):
    """Forward and backward of a stack, whose tokens all ranks share between layers."""

    def __init__(self, variant: Variant, size: Size, device: torch.device) -> None:
        ranks = dist.get_world_size()
        size.config().check_shares(ranks, size.seq_len)
        self._size, self._mesh = size, init_device_mesh(device.type, (ranks,))

        def convert(model: nn.Module) -> nn.Module:
            model = variant.convert(model)
            for block in model.get_submodule("layers").children():
                parallel.parallelize_module(block, self._mesh, _styles(variant), src_data_rank=None)
            return model

        stack, data = stack_and_data(size, device)
        own = data.chunk(ranks, 2)[dist.get_rank()].contiguous()  # of each sequence these tokens
        super().__init__(replace(variant, convert=convert), stack, *own)

    def check(self, references: dict[str, Results]) -> Row:
        """Hold output and gradients against bf16's on one device."""
        if not references:
            alone = model_step(Variant(HIGH_PRECISION, EAGER), self._size, self.device)
            references["alone"] = {name: x.cpu() for name, x in alone().items()}
        self.warm_up()
        found: dict[str, Any] = dict(self())
        for name in ("output", "gradient of input"):
            found[name] = DTensor.from_local(found[name], self._mesh, [Shard(1)])
        results = {name: x.full_tensor() for name, x in found.items()}
        name = f"tp {self.variant.name}:"
        return {"sqnr_db": check(name, references["alone"], results, self.at_least)}
