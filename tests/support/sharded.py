"""Small models that ranks share, and their training: what runs on every rank, on its device.

`outcome` is the oracle: what training brings forth, by how the model is shared; or alone, by one
process that sees the batches of all ranks.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import (
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits
from support.configs import delayed, of_recipe
from support.models import Block, fp8_state, seeded
from support.spies import is_wrapper

Results = dict[str, Tensor]
"""What a training brought forth on this rank: losses, gradients, state of delayed scaling."""
Change = Callable[[nn.Module], Any]

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
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh(here().type, shape, mesh_dim_names=names)


def data_and_tensor(*shape: int) -> DeviceMesh:
    """A mesh for FSDP2 over `data`, if there are two dims, and tensor parallel over `tensor`."""
    return init_device_mesh(here().type, shape, mesh_dim_names=("data", "tensor")[-len(shape) :])


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
    **more: Any,
) -> nn.Module:
    """FSDP2: each block, then the whole."""
    more["mesh"] = mesh_of() if mesh is None else mesh
    more["mp_policy"] = MixedPrecisionPolicy(param_dtype=param_dtype)
    for block in model.children():
        fully_shard(block, **more)
    return fully_shard(model, **more)


keep = partial(shard, reshard_after_forward=False)
offload = partial(shard, offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp1(model: nn.Module, orig: bool = True) -> nn.Module:
    """Each block, then the whole."""
    policy = ModuleWrapPolicy({Block, nn.Sequential})
    more = {"use_orig_params": orig, "device_id": here()}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **more)


def whole(x: Tensor) -> Tensor:
    """A DTensor's full tensor, cloned."""
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def part(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, cloned; no communication."""
    x = x.detach()
    return (x.to_local() if isinstance(x, DTensor) else x).clone()


def assert_same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: object = "") -> None:
    """The same names, and the same bits."""
    assert got.keys() == wanted.keys(), what
    assert got, what
    for name in got:
        assert same_bits(got[name], wanted[name]), f"{what} {name}"


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return seeded(1000 * step + rank, 16, DIM, dtype=dtype, device=here())


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
            sync_float8_amax_and_scale_history(model)
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


def compiled(
    model: nn.Module,
    what: str,
    wrap: Change,
    steps: int = 2,
    backend: str = "aot_eager",
) -> tuple[Results, list[str], int]:
    """What training brings forth, why graphs broke, and how many were compiled.

    `what` is "blocks", "blocks with hooks" of FSDP2, "whole model", or nothing.
    """
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    for block in model if what == "blocks" else ():
        block.compile(backend=counter, fullgraph=IN_ONE_GRAPH)
    wrapped = wrap(model)
    for block in model if what == "blocks with hooks" else ():
        block.compile(backend=counter)
    call = torch.compile(wrapped, backend=counter) if what == "whole model" else wrapped
    found = train(wrapped, steps, forward=lambda _, x: call(x))
    return found, sorted(counters["graph_break"]), counter.frame_count


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
