"""`float8 bench tp`: plain Llama blocks under tensor and sequence parallel."""

import importlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from float8.parallel import tensor as own_styles
from float8_lab.bench.fsdp import Built, RanksStep
from float8_lab.bench.model import Size, bf16_stack, model_step, stack_data
from float8_lab.bench.step import Results, Row, check
from float8_lab.bench.variants import EAGER, HIGH_PRECISION, Variant
from float8_lab.models.parallel import share_layers
from float8_lab.models.presets import preset


def parallelized(stack: nn.Module, variant: Variant, mesh: DeviceMesh) -> nn.Module:
    """Leave each rank its part of weights and, between layers, of the tokens."""
    styles: Any = own_styles if variant.ours else None
    if not (variant.ours or variant.is_reference):
        library = variant.recipe.split()[0]
        styles = importlib.import_module(f"{library}.float8.float8_tensor_parallel")
    share_layers(stack.get_submodule("layers").children(), mesh, Shard(1), styles)
    return stack


class ParallelStep(RanksStep):
    """Forward and backward of a stack, whose tokens all ranks share, with the sync of scaling."""

    def __init__(self, variant: Variant, size: Size, device: torch.device) -> None:
        preset(size.model).model.check_shares("ranks:", dist.get_world_size(), size.seq_len)
        self._mesh = mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        shared = replace(
            variant, convert=lambda model: parallelized(variant.convert(model), variant, mesh)
        )

        def build() -> Built:  # of each sequence the tokens of this rank
            parts = stack_data(size, device).chunk(mesh.size(), 2)
            x, grad = parts[dist.get_rank()].contiguous()
            return bf16_stack(size, device), x, grad

        super().__init__(shared, size, device, build, sync=True, one_graph=True)

    def check(self, references: dict[str, Results]) -> Row:
        """Hold output and gradients against bf16's on one device."""
        if not references:
            alone = model_step(Variant(HIGH_PRECISION, EAGER), self.size, self.device)
            references[HIGH_PRECISION] = {name: x.cpu() for name, x in alone().items()}
        self.warm_up()
        found: dict[str, Any] = dict(self())
        for name in ("output", "gradient of input"):
            found[name] = DTensor.from_local(found[name], self._mesh, [Shard(1)])
        results = {name: x.full_tensor() for name, x in found.items()}
        what, base = f"tp {self.variant.name}:", references[HIGH_PRECISION]
        return {"sqnr_db": check(what, base, results, self.at_least)}
