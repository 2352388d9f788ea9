"""Checkpoints in float8 of models that ranks share: written from parts, read into parts."""

import itertools
import shutil
import time
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from float8 import Float8Weights
from float8.checkpoints import float8_weights, load_float8_checkpoint, save_float8_checkpoint
from float8.tensor import Float8Tensor, high_precision, local_tensor
from sqnr import sqnr
from support.models import Adapted, seeded
from support.outcome import assert_same
from support.parallel import STYLES
from support.ranks import HANGS, on
from support.sharded import convert, data_and_tensor, here, mesh_of, shard, whole
from support.spies import Traffic

SafetensorError = pytest.importorskip("safetensors").SafetensorError

BLOCKS, CHANNELS, TENSORS = FORMATS = (
    ("fine-grained-fp8", None, "blockwise"),
    ("compressed-tensors", "channel", "rowwise"),
    ("compressed-tensors", "tensor", "tensorwise"),
)
formats = pytest.mark.parametrize("of", FORMATS, ids=[recipe for *_, recipe in FORMATS])
EXHAUSTIVE = pytest.mark.exhaustive
short_formats = pytest.mark.parametrize(
    "of",
    [BLOCKS, *(pytest.param(of, marks=EXHAUSTIVE) for of in (CHANNELS, TENSORS))],
    ids=[recipe for *_, recipe in FORMATS],
)
"""Blocks are what shards cut."""
SIZES = (144, 256, 255, 300, 1)
"""Of two ranks: whole blocks, one that overhangs, blocks that are cut, a rank without a row."""
ONLY = Float8Weights.ONLY


def plain(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes))
    return nn.Sequential(*layers).to(here(), dtype)


def written(model: nn.Module, of: Any, **more: Any) -> dict[str, Tensor]:
    return dict(float8_weights(model, of[0], strategy=of[1], **more))


@short_formats
@on("either")
def test_weights_of_fsdp_are_made_whole(of: Any) -> None:
    """One by one, in the dtype that they have; the bytes are those of one rank."""
    sizes = [-(-N // 2) * K for N, K in zip(SIZES[1:], SIZES, strict=False)]
    for dtype, gathers in ((torch.bfloat16, True), (torch.float32, False)):
        alone = convert(plain(*SIZES, dtype=dtype), of[2])
        model = shard(convert(plain(*SIZES, dtype=dtype), of[2], gathers))
        with Traffic() as seen:
            got = written(model, of)
        assert_same(got, written(alone, of))
        sent = [entry[1:] for entry in seen.seen if entry[0].startswith("all_gather")]
        assert sent == [(dtype, size * dtype.itemsize) for size in sizes]


@formats
@on("either")
def test_what_an_evaluation_keeps_gathered(of: Any) -> None:
    """Shards are cast, no float8 again, and rounded to `param_dtype` first, as FSDP2 does."""
    model = shard(convert(plain(256, 256), of[2]), param_dtype=torch.bfloat16)
    expected = written(convert(plain(256, 256).bfloat16(), of[2]), of)
    model.eval()(seeded(1, 16, 256, device=here()).bfloat16())
    model[0].unshard()
    weight: Any = model[0].weight
    assert isinstance(weight, Float8Tensor)
    sent = weight._data.view(torch.uint8).clone()
    got, other = (written(model, of, param_dtype=dtype) for dtype in (torch.bfloat16, None))
    assert_same(got, expected)
    assert torch.equal(got["0.weight"].view(torch.uint8), sent)
    assert not torch.equal(other["0.weight"].view(torch.uint8), sent)


@on("either")
def test_a_model_that_an_evaluation_keeps_gathered_is_saved_by_all(tmp_path: Path) -> None:
    """FSDP2 leaves the weights of the root gathered: on no rank is a DTensor to be seen."""
    model = convert(plain(256, 256), "blockwise", False)
    fully_shard(model, mesh=mesh_of())
    with torch.no_grad():
        model.eval()(seeded(1, 16, 256, device=here()))
    assert not isinstance(model[0].weight, DTensor)
    notes = save_float8_checkpoint(model, tmp_path)
    assert [note.name for note in notes] == ["0.weight"]


def parallel(model: nn.Module, kind: str, mesh: Any = None) -> nn.Module:
    colwise, rowwise, _ = STYLES[kind]
    return parallelize_module(model, mesh or mesh_of(), {"0": colwise(), "1": rowwise()})


@short_formats
@on("either")
def test_tensor_parallel(of: Any, tmp_path: Path) -> None:
    for kind, dtype in (("float8", torch.float32), ("torch", torch.bfloat16)):
        models = (convert(plain(128, 256, 128, dtype=dtype), of[2], False) for _ in "ab")
        wanted, model = written(next(models), of), parallel(next(models), kind)
        assert_same(written(model, of), wanted)
        notes = save_float8_checkpoint(model, tmp_path / kind, of[0], strategy=of[1])
        dist.barrier()
        alone = load_float8_checkpoint(plain(128, 256, 128, dtype=dtype, seed=1), tmp_path / kind)
        other = parallel(convert(plain(128, 256, 128, dtype=dtype, seed=1), of[2], False), kind)
        load_float8_checkpoint(other, tmp_path / kind)
        for note, mine, theirs, was in zip(
            notes, other.parameters(), alone.parameters(), model.parameters(), strict=True
        ):
            assert isinstance(mine, DTensor)
            assert torch.equal(whole(mine), theirs)
            assert note.as_trained
            assert sqnr(whole(was), theirs) > 25


@on("either")
def test_bytes_alone_under_tensor_parallel(tmp_path: Path) -> None:
    """`ONLY` takes its part of the bytes, and gives it back, under one scale or those of rows."""
    for of in (TENSORS, CHANNELS):
        folder = tmp_path / of[2]
        alone = convert(plain(144, 256, 128), of[2])
        save_float8_checkpoint(alone, folder, of[0], strategy=of[1])
        dist.barrier()
        model = plain(144, 256, 128, seed=1).requires_grad_(False)
        model.to(here() if of == TENSORS else "meta")
        convert(model, of[2], False, float8_weights=ONLY)
        colwise, rowwise, _ = STYLES["float8"]
        plan = {"0": colwise(), "1": rowwise() if of == TENSORS else colwise()}
        parallelize_module(model, mesh_of(), plan)
        load_float8_checkpoint(model, folder)
        for layer in model:
            assert isinstance(layer.weight, DTensor)
            bits = local_tensor(layer.weight)._data
            assert bits.untyped_storage().nbytes() == bits.numel() == layer.weight.numel() // 2
        with Traffic() as seen:
            assert_same(written(model, of), written(alone, of))
        assert seen.bytes_of("all_gather")[torch.uint8] == (144 * 256 + 256 * 128) // 2


@short_formats
@on("either")
def test_masters_of_fsdp_come_from_a_file(of: Any, tmp_path: Path) -> None:
    save_float8_checkpoint(convert(plain(*SIZES), of[2]), tmp_path, of[0], strategy=of[1])
    dist.barrier()
    for dtype in (torch.bfloat16, torch.float32):
        alone = load_float8_checkpoint(plain(*SIZES, dtype=dtype, seed=1), tmp_path)
        for gathers in (False, True):
            model = shard(convert(plain(*SIZES, dtype=dtype).to("meta"), of[2], gathers))
            with pytest.raises(ValueError, match=r"call model.to_empty"):
                load_float8_checkpoint(model, tmp_path)
            load_float8_checkpoint(model.to_empty(device=here()), tmp_path)
            for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                assert mine.dtype == dtype
                assert torch.equal(whole(high_precision(mine)), theirs)
            x = seeded(1, 16, SIZES[0], dtype=dtype, device=here())
            y = convert(alone, of[2], gathers)(x)
            assert torch.equal(model(x), y)


@on("either")
def test_what_one_rank_cannot_read_fails_on_all(tmp_path: Path) -> None:
    """At once, with its reason, before anything is changed; ranks that share nothing are alone."""
    save_float8_checkpoint(convert(plain(256, 128), "blockwise"), tmp_path)
    dist.barrier()
    mine = tmp_path / f"of rank {dist.get_rank()}"
    shutil.copytree(tmp_path, mine, ignore=shutil.ignore_patterns("of rank*"))
    (shard_file,) = mine.glob("*.safetensors")
    model, alone = shard(plain(256, 128, seed=1)), plain(256, 128, seed=1)
    before = whole(model[0].weight).clone()
    last = dist.get_rank() == dist.get_world_size() - 1
    for folder, device, kind, match in (
        (3 if last else mine, None, TypeError, "int"),
        (mine, "nowhere" if last else None, RuntimeError, "device string: nowhere"),
        (tmp_path / "none" if last else mine, None, FileNotFoundError, "config.json"),
    ):
        with pytest.raises(kind, match=match) as caught:
            load_float8_checkpoint(model, folder, device=device)
        assert ("rank 1" in str(caught.value)) is not last
    again = shutil.copytree(mine, tmp_path / f"of rank {dist.get_rank()}, again")
    (again / shard_file.name).rename(again / "other.safetensors")  # as a save between the ranks
    index = again / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard_file.name, "other.safetensors"))
    with pytest.raises(ValueError, match="got other files on other ranks"):
        load_float8_checkpoint(model, again if last else mine)
    if last:
        shard_file.write_bytes(shard_file.read_bytes()[:-10])
        with pytest.raises(ValueError, match="cut or damaged"):
            load_float8_checkpoint(alone, mine)
    else:
        load_float8_checkpoint(alone, mine)
    with pytest.raises(ValueError, match="cut or damaged"):
        load_float8_checkpoint(model, mine)
    assert torch.equal(whole(model[0].weight), before)
    load_float8_checkpoint(model, tmp_path)
    assert not torch.equal(whole(model[0].weight), before)


ALONE: dict[str, tuple[int, dict[str, Any], str]] = {
    "no folder": (0, {"folder": "a_file"}, "exists"),
    "disk full": (
        0,
        {"fails": "safetensors.torch.save_file", "at": 2, "raises": SafetensorError},
        "No space left",
    ),
    "late": (0, {"fails": "os.fsync", "at": 2}, r"No space left.*older/\.float8_unfinished"),
    "index": (0, {"fails": "pathlib.Path.write_text"}, r"No space left.*index\.json"),
    "another save": (0, {"fails": "fcntl.flock", "raises": BlockingIOError}, "another process or"),
    "not put in place": (0, {"fails": "pathlib.Path.replace", "at": 3}, "No space left"),
    "argument": (1, {"max_shard_size": True}, "expected bytes"),
    "other arguments": (1, {"dtype": torch.float16}, "other models or arguments"),
    "not cast": (1, {"fails": "float8.checkpoints.writing.in_float8_only"}, "No space left"),
    "late on the other": (
        1,
        {"fails": "float8.checkpoints.writing.in_float8_only", "at": 2},
        "No space",
    ),
}
"""What fails on one rank: which, how, and why."""
NOT_GIVEN = "fails", "at", "raises"


@pytest.mark.parametrize("what", ALONE)
@on("either")
def test_what_one_rank_cannot_write_fails_on_all(what: str, tmp_path: Path) -> None:
    """At once, with that rank's reason, and the older checkpoint stays."""
    of = TENSORS
    rank, how, why = ALONE[what]
    (tmp_path / "a_file").touch()
    arguments: dict[str, Any] = {"folder": tmp_path / "older", "max_shard_size": 30_000}
    arguments |= {"format": of[0], "strategy": of[1]}
    older, newer = (shard(convert(plain(*SIZES, seed=seed), of[2])) for seed in (0, 1))
    save_float8_checkpoint(older, **arguments)
    before = {path.name: path.read_bytes() for path in arguments["folder"].iterdir()}
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == rank:
            arguments |= {name: x for name, x in how.items() if name not in NOT_GIVEN}
            arguments["folder"] = tmp_path / arguments["folder"]
            if "fails" in how:
                calls = itertools.count(1)
                plainly = resolve_name(how["fails"])

                def fails(*args: Any, **more: Any) -> Any:
                    if next(calls) == how.get("at", 1):
                        raise how.get("raises", OSError)("No space left")
                    return plainly(*args, **more)

                patched.setattr(how["fails"], fails)
        start = time.monotonic()
        with pytest.raises((OSError, ValueError), match=why) as caught:
            save_float8_checkpoint(newer, **arguments)
    assert time.monotonic() - start < HANGS / 4
    alone = "other models" not in why and dist.get_rank() != rank
    assert str(caught.value).startswith(f"rank {rank}: ") == alone
    folder = tmp_path / "older"
    if what == "another save" and dist.get_rank() == 0:
        (folder / ".float8_lock").unlink()  # which that one would remove
    dist.barrier()  # the groups are as good as before
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    dist.barrier()
    save_float8_checkpoint(newer, folder, of[0], strategy=of[1])


@on("either")
def test_only_rank_0_casts_a_model_that_is_whole(tmp_path: Path) -> None:
    """Other ranks check theirs, another one in a pipeline, and say that they wrote nothing."""
    first = dist.get_rank() == 0
    model = convert(plain(256, 128 if first else 384), "blockwise")
    with pytest.MonkeyPatch.context() as patched:
        if not first:
            patched.setattr("float8.checkpoints.writing.in_float8_only", None)
        notes = save_float8_checkpoint(model, tmp_path / "stages")
        assert [note.name for note in notes] == (["0.weight"] if first else [])
        with pytest.raises(ValueError, match="expected bytes"):
            save_float8_checkpoint(model, tmp_path / "other", max_shard_size=0)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["stages"]
    load_float8_checkpoint(plain(256, 128), tmp_path / "stages")


@short_formats
@on("either")
def test_adapters_of_fsdp_beside_a_whole_base(of: Any, tmp_path: Path) -> None:
    """Each rank has the bytes of the base, from the meta device; they are never sent."""
    save_float8_checkpoint(convert(plain(256, 256), of[2]), tmp_path, of[0], strategy=of[1])
    dist.barrier()
    made = []
    for sharded in (False, True):
        base = plain(256, 256).to("meta").requires_grad_(False)
        convert(base, of[2], False, float8_weights=ONLY)
        load_float8_checkpoint(base, tmp_path, device=here())
        torch.manual_seed(0)
        model = Adapted(base, 256).to(here())
        if sharded:
            fully_shard(model, mesh=mesh_of(), ignored_params={base[0].weight})
        assert isinstance(base[0].weight, Float8Tensor)
        with Traffic() as seen:
            y = model(x := seeded(1, 16, 256, device=here()).requires_grad_())
        y.square().sum().backward()
        assert seen.sizes == ([4 * 256 * 4] if sharded else [])
        made.append((y, x.grad, whole(model.lora_a.weight.grad)))
        written_again = {n.removeprefix("base."): x for n, x in written(model, of).items()}
        del written_again["lora_a.weight"], written_again["lora_b.weight"]
        assert_same(written_again, written(convert(plain(256, 256), of[2]), of))
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize(
    "kind", ["fsdp", "a whole base", pytest.param("tensor parallel", marks=EXHAUSTIVE)]
)
@on("either")
def test_adapters_of_peft_are_merged(kind: str, tmp_path: Path) -> None:
    """All ranks write the bytes that one rank does, and keep their shards."""
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["0", "1"], init_lora_weights=False)

    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config)
        model.add_adapter("inactive", config)
        return model

    def converted() -> nn.Module:
        model = plain(128, 256, 128).requires_grad_(False)
        return convert(
            model, "blockwise", False, **({"float8_weights": ONLY} if whole_base else {})
        )

    whole_base = kind == "a whole base"
    alone = adapted(converted())
    wanted = written(alone, BLOCKS)
    if not whole_base:
        assert_same(wanted, written(alone.merge_and_unload(), BLOCKS))
    model = adapted(converted())
    if kind == "tensor parallel":  # the adapters, too
        colwise, rowwise, _ = STYLES["float8"]
        plan = {"0.base_layer": colwise(), "0.lora_B.default": ColwiseParallel()}
        plan |= {"1.base_layer": rowwise(), "1.lora_A.default": RowwiseParallel()}
        parallelize_module(model.get_base_model(), mesh_of(), plan)
        assert sum(isinstance(x, DTensor) for x in model.parameters()) == 4
    else:
        base = {x for x in model.parameters() if isinstance(x, Float8Tensor)}
        assert len(base) == 2 * whole_base
        first = model.get_base_model()[0]  # some policies wrap such small parts, too
        for part in [] if whole_base else [first.lora_A["default"], first.base_layer, first]:
            fully_shard(part, mesh=mesh_of())
        fully_shard(model, mesh=mesh_of(), ignored_params=base)
    before = {name: local_tensor(x).clone() for name, x in model.named_parameters()}
    assert_same(written(model, BLOCKS), wanted)
    save_float8_checkpoint(model, tmp_path)
    dist.barrier()
    assert {*load_float8_checkpoint(plain(128, 256, 128), tmp_path).state_dict()} == {
        name for name in wanted if not name.endswith("scale_inv")
    }
    assert all(torch.equal(local_tensor(x), before[name]) for name, x in model.named_parameters())
    if dist.get_rank() == 0:  # what the others gather it would not
        model.base_model.set_adapter("inactive")
    for write in (
        partial(written, model, BLOCKS),
        partial(save_float8_checkpoint, model, tmp_path),
    ):
        with pytest.raises(ValueError, match="got ranks with other active adapters"):
            write()


@on("two_or_four")
def test_two_dims() -> None:
    mesh = data_and_tensor(dist.get_world_size() // 2, 2)
    for of in FORMATS:
        for sizes in ((128, 512, 256), (128, 256, 128)):
            wanted = written(convert(plain(*sizes), of[2], False), of)
            model = parallel(convert(plain(*sizes), of[2], of == TENSORS), "float8", mesh["tensor"])
            shard(model, mesh["data"])
            assert_same(written(model, of), wanted)
