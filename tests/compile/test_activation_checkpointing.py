"""`torch.utils.checkpoint` within compiled code: what is to be computed again is not kept."""

from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tolerances
from float8 import (
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    save_gemm_outputs,
)
from sqnr import sqnr
from support.configs import FINER, RECIPES, of_recipe
from support.devices import on_devices
from support.models import LlamaBlock, forward_backward, seeded
from support.saved import saved_bytes

SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, save_gemm_outputs)}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, **how: Any) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False, **self.how)


def block_and_input(device: str, recipe: str | None, **more: Any) -> tuple[nn.Module, Tensor]:
    """A block of the 8B shape on a GPU, a small one on a CPU."""
    torch.manual_seed(0)
    dim, hidden, heads, tokens = (4096, 14336, 32, 8192) if device == "cuda" else (64, 96, 2, 48)
    attention = {"heads": heads, "kv": heads, "head_dim": dim // heads}
    model: nn.Module = LlamaBlock(dim, hidden, **attention).to(device, torch.bfloat16)
    if recipe is not None:
        fuse = more.pop("fuse", False)
        config = of_recipe(recipe, **more)
        convert_to_float8_training(model, config=config, module_filter_fn=all_linears, fuse=fuse)
    if more.get("float8_weights") is Float8Weights.HELD:
        attach_to_optimizer(model, torch.optim.SGD(model.parameters()))
    return model, seeded(0, 1, tokens, dim, device=device, dtype=torch.bfloat16)


def compiled_checkpoint(model: nn.Module, device: str, **how: Any) -> nn.Module:
    backend = "inductor" if device == "cuda" else "aot_eager_decomp_partition"
    inner = Checkpointed(model, **how)
    torch._dynamo.reset()
    return torch.compile(inner, fullgraph=True, dynamic=False, backend=backend)


def kept_bytes(compiled: nn.Module, x: Tensor) -> int:
    """Count what a checkpointed block keeps, besides parameters, their float8 data, its input."""
    x = x.detach().requires_grad_()
    compiled(x).sum().backward()  # compiles
    held = (each.operand for y in compiled.modules() for each in getattr(y, "held", ()))
    parts = [part for operand in held for part in (operand.row, operand.col)]
    known = [x, *compiled.parameters(), *compiled.buffers(), *(t for part in parts for t in part)]
    return saved_bytes(lambda: compiled(x), known)


WAYS = [(recipe, {}) for recipe in (*RECIPES, *FINER)]
WAYS += [(recipe, {"fuse": True}) for recipe in RECIPES]
WAYS += [("tensorwise", {"float8_weights": Float8Weights.HELD})]


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "more"), WAYS)
def test_no_more_is_kept_than_in_high_precision(recipe: str, more: Any) -> None:
    """torch 2.11 lost the mark of what lies within an autograd function: GEMMs' outputs."""
    kept = []
    for model, x in (block_and_input("cuda", None), block_and_input("cuda", recipe, **more)):
        kept.append(kept_bytes(compiled_checkpoint(model, "cuda"), x))
    scales = 7 * 4 * 16  # four for each layer, at most
    assert kept[1] <= kept[0] + scales


EXHAUSTIVE = [
    pytest.param(*way, marks=[pytest.mark.exhaustive] if n in (1, 2, 4, 5) else [])
    for n, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("recipe", "more"), EXHAUSTIVE)
def test_the_gemms_of_a_checkpointed_forward_are_marked(recipe: str, more: Any) -> None:
    marked = []

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        gemms = (torch.ops.aten._scaled_mm.default, torch.ops.aten.mm.default)
        marked.extend(n for n in joint.graph.nodes if n.target in gemms and "recompute" in n.meta)
        return min_cut_rematerialization_partition(joint, *args, compiler="inductor", **kwargs)

    def run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
    model, x = block_and_input("cpu", recipe, **more)
    compiled = torch.compile(Checkpointed(model), backend=backend, fullgraph=True, dynamic=False)
    compiled(x.requires_grad_()).sum().backward()
    assert len(marked) == 7


@on_devices
def test_the_policy_keeps_the_outputs_of_gemms(device: str) -> None:
    """And gradients are those of everything computed again."""
    model, x = block_and_input(device, "tensorwise")
    dim, hidden, tokens = x.shape[-1], model.ffn.w1.out_features, x.shape[1]
    few, g = x[:, :48], seeded(1, *x[:, :48].shape, device=device, dtype=x.dtype)
    kept, results = [], []
    for how in ({}, SELECTIVE):
        compiled = compiled_checkpoint(model, device, **how)
        kept.append(kept_bytes(compiled, x))
        results.append(forward_backward(compiled, few, g))
        model.zero_grad()  # what was found stays as it is
    outputs = 2 * tokens * (4 * dim + 2 * hidden)  # not that of w2, which backward does not read
    assert kept[1] - kept[0] == pytest.approx(outputs, rel=0.01)
    for name, value in results[0].items():
        assert sqnr(value, results[1][name]) > tolerances.COMPILED, name
