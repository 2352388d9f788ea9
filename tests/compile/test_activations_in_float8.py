"""Activations that compiled code keeps in float8: which, how exact, and what must stay."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from float8 import (
    Float8Weights,
    activations_in_float8,
    all_linears,
    convert_to_float8_training,
    grouped_linear,
    save_gemm_outputs,
    sync_float8_amax_and_scale_history,
    update_float8_weights,
)
from sqnr import same_bits, sqnr
from support.configs import of_recipe, tensorwise
from support.devices import GPU
from support.errors import require_errors
from support.graphs import make_no_code, op_by_op
from support.models import LlamaBlock, forward_backward, seeded
from support.rings import short
from support.saved import saved_bytes
from support.spies import saved_tensors

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def run(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> tuple[Tensor, list[Any]]:
    """The output of a function, compiled with all that can be kept in float8 kept so, and what
    it keeps for backward."""
    torch._dynamo.reset()
    how = op_by_op(activations_in_float8(min_mib=0, **options))
    with saved_tensors() as saved:
        y = torch.compile(function, fullgraph=True, **how)(*args)
    return y, saved


def in_float8(saved: list[Tensor]) -> list[tuple[int, ...]]:
    return sorted(tuple(x.shape) for x in saved if x.dtype in FLOAT8)


RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise"]
ON_GPUS: Any = [(None, {}), ("tensorwise", {"float8_weights": Float8Weights.HELD})]
CASES = short({0}, [("cpu", recipe, {}) for recipe in RECIPES])
CASES += [
    pytest.param("cuda", *each, marks=GPU) for each in (*ON_GPUS, *((x, {}) for x in RECIPES))
]


def steps(model: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Gradients of two microbatches, after a step that lets delayed scaling find its scales."""
    for microbatches in (1, 2):
        update_float8_weights(model)
        for _ in range(microbatches):
            found = forward_backward(model, x, g)
        sync_float8_amax_and_scale_history(model)
    return found


@pytest.mark.parametrize(("device", "recipe", "more"), CASES)
def test_a_block_keeps_less_and_has_nearly_the_same_gradients(
    device: str, recipe: str | None, more: Any
) -> None:
    dim, hidden, tokens = (1024, 3072, 2048) if device == "cuda" else (128, 384, 128)
    torch.manual_seed(0)
    model: nn.Module = LlamaBlock(dim, hidden, heads=4, kv=2, head_dim=dim // 4)
    model = model.to(device, torch.bfloat16)
    if recipe is not None:
        chosen = all_linears if device == "cuda" else lambda mod, fqn: fqn == "ffn.w2"
        convert_to_float8_training(model, config=of_recipe(recipe, **more), module_filter_fn=chosen)
    x = seeded(0, 1, tokens, dim, device=device, dtype=torch.bfloat16)
    g = seeded(1, 1, tokens, dim, device=device, dtype=torch.bfloat16)
    results, kept = [], []
    for options in (None, activations_in_float8(min_mib=0)):
        torch._dynamo.reset()
        one = copy.deepcopy(model)
        how = op_by_op(options) if device == "cpu" else {"options": options}
        one.compile(fullgraph=True, dynamic=False, **how)
        results.append(steps(one, x, g))
        inputs, there = x.clone().requires_grad_(), (*one.parameters(), *one.buffers())
        kept.append(saved_bytes(partial(one, inputs), there))
    for name, expected in results[0].items():  # a mantissa of 3 bits has 31 dB
        least = 40 if name == "output" else 20  # Inductor fuses forward in another way
        assert sqnr(expected, results[1][name]) > least, name
    assert kept[1] < 0.8 * kept[0]


class Linear(nn.Module):
    """A layer in bfloat16 or float16; its input is the operand of its weight's gradient."""

    def __init__(self, columns: int, out: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, out, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Masked(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x[:, 0] > 0].square())


@pytest.mark.parametrize("case", ["data decide", "no tokens", "float16 at its end"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_odd_inputs(case: str) -> None:
    x = seeded(0, 0 if case == "no tokens" else 64, 256, dtype=torch.float16).requires_grad_()
    with torch.no_grad():
        x[3:4, 4] = 65000 if case == "float16 at its end" else 1  # next in float8 is 65,536
    model = (Masked if case == "data decide" else Linear)(256, dtype=torch.float16)
    y, saved = run(model, x)
    y.backward(torch.full_like(y, 2.0**-9))
    assert model.linear.weight.grad.isfinite().all()
    if case != "no tokens":
        rows = int((x[:, 0] > 0).sum()) if case == "data decide" else 64
        assert in_float8(saved) == [(rows, 256)] or torch.__version__ < "2.13"  # stays there


def dequantized(saved: list[Tensor]) -> Tensor:
    data, scale = saved[-2:]
    runs = data.float().unflatten(-1, (-1, 128 if data.shape[-1] % 128 == 0 else data.shape[-1]))
    return (runs * scale.view(*runs.shape[:-1], 1)).flatten(-2)


@pytest.mark.parametrize("columns", [256, 96])  # in runs of 128; one scale for each row
@pytest.mark.parametrize("dtype", FLOAT8)
def test_values_are_rounded_to_the_mantissa(columns: int, dtype: torch.dtype) -> None:
    x = (torch.randn(64, columns) * torch.logspace(-20, 20, 64)[:, None]).bfloat16()
    model = Linear(columns)
    y, saved = run(model, x.requires_grad_(), dtype=dtype)
    y.backward(torch.eye(64, dtype=torch.bfloat16))  # the gradient of the weight is its input
    assert in_float8(saved) == [(64, columns)]
    runs = x.detach().float().view(64, -1, min(columns, 128))
    scale = torch.exp2((runs.abs().amax(-1, True) / torch.finfo(dtype).max).log2().ceil())
    rounded = ((runs / scale).to(dtype).float() * scale).view(64, columns)
    assert same_bits(model.linear.weight.grad, rounded.bfloat16())


def test_what_is_not_finite_stays_so_and_zeros_stay_zero() -> None:
    x = torch.randn(6, 256, dtype=torch.bfloat16)
    x[0], x[1, 3], x[2, 200], x[3], x[4, 7] = 0, float("nan"), float("inf"), 3e4, -float("inf")
    _, saved = run(Linear(256), x.requires_grad_())
    assert in_float8(saved) == [(6, 256)]
    rounded = dequantized(saved)
    assert (rounded[0] == 0).all()
    for row, first in ((1, 0), (2, 128), (4, 0)):
        assert not rounded[row, first : first + 128].isfinite().any()
        assert rounded[row].isfinite().sum() == 128  # those of the other run
    for row in (3, 5):
        assert sqnr(x.detach()[row], rounded[row]) > 24


@torch.library.custom_op("float8_tests::wave", mutates_args=())
def wave(y: Tensor) -> Tensor:
    return (30 * y).sin()


@torch.library.custom_op("float8_tests::wave_backward", mutates_args=())
def wave_backward(y: Tensor) -> Tensor:
    return 30 * (30 * y).cos()


wave.register_fake(torch.empty_like)
wave_backward.register_fake(torch.empty_like)
wave.register_autograd(
    lambda ctx, g: g * wave_backward(*ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


NOISE = seeded(2, 64, 192, dtype=torch.bfloat16)


def near(y: Tensor) -> Tensor:
    """Targets that a model has all but learnt."""
    return y.detach() + 0.01 * y.detach().std() * NOISE


def normed_queries(y: Tensor) -> Tensor:
    q, k, v = (x[:, None] for x in y.view(2, -1, 192).split(64, -1))
    q, k = (10 * F.rms_norm(x, (64,)) for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v)


def unrolled(y: Tensor) -> Tensor:
    """Two steps of a recurrent layer whose gate is nearly open."""
    state = torch.zeros_like(y)
    for _ in range(2):
        gate = torch.sigmoid(y + 3)
        state = gate * torch.tanh(y - state) + (1 - gate) * state
    return state


def attention(y: Tensor) -> Tensor:
    """Attention written out; its values have a common part."""
    q, k, v = y.split(64, -1)
    return F.softmax(q @ k.t() / 8, -1) @ (v + 10)


def linear_attention(y: Tensor) -> Tensor:
    q, k, v = y.split(64, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.t() @ v)) / (q @ k.sum(0)[:, None])


def routed(y: Tensor) -> Tensor:
    """Probabilities of experts, times what has a common part."""
    hidden = F.silu(y[:, :64]) * y[:, 64:128] + 10
    return sum(hidden * p[:, None] for p in F.softmax(y[:, 128:132], -1).unbind(-1))


AMPLIFY: dict[str, Callable[[Tensor], Tensor]] = {
    "column subtracted": lambda y: (y + 10 - torch.full((64, 1), 10.0)).square(),
    "alpha": lambda y: F.silu(torch.add(y + 20, torch.full((192,), 20.0), alpha=-1)),
    "sigmoid near 1": lambda y: torch.sigmoid(y + 4),
    "tanh near 1": lambda y: torch.tanh(y + 3),
    "recurrent gates": unrolled,
    "attention": attention,
    "linear attention": linear_attention,
    "layer norm": lambda y: F.layer_norm(y + 10, (192,), torch.ones(192).requires_grad_()),
    "batch norm": lambda y: F.batch_norm(y + 10, None, None, training=True),
    "a probability per token": routed,
    "hardswish": F.hardswish,
    "clamped": lambda y: F.silu(y.clamp(max=0.5)) * y.clamp(-0.5, 0.5),
    "a function of a softmax": lambda y: F.softmax(F.silu(y) + 10, -1),
    "absmax": lambda y: y / y.abs().amax(-1, keepdim=True).clamp(min=1e-5),
    "max over tokens": lambda y: y.square().sum() + y.amax(0).sum(),
    "mse": lambda y: F.mse_loss(y, near(y)),
    "exp": lambda y: y.exp() / y.exp().sum(-1, keepdim=True),
    "exp of a sum": lambda y: (y + -y.amax(-1, keepdim=True).detach()).exp(),
    "chunks": lambda y: sum(F.cross_entropy(each, torch.arange(len(each))) for each in y.chunk(4)),
    "softmax": lambda y: F.softmax(y, -1).square(),
    "normed queries": normed_queries,
    "custom op": wave,
    "prod": lambda y: y[:, :8].prod(-1),
    "threshold": lambda y: torch.where(y >= y.topk(8).values[:, -1:], y, 0).square(),
    "tanh of an action": lambda y: (1 - y.tanh().square() + 1e-6).log(),
    "quotient": lambda y: 1 / (y.abs() + 1e-4),
    "square root": lambda y: y.abs().sqrt(),
}


class Amplified(Linear):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(64, 192)
        self.function = function
        nn.init.normal_(self.linear.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).float().flatten()


def compiled(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, **op_by_op(activations_in_float8(min_mib=0)))


def gradients(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * g.flatten()[: y.numel()].view(y.shape)).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


FIRST = {"layer norm", "a probability per token", "mse", "custom op"}


@pytest.mark.parametrize("name", short(FIRST, AMPLIFY))
def test_what_makes_errors_grow_is_not_rounded(name: str) -> None:
    torch.manual_seed(0)
    model, x = Amplified(AMPLIFY[name]), seeded(0, 64, 64, dtype=torch.bfloat16)
    g = seeded(1, 64, 192, dtype=torch.float32)
    rounded = gradients(compiled(model), x, g)
    for expected, found in zip(gradients(model, x, g), rounded, strict=True):
        assert expected.isfinite().all()
        assert sqnr(expected, found) > 22  # the input of the layer is rounded


class Compared(Linear):
    """Values beside an outlier are rounded to 0, and others to a constant."""

    def __init__(self, constant: float) -> None:
        super().__init__(128, 128)
        self.constant, self.scale = constant, nn.Parameter(torch.ones(128, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (x == self.constant)


class Centred(Linear):
    """A sum over columns times the value, of which a mean is subtracted."""

    def __init__(self) -> None:
        super().__init__(128, 128)
        self.scale = nn.Parameter(seeded(5, 128).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        y = x * (x.detach() * self.scale).sum(-1, keepdim=True)
        return self.linear(x) + y - y.mean(-1, keepdim=True)


@pytest.mark.parametrize("make", [partial(Compared, 0.0), partial(Compared, 1.0), Centred])
def test_parameters_of_what_no_pattern_has_get_the_same_gradients(make: Any) -> None:
    torch.manual_seed(0)
    x, g = (seeded(i, 96, 128, dtype=torch.bfloat16) for i in (0, 1))
    x[:, 0], x[:, 1] = 1e5, x[:, 1].round()
    model = make()
    _, *expected = gradients(model, x, g)
    _, *found = gradients(compiled(model), x, g)
    for (name, _), *pair in zip(model.named_parameters(), expected, found, strict=True):
        assert sqnr(*pair) > (20 if name == "linear.weight" else 50), name


class Normed(nn.Module):
    def __init__(self, written_out: bool = False) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.ones(128)), nn.Linear(128, 64, bias=False)
        self.written_out = written_out

    def forward(self, x: Tensor) -> Tensor:
        if not self.written_out:
            return self.linear(F.rms_norm(x, (128,), self.weight, 1e-5))
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.linear(self.weight * y.to(x.dtype))


class Cancelling(Normed):
    """The norm reads a small sum of large terms."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((96, 128), -10.0))


class FeedForward(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], fused: bool = False) -> None:
        super().__init__()
        self.function, self.fused = function, fused
        self.gate, self.down = nn.Linear(128, 512), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).chunk(2, -1)
        return self.down(self.function(gate) * up if self.fused else self.function(gate))


PATTERNS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many are kept in float8
    "operand": (lambda: Linear(128), 1),
    "norm": (Normed, 2),
    "norm written out": (lambda: Normed(written_out=True), 2),
    "norm of a sum": (Cancelling, 2),
    "swiglu": (lambda: FeedForward(F.silu, fused=True), 3),
    "gelu": (lambda: FeedForward(F.gelu), 3),
    "geglu, tanh": (lambda: FeedForward(partial(F.gelu, approximate="tanh"), fused=True), 3),
}
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "common part": lambda x: x + 10 * x[:1],
    "mean of 10": lambda x: x + 10,
    "outliers": lambda x: torch.where(torch.arange(128) % 32 == 0, 300 * x, x),
    "tiny": lambda x: 1e-6 * x,
}


@pytest.mark.parametrize("name", short({"norm written out", "swiglu", "gelu"}, PATTERNS))
def test_patterns_are_exact_to_the_mantissa_against_float64(name: str) -> None:
    torch.manual_seed(0)
    make, count = PATTERNS[name]
    model, noise = make().bfloat16(), seeded(0, 96, 128, dtype=torch.bfloat16)
    rounded, exactly = compiled(model), copy.deepcopy(model).double()
    with saved_tensors() as saved:
        rounded(noise.clone().requires_grad_())
    assert len(in_float8(saved)) == count
    for values, change in VALUES.items():
        x = change(noise)
        for mean in (0, 3):  # of the gradient of the output
            g = seeded(1, 96, 64, dtype=torch.bfloat16) + mean
            exact = gradients(exactly, x.double(), g.double())
            for wanted, found in zip(exact, gradients(rounded, x, g), strict=True):
                assert sqnr(wanted, found) > 20, (values, mean, tuple(wanted.shape))


class Head(nn.Module):
    """Attention written out or fused, a feed-forward, and a loss, as one graph."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.key, self.value = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.up, self.head = nn.Linear(64, 256, bias=False), nn.Linear(256, 512, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.fused:
            heads = (y.unflatten(-1, (1, 64)).transpose(1, 2) for y in (q, k, v))
            x = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        else:
            x = F.softmax(q @ k.transpose(1, 2), -1) @ v
        logits = self.head(F.gelu(self.up(x))).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("fused", short({1}, [True, False]))
def test_what_probabilities_are_made_of_stays(fused: bool) -> None:
    """Their errors would grow: backward divides exponents by sums of forward, and subtracts."""
    torch.manual_seed(0)
    model = Head(fused).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, targets = seeded(0, 2, 96, 64, dtype=torch.bfloat16), torch.randint(512, (2, 96))
    gradients, kept = [], []
    for options in (None, activations_in_float8(min_mib=0)):
        torch._dynamo.reset()
        one = copy.deepcopy(model)
        one.compile(fullgraph=True, **op_by_op(options))
        with saved_tensors() as saved:
            loss = one(x.clone().requires_grad_(), targets)
        loss.backward()
        kept.append([tuple(y.shape) for y in saved if y.dtype == torch.bfloat16])
        gradients.append({name: p.grad for name, p in one.named_parameters()})
    for name, expected in gradients[0].items():
        assert sqnr(expected, gradients[1][name]) > 22, name
    for stays in ((192, 512), (2, 1, 96, 64)):  # logits; queries, keys, values, attention's output
        assert kept[1].count(stays) == kept[0].count(stays)
    assert len(kept[1]) < len(kept[0])
    assert kept[1].count((2, 1, 96, 64)) == 4 * fused


class Gated(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Rotated(nn.Module):
    """Its weight is rounded under autocast, its input turned by a table, its output returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.register_buffer("frequencies", torch.rand(64))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        table = (positions[:, None] * self.frequencies).cos().to(x.dtype)
        return torch.tanh(self.linear(x * table))


def test_weights_tables_and_outputs_stay() -> None:
    model, x = Rotated(), seeded(0, 128, 64, dtype=torch.bfloat16).requires_grad_()

    def autocast(x: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, positions)

    y, saved = run(autocast, x, torch.arange(128))
    assert y.dtype == torch.bfloat16
    assert in_float8(saved) == [(128, 64)]  # the input of the linear layer
    stay = sorted(tuple(x.shape) for x in saved if x.dtype == torch.bfloat16)
    assert stay == [(64, 64), (128, 64)]  # the weight, and the output, which tanh reads again
    y.sum().backward()
    first = x.grad
    x.grad = None
    autocast(x, torch.arange(128)).sum().backward()
    assert sqnr(x.grad, first) > 45  # no weight was rounded to 3 bits of mantissa


def test_operands_of_products_of_two_inputs_stay() -> None:
    """Their gradients are no Parameters', and go on into the block before."""
    linear = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    x, z = (seeded(0, 96, n, dtype=torch.bfloat16).requires_grad_() for n in (32, 64))
    _, saved = run(lambda x, z: x @ linear(z).t(), x, z)
    assert in_float8(saved) == [(96, 64)]  # of the weight's


def test_what_shares_storage_with_what_stays_stays() -> None:
    """Queries and keys are views of one tensor with values: to pack these alone frees nothing."""
    linear = nn.Linear(64, 192, bias=False).bfloat16()

    def attention(x: Tensor) -> Tensor:
        q, k, v = linear(x).view(2, 96, 3, 1, 64).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)

    _, saved = run(attention, seeded(0, 2, 96, 64, dtype=torch.bfloat16).requires_grad_())
    assert [x.shape[-1] for x in saved if x.dtype in FLOAT8] == [64]  # the input


def test_it_goes_with_dynamic_shapes_and_compiles_once_for_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    blocks = nn.Sequential(*(Gated(64, 64) for _ in range(3))).bfloat16()
    counters.clear()
    make_no_code(monkeypatch.setattr)
    for block in blocks:  # each has options of its own
        block.compile(dynamic=True, options=activations_in_float8(min_mib=0))
    for tokens in (80, 96, 160):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        blocks(x).sum().backward()
        assert x.grad.isfinite().all()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_it_goes_with_cuda_graphs() -> None:
    torch.manual_seed(0)
    block = LlamaBlock(512, 1536, heads=4, kv=2, head_dim=128).to("cuda", torch.bfloat16)
    convert_to_float8_training(block, config=tensorwise(), module_filter_fn=all_linears)
    x, g = (seeded(i, 2, 512, 512, device="cuda", dtype=torch.bfloat16) for i in (0, 1))
    results = []
    for more in ({}, {"triton.cudagraphs": True}):
        torch._dynamo.reset()
        one = copy.deepcopy(block)
        one.compile(fullgraph=True, options=activations_in_float8(min_mib=0) | more)
        for _ in range(3):  # compiled, recorded, replayed
            torch.compiler.cudagraph_mark_step_begin()
            found = {name: y.clone() for name, y in forward_backward(one, x, g).items()}
        results.append(found)
    for name, expected in results[0].items():  # attention's backward has no fixed order of sums
        assert sqnr(expected, results[1][name]) > 40, name


class Checkpointed(nn.Module):
    """A block whose forward runs again in backward, but for what a policy keeps."""

    def __init__(self, block: nn.Module, selective: bool) -> None:
        super().__init__()
        self.block, self.how = block, {"context_fn": contexts} if selective else {}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, **self.how)


def contexts() -> Any:
    return create_selective_checkpoint_contexts(save_gemm_outputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("inside", "selective"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_it_goes_with_checkpointing(inside: bool, selective: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = LlamaBlock(64, 192, heads=2, kv=1, head_dim=32).bfloat16()
    convert_to_float8_training(block, module_filter_fn=lambda mod, fqn: fqn == "ffn.w2")
    x, g = (seeded(i, 1, 96, 64, dtype=torch.bfloat16) for i in (0, 1))
    model = Checkpointed(block, selective)
    results = [forward_backward(copy.deepcopy(model), x, g)]
    options = activations_in_float8(min_mib=0)
    (model if inside else model.block).compile(fullgraph=True, **op_by_op(options))
    with saved_tensors() as saved:
        results.append(forward_backward(model, x, g))
    # Within a graph backward computes attention, or the amaxes of casts, from what is kept.
    assert not (inside and in_float8(saved))
    for name, expected in results[0].items():
        assert sqnr(expected, results[1][name]) > 20, name


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = tensorwise()
        self.w1, self.w2 = (
            nn.Parameter(seeded(i, 4, *shape).bfloat16())
            for i, shape in enumerate([(96, 64), (64, 96)])
        )

    def forward(self, x: Tensor) -> Tensor:
        offs = torch.tensor([32, 32, 96, 128], dtype=torch.int32)
        h = grouped_linear(x, self.w1, offs, config=self.config)
        return grouped_linear(F.silu(h), self.w2, offs, config=self.config)


@pytest.mark.exhaustive
def test_it_goes_with_experts() -> None:
    model, x = Experts(), seeded(3, 128, 64).bfloat16().requires_grad_()
    model(x).sum().backward()
    leaves = (x, model.w1, model.w2)
    expected = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    y, saved = run(model, x)
    y.sum().backward()
    assert (128, 96) in in_float8(saved)
    for wanted, leaf in zip(expected, leaves, strict=True):
        assert sqnr(wanted, leaf.grad) > 20


def test_settings_are_told_apart_and_equal_ones_are_not() -> None:
    a, b, c, d = (
        activations_in_float8(**how)["custom_partitioner_fn"]
        for how in ({}, {}, {"min_mib": 2}, {"dtype": torch.float8_e5m2})
    )
    assert a == b
    assert a.uuid() == b.uuid() == pickle.loads(pickle.dumps(a)).uuid()
    assert len({a, b, c, d}) == len({x.uuid() for x in (a, b, c, d)}) == 3


def test_small_tensors_stay() -> None:
    x = torch.randn(1024, 512, dtype=torch.bfloat16, requires_grad=True)  # 1 MiB
    for min_mib, count in ((1.0, 1), (1.01, 0)):
        torch._dynamo.reset()
        with saved_tensors() as saved:
            torch.compile(Linear(512), **op_by_op(activations_in_float8(min_mib=min_mib)))(x)
        assert len(in_float8(saved)) == count


def test_wrong_values_are_refused() -> None:
    made, min_mib = activations_in_float8, r": activations_in_float8: got min_mib=.*expected"
    dtype = min_mib.replace("min_mib", "dtype")
    require_errors(
        *((f"TypeError{min_mib}", partial(made, min_mib=x), []) for x in ("1", True)),
        *((f"ValueError{min_mib}", partial(made, min_mib=x), []) for x in (-1, float("nan"))),
        (f"TypeError{dtype}", partial(made, dtype="float8_e4m3fn"), []),
        (f"ValueError{dtype}", partial(made, dtype=torch.bfloat16), []),
    )
