"""What compiled code keeps for backward, what it makes again, and `torch.utils.checkpoint`."""

import copy
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx

import tolerances
from float8 import Float8Weights, all_linears, attach_to_optimizer, convert_to_float8_training
from float8.config import CastConfig
from float8.quantize import recast
from sqnr import assert_close, same_bits
from support.configs import FINER, RECIPES, delayed, of_recipe, tensorwise
from support.devices import E4M3, E5M2, on_devices
from support.graphs import without_code
from support.models import FeedForward, LlamaBlock, forward_backward, gradients, seeded
from support.rings import short
from support.saved import saved_bytes
from support.spies import saved_tensors
from support.training import Wrapped


def block_and_input(device: str, recipe: str | None, **more: Any) -> tuple[nn.Module, Tensor]:
    """A block of the 8B shape on a GPU, a small one on a CPU."""
    torch.manual_seed(0)
    dim, hidden, heads, tokens = (4096, 14336, 32, 8192) if device == "cuda" else (64, 96, 2, 48)
    attention = {"heads": heads, "kv": heads, "head_dim": dim // heads}
    model: nn.Module = LlamaBlock(dim, hidden, **attention).to(device, torch.bfloat16)
    if recipe is not None:
        config = of_recipe(recipe, **more)
        convert_to_float8_training(model, config=config, module_filter_fn=all_linears)
    if more.get("float8_weights") is Float8Weights.HELD:
        attach_to_optimizer(model, torch.optim.SGD(model.parameters()))
    return model, seeded(0, 1, tokens, dim, device=device, dtype=torch.bfloat16)


def compiled(model: nn.Module, device: str, how: str = "checkpoint") -> nn.Module:
    backend = "inductor" if device == "cuda" else "aot_eager_decomp_partition"
    torch._dynamo.reset()
    return torch.compile(Wrapped(model, how), fullgraph=True, dynamic=False, backend=backend)


def kept_bytes(compiled: nn.Module, x: Tensor) -> int:
    """Count what a checkpointed block keeps, besides parameters, their float8 data, its input."""
    x = x.detach().requires_grad_()
    compiled(x).sum().backward()  # compiles
    held = (each for y in compiled.modules() for each in getattr(y, "_float8_held", ()))
    parts = [part for weight in held for part in weight[1:]]
    known = [x, *compiled.parameters(), *compiled.buffers(), *parts]
    return saved_bytes(lambda: compiled(x), known)


WAYS = [(recipe, {}) for recipe in (*RECIPES, *FINER)]
WAYS += [("tensorwise", {"float8_weights": Float8Weights.HELD})]


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "more"), WAYS)
def test_no_more_is_kept_than_in_high_precision(recipe: str, more: Any) -> None:
    """torch 2.11 lost the mark of what lies within an autograd function: GEMMs' outputs."""
    kept = []
    for model, x in (block_and_input("cuda", None), block_and_input("cuda", recipe, **more)):
        kept.append(kept_bytes(compiled(model, "cuda"), x))
    scales = 7 * 4 * 16  # four for each layer, at most
    assert kept[1] <= kept[0] + scales


@pytest.mark.parametrize(("recipe", "more"), short({0}, WAYS))
def test_the_gemms_of_a_checkpointed_forward_are_marked(recipe: str, more: Any) -> None:
    marked = []

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        gemms = (torch.ops.float8.scaled_mm.default, torch.ops.aten.mm.default)
        marked.extend(n for n in joint.graph.nodes if n.target in gemms and "recompute" in n.meta)
        return min_cut_rematerialization_partition(joint, *args, compiler="inductor", **kwargs)

    def run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
    model, x = block_and_input("cpu", recipe, **more)
    layer = Wrapped(model.ffn.w1, "checkpoint")
    run_layer = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    run_layer(x.requires_grad_()).sum().backward()
    assert len(marked) == 1


@on_devices
def test_the_policy_keeps_the_outputs_of_gemms(device: str) -> None:
    model, x = block_and_input(device, "tensorwise")
    gpu = device == "cuda"
    model = model if gpu else model.ffn  # compiles sooner
    dim, hidden, tokens = x.shape[-1], 14336 if gpu else 96, x.shape[1]
    few, g = x[:, :48], seeded(1, *x[:, :48].shape, device=device, dtype=x.dtype)
    kept, results = [], []
    for how in ("checkpoint", "selective-checkpoint"):
        run_block = compiled(model, device, how)
        kept.append(kept_bytes(run_block, x))
        results.append(forward_backward(run_block, few, g))
        model.zero_grad()  # what was found stays as it is
    outputs = 2 * tokens * (4 * dim * gpu + 2 * hidden)  # backward does not read w2's
    assert kept[1] - kept[0] == pytest.approx(outputs, rel=0.01)
    assert_close(*results, bound=tolerances.COMPILED)


def test_inputs_are_not_kept_in_float8() -> None:
    model = nn.Sequential(nn.RMSNorm(32), FeedForward(32, 96)).bfloat16()
    convert_to_float8_training(model)
    found = []

    def inner(graph: torch.fx.GraphModule, inputs: list[Tensor], **how: Any) -> Any:
        casts, transposes = (
            graph.graph.find_nodes(op="call_function", target=op.default)
            for op in (torch.ops.float8.cast, torch.ops.float8.transpose)
        )
        found.append((sum(each.args[1] is not None for each in casts), len(transposes)))
        return without_code(graph, inputs)

    def backend(*given: Any) -> Any:
        return compile_fx(*given, inner_compile=inner)

    x = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved:
        y = torch.compile(model, fullgraph=True, backend=backend)(x)
    y.sum().backward()
    parameters = {p.data_ptr() for p in model.parameters()}
    kept = sorted(
        (tuple(t.shape), t.dtype)
        for t in saved
        if t.numel() > 48 and t.data_ptr() not in parameters
    )
    assert kept == [((48, 32), torch.bfloat16), *2 * [((48, 96), torch.bfloat16)]]
    # Casts under known scales and transposes, of forward and of backward: there of three weights.
    assert found == [(2, 0), (3, 2)]


class WritesIntoItsInput(nn.Module):
    """What a layer has read is written into, before its backward reads it."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.layer, self.residual = nn.Linear(32, 32, bias=False), residual

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        y = self.layer(h)
        return h.add_(y) if self.residual else y + h.add_(1).sum()


@pytest.mark.parametrize(
    ("config", "residual", "backend"),
    [
        (tensorwise(), True, "aot_eager_decomp_partition"),
        (delayed(), False, "eager"),
        pytest.param(delayed(), False, "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_inputs_may_be_written_into_afterwards(config, residual: bool, backend: str) -> None:
    torch.manual_seed(0)
    model = convert_to_float8_training(WritesIntoItsInput(residual), config=config)
    other = copy.deepcopy(model)
    x = torch.randn(48, 32, requires_grad=True)
    for run in (model, torch.compile(other, fullgraph=True, backend=backend)):
        run(x).square().sum().backward()
    assert gradients(model)
    assert_close(gradients(model), gradients(other), tolerances.COMPILED)


@on_devices
@pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=pytest.mark.exhaustive)], ids=str)
def test_what_is_made_again_has_the_same_bits(dtype: torch.dtype, device: str) -> None:
    every_number = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every_number.view(256, 256).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(recast, fullgraph=True, dynamic=False)
    for scale in (1.0, 0.0123, 3.3e5, 2.0**-108, float("inf"), float("nan")):
        args = (x, CastConfig(target_dtype=dtype), torch.tensor(scale, device=device))
        assert same_bits(compiled(*args).data, recast(*args).data), scale
    odd = (x[:19, :37], CastConfig(target_dtype=dtype), torch.tensor(0.01, device=device))
    assert compiled(*odd).data.shape == (48, 32)
    assert same_bits(compiled(*odd).data, recast(*odd).data)
