"""What cannot be read changes no model; what cannot be written leaves an older checkpoint there."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from float8.checkpoints import (
    float8_weights,
    load_float8_checkpoint,
    read_float8_checkpoint,
    save_float8_checkpoint,
)
from support.float8_files import INDEX, Unchanged, built, only, rewrite

safetensors: Any = pytest.importorskip("safetensors.torch")

# ---------------------------------------------------------------- reading

SCALE, WEIGHT, BIAS = "ffn.w1.weight_scale_inv", "ffn.w1.weight", "ffn.w2.bias"
GROUPS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": ["x"]}}}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NO_MAP = "got no weight_map"
Damage = Callable[[Path], object]


def config(**changes: Any) -> Damage:
    return partial(rewrite, config=lambda c: c.update(changes))


def group(**weights: Any) -> Damage:
    """What compressed-tensors says of its one group of weights."""
    one = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8} | weights}
    return config(**GROUPS | {"config_groups": {"group_0": one}})


def put(name: str, change: Callable[[dict[str, Tensor]], Tensor]) -> Damage:
    return partial(rewrite, tensors=lambda t: t.update({name: change(t)}))


def drop(name: str) -> Damage:
    return partial(rewrite, tensors=lambda t: t.pop(name))


def index(text: str) -> Damage:
    """Write an index; `BESIDE` and `OUTSIDE` are names of a file of another folder."""

    def change(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        outside = folder.parent / path.name
        outside.write_bytes(path.read_bytes())  # which would be read
        given = text.replace("BESIDE", f"../{path.name}").replace("OUTSIDE", str(outside))
        (folder / INDEX).write_text(given)

    return change


def cut(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-10])


def copied(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    shutil.copy(path, folder / "other.safetensors")
    (folder / INDEX).unlink()


def elsewhere(folder: Path, name: str) -> None:
    """As modelopt has it, also beside a `config.json`."""
    (folder / name).write_text('{"quantization": {"quant_algo": "FP8"}}')
    (folder / "config.json").write_text('{"model_type": "llama"}')


def of_comfy(folder: Path, name: str) -> None:
    """A file alone; its metadata, or the name of a tensor, say what it is."""
    (path,) = folder.glob("*.safetensors")
    tensors = safetensors.load_file(path) | ({name: torch.zeros(2)} if name else {})
    metadata = {} if name else {"_quantization_metadata": '{"format_version": "1.0"}'}
    safetensors.save_file(tensors, path, metadata)
    (folder / INDEX).unlink()
    (folder / "config.json").unlink()


UNREADABLE: dict[str, tuple[str, Damage]] = {
    "no scale": ("expected a scale for it", drop(SCALE)),
    "block size": ("weight_block_size", config(weight_block_size=[64, 64])),
    "one number": ("weight_block_size", config(weight_block_size=128)),
    "scale_fmt": ("got 'ue4m3', expected 'float' or 'ue8m0'", config(scale_fmt="ue4m3")),
    "exponent of a tensor": (
        r"got 'ue8m0', expected 'float'",
        config(weight_block_size=None, scale_fmt="ue8m0"),
    ),
    "bytes of ue8m0": ("got dtype", put(SCALE, lambda t: torch.ones(3, 2, dtype=torch.uint8))),
    "other scales": (
        r"got shape \(3, 1\) .*; take the config.json of this checkpoint, or load it with trans",
        put(SCALE, lambda t: torch.ones(3, 1)),
    ),
    "scales of rows": (r"got shape \(300,\) .*; take the", put(SCALE, lambda t: torch.ones(300))),
    "scales of others": (
        r"got float8 without ffn.w1.weight_scale_inv",
        put("ffn.w1.weight_scale", lambda t: t.pop(SCALE)),
    ),
    "fp4": ("expert_dtype", config(expert_dtype="fp4")),
    "packed fp4": ("got dtype", put(WEIGHT, lambda t: torch.ones(300, 100, dtype=torch.int8))),
    "experts in one": (
        r"got float8 of shape \(2, 150, 200\), expected two dims",
        put(WEIGHT, lambda t: t[WEIGHT].view(2, 150, 200)),
    ),
    "a list of groups": (
        "number of groups: got 0, expected 1",
        config(**GROUPS | {"config_groups": ["x"]}),
    ),
    "a group of lists": (r"weights\['type'\]", config(**GROUPS)),
    "float scales of 1x32": ("got 'float', expected 'ue8m0'", config(weight_block_size=[1, 32])),
    "mxfp4": (
        r"'mxfp4', expected 'fp8' or 'mxfp8' or 'comp.*; load it with .* and Mxfp4Config",
        config(quant_method="mxfp4"),
    ),
    "nvfp4": (
        r"\['num_bits'\]: got 4, expected 8; load it with transformers, dequantized",
        group(num_bits=4, group_size=16, strategy="tensor_group"),
    ),
    "modelopt": (
        r"'modelopt_fp4', .*; if its quant_algo is 'FP8', write .*; else take the model in 16 bits",
        config(quant_method="modelopt_fp4", quant_algo="NVFP4"),
    ),
    "modelopt by its own file": (
        r"got 'modelopt', .*; else take the model in 16 bits",
        lambda folder: elsewhere(folder, "hf_quant_config.json"),
    ),
    "comfy": (r"got 'comfy', .*; take the model in 16 bits", lambda folder: of_comfy(folder, "")),
    "older comfy": ("got 'comfy'", lambda folder: of_comfy(folder, "scaled_fp8")),
    "small blocks": (
        r"\['block_structure'\]: got \[64, 64\], expected \[128, 128\]",
        group(strategy="block", block_structure=[64, 64]),
    ),
    "long groups": (r"\['group_size'\]: got 128, expected 32", group(**MX | {"group_size": 128})),
    "integers": (
        "expected numbers like torch.bfloat16",
        put(BIAS, lambda t: torch.ones(200, dtype=torch.int8)),
    ),
    "two values of one tensor": (
        "got other values than those of 'embed.weight'",
        put("lm_head.weight", lambda t: t["embed.weight"] + 1),
    ),
    "method": ("'quant_method'.: got 'gptq'", config(quant_method="gptq")),
    "missing": ("got nothing for 1 Parameter", drop(BIAS)),
    "unknown": ("'other'", put("other", lambda t: torch.ones(1))),
    "shape": (r"ffn.w2.bias: got shape \(7,\)", put(BIAS, lambda t: torch.ones(7))),
    "cut": ("cut or damaged", cut),
    "no file": (
        r"No such file.*model-0000",
        lambda folder: next(folder.glob("*.safetensors")).unlink(),
    ),
    "two files": ("in two files and no index", copied),
    "no map": (NO_MAP, index("{}")),
    "empty map": (NO_MAP, index('{"weight_map": {}}')),
    "list for map": (NO_MAP, index('{"weight_map": ["a"]}')),
    "null for file": ("got None as the file of 'a'", index('{"weight_map": {"a": null}}')),
    "no name": ("got '' as the file of 'a'", index('{"weight_map": {"a": ""}}')),
    "folder": ("got '.' as the file of 'a'", index('{"weight_map": {"a": "."}}')),
    "beside": ("expected one in this folder", index('{"weight_map": {"a": "BESIDE"}}')),
    "outside": ("expected one in this folder", index('{"weight_map": {"a": "OUTSIDE"}}')),
    "name twice": ("a name twice", index('{"weight_map": {"a": "b", "a": "c"}}')),
    "list": ("got a list, expected a JSON object", index("[]")),
    "no JSON": ("expected a JSON object", index("{")),
    "deep": ("expected a JSON object", index("[" * 100_000)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_float8_checkpoint(built("blockwise"), folder)
    return folder


@pytest.mark.parametrize("name", UNREADABLE)
def test_bad_files_raise_before_anything_is_changed(name: str, saved: Path, tmp_path: Path) -> None:
    match, damage = UNREADABLE[name]
    damage(folder := shutil.copytree(saved, tmp_path / "damaged"))
    model = built("blockwise", seed=1)
    with Unchanged(model, match):
        load_float8_checkpoint(model, folder)


def test_what_a_model_or_a_device_cannot_take(saved: Path) -> None:
    with pytest.raises(ValueError, match="convert it by the recipe for this checkpoint"):
        load_float8_checkpoint(built(only("tensorwise")), saved)
    with pytest.raises(TypeError, match=r"dtype: got torch\.int8"):
        read_float8_checkpoint(saved, dtype=torch.int8)
    for device in ("nowhere", "cuda:77", -7):
        for read in (read_float8_checkpoint, partial(load_float8_checkpoint, built())):
            with pytest.raises((RuntimeError, AssertionError)):
                read(saved, device=device)


# ---------------------------------------------------------------- writing


class Config:
    def to_dict(self) -> dict[str, Any]:
        return {"sizes": {1, 2}}


def parametrized(model: Any) -> None:
    for layer in (model.ffn.w1, model.ffn.w2, model.ffn.w3):
        parametrize.register_parametrization(layer, "weight", nn.Identity())


def buffer(name: str, make: Callable[[], Any]) -> tuple[str, Callable[[Any], object]]:
    change = lambda model: model.ffn.w1.register_buffer(name, make())  # noqa: E731
    return rf"ffn\.w1\.{name}.*: got .* expected", change


FORMATS = "expected one of 'fine-grained-fp8'"
MODELS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "meta": ("meta", lambda model: model.ffn.w3.to("meta")),
    "lazy": buffer("x", nn.UninitializedBuffer),
    "float8": buffer("x", lambda: built(only("blockwise")).ffn.w1.weight.data),
    "float8 of others": buffer("x", lambda: torch.zeros(2).to(torch.float8_e4m3fnuz)),
    "sparse": buffer("x", lambda: torch.eye(2).to_sparse()),
    "nested": buffer("x", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "quantised": buffer("x", lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)),
    "complex128": buffer("x", lambda: torch.ones(2, dtype=torch.complex128)),
    "scale": buffer("weight_scale_inv", lambda: torch.ones(3, 2)),
    "another scale": buffer("bias_scale_inv", lambda: torch.ones(1)),
    "parametrized": ("nor parametrized", parametrized),
    "no layer": ("without a Float8Linear", lambda model: setattr(model, "ffn", built().ffn)),
    "config": ("set is not JSON", lambda model: setattr(model, "config", Config())),
}
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    (FORMATS, {"format": "gguf"}),
    (FORMATS, {"format": "compressed-tensors", "strategy": "group"}),
    *(("expected bytes, 1 or more", {"max_shard_size": x}) for x in ("5GB", 0, True, 1e9)),
    *(
        (f"{name}: got {dtype}", {name: dtype})
        for name in ("dtype", "param_dtype")
        for dtype in (torch.int8, torch.float64, torch.float8_e8m0fnu, False)
    ),
]
REFUSED = [(*MODELS[name], {}) for name in MODELS] + [
    (match, lambda model: None, how) for match, how in ARGUMENTS
]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("match", "change", "how"), REFUSED)
def test_what_cannot_be_written_is_refused_before_it_is(
    match: str, change: Any, how: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    change(model := built("blockwise", seed=1))
    before, refused = contents(saved), partial(pytest.raises, (ValueError, TypeError), match=match)
    for folder in (saved, tmp_path / "new"):
        with refused():
            save_float8_checkpoint(model, folder, **how)
    if "max_shard_size" not in how and not hasattr(model, "config"):
        with refused():
            [*float8_weights(model, **how)]
    assert not (tmp_path / "new").exists()
    assert contents(saved) == before


def test_what_files_do_not_have_may_be_there(tmp_path: Path) -> None:
    model = built("blockwise")
    for name, make in (("x", nn.UninitializedBuffer), ("weight_scale_inv", lambda: torch.ones(3))):
        model.ffn.w1.register_buffer(name, make(), persistent=False)
    assert len(save_float8_checkpoint(model, tmp_path)) == 3


def failing(target: str, number: int, error: BaseException) -> Any:
    """Have the call of that number fail, of what writes files or puts them in place."""
    owner: Any = __import__("safetensors.torch").torch if target == "save_file" else Path
    real, calls = getattr(owner, target), []

    def call(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise error
        return real(*args, **more)

    return mock.patch.object(owner, target, call)


FAILURES: dict[str, tuple[str, int, BaseException]] = {
    "disk": ("save_file", 2, OSError(28, "No space left")),
    "interrupt": ("save_file", 2, KeyboardInterrupt()),
} | {f"place {n}": ("replace", n, PermissionError("not yours")) for n in (2, 4, 5)}


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("name", FAILURES)
def test_an_older_checkpoint_outlives_a_failure(
    name: str, has_index: bool, saved: Path, tmp_path: Path
) -> None:
    """Also one without an index, as others write it; nothing new is left behind."""
    folder = shutil.copytree(saved, tmp_path / "older")
    if not has_index:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        (folder / INDEX).unlink()
    before, newer = contents(folder), built("rowwise", seed=1)
    with failing(*FAILURES[name]), pytest.raises((OSError, KeyboardInterrupt)):
        save_float8_checkpoint(newer, folder, "compressed-tensors", max_shard_size=100_000)
    assert contents(folder) == before
    read = load_float8_checkpoint(built(seed=2), folder)
    assert torch.equal(read.ffn.w1.bias, built().ffn.w1.bias)


def test_files_of_an_older_model_go_and_others_stay(saved: Path, tmp_path: Path) -> None:
    others = {"adapter_model.safetensors", "model_of_mine.safetensors", "tokenizer.json"}
    for name in ("model.safetensors", "model-00009-of-00010.safetensors", *others):
        shutil.copy(saved / "model-00001.safetensors", tmp_path / name)
    for size, count in ((100_000, 3), (10**9, 1), (50_000, 7)):  # more files, fewer, more again
        save_float8_checkpoint(built("blockwise"), tmp_path, max_shard_size=size)
        files = {*json.loads((tmp_path / INDEX).read_text())["weight_map"].values()}
        assert len(files) == count
        now = {"config.json", INDEX, *files}
        assert {path.name for path in tmp_path.iterdir()} == now | others
        load_float8_checkpoint(built(seed=1), tmp_path)


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


def test_older_files_that_cannot_be_removed_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    unlink = Path.unlink

    def fails(path: Path, **more: Any) -> None:
        if path.name == "model.safetensors":
            raise PermissionError("not yours")
        unlink(path, **more)

    model = built("blockwise")
    warns = pytest.warns(UserWarning, match=r"/model.safetensors of .*\(not yours\); remove it")
    with mock.patch.object(Path, "unlink", fails), warns:
        notes = save_float8_checkpoint(model, tmp_path)
    assert len(notes) == 3
    read = load_float8_checkpoint(built(seed=1), tmp_path)
    assert torch.equal(read.ffn.w1.bias, model.ffn.w1.bias)
