"""Small models under FSDP2, and their training: what runs on every rank, on its device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import (
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed, of_recipe
from support.models import Block, fp8_state, seeded
from support.spies import is_wrapper

IN_ONE_GRAPH = TorchVersion(torch.__version__) < "2.14"
"""Whether `fullgraph=True` takes a block with FSDP2's hooks; else they break it, float8 or not."""
DIM = 24
"""Not divisible by 16: the gathered bytes are padded for the GEMMs."""


def here() -> torch.device:
    """The device of this rank."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def model_of(
    hidden: int = 40,
    dtype: torch.dtype = torch.float32,
    blocks: int = 2,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Blocks over `DIM` features; the hidden width decides how the shards come out.

    With the same weights on every device; None: that of this rank.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(DIM, hidden) for _ in range(blocks)))
    return model.to(device or here(), dtype)


def convert(model: nn.Module, recipe: str, all_gather: bool = True, **more: Any) -> nn.Module:
    """By a recipe; "delayed" is that of weights, too, and "delayed recipe" as of `float8`."""
    make = delayed if recipe == "delayed" else partial(of_recipe, recipe.removesuffix(" recipe"))
    config = make(enable_fsdp_float8_all_gather=all_gather, **more)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def small(recipe: str | None, all_gather: bool) -> nn.Module:
    """Two blocks of one layer, quickly compiled; None: not converted.

    Without biases: Inductor adds up their gradients in an order of its own for each graph.
    """
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.SiLU()) for _ in range(2))
    model = nn.Sequential(*blocks).to(here())
    return model if recipe is None else convert(model, recipe, all_gather)


def mesh_of(*shape: int) -> DeviceMesh:
    """All ranks; of one dim, or (replicas, shards)."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(
        here().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
    **more: Any,
) -> nn.Module:
    """Each block, then the whole."""
    more["mesh"] = mesh_of() if mesh is None else mesh
    more["mp_policy"] = MixedPrecisionPolicy(param_dtype=param_dtype)
    for block in model.children():
        fully_shard(block, **more)
    return fully_shard(model, **more)


def whole(x: Tensor) -> Tensor:
    """A DTensor's full tensor, cloned."""
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def part(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, cloned; no communication."""
    x = x.detach()
    return (x.to_local() if isinstance(x, DTensor) else x).clone()


@dataclass
class Run:
    """What a training brought forth on this rank: losses and all gradients."""

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    """Of delayed scaling, after the last step."""

    def keep_state(self, model: nn.Module) -> "Run":
        state = fp8_state(model).items()
        self.state = {name.removeprefix("module."): value.clone() for name, value in state}
        return self

    def assert_equal(self, other: "Run") -> None:
        assert len(self.losses) == len(other.losses) > 0
        for step, (mine, theirs) in enumerate(zip(self.grads, other.grads, strict=True)):
            assert torch.equal(self.losses[step], other.losses[step]), f"loss of step {step}"
            assert mine.keys() == theirs.keys()
            for name in mine:
                assert torch.equal(mine[name], theirs[name]), f"{name} of step {step}"
        assert self.state.keys() == other.state.keys()
        for name in self.state:
            assert torch.equal(self.state[name], other.state[name]), name

    def assert_close(self, other: "Run", loss: float, grad: float) -> None:
        """Relative to the value, or to the norm of the gradient."""
        for step, (mine, theirs) in enumerate(zip(self.grads, other.grads, strict=True)):
            a, b = self.losses[step], other.losses[step]
            assert (a - b).abs() <= loss * b.abs(), f"loss of step {step}: {a} {b}"
            for name in mine:
                off = (mine[name] - theirs[name]).norm() / theirs[name].norm()
                assert off <= grad, f"{name} of step {step}: {off}"


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return seeded(1000 * step + rank, 16, DIM, dtype=dtype, device=here())


def train(
    model: nn.Module,
    steps: int = 10,
    *,
    dtype: torch.dtype = torch.float32,
    attach: bool = True,
    full: bool = False,
    microbatches: int = 1,
    forward: Callable[[Tensor], Tensor] | None = None,
    before_backward: Callable[[bool], None] = lambda last: None,
    **optimizer_options: Any,
) -> Run:
    """AdamW on batches of this rank's own.

    `before_backward(last)` is called before each microbatch. Gradients are this rank's shards, or
    whole if `full`.
    """
    run, take = Run(), whole if full else part
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **optimizer_options)
    if attach:
        attach_to_optimizer(model, optimizer)
    for step in range(steps):
        for microbatch in range(microbatches):
            before_backward(microbatch == microbatches - 1)
            x = batch(step + 100 * microbatch, dist.get_rank(), dtype)
            y = model(x) if forward is None else forward(x)
            loss = (y - x.roll(1, -1)).float().square().mean()
            loss.backward()
        if not attach:
            sync_float8_amax_and_scale_history(model)
        run.losses.append(loss.detach())
        run.grads.append(
            {n: take(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
    return run.keep_state(model)


def compiled(
    model: nn.Module,
    what: str,
    wrap: Callable[[nn.Module], nn.Module],
    steps: int = 2,
    backend: str = "aot_eager",
) -> tuple[Run, list[str], int]:
    """What training brings forth, why graphs broke, and how many were compiled.

    `what` is "blocks", "blocks with hooks" of FSDP2, "whole model", or nothing.
    """
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    for block in model if what == "blocks" else ():
        block.compile(backend=counter, fullgraph=IN_ONE_GRAPH)
    forward = wrapped = wrap(model)
    for block in model if what == "blocks with hooks" else ():
        block.compile(backend=counter)
    if what == "whole model":
        forward = torch.compile(wrapped, backend=counter)
    run = train(wrapped, steps, forward=forward)
    return run, sorted(counters["graph_break"]), counter.frame_count


def train_alone(
    model: nn.Module,
    steps: int = 10,
    *,
    dtype: torch.dtype = torch.float32,
    **optimizer_options: Any,
) -> Run:
    """What all ranks together do, in one process: each rank's batch as a microbatch.

    The losses are those of this rank.
    """
    run, world = Run(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **optimizer_options)
    attach_to_optimizer(model, optimizer)
    for step in range(steps):
        for rank in range(world):
            x = batch(step, rank, dtype)
            loss = (model(x) - x.roll(1, -1)).float().square().mean()
            loss.backward()
            if rank == dist.get_rank():
                run.losses.append(loss.detach())
        for parameter in model.parameters():
            parameter.grad.div_(world)
        run.grads.append({n: whole(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return run.keep_state(model)


class Traffic(TorchDispatchMode):
    """Collectives of this rank while it is watched; in compiled code none but FSDP2's."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_higher_order_operators = True
        self.sizes: list[int] = []
        """Bytes that this rank gave into each all-gather of FSDP2."""
        self.gather_dtypes: set[torch.dtype] = set()
        self.all_reduces = 0
        self.seen: list[tuple[str, torch.dtype, int]] = []
        """Functional collectives, as DTensors make them: name, dtype and bytes given."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else compiled code would run in eager mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # it will call what it is made of
        name = func.overloadpacket.__name__
        if func.namespace == "fsdp" and name == "all_gather_copy_in":
            self.sizes.append(args[3] * args[1].itemsize)
            self.gather_dtypes.add(args[1].dtype)
        if func.namespace == "_c10d_functional" and "wait" not in name:
            dtype = args[0].dtype
            dtype = torch.uint8 if dtype.itemsize == 1 else dtype  # GPUs send float8 as it is
            self.seen.append((name, dtype, args[0].nbytes))
        self.all_reduces += name in ("allreduce_", "all_reduce")
        return func(*args, **kwargs or {})

    def bytes_of(self, name: str) -> dict[torch.dtype, int]:
        """Given into functional ones of this name, by dtype; those of single numbers left out."""
        total: dict[torch.dtype, int] = {}
        for kind, dtype, size in self.seen:
            if kind.startswith(name) and size > 4:
                total[dtype] = total.get(dtype, 0) + size
        return total
