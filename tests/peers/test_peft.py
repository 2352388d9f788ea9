"""LoRA of PEFT on a converted model, and a model with LoRA converted: trained, saved, merged."""

import copy
import itertools
import json
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from float8 import (
    all_linears,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    high_precision_state_dict,
)
from float8 import sync_float8_amax_and_scale_history as sync
from float8.checkpoints import float8_weights, quantization_config, save_float8_checkpoint
from float8.checkpoints.adapters import merged_base_layer
from float8.linear import Float8Linear
from sqnr import same_bits, sqnr
from support.configs import BOTH, delayed
from support.float8_files import bits, in_files, only, same_bytes
from support.lazily import Lazily
from support.models import seeded
from support.rings import short

peft, hf = Lazily("peft"), Lazily("support.hugging_face")
safetensors = Lazily("safetensors.torch")

ORDERS = ("convert first", "LoRA first")


def adapted(order: str, config, plain: Any = None, **more) -> Any:
    plain = hf.llama() if plain is None else plain
    if order == "convert first":
        convert_to_float8_training(plain, config=config)
    lora = hf.with_lora(plain, **more).eval()  # no dropout
    with torch.no_grad():  # else it has no effect yet
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    if order == "LoRA first":
        convert_to_float8_training(lora, config=config)
    return lora


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=hf.tokens()).logits


def train(model: nn.Module, steps: int = 2) -> nn.Module:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    attachment = attach_to_optimizer(model, optimizer)
    for seed in range(steps):
        optimizer.zero_grad()
        model(input_ids=hf.tokens(seed), labels=hf.tokens(seed)).loss.backward()
        optimizer.step()
    attachment.remove()
    return model


@BOTH
@pytest.mark.parametrize(
    "dora", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["DoRA", "LoRA"]
)
def test_both_orders_train_alike_and_merge(config, dora: bool) -> None:
    """Adapters stay in high precision; DoRA reads the weights. Merged as in high precision."""
    first, second = (train(adapted(order, config, use_dora=dora)) for order in ORDERS)
    for lora in (first, second):
        names = {name for name, x in lora.named_modules() if isinstance(x, Float8Linear)}
        assert len(names) == 14
        assert all(name.endswith(".base_layer") for name in names)
    state = second.state_dict()
    assert all(same_bits(x, state[name]) for name, x in first.state_dict().items())
    plain = convert_to_high_precision(copy.deepcopy(second))
    assert conversion_report(plain).converted == ()
    assert sqnr(logits(plain), logits(second)) > 15
    wanted = plain.merge_and_unload()
    for merged in (first.merge_and_unload(), second.merge_and_unload()):
        assert len(conversion_report(merged).converted) == 14
        state = merged.state_dict()
        assert all(torch.equal(state[name], x) for name, x in wanted.state_dict().items())
        assert sqnr(logits(wanted), logits(merged)) > 15
        sync(merged)
        convert_to_high_precision(merged)
        assert torch.equal(logits(merged), logits(wanted))
        assert [*map(type, merged.modules())] == [*map(type, hf.llama().modules())]


@pytest.mark.parametrize("order", ORDERS)
def test_an_adapter_is_saved_without_float8_and_loads_into_the_plain_model(
    order: str, tmp_path: Path
) -> None:
    lora = train(adapted(order, delayed(), modules_to_save=["lm_head"]))
    lora.save_pretrained(tmp_path)
    names = safetensors.load_file(tmp_path / "adapter_model.safetensors").keys()
    assert any("lora_A" in name for name in names)
    assert any("lm_head" in name for name in names)
    assert not any("fp8" in name for name in names)
    plain = peft.PeftModel.from_pretrained(hf.llama(), tmp_path).eval()
    assert sqnr(logits(plain), logits(lora)) > 15
    convert_to_float8_training(plain, config=delayed())
    assert torch.equal(logits(plain), logits(lora))


# ---------------------------------------------------------------- weights in float8 only, and files

HOW: dict[str, dict[str, Any]] = {
    "blockwise": {},
    "tensorwise": {"format": "compressed-tensors", "strategy": "tensor"},
    "rowwise": {"format": "compressed-tensors"},
    "mxfp8": {"strategy": "mxfp8"},
}
"""The formats with the scales of each recipe."""


def frozen() -> nn.Module:
    return hf.llama().bfloat16().requires_grad_(False)


def merged_in_float32(model: nn.Module, recipe: str) -> nn.Module:
    """The plain model with the exact values of the base, merged by PEFT, converted again."""
    plain = convert_to_high_precision(copy.deepcopy(model).float()).merge_and_unload()
    return convert_to_float8_training(plain, config=recipe)


@pytest.mark.parametrize(
    ("order", "recipe"), short(range(len(HOW) + 1), itertools.product(ORDERS, HOW))
)
def test_adapters_are_merged_into_weights_in_float8_only(order: str, recipe: str) -> None:
    """On the way to files: the sum in float32 is cast once, with the bytes of a float32 merge."""
    model = adapted(order, only(recipe), frozen())
    wanted = dict(float8_weights(merged_in_float32(model, recipe), **HOW[recipe]))
    assert same_bytes(float8_weights(model, **HOW[recipe]), wanted.items())
    with pytest.raises(NotImplementedError, match="save_float8_checkpoint merges adapters of PEFT"):
        model.merge_and_unload()


def test_weights_in_float8_only_are_not_saved_by_transformers(tmp_path: Path) -> None:
    saved = adapted("LoRA first", only("tensorwise")).unload()
    with pytest.raises(RuntimeError, match=r"state_dict=high_precision_state_dict\(model\)"):
        saved.save_pretrained(tmp_path)


def test_weights_in_float8_only_are_saved_and_come_back(tmp_path: Path) -> None:
    model = adapted("LoRA first", only("tensorwise"))
    model.save_pretrained(tmp_path / "adapter")  # has none of them
    base = model.unload()
    base.save_pretrained(tmp_path / "base", state_dict=high_precision_state_dict(base))
    saved = type(base).from_pretrained(tmp_path / "base")
    assert torch.equal(logits(saved), logits(convert_to_high_precision(base)))


EXPORTED: dict[str, Any] = {
    "rslora": {"use_rslora": True, "r": 4},
    "DoRA": {"use_dora": True},
    "biases": {"lora_bias": True, "target_modules": ["q_proj", "o_proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "up_proj"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 5]}},
}


@pytest.mark.parametrize(
    ("name", "tied"),
    short({0, 2, 4, 6, 7, 8, 9, 10, 11}, itertools.product(EXPORTED, [False, True])),
)
def test_what_is_exported_is_the_merged_model(name: str, tied: bool, tmp_path: Path) -> None:
    """Names, bytes and `config.json`; the model itself stays as it is."""
    plain = hf.llama(attention_bias=True, tie_word_embeddings=tied).bfloat16()
    model = adapted("convert first", "blockwise", plain=plain, **EXPORTED[name])
    with torch.no_grad():
        for key, x in model.named_parameters():
            if x.requires_grad:
                x += seeded(len(key), *x.shape) * 0.05
    before = {key: x.clone() for key, x in model.state_dict().items()}
    merged = merged_in_float32(model, "blockwise")
    wanted = dict(float8_weights(merged, dtype=torch.bfloat16))
    notes = save_float8_checkpoint(model, tmp_path)
    assert same_bytes(in_files(tmp_path).items(), wanted.items())
    assert [*dict(float8_weights(model))] == [*wanted]
    assert quantization_config(model) == quantization_config(merged)
    changed = {note.name for note in notes if not note.as_trained}
    assert changed == {n.removesuffix("_scale_inv") for n in wanted if "_scale" in n} & {
        f"{key.partition('base_model.model.')[2].partition('.lora_A')[0]}.weight" for key in before
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] == ("lm_head.weight" not in wanted)
    state = model.state_dict()
    assert all(torch.equal(x, state[key]) for key, x in before.items())


@pytest.mark.parametrize("base", ["blockwise", only("blockwise")], ids=["masters", "bytes"])
def test_the_adapters_that_are_merged_are_the_active_ones(base: Any) -> None:
    """All of several, none that are disabled or merged already; within wrappers, too. Ranks gather
    no others."""
    model = adapted("convert first", base, frozen())
    alone = dict(float8_weights(copy.deepcopy(model).unload()))
    model.add_adapter("b", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    for names, count in (("b", 3), (["default", "b"], 5)):
        model.base_model.set_adapter(names)
        q_proj = model.base_model.model.model.layers[0].self_attn.q_proj
        merged_base_layer(q_proj, gather=(gather := mock.Mock(side_effect=lambda x: x)))
        assert gather.call_count == count  # the weight, and two of each adapter
        wanted = dict(float8_weights(merged_in_float32(model, "blockwise"), dtype=torch.bfloat16))
        assert same_bytes(float8_weights(model), wanted.items())
    with model.disable_adapter():
        assert same_bytes(float8_weights(model), alone.items())
    blocks = model.base_model.model.model.layers
    blocks[0], blocks[1] = torch.compile(blocks[0]), checkpoint_wrapper(blocks[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bytes(float8_weights(torch.compile(model)), wanted.items())
    in_another = nn.ModuleDict({"policy": model})
    assert [*dict(float8_weights(in_another))] == [f"policy.{name}" for name in wanted]
    q_proj.lora_A["default"].weight = q_proj.lora_A["b"].weight  # of one that is not active, too
    model.base_model.set_adapter("b")
    merged_base_layer(q_proj, gather=(gather := mock.Mock(side_effect=lambda x: x)))
    assert gather.call_count == 3


@pytest.mark.parametrize("outer", ["LoHa", "IA3", "mixed"])
def test_adapters_in_adapters_and_of_two_kinds_are_all_merged(outer: str) -> None:
    """Hooks of layers, whatever they hold, are not copied with them."""
    lora = peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    loha = peft.LoHaConfig(target_modules=["up_proj"], init_weights=False)
    torch.manual_seed(0)
    if outer == "mixed":
        model = peft.get_peft_model(hf.llama(), lora, mixed=True)
        model.add_adapter("b", loha)
        model.set_adapter(["default", "b"])
    else:
        ia3 = peft.IA3Config(target_modules=["up_proj"], feedforward_modules=[])
        model = peft.get_peft_model(peft.get_peft_model(hf.llama(), lora), ia3)
        if outer == "LoHa":
            model = peft.get_peft_model(peft.get_peft_model(hf.llama(), lora), loha)
        for name, x in model.named_parameters():
            if "ia3_l" in name:
                torch.nn.init.uniform_(x, 0.5, 2)
    before = logits(model)
    convert_to_float8_training(model, config="blockwise")
    layers = [x for x in model.modules() if isinstance(x, Float8Linear)]
    layers[0].register_forward_hook(partial(lambda lock, *_: None, threading.Lock()))
    plain = hf.llama()
    convert_to_float8_training(plain, config="blockwise")
    state = dict(float8_weights(model))
    for name, x in plain.named_parameters():
        data = state[name].float()
        if (scale := state.get(f"{name}_scale_inv")) is not None:
            N, K = data.shape
            data *= scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:N, :K]
        x.data.copy_(data)
    assert sqnr(before, logits(convert_to_high_precision(plain))) > 15
    assert sqnr(before, logits(hf.llama())) < 12  # without them


def test_a_tied_config_without_embeddings_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    model.config = SimpleNamespace(to_dict=lambda: {"tie_word_embeddings": True})
    model.get_output_embeddings = lambda: None
    convert_to_float8_training(model, config="blockwise", module_filter_fn=all_linears)
    save_float8_checkpoint(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_adapters_of_experts_are_merged_on_export() -> None:
    """`target_parameters`: layers of PEFT in each other."""
    model = hf.llama(0, "Mixtral", num_local_experts=2).bfloat16()
    convert_to_float8_training(model, config="rowwise")
    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    more = {"target_modules": ["q_proj"], "target_parameters": names, "init_lora_weights": False}
    model = hf.with_lora(model, **more)
    wanted = dict(float8_weights(merged_in_float32(model, "rowwise"), **HOW["rowwise"]))
    got = dict(float8_weights(model, dtype=torch.float32, **HOW["rowwise"]))
    assert got.keys() == wanted.keys()
    of_experts = [name for name in got if ".experts." in name]
    assert len(of_experts) == 2 * 2 * 3 * 2
    assert all(torch.equal(bits(got[name]), bits(wanted[name])) for name in of_experts)


def test_adapters_that_cannot_be_merged_are_refused(tmp_path: Path) -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    activated = peft.LoraConfig(
        target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[1]
    )
    quantized = hf.with_lora(hf.converted("blockwise"))
    layer = next(x.base_layer for x in quantized.modules() if hasattr(x, "base_layer"))
    layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    for model, match in (
        (
            peft.get_peft_model(hf.converted("blockwise"), prompt),
            "a PeftModelForCausalLM that cannot be merged",
        ),
        (peft.get_peft_model(hf.converted("blockwise"), activated), "aLoRA does not support merg"),
        (quantized, "that another library has quantized.*; load the base dequantized"),
    ):
        with pytest.raises(ValueError, match=match):
            save_float8_checkpoint(model, tmp_path / "a")
        assert not [*tmp_path.glob("a/*")]


def peak(run: Callable[[], object]) -> int:
    """The most bytes that live at a time, beyond those that lived before."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    events = [x for x in profile.kineto_results.events() if x.name() == "[memory]"]
    sizes = [x.nbytes() for x in sorted(events, key=lambda x: x.start_ns())]
    return max(itertools.accumulate(sizes))


def test_the_peak_of_merging_is_one_layer() -> None:
    """However many layers there are."""

    def run(blocks: int) -> int:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(blocks)))
        model.bfloat16().requires_grad_(False)
        convert_to_float8_training(model, config=only("blockwise"), module_filter_fn=all_linears)
        config = peft.LoraConfig(r=4, target_modules=r"\d+", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        return peak(lambda: deque(float8_weights(model), maxlen=0))

    few, many = run(2), run(8)
    assert many - few < 256 * 256  # less than the float8 data of one layer more
    assert few < 5 * 256 * 256 * 4  # one layer in float32, what PEFT adds, and the cast
