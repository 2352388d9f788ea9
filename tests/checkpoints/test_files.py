"""Checkpoints in float8 that are written and read: bytes, values, names, what stays as it was."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

from float8 import (
    CastConfig,
    Float8Linear,
    ScalingGranularity,
    all_linears,
    convert_to_float8_training,
)
from float8.checkpoints import (
    float8_weights,
    load_float8_checkpoint,
    quantization_config,
    read_float8_checkpoint,
    save_float8_checkpoint,
)
from float8.checkpoints.schemes import values_of
from float8.config import as_config
from float8.tensor import Float8Tensor, dequantise
from sqnr import sqnr
from support.configs import delayed
from support.float8_files import (
    INDEX,
    LAYOUTS,
    Layout,
    Model,
    bits,
    built,
    in_files,
    layouts,
    only,
    rewrite,
    same_bytes,
)
from support.models import seeded

pytest.importorskip("safetensors")


@layouts
def test_round_trips_byte_for_byte(layout: Layout, tmp_path: Path) -> None:
    """Trained -> file -> `ONLY` on the meta device -> file; and what is read multiplies alike."""
    trained = built(layout.recipe)
    notes = save_float8_checkpoint(trained, tmp_path / "a", **layout.how)
    assert [note.name for note in notes] == [f"ffn.w{i}.weight" for i in (1, 2, 3)]
    assert all(note.as_trained for note in notes)
    with torch.device("meta"):
        model = Model().bfloat16().requires_grad_(False)
    how = {"config": only(layout.recipe), "module_filter_fn": lambda mod, fqn: "ffn" in fqn}
    convert_to_float8_training(model, **how)
    with pytest.warns(UserWarning, match="passing"):
        load_float8_checkpoint(model, tmp_path / "a")
    assert model.lm_head.weight is model.embed.weight
    assert model.steps == 3
    notes = save_float8_checkpoint(model, tmp_path / "b", **layout.how, max_shard_size=100_000)
    assert all(note.as_trained for note in notes)
    assert len([*(tmp_path / "b").glob("*.safetensors")]) > 1
    found = [float8_weights(each, **layout.how) for each in (trained, model)]
    found += [in_files(tmp_path / name).items() for name in "ab"]
    first, *others = map(dict, found)
    assert all(same_bytes(first.items(), each.items()) for each in others)
    ids = torch.arange(20).view(4, 5)
    assert torch.equal(trained.eval()(ids), model.eval()(ids))


@layouts
def test_what_is_read_is_what_was_written(layout: Layout, tmp_path: Path) -> None:
    """In a plain model, in one that trains, and, as for gradients, in a frozen base in float8."""
    save_float8_checkpoint(built(layout.recipe), tmp_path, **layout.how)
    for dtype in (torch.bfloat16, torch.float32):
        written = dict(read_float8_checkpoint(tmp_path, dtype=dtype))
        for config in (None, layout.recipe):
            model = load_float8_checkpoint(built(config, seed=1).to(dtype), tmp_path)
            for i in (1, 2, 3):
                weight: Any = written[f"ffn.w{i}.weight"]
                assert isinstance(weight, Float8Tensor)
                got = model.get_submodule(f"ffn.w{i}").weight
                assert torch.equal(got, dequantise(weight))
                assert got.requires_grad
            assert torch.equal(model.ffn.w1.bias, written["ffn.w1.bias"].to(dtype))
    x = seeded(0, 64, 200).bfloat16()
    made = []
    for config in (None, only(layout.recipe)):
        base = load_float8_checkpoint(built(config), tmp_path)
        y = base.ffn(x := x.detach().requires_grad_())
        made.append((y, *torch.autograd.grad(y, x, F.normalize(seeded(1, 64, 200)).bfloat16())))
    assert all(sqnr(want, got) > 20 for want, got in zip(*made, strict=True))


def test_another_granularity_is_said_to_be_a_cast(tmp_path: Path) -> None:
    for recipe in ("tensorwise", "delayed"):
        notes = save_float8_checkpoint(trained := built(recipe), tmp_path)
        assert not any(note.as_trained for note in notes)
        weight = dict(read_float8_checkpoint(tmp_path))["ffn.w1.weight"]
        assert sqnr(trained.ffn.w1.weight, dequantise(weight)) > 25
    by_history = built(delayed())
    notes = save_float8_checkpoint(by_history, tmp_path, "compressed-tensors", strategy="tensor")
    assert not any(note.as_trained for note in notes)


@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_scales_that_are_no_powers_of_two_stay_exact(layout: Layout) -> None:
    """Those of bfloat16, as compressed-tensors has them."""
    model = built(only(layout.recipe))
    weight: Any = model.ffn.w1.weight
    scale = (weight._scale * 1.37).bfloat16().float()
    new = Float8Tensor(weight._data, scale, torch.bfloat16, weight._granularity)
    model.ffn.w1._parameters["weight"] = nn.Parameter(new, requires_grad=False)
    model.ffn.w2 = model.ffn.w3 = None
    tensors = dict(float8_weights(model, **layout.how))
    (stored,) = (x for name, x in tensors.items() if "scale" in name)
    wanted = scale[:, : stored.shape[-1]] if stored.numel() > 1 else scale
    assert torch.equal(stored, wanted.reshape(stored.shape))


def test_exponents_of_all_values(tmp_path: Path) -> None:
    """A byte is 2^(byte - 127), 255 is NaN, in files of all three dtypes; blocks may be zeros."""
    model = built("blockwise")
    model.ffn = model.ffn.w1  # [300, 200]: 3 x 2 blocks
    nn.init.zeros_(model.ffn.weight)
    for strategy, zero in (("block_ue8m0", 127 - 108), ("mxfp8", 0)):
        save_float8_checkpoint(model, tmp_path / "zeros", strategy=strategy)
        assert (
            in_files(tmp_path / "zeros")["ffn.weight_scale_inv"].view(torch.uint8) == zero
        ).all()
    stored = torch.tensor([[0, 1], [126, 127], [254, 255]], dtype=torch.uint8)
    exact = torch.tensor([[-127, -126], [-1, 0], [127, 128]]).double().exp2()
    exact[2, 1] = torch.nan
    data = (torch.arange(60_000).view(300, 200) % 127).to(torch.uint8)  # no NaN among them
    values = exact.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    values = (data.view(torch.float8_e4m3fn).double() * values).float()
    for scale in (stored, stored.view(torch.float8_e8m0fnu), exact.float()):
        written = {"ffn.weight": data.view(torch.float8_e4m3fn), "ffn.weight_scale_inv": scale}
        folder = tmp_path / str(scale.dtype)
        save_float8_checkpoint(model, folder, strategy="block_ue8m0")
        rewrite(folder, tensors=lambda found: found.update(written))  # noqa: B023
        weight: Any = dict(read_float8_checkpoint(folder))["ffn.weight"]
        got = dequantise(weight, torch.float32)
        torch.testing.assert_close(got, values, rtol=0, atol=0, equal_nan=True)
        frozen = built(only("blockwise"))
        frozen.ffn = frozen.ffn.w1
        load_float8_checkpoint(frozen, folder)
        (note,) = save_float8_checkpoint(frozen, folder / "again", strategy="block_ue8m0")
        again = in_files(folder / "again")
        assert note.as_trained
        assert torch.equal(bits(again["ffn.weight"]), data.view(-1))
        assert again["ffn.weight_scale_inv"].dtype == torch.float8_e8m0fnu
        assert torch.equal(bits(again["ffn.weight_scale_inv"]), stored.view(-1))
        as_floats = dict(float8_weights(frozen))["ffn.weight_scale_inv"]  # as DeepSeek-V3.1
        torch.testing.assert_close(as_floats, exact.float(), rtol=0, atol=0, equal_nan=True)


def test_scales_that_are_no_powers_of_two_are_cast_anew_for_exponents(tmp_path: Path) -> None:
    """From masters, and from weights in float8 alone."""
    config = {"format": "fine-grained-fp8", "strategy": "block_ue8m0"}
    wanted = built("blockwise").ffn.w1.weight
    for model in (built("blockwise"), built(only("blockwise"))):
        notes = save_float8_checkpoint(model, tmp_path, **config)
        assert not any(note.as_trained for note in notes)
        weight = dict(read_float8_checkpoint(tmp_path))["ffn.w1.weight"]
        assert sqnr(wanted, dequantise(weight)) > 25
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (said["scale_fmt"], said["weight_block_size"]) == ("ue8m0", [128, 128])


@pytest.mark.parametrize("format", ["fine-grained-fp8", "compressed-tensors"])
def test_squares_of_32_are_written_as_mxfp8(format: str, tmp_path: Path) -> None:
    """The scale of a square for each of its rows: what is read multiplies the same bytes."""
    squares = CastConfig(scaling_granularity=ScalingGranularity.BLOCK_32x32)
    trained = built(replace(as_config("mxfp8"), cast_config_weight=squares))
    notes = save_float8_checkpoint(trained, tmp_path, format, strategy="mxfp8")
    assert all(note.as_trained for note in notes)
    read = load_float8_checkpoint(built(only("mxfp8"), seed=1), tmp_path)
    ids = torch.arange(20).view(4, 5)
    assert torch.equal(trained.eval()(ids), read.eval()(ids))


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    """Of the whole model and of parts of it; nor does state. A wrapped model can be loaded."""
    model = built("delayed")
    model.fp8_gain = nn.Parameter(torch.ones(1))  # which only looks like state
    assert [name for name, _ in float8_weights(model) if "fp8_" in name] == ["fp8_gain"]
    model = built("blockwise")
    names = [name for name, _ in float8_weights(model)]
    ffn, model.ffn = model.ffn, torch.compile(checkpoint_wrapper(model.ffn))
    for each in (model, torch.compile(model)):
        assert [name for name, _ in float8_weights(each)] == names
        assert quantization_config(each)["modules_to_not_convert"] == ["lm_head"]
    save_float8_checkpoint(torch.compile(model), tmp_path)
    read = load_float8_checkpoint(torch.compile(built(seed=1)), tmp_path)
    assert torch.equal(read._orig_mod.ffn.w1.bias, ffn.w1.bias)


class Config:
    model_type = "own"

    def to_dict(self) -> dict[str, Any]:
        more = {"architectures": None, "dtype": "float32", "sizes": [1, 2]}
        return {"model_type": "own", **more}


def test_config_says_what_the_files_are(tmp_path: Path) -> None:
    """Servers want the class, and the dtype of what they read."""
    model = built("blockwise").float()
    model.config = Config()
    save_float8_checkpoint(torch.compile(model), tmp_path, dtype=torch.float16)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    assert config == {
        "model_type": "own",
        "architectures": ["Model"],
        "dtype": "float16",
        "sizes": [1, 2],
    }


def test_float32_beside_a_body_of_16_bits_stays(tmp_path: Path) -> None:
    """Buffers and Parameters, of any model; unless `dtype` says otherwise, or all is float32."""

    def mixed(dtype: torch.dtype) -> Any:
        model = built("blockwise").to(dtype)
        model.gain = nn.Parameter(torch.tensor([1 + 2**-20]))
        model.register_buffer("bias_of_router", torch.tensor([6.0001]))
        model.register_buffer("exact", torch.tensor([0.1], dtype=torch.float64))
        return model

    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for body, given, rest, small in (
        (bf16, None, bf16, f32),
        (f16, None, f16, f32),
        (f32, None, bf16, bf16),
        (bf16, bf16, bf16, bf16),
        (bf16, f32, f32, f32),
    ):
        model = mixed(body)
        save_float8_checkpoint(model, tmp_path, dtype=given)
        written, config = in_files(tmp_path), json.loads((tmp_path / "config.json").read_text())
        assert written["ffn.w1.bias"].dtype == written["embed.weight"].dtype == rest
        assert written["gain"].dtype == written["bias_of_router"].dtype == small
        assert written["exact"].dtype == torch.float64
        assert "dtype" not in config  # of a model without `config`
        if small == f32:
            again = load_float8_checkpoint(mixed(body).to_empty(device="cpu"), tmp_path)
            assert torch.equal(again.gain, model.gain)
            assert torch.equal(again.bias_of_router, model.bias_of_router)


def test_views_of_one_memory_are_written(tmp_path: Path) -> None:
    """Whole, overlapping and conjugated ones, in one file; they are no tied Parameters."""

    def more(seed: int) -> Any:
        model, x = built("blockwise", seed=seed), seeded(seed, 8) * (1 + 2j)
        model.views = nn.ParameterList([x[:5], x[3:], x, x.conj(), x.imag, x.conj().imag])
        return model

    model = more(0)
    save_float8_checkpoint(model, tmp_path)
    tensors = in_files(tmp_path)
    for i, x in enumerate(model.views):
        assert torch.equal(tensors[f"views.{i}"].to(x.dtype), x)


def test_parametrized_layers_are_in_high_precision() -> None:
    model = built("blockwise")
    wanted = model.ffn.w2.weight
    parametrize.register_parametrization(model.ffn.w2, "weight", nn.Identity())
    model.ffn.w3.double()
    tensors = dict(float8_weights(model))
    assert quantization_config(model)["modules_to_not_convert"] == ["ffn.w2", "ffn.w3", "lm_head"]
    assert torch.equal(tensors["ffn.w2.parametrizations.weight.original"], wanted)
    assert torch.equal(tensors["ffn.w3.weight"], model.ffn.w3.weight)


def in_a_folder_of_their_own(folder: Path) -> None:
    index, (path,) = folder / INDEX, folder.glob("*.safetensors")
    (folder / "shards").mkdir()
    path.rename(folder / "shards" / path.name)
    index.write_text(index.read_text().replace(path.name, f"shards/{path.name}"))


@pytest.mark.parametrize(
    "change",
    [
        in_a_folder_of_their_own,
        partial(rewrite, config=lambda c: c.update(scale_fmt=None, fmt=None, expert_dtype=None)),
        # Of a cache, which is skipped.
        partial(rewrite, tensors=lambda t: t.update({"ffn.k_scale": torch.ones(1)})),
        # Many save tied weights twice: the same values, whatever their dtypes.
        partial(rewrite, tensors=lambda t: t.update({"lm_head.weight": t["embed.weight"].float()})),
    ],
    ids=["shards", "defaults", "scale of a cache", "two names"],
)
def test_other_files_are_read_all_the_same(change: Any, tmp_path: Path) -> None:
    save_float8_checkpoint(built("blockwise"), tmp_path)
    change(tmp_path)
    model = load_float8_checkpoint(built(seed=1), tmp_path)
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, built().embed.weight)
    assert "ffn.k_scale" not in dict(read_float8_checkpoint(tmp_path))


AUTO_FP8: list[dict[str, Any]] = [
    {"activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"},
    {"activation_scheme": "dynamic"},
    {"producer": "what the error about modelopt says to write"},
]


@pytest.mark.parametrize(("shape", "says"), [*zip([(), (1,), ()], AUTO_FP8, strict=True)])
def test_files_of_auto_fp8_are_read(
    shape: tuple[int, ...], says: dict[str, Any], tmp_path: Path
) -> None:
    """`quant_method` "fp8" without blocks, beside `weight_scale` and static scales."""
    save_float8_checkpoint(built("tensorwise"), tmp_path, strategy="tensor")
    wanted = dict(read_float8_checkpoint(tmp_path))

    def as_auto_fp8(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            layer = name.removesuffix(".weight_scale_inv")
            tensors[f"{layer}.weight_scale"] = tensors.pop(name).reshape(shape)
            for of in ("input", "act", "kv") if says.get("activation_scheme") == "static" else ():
                tensors[f"{layer}.{of}_scale"] = torch.ones(())

    def config(said: dict[str, Any]) -> None:
        said.clear()
        said |= {"quant_method": "fp8"} | says

    rewrite(tmp_path, config, as_auto_fp8)
    for how in (None, only("tensorwise")):
        read = load_float8_checkpoint(built(how, seed=1), tmp_path)
        for layer in ("ffn.w1", "ffn.w2", "ffn.w3"):
            weight: Any = read.get_submodule(layer).weight
            assert isinstance(weight, Float8Tensor) == (how is not None)
            assert torch.equal(
                values_of(weight).bfloat16(), values_of(wanted[f"{layer}.weight"]).bfloat16()
            )


@pytest.mark.parametrize("structure", [[128, 128], "128x128"], ids=str)
def test_blocks_of_compressed_tensors(structure: Any, tmp_path: Path) -> None:
    """Scales in bfloat16 stay exact, and values are those of compressed-tensors itself.

    In blocks that overhang, too.
    """
    base = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    how = {"format": "compressed-tensors", "strategy": "block"}
    save_float8_checkpoint(built("blockwise"), tmp_path / "a", **how)
    said = json.loads((tmp_path / "a/config.json").read_text())["quantization_config"]
    args = said["config_groups"]["group_0"]["weights"]
    assert schemes.QuantizationConfig.model_validate(said).format == "float-quantized"

    def rounded(tensors: dict[str, Tensor]) -> None:
        tensors |= {n: x.bfloat16() for n, x in tensors.items() if n.endswith("_scale")}

    change = lambda c: c["config_groups"]["group_0"]["weights"].update(block_structure=structure)  # noqa: E731
    rewrite(tmp_path / "a", change, rounded)
    frozen = load_float8_checkpoint(built(only("blockwise"), seed=1), tmp_path / "a")
    save_float8_checkpoint(frozen, tmp_path / "b", **how)
    first, second = in_files(tmp_path / "a"), in_files(tmp_path / "b")
    assert first.keys() == second.keys()
    scheme = schemes.QuantizationScheme(targets=["Linear"], weights=args)
    decompress = base.BaseCompressor.get_value_from_registry("float-quantized").decompress
    for i in (1, 2, 3):
        name = f"ffn.w{i}.weight"
        assert torch.equal(bits(first[name]), bits(second[name]))
        scale = first[name + "_scale"]
        assert scale.dtype == torch.bfloat16
        assert torch.equal(scale.float(), second[name + "_scale"])
        state = {"weight": first[name], "weight_scale": scale.float()}
        theirs = decompress(state, scheme)["weight"]
        mine: Any = frozen.get_submodule(f"ffn.w{i}").weight
        assert torch.equal(values_of(mine.detach()), theirs)


def test_channel_scales_may_have_one_dim(tmp_path: Path) -> None:
    """[N] as well as [N, 1]: each row has one in both."""
    how = {"format": "compressed-tensors", "strategy": "channel"}
    save_float8_checkpoint(built("rowwise"), tmp_path, **how)
    wanted = dict(read_float8_checkpoint(tmp_path))
    flat = lambda t: t.update({n: x[:, 0] for n, x in t.items() if "scale" in n})  # noqa: E731
    rewrite(tmp_path, tensors=flat)
    assert in_files(tmp_path)["ffn.w1.weight_scale"].dim() == 1
    for name, x in read_float8_checkpoint(tmp_path):
        parts = [
            (each._data, each._scale) if hasattr(each, "_data") else (each,)
            for each in (x, wanted[name])
        ]
        assert all(map(torch.equal, *parts))
    frozen = load_float8_checkpoint(built(only("rowwise"), seed=1), tmp_path)
    ids = torch.arange(20).view(4, 5)
    assert torch.equal(frozen.eval()(ids), built("rowwise").eval()(ids))


@pytest.mark.parametrize("config", [None, only("blockwise")], ids=["masters", "bytes"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_loaded_in_inference_mode_trains(config: Any, device: str, tmp_path: Path) -> None:
    """As what was there before; and inference tensors are written outside of that mode."""
    save_float8_checkpoint(built("blockwise"), tmp_path)
    with torch.device(device):
        model = built(config)
    with torch.inference_mode():
        model.register_buffer("passing", torch.ones(2), persistent=False)
        load_float8_checkpoint(model, tmp_path)
        assert torch.is_inference_mode_enabled()
    assert not any(x.is_inference() for x in (*model.parameters(), model.steps))
    x = seeded(0, 16, 200).bfloat16().requires_grad_()
    model.ffn(x).sum().backward()
    assert x.grad.isfinite().all()
    with torch.inference_mode():
        model = Model().bfloat16()
    load_float8_checkpoint(model, tmp_path)
    assert torch.equal(model.embed.weight, built().embed.weight)


def test_layers_in_high_precision_are_listed() -> None:
    """Also those that are tied to an embedding."""
    tied = convert_to_float8_training(Model().bfloat16(), module_filter_fn=all_linears)
    assert isinstance(tied.lm_head, Float8Linear)
    assert quantization_config(tied)["modules_to_not_convert"] == ["lm_head"]
    tensors = dict(float8_weights(tied))
    assert tensors["embed.weight"].dtype == torch.bfloat16
    assert "lm_head.weight" not in tensors
    model = built("blockwise")
    config = quantization_config(model)
    assert config["modules_to_not_convert"] == ["lm_head"]
    assert config["weight_block_size"] == [128, 128]
    config = quantization_config(model, "compressed-tensors", strategy="channel")
    assert config["ignore"] == ["lm_head"]
    model.experts = nn.Module()  # which transformers would replace
    model.experts.weight = nn.Parameter(torch.ones(2, 32, 32))
    assert quantization_config(model)["modules_to_not_convert"] == ["lm_head", "experts"]
    model.positions = nn.Parameter(torch.ones(1, 2, 32))  # no reason to leave out the whole model
    assert quantization_config(model)["modules_to_not_convert"] == ["lm_head", "experts"]
    model.ffn.w1.adapters = nn.Parameter(torch.ones(2, 2, 2))
    assert dict(float8_weights(model))["ffn.w1.weight"].dtype == torch.float8_e4m3fn
    everything = convert_to_float8_training(
        nn.Sequential(nn.Linear(32, 32)), module_filter_fn=all_linears
    )
    assert isinstance(everything[0], Float8Linear)
    assert quantization_config(everything)["modules_to_not_convert"] == []
