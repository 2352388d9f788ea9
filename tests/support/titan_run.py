"""torchtitan's debug model on the CPU, with our converter; needs torchtitan."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.models import llama3
from torchtitan.models.llama3 import config_registry

from float8.integrations import torchtitan as titan
from support.models import gradients


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, **_: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=enable_gqa
        ).transpose(1, 2)


def built(**converter: object) -> tuple[nn.Module, Any]:
    """The model, and its optimizers; as the `Trainer` makes them."""
    converters = [titan.Float8Converter.Config(**converter)] if converter else None
    spec = llama3.model_registry("debugmodel", converters=converters)
    config = config_registry.llama3_debugmodel()
    config.model_spec = spec
    config.optimizer.implementation = "foreach"
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    for layer in model.layers.values():
        layer.attention.inner_attention = Attention()
    optimizers = config.optimizer.build(model_parts=[model])
    spec.post_optimizer_build_fn = titan.attach_to_optimizers
    spec.post_optimizer_build_fn(optimizers, [model], None)
    return model, optimizers


def step(model: nn.Module, optimizers: Any, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(2048, (1, 64), generator=torch.Generator().manual_seed(seed))
    optimizers.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])
    loss.backward()
    grads = copy.deepcopy(gradients(model))
    optimizers.step()
    return {"loss": loss.detach(), **grads}


def run(folder: Path, steps: range) -> dict[str, Tensor]:
    """Train `steps` by the recipe `delayed`; before step 2 all is saved, or loaded if first."""
    model, optimizers = built(recipe_name="delayed")
    states = {"model": ModelWrapper(model), "optimizer": optimizers}
    if steps.start == 2:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # all comes from the checkpoint
        dcp.load(states, checkpoint_id=folder)
    for seed in steps:
        if seed == 2 and steps.start == 0:
            dcp.save(states, checkpoint_id=folder)
        step(model, optimizers, seed)
    return model.state_dict()
