"""Inputs that are no plain tensors: what torch.fx, torch.jit and ONNX trace with; other layouts."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import (
    all_linears,
    conversion_report,
    convert_to_float8_training,
    swiglu_feed_forward,
)
from float8 import sync_float8_amax_and_scale_history as sync
from float8.kernels.runtime.private import known_lengths
from support.models import seeded


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Called(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return swiglu_feed_forward(x, self.w1, self.w3, self.w2)


def made(recipe: str, *parts: nn.Module, **how) -> nn.Sequential:
    model = nn.Sequential(*(parts or (nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))))
    convert_to_float8_training(model, config=recipe, module_filter_fn=all_linears, **how)
    return model


def nested(x: Tensor) -> Tensor:
    """A batch of sequences of 3 and 5."""
    offsets = torch.tensor([0, 3, 8])
    return torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=3, max_seqlen=5)


# ---------------------------------------------------------------- torch.fx


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_layers_are_leaves_of_a_symbolic_trace(recipe: str) -> None:
    model, x = made(recipe), seeded(0, 16, 32)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes][1:-1] == ["0", "1", "2"]
    assert getattr(traced, "0") is model[0]
    for _ in range(2):
        expected, got = (run(x) for run in (model, traced))
        assert torch.equal(expected, got)
        got.sum().backward()
        sync(traced)
    for copied in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert torch.equal(copied(x), traced(x))


@pytest.mark.parametrize("fuse", [False, True])
def test_fused_modules_are_traced_layer_by_layer(fuse: bool) -> None:
    model, x = made("tensorwise", Norm(), FeedForward(), Called(), fuse=fuse), seeded(0, 16, 32)
    assert [each.reason for each in conversion_report(model).fused] == [None] * 2 * fuse
    traced = torch.fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == [f"{part}.{layer}" for part in (1, 2) for layer in ("w1", "w3", "w2")]
    assert torch.equal(traced(x), made_without_fusing(model)(x))


def made_without_fusing(model: nn.Module) -> nn.Module:
    plain = nn.Sequential(Norm(), FeedForward(), FeedForward())
    plain.load_state_dict(model.state_dict())
    return convert_to_float8_training(plain, module_filter_fn=all_linears)


def test_layers_of_which_no_call_can_be_noted_say_so() -> None:
    layer = made("tensorwise")[0]
    with pytest.raises(
        RuntimeError, match=r"symbolic_trace of a layer with no module .*Sequential"
    ):
        torch.fx.symbolic_trace(layer)
    layer.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(RuntimeError, match=r"with forward hooks, which ran .*is_leaf_module"):
        torch.fx.symbolic_trace(nn.Sequential(layer))


# ---------------------------------------------------------------- other layouts


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("tensorwise", None), ("delayed", None), ("blockwise", None), ("delayed", "aot_eager")],
)
def test_a_jagged_tensor_is_read_as_its_values_are(backend: str | None, recipe: str) -> None:
    model, data = made(recipe), seeded(0, 8, 32)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    results = []
    for wrap in (lambda x: x, nested):
        x = data.clone().requires_grad_()
        wrapped = wrap(x)
        y = run(wrapped)
        if wrap is nested:
            assert (y + wrapped).shape == wrapped.shape  # of the same lengths, as torch sees it
            assert known_lengths(y) == known_lengths(wrapped)
            y = y.values()
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_fused_functions_take_jagged_tensors_layer_by_layer() -> None:
    model, x = made("tensorwise", Norm(), FeedForward(), fuse=True), seeded(0, 8, 32)
    plain = made("tensorwise", Norm(), FeedForward())
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(nested(x)).values(), plain(x))


def test_other_nested_tensors_say_what_to_do() -> None:
    model, x = made("tensorwise"), seeded(0, 8, 32)
    holes = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8]), torch.tensor([2, 4]))
    for input in (holes, nested(x).transpose(1, 2)):
        with pytest.raises(ValueError, match=r"not contiguous, .* call input\.contiguous\(\)"):
            model(input)
    with pytest.raises(TypeError, match=r"nested input of layout torch.strided, .*=torch\.jagged"):
        model(torch.nested.nested_tensor([x[:3], x[3:]]))


@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "mkldnn"])
def test_other_layouts_say_what_to_do(layout: str) -> None:
    x = getattr(seeded(0, 8, 32), f"to_{layout}")()
    with pytest.raises(TypeError, match=r"got input of layout .*; call input\.to_dense\(\)"):
        made("tensorwise")(x)


# ---------------------------------------------------------------- torch.jit and ONNX


def test_delayed_scaling_is_traced_by_torch_jit_only_where_it_records_nothing() -> None:
    model, x = made("delayed"), seeded(0, 8, 32)
    with pytest.raises(RuntimeError, match=r"got torch.jit.trace with delayed .*torch\.no_grad"):
        torch.jit.trace(model, x)
    model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a trace fixes, and that it is old
        assert torch.equal(torch.jit.trace(model, x)(2 * x), model(2 * x))


@pytest.mark.filterwarnings("ignore")  # that exporting TorchScript is old
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_onnx_is_refused(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, refused = made(recipe), seeded(0, 8, 32), r"got torch\.onnx\.export, .*to_high_prec"
    with pytest.raises(RuntimeError, match=refused):
        torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False)
    # What the other exporter does, which needs packages.
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    for strict in (False, True):
        with pytest.raises(RuntimeError, match=refused):
            torch.export.export(model, (x,), strict=strict)
