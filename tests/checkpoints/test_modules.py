"""Layers that transformers and compressed-tensors loaded in float8, and what they become."""

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    Float8Linear,
    Float8Weights,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8.checkpoints import float8_weights, load_float8_checkpoint, save_float8_checkpoint
from float8.tensor import Float8Tensor
from support.models import seeded

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
hf = importlib.import_module("support.hugging_face")
fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")

LAYOUTS = [
    ("fine-grained-fp8", None, "blockwise"),
    ("compressed-tensors", "channel", "rowwise"),
    ("compressed-tensors", "tensor", "tensorwise"),
]
layouts = pytest.mark.parametrize(("format", "strategy", "recipe"), LAYOUTS)


def llama(seed: int = 0) -> nn.Module:
    """In whole blocks: transformers takes blocks that overhang for smaller ones."""
    return hf.llama(seed, hidden_size=128, intermediate_size=384, head_dim=64).bfloat16()


def saved(folder: Path, format: str, strategy: str | None, recipe: str) -> dict[str, Tensor]:
    """Write a converted Llama; return what was written."""
    model = convert_to_float8_training(llama(), config=recipe)
    save_float8_checkpoint(model, folder, format, strategy=strategy)
    return dict(float8_weights(model, format, strategy=strategy))


def loaded(written: dict[str, Tensor], format: str) -> nn.Module:
    """Return a Llama as transformers has it on a GPU: its layers with bytes and scales."""
    model = llama(1)
    for name, layer in [*model.named_modules()]:
        data = written.get(f"{name}.weight")
        if not isinstance(layer, nn.Linear) or data is None or data.dtype != torch.float8_e4m3fn:
            continue
        if format == "fine-grained-fp8":
            new: Any = fp8.FP8Linear(layer.in_features, layer.out_features, (128, 128))
            new.weight_scale_inv = nn.Parameter(written[f"{name}.weight_scale_inv"])
        else:
            new = nn.Linear(layer.in_features, layer.out_features, bias=False)
            new.weight_scale = nn.Parameter(written[f"{name}.weight_scale"], requires_grad=False)
            new.forward = lambda x: pytest.fail("not that of a Float8Linear")
            strategy = "tensor" if new.weight_scale.numel() == 1 else "channel"
            new.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(strategy=strategy))
        new.weight = nn.Parameter(data, requires_grad=False)
        model.set_submodule(name, new)
    others = {n: x for n, x in written.items() if x.dtype == torch.bfloat16}
    model.load_state_dict(others, strict=False)
    if format == "compressed-tensors":
        hook = model.register_forward_pre_hook(lambda *_: pytest.fail("nothing is compressed"))
        model.ct_decompress_hook = hook
    return model


@layouts
def test_files_are_read_as_transformers_reads_them(
    format: str, strategy: str | None, recipe: str, tmp_path: Path
) -> None:
    """Bit for bit, dequantised to bfloat16."""
    saved(tmp_path, format, strategy, recipe)
    if format == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        how = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    else:
        config = transformers.FineGrainedFP8Config(dequantize=True)
        how = {"quantization_config": config}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how).state_dict()
    mine = load_float8_checkpoint(llama(1), tmp_path).state_dict()
    assert all(torch.equal(x, mine[name]) for name, x in theirs.items())


@layouts
def test_bytes_stay_and_come_out_again(
    format: str, strategy: str | None, recipe: str, tmp_path: Path
) -> None:
    written = saved(tmp_path, format, strategy, recipe)
    model = loaded(written, format)
    plain = load_float8_checkpoint(llama(1), tmp_path)
    convert_to_float8_training(model)
    report = conversion_report(model)
    assert len(report.converted) == 14
    assert sum(isinstance(p, Float8Tensor) for p in model.parameters()) == 14
    again = dict(float8_weights(model, format, strategy=strategy))
    assert again.keys() == written.keys()
    for name, x in written.items():
        assert torch.equal(x.view(torch.uint8), again[name].view(torch.uint8)), name
    ids = hf.tokens()
    want, got = (each.eval()(ids).logits for each in (plain, model))
    assert 20 * torch.log10(want.norm() / (want - got).norm()) > 20
    convert_to_high_precision(model)
    assert torch.equal(model(ids).logits, want)


@layouts
def test_masters_train(format: str, strategy: str | None, recipe: str, tmp_path: Path) -> None:
    model = loaded(saved(tmp_path, format, strategy, recipe), format)
    plain = load_float8_checkpoint(llama(1), tmp_path)
    convert_to_float8_training(model, config="tensorwise")
    state = plain.state_dict()
    assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        losses.append(hf.step(model)["loss"])
        optimizer.step()
    assert losses[2] < losses[0]


def test_adapters_train_on_a_base_in_float8(tmp_path: Path) -> None:
    """LoRA by PEFT: gradients as on the dequantised base, which itself stays as it is."""
    peft = pytest.importorskip("peft")
    written = saved(tmp_path, *LAYOUTS[0])
    plain = load_float8_checkpoint(llama(1), tmp_path)
    base = convert_to_float8_training(loaded(written, "fine-grained-fp8"))
    made = []
    for model in (plain, base):
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
        model.train()(input_ids=hf.tokens(), labels=hf.tokens()).loss.backward()
        made.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    wanted, got = made
    assert wanted.keys() == got.keys()
    for name, want in wanted.items():
        assert 20 * torch.log10(want.norm() / (want - got[name]).norm()) > 12, name
    assert sum(isinstance(p, Float8Tensor) for p in base.parameters()) == 14
    with pytest.raises(ValueError, match="with adapters of PEFT"):
        save_float8_checkpoint(model, tmp_path / "adapted")


@pytest.mark.parametrize("of", LAYOUTS[1:])
def test_what_compressed_tensors_has_loaded(of: Any, tmp_path: Path) -> None:
    """It would decompress all layers at the first forward."""
    pytest.importorskip("compressed_tensors")
    written = saved(tmp_path, *of)
    for config in (None, of[2]):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        convert_to_float8_training(model, config=config)
        hf.step(model)
        kept = sum(isinstance(p, Float8Tensor) for p in model.parameters())
        assert kept == (0 if config else 14)
        again = dict(float8_weights(model, of[0], strategy=of[1]))
        assert again.keys() == written.keys()
        model.to(torch.float32)


@pytest.mark.parametrize("of", [LAYOUTS[0], ("fine-grained-fp8", "tensor", "tensorwise")])
def test_what_transformers_has_loaded(of: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """As on a GPU, into its own layers."""
    quantizers = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")
    of_layers = quantizers.FineGrainedFP8HfQuantizer
    monkeypatch.setattr(of_layers, "validate_environment", lambda *args, **more: None)
    written = saved(tmp_path, *of)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(isinstance(layer, fp8.FP8Linear) for layer in model.modules()) == 14
    convert_to_float8_training(model)
    again = dict(float8_weights(model, of[0], strategy=of[1]))
    assert again.keys() == written.keys()
    assert all(torch.equal(x.float(), again[name].float()) for name, x in written.items())
    masters = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    convert_to_float8_training(masters, config="rowwise", module_filter_fn=lambda m, n: "mlp" in n)
    assert masters.is_quantized  # attention is as it was
    convert_to_float8_training(masters, config="rowwise")
    assert not masters.is_quantized
    masters.save_pretrained(tmp_path / "masters")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "masters")
    state = plain.state_dict()
    assert all(torch.equal(p, state[name]) for name, p in masters.named_parameters())


def test_scales_do_not_say_the_dtype_of_a_model() -> None:
    """Those of experts are in float32, and stay."""
    experts = nn.Module()
    experts.down_proj_scale_inv = nn.Parameter(torch.ones(2, 2, 2))
    layer = fp8.FP8Linear(128, 128, (128, 128))
    model = convert_to_float8_training(nn.Sequential(experts, layer))
    assert layer.weight.dtype == torch.bfloat16
    assert isinstance(model[1], Float8Linear)


def test_what_cannot_be_taken_stays_and_says_why() -> None:
    def layer(block: Any, scale: Tensor) -> Any:
        new = fp8.FP8Linear(256, 256, block)
        new.weight = nn.Parameter(seeded(0, 256, 256).to(torch.float8_e4m3fn), requires_grad=False)
        new.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        return new

    e8 = torch.ones(2, 2).to(torch.float8_e8m0fnu)
    for each, config, reason in (
        (layer((64, 64), torch.ones(4, 4)), None, "expected 128x128 blocks"),
        (layer((128, 128), torch.ones(4, 4)), None, r"expected (2, 2)"),
        (layer((128, 128), e8), None, "float8_e8m0fnu, expected one of"),
        (layer((128, 128), torch.ones(2, 2)), "tensorwise", "expected the recipe 'blockwise'"),
    ):
        if config is not None:
            model = convert_to_float8_training(hf.llama().requires_grad_(False), config=config)
            config = next(x for x in model.modules() if isinstance(x, Float8Linear)).config
            config = copy.copy(config)
            object.__setattr__(config, "float8_weights", Float8Weights.ONLY)
        model = nn.Sequential(each)
        with pytest.warns(UserWarning, match="no layer of Sequential was converted"):
            convert_to_float8_training(model, config=config)
        assert reason in str(conversion_report(model).skipped[0].skip_reason)
        assert type(model[0]) is fp8.FP8Linear
    grouped = fp8.FP8GroupedLinear(256, 512, 4, (128, 128))
    replaced = layer((128, 128), torch.ones(2, 2))
    replaced.forward = lambda x: x
    for each, reason in ((grouped, "float8_e4m3fn"), (replaced, "`forward` of its own")):
        model = nn.Sequential(each)
        with pytest.warns(UserWarning, match="no layer of Sequential was converted"):
            convert_to_float8_training(model)
        assert reason in str(conversion_report(model).skipped[0].skip_reason)
        assert model[0] is each
        assert isinstance(each, fp8.FP8Linear)
    by_tensor = nn.Sequential(layer(None, torch.tensor(0.5)))
    convert_to_float8_training(by_tensor)
    assert isinstance(by_tensor[0], Float8Linear)
