"""Small models that ranks share, made on every rank, on its device."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from float8 import all_linears, convert_to_float8_training
from support.configs import delayed, of_recipe
from support.models import Block, seeded

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


def small(recipe: str | None, all_gather: bool, blocks: int = 2) -> nn.Module:
    """Blocks of one layer, quickly compiled; None: not converted.

    Without biases: Inductor adds up their gradients in an order of its own for each graph.
    """
    torch.manual_seed(0)
    made = (nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.SiLU()) for _ in range(blocks))
    model = nn.Sequential(*made).to(here())
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
    return Fsdp1(model, auto_wrap_policy=policy, **more)


def whole(x: Tensor) -> Tensor:
    """A DTensor's full tensor, cloned."""
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def part(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, cloned; no communication."""
    x = x.detach()
    return (x.to_local() if isinstance(x, DTensor) else x).clone()


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return seeded(1000 * step + rank, 16, DIM, dtype=dtype, device=here())
