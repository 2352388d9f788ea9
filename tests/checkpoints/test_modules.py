"""Layers that transformers and compressed-tensors loaded in float8, and what they become."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    Float8Linear,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8.checkpoints import float8_weights, load_float8_checkpoint, save_float8_checkpoint
from float8.tensor import Float8Tensor, dequantise
from sqnr import sqnr
from support.float8_files import LAYOUTS, Layout, only, same_bytes
from support.lazily import Lazily, needs_installed
from support.models import gradients, seeded

needs_installed("safetensors")
transformers, hf = Lazily("transformers"), Lazily("support.hugging_face")
fp8 = Lazily("transformers.integrations.finegrained_fp8")
pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it

E8M0 = torch.float8_e8m0fnu


@pytest.fixture(autouse=True)
def _read_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    hf.read_in_float8(monkeypatch)


def llama(seed: int = 0) -> nn.Module:
    """In whole blocks: transformers takes blocks that overhang for smaller ones."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 64}
    return hf.llama(seed, num_hidden_layers=1, **sizes).bfloat16()


def saved(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """Write a converted Llama; return what was written."""
    if layout.format == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model = convert_to_float8_training(llama(), config=layout.recipe)
    save_float8_checkpoint(model, folder, **layout.how)
    return dict(float8_weights(model, **layout.how))


def loaded(folder: Path, **conversion: Any) -> Any:
    """What transformers loads, converted."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return convert_to_float8_training(model, **conversion)


def in_float8(model: nn.Module) -> dict[str, Float8Tensor]:
    return {name: p.data for name, p in model.named_parameters() if type(p.data) is Float8Tensor}


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[i] for i in (0, 3, 6, 7)]
    + [pytest.param(LAYOUTS[i], marks=pytest.mark.exhaustive) for i in (1, 2, 4, 5)],
    ids=lambda x: f"{x.format}-{x.strategy}",
)
def test_bytes_stay_and_come_out_again(layout: Layout, tmp_path: Path) -> None:
    """Also after a forward, at which compressed-tensors would decompress all layers.

    What trains is made of the same values.
    """
    written = saved(tmp_path, layout)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = dict(model.state_dict())
    convert_to_float8_training(model)
    assert len(conversion_report(model).converted) == 7
    got = model(hf.tokens()).logits
    hf.step(model)
    kept = in_float8(model)
    assert len(kept) == 7
    again = dict(float8_weights(model, **layout.how))
    assert again.keys() == written.keys()
    for name, x in again.items():
        stored, held = (y.view(E8M0) if y.dtype == torch.uint8 else y for y in (x, theirs[name]))
        assert torch.equal(stored.float(), held.float().view(x.shape)), name
    if layout not in (LAYOUTS[3], LAYOUTS[7]):  # compressed-tensors rounds scales to bfloat16
        assert same_bytes(again.items(), written.items())
    masters = loaded(tmp_path, config=layout.recipe)
    assert in_float8(masters) == {}
    assert dict(float8_weights(masters, **layout.how)).keys() == written.keys()
    convert_to_high_precision(model)
    for each in (model, masters):
        assert all(torch.equal(each.get_parameter(name), dequantise(x)) for name, x in kept.items())
    assert sqnr(model(hf.tokens()).logits, got) > 20


@pytest.mark.parametrize("layout", LAYOUTS[:1], ids=["blocks"])
def test_a_model_is_quantised_until_all_are_masters(layout: Layout, tmp_path: Path) -> None:
    """And these train."""
    saved(tmp_path, layout)
    masters = loaded(tmp_path, config="rowwise", module_filter_fn=lambda m, n: "mlp" in n)
    assert masters.is_quantized  # attention is as it was
    assert sum(isinstance(layer, fp8.FP8Linear) for layer in masters.modules()) == 4
    convert_to_float8_training(masters, config="rowwise")
    assert not masters.is_quantized
    masters.save_pretrained(tmp_path / "masters")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "masters")
    state = plain.state_dict()
    assert all(torch.equal(p, state[name]) for name, p in masters.named_parameters())
    optimizer = torch.optim.AdamW(masters.to(torch.float32).parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        losses.append(hf.step(masters)["loss"])
        optimizer.step()
    assert losses[2] < losses[0]


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[6]], ids=lambda x: x.strategy)
def test_adapters_train_on_a_base_in_float8(layout: Layout, tmp_path: Path) -> None:
    """LoRA by PEFT: gradients as on the dequantised base, which itself stays as it is.

    What is exported has the tensors of the checkpoint that was loaded.
    """
    pytest.importorskip("peft")
    written = saved(tmp_path, layout)
    base, made = loaded(tmp_path), []
    for model in (load_float8_checkpoint(llama(1), tmp_path), base):
        how = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
        model = hf.with_lora(model, **how)
        model.train()(input_ids=hf.tokens(), labels=hf.tokens()).loss.backward()
        made.append(gradients(model))
    wanted, got = made
    assert wanted.keys() == got.keys()
    for name, want in wanted.items():
        assert sqnr(want, got[name]) > 12, name
    assert len(in_float8(base)) == 7
    again = dict(float8_weights(model, **layout.how))
    assert [(n, x.shape, x.dtype) for n, x in again.items()] == [
        (n, x.shape, x.dtype) for n, x in written.items()
    ]


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

    e8 = torch.tensor([[126, 0], [130, 127]], dtype=torch.uint8).view(E8M0)
    grouped = fp8.FP8GroupedLinear(256, 512, 4, (128, 128))
    replaced = layer((128, 128), torch.ones(2, 2))
    replaced.forward = lambda x: x
    for each, config, reason in (
        (layer((64, 64), torch.ones(4, 4)), None, "expected one of"),
        (layer((128, 128), torch.ones(4, 4)), None, r"expected (2, 2)"),
        (layer((64, 64), e8), None, "expected one of"),
        (
            layer((128, 128), torch.ones(2, 2)),
            only("tensorwise"),
            "expected the recipe 'blockwise'",
        ),
        (grouped, None, "float8_e4m3fn"),
        (replaced, None, "`forward` of its own"),
    ):
        model = nn.Sequential(each)
        with pytest.warns(UserWarning, match="no layer of Sequential was converted"):
            convert_to_float8_training(model, config=config)
        assert reason in str(conversion_report(model).skipped[0].skip_reason)
        assert model[0] is each
        assert isinstance(each, fp8.FP8Linear)
    for taken in (layer(None, torch.tensor(0.5)), layer((128, 128), e8)):
        model = convert_to_float8_training(nn.Sequential(taken))
        assert isinstance(model[0], Float8Linear)
    assert torch.equal(model[0].weight._scale[:, :2], torch.tensor([[0.5, 2**-127], [8, 1]]))
