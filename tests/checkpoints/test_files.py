"""Checkpoints in float8 that are written and read: bytes, values, other readers, damaged files."""

import copy
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
    Float8Linear,
    Float8LinearConfig,
    Float8Weights,
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
from float8.tensor import Float8Tensor, dequantise
from support.configs import delayed
from support.models import FeedForward, seeded

safetensors = pytest.importorskip("safetensors.torch")

LAYOUTS = [
    ("fine-grained-fp8", None, "blockwise"),
    ("fine-grained-fp8", "tensor", "tensorwise"),
    ("compressed-tensors", "channel", "rowwise"),
    ("compressed-tensors", "tensor", "tensorwise"),
]
layouts = pytest.mark.parametrize(("format", "strategy", "recipe"), LAYOUTS)


class Model(nn.Module):
    """Odd shapes, blocks that overhang, a head tied to the embedding, a buffer, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 200)
        self.ffn = FeedForward(200, 300, bias=True)
        self.lm_head = nn.Linear(200, 50, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.ffn(self.embed(ids)))


def only(recipe: str) -> Float8LinearConfig:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return replace(config, float8_weights=Float8Weights.ONLY)


def built(config: Any = None, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Model().bfloat16()
    if config is None:
        return model
    if isinstance(config, Float8LinearConfig):
        model.requires_grad_(False)
    return convert_to_float8_training(model, config=config)


def as_bytes(tensors: Any) -> dict[str, Tensor]:
    return {name: x.detach().contiguous().view(-1).view(torch.uint8) for name, x in tensors}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@layouts
def test_round_trips_byte_for_byte(
    format: str, strategy: str | None, recipe: str, tmp_path: Path
) -> None:
    """Trained -> file -> `ONLY` on the meta device -> file; and what is read multiplies alike."""
    trained = built(recipe)
    notes = save_float8_checkpoint(trained, tmp_path / "a", format, strategy=strategy)
    assert [note.name for note in notes] == [f"ffn.w{i}.weight" for i in (1, 2, 3)]
    assert all(note.as_trained and 25 < note.sqnr < 45 for note in notes)
    with torch.device("meta"):
        model = Model().bfloat16().requires_grad_(False)
    convert_to_float8_training(model, config=only(recipe), module_filter_fn=lambda m, n: "ffn" in n)
    with pytest.warns(UserWarning, match="passing"):
        load_float8_checkpoint(model, tmp_path / "a")
    assert model.lm_head.weight is model.embed.weight
    assert model.steps == 3
    more = {"strategy": strategy, "max_shard_size": 100_000}
    notes = save_float8_checkpoint(model, tmp_path / "b", format, **more)
    assert all(note.as_trained and note.sqnr == float("inf") for note in notes)
    assert len([*(tmp_path / "b").glob("*.safetensors")]) > 1
    first, second = (dict(float8_weights(m, format, strategy=strategy)) for m in (trained, model))
    assert same(as_bytes(first.items()), as_bytes(second.items()))
    files = [_files(tmp_path / name) for name in "ab"]
    assert same(*(as_bytes(each.items()) for each in files))
    assert files[0].keys() == first.keys()
    ids = torch.arange(20).view(4, 5)
    assert torch.equal(trained.eval()(ids), model.eval()(ids))


def _files(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.load_file(path)
    return tensors


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_are_the_dequantised_values(
    format: str, strategy: str | None, recipe: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In a plain model, and in a converted one that trains."""
    save_float8_checkpoint(built(recipe), tmp_path, format, strategy=strategy)
    written = dict(read_float8_checkpoint(tmp_path, dtype=dtype))
    for config in (None, recipe):
        model = load_float8_checkpoint(built(config, seed=1).to(dtype), tmp_path)
        for i in (1, 2, 3):
            weight: Any = written[f"ffn.w{i}.weight"]
            assert isinstance(weight, Float8Tensor)
            got = model.get_submodule(f"ffn.w{i}").weight
            assert torch.equal(got, dequantise(weight))
            assert got.requires_grad
        assert torch.equal(model.ffn.w1.bias, written["ffn.w1.bias"].to(dtype))


def test_another_granularity_is_said_to_be_a_cast(tmp_path: Path) -> None:
    for recipe in ("tensorwise", "delayed"):
        notes = save_float8_checkpoint(built(recipe), tmp_path)
        assert all(not note.as_trained and note.sqnr > 25 for note in notes)
    by_history = built(delayed())
    notes = save_float8_checkpoint(by_history, tmp_path, "compressed-tensors", strategy="tensor")
    assert not any(note.as_trained for note in notes)


@layouts
def test_scales_that_are_no_powers_of_two_stay_exact(
    format: str, strategy: str | None, recipe: str
) -> None:
    """Those of bfloat16, as compressed-tensors has them."""
    model = built(only(recipe))
    weight: Any = model.ffn.w1.weight
    scale = (weight._scale * 1.37).bfloat16().float()
    new = Float8Tensor(weight._data, scale, torch.bfloat16, weight._granularity)
    model.ffn.w1._parameters["weight"] = nn.Parameter(new, requires_grad=False)
    model.ffn.w2 = model.ffn.w3 = None
    tensors = dict(float8_weights(model, format, strategy=strategy))
    (stored,) = (x for name, x in tensors.items() if "scale" in name)
    wanted = scale[:, : stored.shape[-1]] if stored.numel() > 1 else scale
    assert torch.equal(stored, wanted.reshape(stored.shape))


@layouts
def test_gradients_through_a_frozen_base(
    format: str, strategy: str | None, recipe: str, tmp_path: Path
) -> None:
    """Against those of the dequantised weights in high precision."""
    save_float8_checkpoint(built(recipe), tmp_path, format, strategy=strategy)
    base = load_float8_checkpoint(built(only(recipe)), tmp_path)
    plain = load_float8_checkpoint(built(), tmp_path)
    x = seeded(0, 64, 200).bfloat16()
    made = []
    for each in (plain, base):
        y = each.ffn(x := x.detach().requires_grad_())
        made.append((y, *torch.autograd.grad(y, x, F.normalize(seeded(1, 64, 200)).bfloat16())))
    for want, got in zip(*made, strict=True):
        assert 20 * torch.log10(want.norm() / (want - got).norm()) > 20


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    """Of the whole model and of parts of it; and a wrapped model can be loaded."""
    model = built("blockwise")
    names = [name for name, _ in float8_weights(model)]
    assert not any("fp8_" in name for name in names)
    ffn, model.ffn = model.ffn, torch.compile(checkpoint_wrapper(model.ffn))
    for each in (model, torch.compile(model)):
        assert [name for name, _ in float8_weights(each)] == names
        assert quantization_config(each)["modules_to_not_convert"] == ["lm_head"]
    save_float8_checkpoint(torch.compile(model), tmp_path)
    read = load_float8_checkpoint(torch.compile(built(seed=1)), tmp_path)
    assert torch.equal(read._orig_mod.ffn.w1.bias, ffn.w1.bias)


def test_what_is_tied_to_an_embedding_stays_in_high_precision() -> None:
    model = convert_to_float8_training(Model().bfloat16(), module_filter_fn=all_linears)
    assert isinstance(model.lm_head, Float8Linear)
    assert quantization_config(model)["modules_to_not_convert"] == ["lm_head"]
    tensors = dict(float8_weights(model))
    assert tensors["embed.weight"].dtype == torch.bfloat16
    assert "lm_head.weight" not in tensors


def test_names_that_only_look_like_state_are_saved() -> None:
    model = built("delayed")
    model.fp8_gain = nn.Parameter(torch.ones(1))
    names = [name for name, _ in float8_weights(model) if "fp8_" in name]
    assert names == ["fp8_gain"]


class Config:
    model_type = "own"

    def __init__(self, **more: Any) -> None:
        self.more = more

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "own", "architectures": None, "dtype": "float32", **self.more}


def test_config_says_what_the_files_are(tmp_path: Path) -> None:
    """Servers want the class, and the dtype of what they read."""
    model = built("blockwise").float()
    model.config = Config(sizes=[1, 2])
    save_float8_checkpoint(torch.compile(model), tmp_path, dtype=torch.float16)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    assert config == {
        "model_type": "own",
        "architectures": ["Model"],
        "dtype": "float16",
        "sizes": [1, 2],
    }
    model.config = Config(sizes={1, 2})
    with pytest.raises(TypeError, match="set is not JSON"):
        save_float8_checkpoint(model, tmp_path / "other")
    for size in ("5GB", 0, True, 1e9):
        with pytest.raises(ValueError, match="expected bytes, 1 or more"):
            save_float8_checkpoint(built("blockwise"), tmp_path / "other", max_shard_size=size)
    assert not (tmp_path / "other").exists()


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
        written, config = _files(tmp_path), json.loads((tmp_path / "config.json").read_text())
        assert written["ffn.w1.bias"].dtype == written["embed.weight"].dtype == rest
        assert written["gain"].dtype == written["bias_of_router"].dtype == small
        assert written["exact"].dtype == torch.float64
        assert "dtype" not in config  # of a model without `config`
        if small == f32:
            again = load_float8_checkpoint(mixed(body).to_empty(device="cpu"), tmp_path)
            assert torch.equal(again.gain, model.gain)
            assert torch.equal(again.bias_of_router, model.bias_of_router)


def test_files_of_an_older_model_go_and_others_stay(tmp_path: Path) -> None:
    others = {"adapter_model.safetensors", "model_of_mine.safetensors", "tokenizer.json"}
    for name in ("model.safetensors", "model-00009-of-00010.safetensors", *others):
        safetensors.save_file({"x": torch.ones(1)}, tmp_path / name)
    for size in (100_000, 10**9, 50_000):  # more files, fewer, more again
        save_float8_checkpoint(built("blockwise"), tmp_path, max_shard_size=size)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert len({*index["weight_map"].values()}) == {100_000: 3, 10**9: 1, 50_000: 7}[size]
        now = {"config.json", "model.safetensors.index.json", *index["weight_map"].values()}
        assert {path.name for path in tmp_path.iterdir()} == now | others
        load_float8_checkpoint(built(seed=1), tmp_path)


def refuse(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a model, a disk or a user fail, now or later."""
    calls, save, replace = [], safetensors.save_file, Path.replace

    def fails(plain: Any, number: int, error: BaseException) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == number:
                raise error
            return plain(*args, **more)

        return call

    if name == "meta":
        model.ffn.w3.to("meta")
    elif name == "disk":
        monkeypatch.setattr(
            "safetensors.torch.save_file", fails(save, 2, OSError(28, "No space left"))
        )
    elif name == "interrupt":
        monkeypatch.setattr("safetensors.torch.save_file", fails(save, 2, KeyboardInterrupt()))
    else:  # as files are put in place
        number = int(name.split()[-1])
        monkeypatch.setattr(Path, "replace", fails(replace, number, PermissionError("not yours")))


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    "name", ["meta", "disk", "interrupt", "replace 2", "replace 4", "replace 5"]
)
def test_an_older_checkpoint_outlives_a_failure(
    name: str, has_index: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without an index, as others write it; nothing new is left behind."""
    older, newer = built("blockwise"), built("rowwise", seed=1)
    save_float8_checkpoint(older, tmp_path)
    if not has_index:
        (tmp_path / "model-00001.safetensors").rename(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors.index.json").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patched:
        refuse(name, newer, patched)
        with pytest.raises((ValueError, OSError, KeyboardInterrupt)):
            save_float8_checkpoint(newer, tmp_path, "compressed-tensors", max_shard_size=100_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    read = load_float8_checkpoint(built(seed=2), tmp_path)
    assert torch.equal(read.ffn.w1.bias, older.ffn.w1.bias)


def test_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    """A file, or a link; what a link leads to stays."""
    left, other = tmp_path / "new/.float8_unfinished", tmp_path / "other"
    left.mkdir(parents=True)
    other.touch()
    (left / "model-00001.safetensors").touch()
    (left / "config.json").symlink_to(other)
    save_float8_checkpoint(built("blockwise"), left.parent)
    assert len([*left.parent.iterdir()]) == 3
    assert other.read_bytes() == b""


def test_older_files_that_cannot_be_removed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    unlink = Path.unlink

    def fails(path: Path, **more: Any) -> None:
        if path.name == "model.safetensors":
            raise PermissionError("not yours")
        unlink(path, **more)

    monkeypatch.setattr(Path, "unlink", fails)
    model = built("blockwise")
    with pytest.warns(UserWarning, match=r"/model.safetensors of .*\(not yours\); remove it"):
        notes = save_float8_checkpoint(model, tmp_path)
    assert len(notes) == 3
    assert torch.equal(
        load_float8_checkpoint(built(seed=1), tmp_path).ffn.w1.bias, model.ffn.w1.bias
    )


def test_views_of_one_memory_are_written(tmp_path: Path) -> None:
    """Whole, overlapping and conjugated ones, in one file; they are no tied Parameters."""

    def more(seed: int) -> Any:
        model, x = built("blockwise", seed=seed), seeded(seed, 8) * (1 + 2j)
        model.views = nn.ParameterList([x[:5], x[3:], x, x.conj(), x.imag, x.conj().imag])
        return model

    model = more(0)
    save_float8_checkpoint(model, tmp_path)
    tensors = _files(tmp_path)
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
    parametrize.register_parametrization(model.ffn.w1, "weight", nn.Identity())
    with pytest.raises(ValueError, match="nor parametrized"):
        dict(float8_weights(model))


def test_zeros_are_written_without_loss(tmp_path: Path) -> None:
    model = built("blockwise")
    nn.init.zeros_(model.ffn.w1.weight)
    note, *_ = save_float8_checkpoint(model, tmp_path)
    assert note.sqnr == float("inf")


def test_scales_of_caches_are_skipped(tmp_path: Path) -> None:
    save_float8_checkpoint(built("blockwise"), tmp_path)
    rewritten(tmp_path, tensors=lambda t: t.update({"ffn.k_scale": torch.ones(1)}))
    assert "ffn.k_scale" not in dict(read_float8_checkpoint(tmp_path))


# ---------------------------------------------------------------- what is refused


def rewritten(folder: Path, **changes: Any) -> None:
    """Change `config.json`, or the tensors of the one file, by functions of them."""
    config = json.loads((folder / "config.json").read_text())
    changes.get("config", lambda quantization: None)(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    if "tensors" in changes:
        (path,) = folder.glob("*.safetensors")
        tensors = safetensors.load_file(path)
        changes["tensors"](tensors)
        safetensors.save_file(tensors, path)
        (folder / "model.safetensors.index.json").unlink()


SCALE, WEIGHT = "ffn.w1.weight_scale_inv", "ffn.w1.weight"
GROUPS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": ["x"]}}}
LIST = {"config_groups": ["x"]}
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no scale": ("expected a scale for it", {"tensors": lambda t: t.pop(SCALE)}),
    "block size": ("weight_block_size", {"config": lambda c: c.update(weight_block_size=[64, 64])}),
    "ue8m0": ("scale_fmt", {"config": lambda c: c.update(scale_fmt="ue8m0")}),
    "bytes of ue8m0": (
        "got dtype",
        {"tensors": lambda t: t.update({SCALE: torch.ones(3, 2, dtype=torch.uint8)})},
    ),
    "scales of another size": (
        r"got shape \(3, 1\)",
        {"tensors": lambda t: t.update({SCALE: torch.ones(3, 1)})},
    ),
    "fp4": ("expert_dtype", {"config": lambda c: c.update(expert_dtype="fp4")}),
    "packed fp4": (
        "got dtype",
        {"tensors": lambda t: t.update({WEIGHT: torch.ones(300, 100, dtype=torch.int8)})},
    ),
    "experts in one": (
        r"got float8 of shape \(2, 150, 200\), expected two dims",
        {"tensors": lambda t: t.update({WEIGHT: t[WEIGHT].view(2, 150, 200)})},
    ),
    "one number": ("weight_block_size", {"config": lambda c: c.update(weight_block_size=128)}),
    "a list of groups": ("expected one group", {"config": lambda c: c.update(GROUPS | LIST)}),
    "a group of lists": (r"weights\['type'\]", {"config": lambda c: c.update(GROUPS)}),
    "integers": (
        "expected numbers like torch.bfloat16",
        {"tensors": lambda t: t.update({"ffn.w2.bias": torch.ones(200, dtype=torch.int8)})},
    ),
    "two values of one tensor": (
        "got other values than those of 'embed.weight'",
        {"tensors": lambda t: t.update({"lm_head.weight": t["embed.weight"] + 1})},
    ),
    "method": ("quant_method 'gptq'", {"config": lambda c: c.update(quant_method="gptq")}),
    "missing": ("got nothing for 1 Parameter", {"tensors": lambda t: t.pop("ffn.w2.bias")}),
    "unknown": ("'other'", {"tensors": lambda t: t.update(other=torch.ones(1))}),
    "shape": (
        r"ffn.w2.bias: got shape \(7,\)",
        {"tensors": lambda t: t.update({"ffn.w2.bias": torch.ones(7)})},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_raise_before_anything_is_changed(name: str, tmp_path: Path) -> None:
    match, changes = BAD[name]
    save_float8_checkpoint(built("blockwise"), tmp_path)
    rewritten(tmp_path, **changes)
    model = built("blockwise", seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        load_float8_checkpoint(model, tmp_path)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_cut_and_missing_shards(tmp_path: Path) -> None:
    save_float8_checkpoint(built("blockwise"), tmp_path, max_shard_size=100_000)
    *_, last = sorted(tmp_path.glob("*.safetensors"))
    whole = last.read_bytes()
    last.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="cut or damaged"):
        load_float8_checkpoint(built(), tmp_path)
    last.unlink()
    with pytest.raises(FileNotFoundError, match=r"No such file.*model-0000"):
        load_float8_checkpoint(built(), tmp_path)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    """Many save tied weights twice: the same values are read, whatever their dtypes."""
    save_float8_checkpoint(built("blockwise"), tmp_path)
    rewritten(tmp_path, tensors=lambda t: t.update({"lm_head.weight": t["embed.weight"].float()}))
    model = load_float8_checkpoint(built(seed=1), tmp_path)
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, built().embed.weight)


def test_indices_that_say_nothing_and_tensors_in_two_files(tmp_path: Path) -> None:
    save_float8_checkpoint(built("blockwise"), tmp_path)
    index, (path,) = tmp_path / "model.safetensors.index.json", tmp_path.glob("*.safetensors")
    outside = tmp_path.parent / path.name
    outside.write_bytes(path.read_bytes())  # which would be read
    for text, match in (
        ("{}", "got no weight_map"),
        ('{"weight_map": {}}', "got no weight_map"),
        ('{"weight_map": ["a"]}', "got no weight_map"),
        ('{"weight_map": {"a": null}}', "got None as the file of 'a'"),
        ('{"weight_map": {"a": ""}}', "got '' as the file of 'a'"),
        ('{"weight_map": {"a": "."}}', "got '.' as the file of 'a'"),
        (json.dumps({"weight_map": {"a": f"../{path.name}"}}), "expected one in this folder"),
        (json.dumps({"weight_map": {"a": str(outside)}}), "expected one in this folder"),
        ("[]", "got a list, expected an object"),
        ("{", "expected an object"),
        ("[" * 100_000, "expected an object"),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=match):
            read_float8_checkpoint(tmp_path)
    index.unlink()
    (tmp_path / "other.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="in two files and no index"):
        read_float8_checkpoint(tmp_path)


def test_shards_in_a_folder_of_their_own(tmp_path: Path) -> None:
    save_float8_checkpoint(built("blockwise"), tmp_path)
    index, (path,) = tmp_path / "model.safetensors.index.json", tmp_path.glob("*.safetensors")
    (tmp_path / "shards").mkdir()
    path.rename(tmp_path / "shards" / path.name)
    index.write_text(index.read_text().replace(path.name, f"shards/{path.name}"))
    model = load_float8_checkpoint(built(seed=1), tmp_path)
    assert torch.equal(model.embed.weight, built().embed.weight)


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


def test_what_a_model_cannot_take_or_give(tmp_path: Path) -> None:
    save_float8_checkpoint(built("blockwise"), tmp_path)
    load = partial(load_float8_checkpoint, built(), tmp_path)
    with pytest.raises(ValueError, match="convert it by the recipe for this checkpoint"):
        load_float8_checkpoint(built(only("tensorwise")), tmp_path)
    with pytest.raises(ValueError, match="without a Float8Linear"):
        save_float8_checkpoint(built(), tmp_path)
    for format, strategy in (("gguf", None), ("compressed-tensors", "group")):
        with pytest.raises(ValueError, match="expected one of 'fine-grained-fp8'"):
            dict(float8_weights(built("rowwise"), format, strategy=strategy))
    for name in ("dtype", "param_dtype"):
        for dtype in (torch.int8, torch.float64, torch.float8_e8m0fnu, False):
            with pytest.raises(TypeError, match=rf"{name}: got {dtype}"):
                dict(float8_weights(built("rowwise"), **{name: dtype}))
    with pytest.raises(TypeError, match=r"dtype: got torch\.int8"):
        read_float8_checkpoint(tmp_path, dtype=torch.int8)
    for device in ("nowhere", "cuda:77", -7):
        for read in (partial(read_float8_checkpoint, tmp_path), load):
            with pytest.raises((RuntimeError, AssertionError)):
                read(device=device)


BESIDE: dict[str, tuple[str, Any]] = {
    "lazy": ("x", lambda: nn.UninitializedBuffer()),
    "float8": ("x", lambda: built(only("blockwise")).ffn.w1.weight.data),
    "scale": ("weight_scale_inv", lambda: torch.ones(3, 2)),
    "scale of no weight": ("bias_scale_inv", lambda: torch.ones(1)),
}


@pytest.mark.parametrize("what", BESIDE)
def test_what_files_cannot_have_raises_before_they_are_written(what: str, tmp_path: Path) -> None:
    name, make = BESIDE[what]
    model = built("blockwise")
    model.ffn.w1.register_buffer(name, make())
    for write in (partial(save_float8_checkpoint, folder=tmp_path / "new"), float8_weights):
        with pytest.raises(ValueError, match=rf"ffn\.w1\.{name}.*: got .* expected"):
            [*write(model)]
    assert not (tmp_path / "new").exists()
    model.ffn.w1.register_buffer(name, make(), persistent=False)
    assert len(save_float8_checkpoint(model, tmp_path / "new")) == 3


def test_layers_in_high_precision_are_listed() -> None:
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
