"""torchtitan's debug models on the CPU, with our converter; needs torchtitan."""

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import FlexAttention

from float8.integrations import torchtitan as titan
from support.models import fp8_state, gradients, seeded
from support.outcome import compiles
from support.titan_datasets import in_its_place

with in_its_place():
    REGISTRIES = {
        name: importlib.import_module(f"torchtitan.models.{name}.config_registry")
        for name in ("llama3", "deepseek_v3")
    }


def attention(
    self: nn.Module,
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    *,
    enable_gqa: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    how = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)


FlexAttention.forward = attention  # its backward needs a GPU


def built(
    ranks: int = 1,
    tp: int = 1,
    backend: str = "partial_dtensor",
    compiled: bool = False,
    name: str = "llama3",
    ep: int = 1,
    **converter: object,
) -> tuple[nn.Module, Any]:
    """The model, and its optimizers; as the `Trainer` makes them, on the CPU.

    Two blocks of it, under FSDP2, and tensor parallel on `tp` ranks, if there are several; the
    experts of `deepseek_v3` on `ep` of them.
    """
    module = f"torchtitan.models.{name}"
    converters = [titan.Float8Converter.Config(**converter)] if converter else None
    spec = importlib.import_module(module).model_registry("debugmodel", converters=converters)
    config = getattr(REGISTRIES[name], f"{name}_debugmodel")()
    config.model_spec = spec
    spec.model.layers = spec.model.layers[:2]  # of DeepSeek one without experts, one with
    config.optimizer.implementation = "foreach"
    config.parallelism.spmd_backend = backend
    config.parallelism.tensor_parallel_degree = tp
    config.parallelism.expert_parallel_degree = ep
    config.training.mixed_precision_param = "float32"
    config.compile.enable = compiled and compiles()
    config.compile.backend = "aot_eager"
    config.compile.components = ["model"]
    set_spmd_backend(backend)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    if ranks > 1:
        parallel_dims.device_type = "cpu"
        dims = parallel_dims.ParallelDims.from_config(config.parallelism, ranks)
        dims.build_mesh()
        spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None,
            dump_folder="",
        )
        for part in model.modules():
            if isinstance(part, FSDPModule):  # with 1.0 it sums by an op that Gloo has not
                part.set_gradient_divide_factor(float(ranks // tp))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    optimizers = config.optimizer.build(model_parts=[model])
    spec.post_optimizer_build_fn = titan.attach_to_optimizers
    spec.post_optimizer_build_fn(optimizers, [model], None)
    return model, optimizers


def step(model: nn.Module, optimizers: Any, seed: int, rows: slice = slice(1)) -> dict[str, Tensor]:
    """One step with these rows of two, and what it gave."""
    tokens = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(seed))[rows]
    optimizers.zero_grad()
    logits = whole(model(tokens))[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = {name: whole(grad).clone() for name, grad in gradients(model).items()}
    optimizers.step()
    return {"loss": loss.detach(), **grads}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """The same weights on one rank and on several, whose random numbers differ."""
    for seed, parameter in enumerate(model.parameters()):
        if parameter.dim() > 1:
            value = 0.02 * seeded(seed, *parameter.shape)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


def on_ranks(tp: int, steps: int, backend: str, **how: object) -> dict[str, Tensor]:
    """What the last of `steps` gave, and the buffers, the same on all ranks."""
    model, optimizers = built(dist.get_world_size(), tp, backend, **how)
    fill(model)
    for seed in range(steps):
        result = step(model, optimizers, seed)
    return {**result, **fp8_state(model)}
