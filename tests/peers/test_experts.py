"""Experts of transformers: converted, trained, held, compiled, checkpointed, and back."""

import copy
import importlib
import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import (
    Float8LinearConfig,
    Float8Tensor,
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    grouped_linear,
    high_precision_state_dict,
    update_float8_weights,
)
from float8.experts import Float8Experts
from float8.experts.conversion import experts_per_token
from float8.tensor import dequantise
from sqnr import same_bits, sqnr
from support.lazily import Lazily
from support.microbatches import with_weights
from support.models import seeded
from support.saved import saved_bytes

transformers, hf = Lazily("transformers"), Lazily("support.hugging_face")

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
FOUR: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
NARROW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": FOUR,
    "Qwen2Moe": NARROW | {"shared_expert_intermediate_size": 64},
    "Qwen3Moe": NARROW | {"head_dim": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": FOUR | {"head_dim": 16, "layer_types": ["full_attention"]},
    "DeepseekV3": NARROW
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    | {"num_key_value_heads": 4, "q_lora_rank": 32}
    | dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
}
PAIRS = [
    pytest.param(*x, marks=() if "rowwise" in x or "GptOss" in x else pytest.mark.exhaustive)
    for x in itertools.product(MODELS, RECIPES)
]
SOME = [
    pytest.param(x, marks=() if x in ("Mixtral", "GptOss") else pytest.mark.exhaustive)
    for x in MODELS
]
TWO = pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
ROWWISE = Float8LinearConfig.from_recipe_name("rowwise")


def built(name: str = "Mixtral", layers: int = 1) -> nn.Module:
    return hf.llama(0, name, **MODELS[name], num_hidden_layers=layers).train()


def converted(name: str = "Mixtral", config: Any = "rowwise", **how: Any) -> Any:
    return convert_to_float8_training(built(name), config=config, **how)


def first_experts(name: str = "Mixtral") -> Any:
    return experts_of(converted(name))[0]


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Float8Experts)]


def routed(experts: Any, seed: int = 0, tokens: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, and two experts of each with their weights; the last expert has none."""
    x = seeded(seed, tokens, 64).requires_grad_()
    index = torch.randint(3, (tokens, 2), generator=torch.Generator().manual_seed(seed))
    return x, index, seeded(seed + 1, tokens, 2).sigmoid()


@pytest.mark.parametrize(("name", "recipe"), PAIRS)
def test_experts_compute_what_they_did(name: str, recipe: str) -> None:
    plain = built(name)
    model = convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    mine = experts_of(model)[0]
    (theirs,) = (x for n, x in plain.named_modules() if model.get_submodule(n) is mine)
    made = []
    for each in (theirs, mine):
        with torch.no_grad():
            for parameter in each.parameters():  # biases are zeros at first
                parameter.copy_(seeded(3, *parameter.shape) / 8)
        x, *routing = routed(each)
        y = each(x, *routing)
        made.append((y, *torch.autograd.grad(y.square().sum(), (x, *each.parameters()))))
    for want, got in zip(*made, strict=True):
        assert sqnr(want, got) > 17


def test_outputs_have_the_dtype_of_the_input_under_float32_routing_weights() -> None:
    experts = first_experts().bfloat16()
    x, index, weights = routed(experts)
    assert experts(x.bfloat16(), index, weights.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", SOME)
def test_trained_saved_loaded_and_generating(name: str, tmp_path: Path) -> None:
    model = converted(name, "tensorwise")
    report = conversion_report(model)
    assert all(each.skip_reason is None and each.experts == 4 for each in report.experts)
    assert len(report.experts) == 2
    assert "2 of 2 weights of experts" in str(report)
    assert not any("e5m2" in str(each.scaling) for each in report.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        losses.append(hf.step(model)["loss"])
        optimizer.step()
    assert losses[2] < losses[0]
    model.save_pretrained(tmp_path)
    # Copied: where a file's weights lie in memory may change the last bit of a GEMM.
    plain = copy.deepcopy(type(model).from_pretrained(tmp_path))
    assert not experts_of(plain)
    state = model.state_dict()
    assert all(torch.equal(x, state[key]) for key, x in plain.state_dict().items())
    prompt = hf.tokens()[:, :5]
    made = model.eval().generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (2, 9)
    convert_to_high_precision(model)
    assert not experts_of(model)
    assert torch.equal(plain.eval()(prompt).logits, model(prompt).logits)


def compile_experts(model: nn.Module) -> None:
    torch._dynamo.reset()
    for experts in experts_of(model):
        experts.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_less_is_kept_for_backward(recipe: str) -> None:
    """Bytes beside Parameters, of experts as wide as Mixtral's, in bfloat16."""
    plain = hf.llama(0, "Mixtral", **FOUR, intermediate_size=224).model.layers[0].mlp.experts
    mine = convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    kept = []
    for experts in (plain.bfloat16(), mine.bfloat16()):
        x, index, weights = routed(experts, tokens=512)
        args = x.detach().bfloat16().requires_grad_(), index, weights.bfloat16()
        kept.append(saved_bytes(partial(experts, *args), [*experts.parameters(), *args]))
    # Of runs there is a scale for 128 elements.
    assert kept[1] <= (0.69 if recipe == "blockwise" else 0.68) * kept[0], kept


@TWO
def test_no_tokens(name: str) -> None:
    first = first_experts(name)
    x = torch.zeros(0, 64, requires_grad=True)
    y = first(x, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    y.sum().backward()
    assert y.shape == (0, 64)
    assert not first.gate_up_proj.grad.any()


def test_nothing_is_made_on_the_cpu_for_another_device() -> None:
    class OnDevice(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            made = func(*args, **(kwargs or {}))
            # torch 2.11's checkpoint makes an empty one.
            assert not isinstance(made, Tensor) or made.is_meta or not made.numel(), func
            return made

    first = first_experts()
    x, index, weights = (each.to("meta") for each in routed(first))
    with OnDevice():
        assert first.to("meta")(x, index, weights).shape == x.shape


def test_experts_of_other_ranks_teach_the_router_nothing() -> None:
    """Their outputs are those of biases, and so not zeros."""
    first = first_experts("GptOss")
    nn.init.ones_(first.down_proj_bias)
    x, index, weights = routed(first)
    elsewhere = index == 2
    weights.requires_grad_()
    wanted = first(x, index, weights.masked_fill(elsewhere, 0))
    y = first(x, index.masked_fill(elsewhere, first.num_experts), weights)
    assert torch.equal(y, wanted)
    (grad,) = torch.autograd.grad(y.sum(), weights)
    assert grad[~elsewhere].all()
    assert not grad[elsewhere].any()


def test_biases_leave_the_dtype_of_autocast() -> None:
    first = first_experts("GptOss")
    gate, seen = first._apply_gate, []
    first._apply_gate = lambda x: (seen.append(x.dtype), gate(x))[1]
    with torch.autocast("cpu", torch.bfloat16):
        first(*routed(first))
    assert seen == [torch.bfloat16]


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@TWO
def test_a_weight_that_is_computed_by_now(name: str) -> None:
    """As PEFT's `target_parameters` has it, for as long as forward takes."""
    first = first_experts(name)
    other = copy.deepcopy(first)
    nn.utils.parametrize.register_parametrization(first, "down_proj", Doubled())
    with torch.no_grad():
        other.down_proj.mul_(2)
    assert torch.equal(first(*routed(first)), other(*routed(other)))


# ---------------------------------------------------------------- held


@pytest.mark.exhaustive
def test_compiled_code_reads_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward; in the first step uses cast, as it may follow a checkpoint."""
    model = converted(config=with_weights(ROWWISE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    attach_to_optimizer(model, optimizer)
    compile_experts(model)
    hf.step(model)
    optimizer.step()
    made: list[Any] = []
    products = importlib.import_module("float8.experts.grouped")

    def quantize_experts(x: torch.Tensor, *args: Any, **how: Any) -> Any:
        made.append(x)
        return real(x, *args, **how)

    real = products.quantize_experts
    monkeypatch.setattr(products, "quantize_experts", quantize_experts)
    hf.step(model)
    assert not made


def load(model: nn.Module) -> None:
    model.load_state_dict({name: 1.5 * x for name, x in model.state_dict().items()})


@torch.no_grad()
def copy_in(model: nn.Module) -> None:
    for experts in experts_of(model):
        experts.down_proj.copy_(-experts.down_proj)


def replace_one(model: nn.Module) -> None:
    for experts in experts_of(model):
        experts.down_proj = nn.Parameter(experts.down_proj.detach() / 2)


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [
        ("rowwise", False),
        *(
            pytest.param(*x, marks=pytest.mark.exhaustive)
            for x in (("rowwise", True), ("tensorwise", False), ("blockwise", False))
        ),
    ],
)
def test_held_weights_are_current(recipe: str, compiled: bool) -> None:
    """Steps of two microbatches, weights written in between: bit by bit as on the fly, eager."""
    results = []
    for held in (False, True):
        config = Float8LinearConfig.from_recipe_name(recipe)
        model = converted("GptOss", with_weights(config) if held else config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        attach_to_optimizer(model, optimizer)
        if compiled and held:
            compile_experts(model)
        found: list[Tensor] = []
        for step, write in enumerate((load, copy_in, replace_one)):
            found += hf.step(model, step).values()
            write(model)
            found += hf.step(model, step).values()
            optimizer.step()
            is_held = [bool(experts._float8_held) for experts in experts_of(model)]
            assert is_held == [held]
        assert ("weights held in float8" in repr(model)) == held
        results.append([*found, *model.parameters()])
    assert all(map(same_bits, *results))


# ---------------------------------------------------------------- which


def chosen(
    name: str, sizes: dict[str, Any], config: Any = "rowwise", *, trains: bool = True, **how: Any
) -> Any:
    shape = getattr(transformers, f"{name}Config")(num_hidden_layers=1, vocab_size=256, **sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(shape)
    model.requires_grad_(trains)
    return conversion_report(convert_to_float8_training(model, config=config, **how))


MIXTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
QWEN3 |= {"num_experts_per_tok": 8, "head_dim": 128}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_weights_in_float8_alone(recipe: str) -> None:
    """Output and gradient of the input are those of casts on the fly; moves keep the bytes."""
    base = built().requires_grad_(False)

    def of(model: nn.Module, weights: Float8Weights) -> Any:
        config = with_weights(Float8LinearConfig.from_recipe_name(recipe), weights)
        filter_fn = lambda mod, fqn: fqn.endswith("experts")  # noqa: E731
        return convert_to_float8_training(
            copy.deepcopy(model), config=config, module_filter_fn=filter_fn
        )

    alone = of(base, Float8Weights.ONLY)
    (mine,) = experts_of(alone)
    assert all(type(p.data) is Float8Tensor for p in mine.parameters())
    assert "weights only in float8" in repr(mine)
    values = convert_to_high_precision(copy.deepcopy(alone))
    assert type(next(values.parameters()).data) is Tensor
    state = high_precision_state_dict(alone)
    assert {type(x) for x in state.values()} == {Tensor}
    assert all(same_bits(state.pop(name), x) for name, x in values.state_dict().items())
    assert state == {}
    # Rows and runs have no columns: they are cast from the values.
    cast_from = base if recipe in ("tensorwise", "blockwise") else values
    made = []
    for each in (mine, *experts_of(of(cast_from, Float8Weights.ON_THE_FLY))):
        x, *routing = routed(each)
        y = each(x, *routing)
        made.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(map(same_bits, *made))
    other = of(built().requires_grad_(False), Float8Weights.ONLY)
    other.load_state_dict(base.state_dict())  # which is cast
    again = of(base, Float8Weights.ON_THE_FLY)
    again.load_state_dict(alone.state_dict())  # which is dequantised
    for name, p in mine.named_parameters():
        data, scale = p._data.clone(), p._scale.clone()
        assert same_bits(experts_of(again)[0].get_parameter(name), dequantise(p))
        for model in (other, copy.deepcopy(alone).bfloat16()):
            kept: Any = experts_of(model)[0].get_parameter(name)
            assert same_bits(kept._data, data)
            assert same_bits(kept._scale, scale)


def test_weights_in_float8_under_other_scales_are_refused() -> None:
    config = with_weights(ROWWISE, Float8Weights.ONLY)
    model = convert_to_float8_training(built().requires_grad_(False), config=config)
    x, offs = torch.randn(8, 64), torch.full((4,), 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weight in float8 under .*AXISWISE, expected"):
        grouped_linear(x, experts_of(model)[0].gate_up_proj, offs, config="blockwise")


@TWO
def test_weights_that_cannot_be_in_float8_alone_stay(name: str) -> None:
    """Those that train, and those that lie as [E, K, N]."""
    model = built(name).requires_grad_(name == "Mixtral")
    config = with_weights(ROWWISE, Float8Weights.ONLY)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda *_: True)
    assert experts_of(model) == []
    assert "with float8_weights=ONLY" in str(conversion_report(model).experts[0].skip_reason)


def test_the_filter_leaves_experts_whose_casts_take_longer() -> None:
    assert {x.skip_reason for x in chosen("Mixtral", MIXTRAL, gpu="H100").experts} == {None}
    (reason,) = {x.skip_reason for x in chosen("Qwen3Moe", QWEN3, gpu="H100").experts}
    assert reason.startswith("loses: modelled 0.")
    assert "x of bf16 on H100, 512 tokens for each of 128 experts (8192 tokens go to 8 ea" in reason
    everything = chosen("Qwen3Moe", QWEN3, module_filter_fn=all_linears)
    assert {x.skip_reason for x in everything.experts} == {None}
    few = chosen("Mixtral", MIXTRAL, gpu="H100", tokens_per_step=1024)
    assert all("256 tokens for each" in str(x.skip_reason) for x in few.experts)


def test_the_filter_knows_that_frozen_experts_in_float8_have_no_casts_of_weights() -> None:
    """They have two GEMMs, and a transpose for one of these."""
    config = with_weights(ROWWISE, Float8Weights.ONLY)
    for tokens, reason in ((8192, "modelled 0.98x of bf16"), (16384, "None")):
        how: Any = {"gpu": "H200", "tokens_per_step": tokens}
        assert all(
            reason in str(x.skip_reason)
            for x in chosen("Qwen3Moe", QWEN3, config, trains=False, **how).experts
        )
        trains = chosen("Qwen3Moe", QWEN3, **how).experts
        assert all("modelled 0." in x.skip_reason for x in trains)


def reasons(model: nn.Module) -> list[Any]:
    return [each.skip_reason for each in conversion_report(model).experts]


@pytest.mark.parametrize(
    ("config", "reason"),
    [("delayed", "delayed scaling"), ("blockwise", ""), (with_weights(ROWWISE), "")],
    ids=["delayed", "blockwise", "held"],
)
def test_what_grouped_gemms_cannot_do_stays(config: Any, reason: str) -> None:
    model = converted(config=config)
    assert all(r is None if reason == "" else reason in r for r in reasons(model))
    assert len(conversion_report(model).converted) == 4


def test_how_many_experts_a_token_has_is_known_by_other_names() -> None:
    experts = first_experts()
    experts.config = SimpleNamespace(top_k_experts=8)
    assert experts_per_token(experts, None) == 8


def test_converted_experts_take_another_config_or_raise() -> None:
    model = converted()
    with pytest.raises(ValueError, match=r"experts'(.)*cannot take the new config(.)*delayed"):
        convert_to_float8_training(model, config="delayed")
    convert_to_float8_training(model, config="tensorwise")
    assert all("tensorwise" in repr(each) for each in experts_of(model))


@pytest.mark.filterwarnings("error")
def test_weights_on_meta_are_held_later() -> None:
    with torch.device("meta"):
        model = built()
    update_float8_weights(convert_to_float8_training(model, config=with_weights(ROWWISE)))


def test_a_filter_decides_and_experts_convert_by_themselves() -> None:
    model = converted(module_filter_fn=lambda mod, fqn: "mlp" not in fqn)
    assert set(reasons(model)) == {"module_filter_fn returned False"}
    only = converted(module_filter_fn=lambda mod, fqn: fqn.endswith("experts"))
    assert not conversion_report(only).converted
    assert len(experts_of(only)) == 1
    of_layers = {"module_filter_fn": lambda mod, fqn: mod.in_features % 16 == 0}
    narrow = converted(config=None, **of_layers)
    assert all("AttributeError" in reason for reason in reasons(narrow))
    convert_to_float8_training(only, config="tensorwise", **of_layers)
    assert len(experts_of(only)) == 1
    odd = built()
    odd.model.layers[0].mlp.experts.down_proj = nn.Parameter(torch.ones(4, 64, 152))
    convert_to_float8_training(odd)
    assert all("multiples of 16" in reason for reason in reasons(odd)[:2])


def test_routers_stay() -> None:
    """Linear layers with as many outputs as experts that are called so, unless a filter says."""
    model = built(layers=2)
    model.model.layers[0].mlp.router = nn.Linear(64, 32)
    model.model.layers[1].mlp.other = nn.Linear(64, 32)
    many = {"num_local_experts": 32, "num_experts_per_tok": 2}
    model.model.layers[1].mlp.experts = hf.llama(0, "Mixtral", **many).model.layers[0].mlp.experts
    model.model.layers[1].mlp.router = type("Own", (nn.Linear,), {"forward": None})(64, 32)
    report = conversion_report(convert_to_float8_training(model, config="rowwise"))
    fates = {each.fqn: each.skip_reason for each in report.layers}
    assert all("a router" in str(fates[f"model.layers.{i}.mlp.router"]) for i in (0, 1))
    assert fates["model.layers.1.mlp.other"] is None
