"""The oracle of what ranks compute: what training brings forth, by how they share the model.

Or alone, by one process that sees the batches of all ranks.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

import float8
from float8 import Float8Weights, attach_to_optimizer
from sqnr import same_bits
from support.models import fp8_state
from support.sharded import batch, convert, here, model_of, part, shard
from support.spies import OpCounter

Results = dict[str, Tensor]
"""What a training brought forth on this rank: losses, gradients, state of delayed scaling."""
Change = Callable[[nn.Module], Any]

IN_ONE_GRAPH = TorchVersion(torch.__version__) < "2.14"
"""Whether `fullgraph=True` takes a block with FSDP2's hooks; else they break it, float8 or not."""


def assert_same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: object = "") -> None:
    """The same names, dtypes, and values, bit by bit but for the sign of a zero."""
    assert got.keys() == wanted.keys(), what
    assert got, what
    for name, x in got.items():
        assert same_bits(x, wanted[name]) or torch.equal(x, wanted[name]), f"{what} {name}"
        assert x.dtype == wanted[name].dtype, f"{what} {name}"


def train(
    model: nn.Module,
    steps: int = 4,
    *,
    dtype: torch.dtype = torch.float32,
    alone: bool = False,
    attach: bool = True,
    take: Callable[[Tensor], Tensor] = part,
    microbatches: int = 1,
    forward: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__,
    before_backward: Callable[[nn.Module, bool], object] = lambda model, last: None,
    before_step: Change = lambda model: None,
    after_step: Change = lambda model: None,
    **optimizer_options: Any,
) -> Results:
    """Train with AdamW on batches of this rank's own, or, `alone`, on those of all ranks.

    `before_backward(model, last)` is called before each microbatch. Losses are those of this
    rank, gradients its shards if `take` is `part`.
    """
    found: Results = {}
    mine, world = dist.get_rank(), dist.get_world_size()
    # On GPUs `foreach`, which rounds otherwise, is the default for plain weights only.
    options = {"foreach": here().type == "cpu"} | optimizer_options
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    if attach:
        attach_to_optimizer(model, optimizer)
    for step in range(steps):
        for microbatch in range(microbatches):
            before_backward(model, microbatch == microbatches - 1)
            for rank in range(world) if alone else [mine]:
                x = batch(step + 100 * microbatch, rank, dtype)
                loss = (forward(model, x) - x.roll(1, -1)).float().square().mean()
                loss.backward()
                if rank == mine:
                    found[f"loss {step}"] = loss.detach()
        if alone:
            torch._foreach_div_([p.grad for p in model.parameters()], world)
        before_step(model)
        if not attach:
            float8.sync_float8_amax_and_scale_history(model)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"grad {step} of {plain_name(name)}"] = take(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
    state = {plain_name(name): value.clone() for name, value in fp8_state(model).items()}
    return found | state


def plain_name(name: str) -> str:
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def outcome(
    recipe: str,
    gather: bool = False,
    wrap: Change | None = shard,
    *,
    make: Callable[[], nn.Module] = model_of,
    edit: Change = lambda model: None,
    begin: Change = lambda model: None,
    config: Mapping[str, Any] | None = None,
    **training: Any,
) -> Results:
    """What comes of a model that is made, edited, converted, wrapped, and begun with, then trained.

    `wrap`: how ranks share it; None: one process alone trains it.
    """
    model = make()
    edit(model)
    convert(model, recipe, gather, **config or {})
    if wrap is not None:
        model = wrap(model)
    begin(model)
    return train(model, alone=wrap is None, **training)


def casts_saved(recipe: str, wrap: Change, **more: Any) -> int:
    """How many casts hooks of the optimizer save in two steps of two microbatches.

    All that comes of it is the same. Nothing says that held weights are cast on the fly.
    """
    found, casts = [], []
    for weights in (Float8Weights.ON_THE_FLY, Float8Weights.HELD):
        how = {"config": {"float8_weights": weights}, "microbatches": 2, "steps": 2}
        how["attach"] = weights is Float8Weights.HELD
        with OpCounter() as counter, warnings.catch_warnings():
            warnings.filterwarnings("error", ".*on the fly.*")
            found.append(outcome(recipe, True, wrap, **how, **more))
        casts.append(sum(n for name, n in counter.ops.items() if "float8.cast" in name))
    assert_same(*found)
    return casts[0] - casts[1]


def after_a_write(write: Change, recipe: str, make: Callable[[], nn.Module]) -> list[Tensor]:
    """The outputs of one model whose gathers cast, and of one whose shards are cast ahead.

    They are trained, run, written, and run again.
    """
    found = []
    for weights in (Float8Weights.ON_THE_FLY, Float8Weights.HELD):
        model = shard(convert(make(), recipe, float8_weights=weights))
        train(model, 1, attach=weights is Float8Weights.HELD)
        with torch.no_grad():
            model(batch(0, 0))
            write(model)
            found.append(model(batch(0, 0)))
    return found


def accumulate(model: Any, last: bool) -> None:
    """Before each microbatch: weights stay gathered and gradients unreduced, but for the last."""
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def evaluate(model: nn.Module) -> None:
    """All weights stay gathered after it, if they do after a forward."""
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            model(batch(7, 0))


def compiles() -> bool:
    """Whether this rank compiles: on CPUs one does, beside eager ones with the same collectives."""
    return dist.get_rank() == 0 or here().type == "cuda"


def compiled(
    model: nn.Module, what: str, wrap: Change, steps: int = 2, backend: str = "aot_eager"
) -> tuple[Results, list[str], int]:
    """What training brings forth, why graphs broke, and how many this rank compiled.

    `what` is "blocks", "blocks with hooks" of FSDP2, "whole model", or nothing.
    """
    torch._dynamo.reset()
    counters.clear()
    what = what if compiles() else ""
    counter = CompileCounterWithBackend(backend)
    for block in model if what == "blocks" else ():
        block.compile(backend=counter, fullgraph=IN_ONE_GRAPH)
    wrapped = wrap(model)
    for block in model if what == "blocks with hooks" else ():
        block.compile(backend=counter)
    call = torch.compile(wrapped, backend=counter) if what == "whole model" else wrapped
    found = train(wrapped, steps, forward=lambda _, x: call(x))
    return found, sorted(counters["graph_break"]), counter.frame_count
