"""Experts of transformers in float8 checkpoints: names, bytes, other readers, ranks."""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from float8 import conversion_report, convert_to_float8_training
from float8.checkpoints import (
    float8_weights,
    load_float8_checkpoint,
    quantization_config,
    save_float8_checkpoint,
)
from float8.checkpoints.names import _split
from float8.checkpoints.schemes import scheme_named
from float8.experts.grouped import quantize_experts
from float8.kernels.dequantize import dequantised
from float8.quantize import quantize
from float8.tensor import dequantise
from sqnr import assert_close
from support.float8_files import INDEX, LAYOUTS, Layout, Unchanged, bits, in_files, only, same_bytes
from support.lazily import Lazily
from support.ranks import on
from support.sharded import convert, here, mesh_of, whole
from tolerances import GEMM

transformers, safetensors = Lazily("transformers"), Lazily("safetensors.torch")
hf, fp8 = Lazily("support.hugging_face"), Lazily("transformers.integrations.finegrained_fp8")

NARROW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 64},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": NARROW | {"head_dim": 64},
    "DeepseekV3": NARROW
    | LATENT
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4, "v_head_dim": 128},
}
BLOCKS, CHANNELS = "fine-grained-fp8", "compressed-tensors"


def built(name: str = "Mixtral", seed: int = 0, **more: Any) -> Any:
    """In whole blocks: transformers takes blocks that overhang for smaller ones."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    return hf.llama(seed, name, **sizes | MODELS.get(name, {}) | more).bfloat16()


def converted(model: nn.Module, recipe: str = "rowwise") -> nn.Module:
    return convert_to_float8_training(
        model, config=recipe, module_filter_fn=lambda mod, fqn: fqn != "lm_head"
    )


def rewrite(folder: Path, **tensors: Tensor | None) -> None:
    """Put tensors into the one file, or, if they are None, take them away."""
    (path,) = folder.glob("*.safetensors")
    found = safetensors.load_file(path) | tensors
    safetensors.save_file({name: x for name, x in found.items() if x is not None}, path)
    (folder / INDEX).unlink()


def cases() -> Iterator[Any]:
    """All layouts with one model; of the others each with some, mostly as `exhaustive`."""
    for name, (number, layout) in itertools.product(MODELS, enumerate(LAYOUTS)):
        # Of the last two transformers multiplies experts by scales as they lie, and fails.
        dense = number >= 6
        first = (name == "Mixtral") != dense or (name, number) == ("DeepseekV3", 0)
        if (dense and name != "Llama") or not (first or (number + len(name)) % 3 == 0):
            continue
        how = f"{name}-{layout.format}-{layout.strategy}"
        yield pytest.param(name, layout, id=how, marks=[] if first else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "layout"), cases())
def test_transformers_reads_what_is_written(name: str, layout: Layout, tmp_path: Path) -> None:
    """Names are its own; values, dequantised to bfloat16, are those that this library reads."""
    model = converted(built(name))
    notes = save_float8_checkpoint(model, tmp_path / "float8", **layout.how)
    model.save_pretrained(tmp_path / "plain")
    written = in_files(tmp_path / "float8")
    names = {key for key in written if not key.endswith(("weight_scale", "weight_scale_inv"))}
    assert names == in_files(tmp_path / "plain").keys()
    of_experts = [note for note in notes if ".experts." in note.name]
    assert len(of_experts) % (3 * 4) == 0
    assert bool(of_experts) == (name != "Llama")
    assert all(written[note.name].dtype == torch.float8_e4m3fn for note in of_experts)
    assert all(note.as_trained == (layout.recipe == "rowwise") for note in notes)
    theirs = hf.dequantised(tmp_path / "float8", layout.format).state_dict()
    theirs = {key: x for key, x in theirs.items() if not key.endswith("_scale")}  # of 5.17
    mine = load_float8_checkpoint(built(name, 1), tmp_path / "float8").state_dict()
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(x, mine[key]) for key, x in theirs.items())


@pytest.mark.parametrize(
    ("recipe", "rows", "joined"),
    [
        ("rowwise", 256, True),
        ("tensorwise", 256, False),  # of the two projections of a Parameter training has one scale
        ("blockwise", 256, True),
        ("blockwise", 192, False),  # a square has rows of both
        ("mxfp8", 192, True),
    ],
)
def test_bytes_are_those_that_training_multiplies(
    recipe: str, rows: int, joined: bool, tmp_path: Path
) -> None:
    """And notes say so; `joined`: of `gate_up_proj`, too, which files have as two weights."""
    layout = next(x for x in LAYOUTS[::-1] if x.recipe == recipe)
    model = converted(built(intermediate_size=rows), recipe)
    notes = save_float8_checkpoint(model, tmp_path, **layout.how)
    tensors, suffix = in_files(tmp_path), scheme_named(*layout.how.values()).scale_suffix
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    for own, names in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        weight = getattr(experts, own)
        row = quantize_experts(weight, experts._float8_plan.casts.weight, row=True).row
        for expert in range(4):
            prefix = f"model.layers.1.block_sparse_moe.experts.{expert}"
            each = [f"{prefix}.{name}.weight" for name in names]
            data = torch.cat([tensors[name] for name in each])
            scales = [tensors[name + suffix] for name in each]
            if layout.strategy == "mxfp8":
                scales = [x.view(torch.float8_e8m0fnu).float() for x in scales]
            wanted = row.scale[expert].flatten()
            if recipe in ("blockwise", "mxfp8"):
                wanted = row.scale[expert, :, : scales[0].shape[1]]
            scale = torch.cat([x if x.dim() == wanted.dim() else x.flatten() for x in scales])
            scale = scale.expand(wanted.shape) if len(each) == scale.numel() == 1 else scale
            is_same = torch.equal(bits(data), bits(row.data[expert, :, : weight.shape[2]]))
            is_same = is_same and torch.equal(scale, wanted)
            said = {note.as_trained for note in notes if note.name in each}
            assert said == {is_same} == {joined or own == "down_proj"}, own


@pytest.mark.parametrize("layout", [LAYOUTS[i] for i in (0, 2, 4, 5)], ids=lambda x: x.strategy)
@pytest.mark.parametrize("device", ["meta", pytest.param("cpu", marks=pytest.mark.exhaustive)])
def test_published_bytes_are_multiplied(layout: Layout, device: str, tmp_path: Path) -> None:
    """In weights in float8 alone, whatever bytes and scales are: no cast would give these."""
    save_float8_checkpoint(converted(built(), layout.recipe), tmp_path, **layout.how)
    written, number = in_files(tmp_path), torch.Generator().manual_seed(0)
    for name, x in written.items():
        if "experts" in name and "scale" not in name:
            x.view(torch.uint8).random_(0, 0x70, generator=number)  # the largest is 120 of 448
        elif "experts" in name and x.dtype == torch.float32:
            x.mul_(1.37)
        elif "experts" in name:
            x.view(torch.uint8).random_(120, 127, generator=number)
    rewrite(tmp_path, **written)
    with torch.device(device):
        model: Any = built(seed=1).requires_grad_(False)
    convert_to_float8_training(
        model, config=only(layout.recipe), module_filter_fn=lambda mod, fqn: fqn != "lm_head"
    )
    with warnings.catch_warnings(action="ignore"):  # of frequencies on the meta device
        load_float8_checkpoint(model, tmp_path)
    assert same_bytes(float8_weights(model, **layout.how), written.items())
    experts = model.get_submodule("model.layers.1.mlp.experts")
    x, offs = torch.randn(40, 128).bfloat16(), torch.tensor([10, 10, 25, 40], dtype=torch.int32)
    y = experts._float8_product(x, experts.gate_up_proj, offs)
    scheme = scheme_named(*layout.how.values())
    for expert, (begin, end) in enumerate([(0, 10), (10, 10), (10, 25), (25, 40)]):
        cast = experts._float8_plan.casts.input
        row = quantize(x[begin:end], cast, row=True).row
        rows = dequantised(row, cast.config.scaling_granularity)[: end - begin]
        for name, got in zip(("w1", "w3"), y[begin:end].chunk(2, 1), strict=True):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"
            weight = scheme.weight(written[name], written[name + scheme.scale_suffix], x.dtype)
            wanted = rows @ dequantise(weight, torch.float32).T
            if layout.recipe == "rowwise":  # scales apply to sums
                wanted = row.data[: end - begin].float() @ weight._data.float().T
                wanted = wanted * row.scale[: end - begin] * weight._scale.T
            assert_close({name: wanted}, {name: got.float()}, GEMM)  # another cast gives 30 dB


def test_experts_in_float8_alone_take_no_scale_of_two_projections(tmp_path: Path) -> None:
    for recipe, strategy in (("blockwise", "block"), ("tensorwise", "tensor")):
        written = converted(built(intermediate_size=192), recipe)
        save_float8_checkpoint(written, tmp_path, strategy=strategy)
        model = built(seed=1, intermediate_size=192).requires_grad_(False)
        convert_to_float8_training(
            model, config=only(recipe), module_filter_fn=lambda mod, fqn: "experts" in fqn
        )
        with pytest.raises(ValueError, match=r"with float8_weights=ONLY"):
            load_float8_checkpoint(model, tmp_path)


def test_plain_experts_beside_blockwise_layers(tmp_path: Path) -> None:
    left = lambda mod, fqn: fqn != "lm_head" and not fqn.endswith("experts")  # noqa: E731
    model = convert_to_float8_training(built(), config="blockwise", module_filter_fn=left)
    notes = save_float8_checkpoint(model, tmp_path)
    assert all(note.as_trained == (".experts." not in note.name) for note in notes)
    assert quantization_config(model)["modules_to_not_convert"] == ["lm_head"]
    wanted = dict(load_float8_checkpoint(built(seed=1), tmp_path).named_parameters())
    with torch.device("meta"):
        empty = built(seed=2)
    with pytest.warns(UserWarning, match="still on the meta device"):
        load_float8_checkpoint(empty, tmp_path)
    for other in (empty, load_float8_checkpoint(converted(built(seed=3)).float(), tmp_path)):
        for name, x in other.named_parameters():
            assert torch.equal(x.bfloat16(), wanted[name]), name
            assert x.requires_grad


def test_what_transformers_loads_in_float8(tmp_path: Path, monkeypatch: Any) -> None:
    """As on a GPU: the very bytes and scales. They stay, and the report says what to do."""
    hf.read_in_float8(monkeypatch)
    for strategy in (None, "tensor"):
        save_float8_checkpoint(converted(built()), tmp_path, strategy=strategy)
        written = in_files(tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        experts = model.model.layers[1].mlp.experts
        assert isinstance(experts, fp8.FP8Experts)
        for expert in range(4):
            prefix = f"model.layers.1.block_sparse_moe.experts.{expert}"
            for end in ("", "_scale_inv"):
                mine = getattr(experts, f"gate_up_proj{end}")
                both = [written[f"{prefix}.{name}.weight{end}"] for name in ("w1", "w3")]
                assert torch.equal(bits(torch.cat(both)), bits(mine[expert]))
        convert_to_float8_training(model)
        report = conversion_report(model)
        assert len(report.experts) == 4
        assert all("dequantize=True" in str(each.skip_reason) for each in report.experts)
        with pytest.raises(ValueError, match="load the model dequantized"):
            float8_weights(model).__next__()


def test_other_experts_stay_in_16_bits() -> None:
    """Those of which a file has one Parameter for all, as the model does."""
    model = converted(built("GptOss", num_local_experts=4, head_dim=64))
    tensors = dict(float8_weights(model))
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    assert "model.layers.0.mlp.experts" in quantization_config(model)["modules_to_not_convert"]


def test_layers_that_transformers_skips_are_skipped(tmp_path: Path) -> None:
    """DeepSeek-V3 is published with one that predicts a second token."""
    model = converted(built("DeepseekV3"))
    save_float8_checkpoint(model, tmp_path)
    rewrite(tmp_path, **{"model.layers.61.mlp.experts.0.up_proj.weight": torch.ones(2, 2)})
    load_float8_checkpoint(built("DeepseekV3"), tmp_path)


def test_routers_have_their_published_names(tmp_path: Path) -> None:
    """Beside them are no scales, whose names transformers would not find again."""
    model = converted(built("Phimoe", num_local_experts=4))
    model.save_pretrained(tmp_path)
    weights = {name for name, _ in float8_weights(model) if not name.endswith("_scale_inv")}
    assert weights == in_files(tmp_path).keys()
    save_float8_checkpoint(model, tmp_path)
    load_float8_checkpoint(converted(built("Phimoe", 1, num_local_experts=4)), tmp_path)


def test_experts_that_layers_share_are_in_files_once(tmp_path: Path) -> None:
    one, other = (converted(built(seed=seed)) for seed in (0, 1))
    for model in (one, other):
        layers: Any = model.get_submodule("model.layers")
        layers[1].mlp.experts = layers[0].mlp.experts
    save_float8_checkpoint(one, tmp_path)
    load_float8_checkpoint(other, tmp_path)
    names = dict(float8_weights(one)).keys()
    assert sum("experts" in name for name in names) == 2 * 3 * 4  # each with its scale


def test_transformers_finds_the_scales_of_all_weights(tmp_path: Path, monkeypatch: Any) -> None:
    """T5 has `wo` in float32: its float8 loader reads that without scales."""
    hf.read_in_float8(monkeypatch)
    config = transformers.T5Config(d_model=128, d_ff=256, d_kv=32, num_heads=4, num_layers=1)
    model = converted(transformers.T5ForConditionalGeneration(config).bfloat16())
    save_float8_checkpoint(model, tmp_path)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    for name, x in theirs.named_parameters():
        if x.dtype == torch.bfloat16:
            assert torch.equal(x, model.get_parameter(name)), name
    assert "encoder.block.0.layer.1.DenseReluDense.wo.weight_scale_inv" not in in_files(tmp_path)


@pytest.mark.parametrize(
    "body", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)]
)
def test_what_transformers_keeps_in_float32_stays(body: torch.dtype, tmp_path: Path) -> None:
    """Biases of routers, whose steps in training bfloat16 rounds away; beside masters, too."""
    model = built("DeepseekV3").to(body)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    gate = model.get_submodule(name.rpartition(".")[0])
    gate.e_score_correction_bias = 6 + torch.randn(4) * 0.01
    save_float8_checkpoint(converted(model, "blockwise"), tmp_path)
    written = in_files(tmp_path)
    kept = {key for key, x in written.items() if x.dtype == torch.float32}
    assert {key for key in kept if not key.endswith("_scale_inv")} == {name}
    theirs = hf.dequantised(tmp_path, BLOCKS)
    mine = load_float8_checkpoint(built("DeepseekV3", 1).float(), tmp_path)
    for each in (theirs, mine):
        assert torch.equal(each.get_buffer(name), gate.e_score_correction_bias)
    save_float8_checkpoint(model, tmp_path, dtype=torch.bfloat16)
    assert in_files(tmp_path)[name].dtype == torch.bfloat16
    # It would read the bytes of these without their scales.
    model._keep_in_fp32_modules_strict = {"o_proj.weight", "layers.1.mlp.experts"}
    tensors = dict(float8_weights(model))
    for key in ("self_attn.o_proj.weight", "mlp.experts.gate_up_proj"):
        assert tensors[f"model.layers.1.{key}"].dtype == body


def test_experts_that_transformers_replaces_are_refused(tmp_path: Path) -> None:
    """Llama 4 is loaded from compressed-tensors into linear layers, which find no weights."""
    sizes = {"intermediate_size_mlp": 256, "num_local_experts": 4, "num_hidden_layers": 1}
    sizes |= {"hidden_size": 128, "interleave_moe_layer_step": 1, "head_dim": 32}
    config = transformers.Llama4TextConfig(
        vocab_size=128, intermediate_size=256, num_attention_heads=4, **sizes
    )
    model = transformers.Llama4ForCausalLM(config).bfloat16()
    convert_to_float8_training(
        model, config="rowwise", module_filter_fn=lambda mod, fqn: fqn.endswith("proj")
    )
    with pytest.raises(ValueError, match=r"Llama4TextExperts.*expected 'fine-grained-fp8'"):
        save_float8_checkpoint(model, tmp_path / "none", CHANNELS)
    assert not (tmp_path / "none").exists()
    save_float8_checkpoint(model, tmp_path)
    theirs, report = hf.dequantised(tmp_path, BLOCKS, output_loading_info=True)
    assert not any(report.values())
    mine = load_float8_checkpoint(transformers.Llama4ForCausalLM(config).bfloat16(), tmp_path)
    assert all(torch.equal(x, theirs.get_parameter(n)) for n, x in mine.named_parameters())


@pytest.mark.parametrize("change", ["missing", "shape", "given twice"])
def test_bad_files_raise_before_anything_is_changed(change: str, tmp_path: Path) -> None:
    save_float8_checkpoint(converted(built()), tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    model = built(seed=1)
    if change == "missing":
        rewrite(tmp_path, **{name: None, f"{name}_scale_inv": None})
        match = r"got nothing for 1 Param.*experts\.3\.w3\.weight"
    elif change == "shape":
        rewrite(tmp_path, **{name: in_files(tmp_path)[name][:255].contiguous()})
        match = r"experts\.3\.w3\.weight.*got shape \(255, 128\)"
    else:  # of which the last would win
        joined = "model.layers.0.mlp.experts.gate_up_proj"
        rewrite(tmp_path, **{joined: torch.zeros_like(model.get_parameter(joined))})
        match = "got these experts joined and one by one"
    with Unchanged(model, f"(?s){match}"):
        load_float8_checkpoint(model, tmp_path)


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        (lambda x: {f"{e}.{i}": x[e, 6 * i : 6 * i + 6] for e in range(3) for i in (0, 1)}, 2),
        (lambda x: {f"{e}": x[e] for e in range(3)}, 1),
        (lambda x: {f"{e}": x[e].T for e in range(3)}, None),
        (lambda x: {f"{e}": x[0] for e in range(3)}, None),
        (lambda x: {f"{e}": x[e, ::2] for e in range(3)}, None),
        (lambda x: {"0": x[:, :6], "1": x[:, 6:]}, None),
        (lambda x: {}, None),
    ],
)
def test_only_experts_that_are_split_into_whole_rows_are_published_one_by_one(
    split: Any, pieces: int | None
) -> None:
    """What a converter of transformers may do to weights [E, N, K]."""

    class Converter:
        def rename_source_key(self, name: str) -> tuple[str, str]:
            return name, name

        def add_tensor(self, key: str, name: str, pattern: str, x: Tensor) -> None:
            self.x = x

        def convert(self, key: str, **more: Any) -> dict[str, Tensor]:
            return {f"{name}.weight": x for name, x in split(self.x).items()}

    root, weights = SimpleNamespace(config=None), torch.arange(3 * 8 * 5).view(3, 8, 5)
    parts = _split(Converter(), "", weights.shape, root)
    each = [part.of(weights) for part in parts.values()]
    assert bool(each) == (pieces is not None)
    if each:
        by_piece = torch.stack(each).view(pieces, 3, -1, 5).transpose(0, 1)
        assert torch.equal(by_piece.reshape(weights.shape), weights)
    assert _split(Converter(), "", (3, 7, 5), root).keys() == (
        parts.keys() if pieces == 1 else set()
    )


@pytest.mark.exhaustive
@pytest.mark.xdist_group("ranks")
@on("two")
def test_ranks_have_whole_experts(tmp_path: Path) -> None:
    """FSDP2: the weights are made whole, one Parameter at a time; each rank reads its own."""

    def made(seed: int) -> Any:
        sizes = {"num_hidden_layers": 1, "num_local_experts": number, "num_experts_per_tok": 1}
        return convert(built(seed=seed, **sizes).to(here()), "rowwise", all_gather=number == 4)

    for number, of_some in ((4, LAYOUTS[1:2]), (3, LAYOUTS[2:3]), (1, LAYOUTS[:1])):
        for layout in of_some:
            alone, model = made(0), made(0)
            fully_shard(model, mesh=mesh_of())
            wanted, got = (float8_weights(each, **layout.how) for each in (alone, model))
            assert same_bytes(wanted, got)
            folder = tmp_path / f"{number}-{layout.format}-{layout.strategy}"
            notes = save_float8_checkpoint(model, folder, **layout.how)
            torch.distributed.barrier()
            again = save_float8_checkpoint(alone, tmp_path / "alone", **layout.how)
            assert len(again) == (len(notes) if torch.distributed.get_rank() == 0 else 0)
            for one, other in zip(notes, again, strict=False):
                assert one.name == other.name
                assert one.as_trained == other.as_trained
            torch.distributed.barrier()
            load_float8_checkpoint(alone, folder)
            other = made(1)
            fully_shard(other, mesh=mesh_of())
            load_float8_checkpoint(other, folder)
            for mine, theirs in zip(other.parameters(), alone.parameters(), strict=True):
                assert torch.equal(whole(mine), theirs)


def test_experts_are_read_in_inference_mode(tmp_path: Path) -> None:
    save_float8_checkpoint(converted(built()), tmp_path, CHANNELS)
    with torch.device("meta"):
        model = built(seed=1)
    with torch.inference_mode():
        load_float8_checkpoint(model, tmp_path)
    assert not any(x.is_inference() for x in model.parameters())


def test_names_of_experts_that_another_tensor_has(tmp_path: Path) -> None:
    """Experts are published one by one: neither a weight nor a scale gives way, in any format."""
    expert = "model.layers.0.block_sparse_moe.experts.0.w1"
    for own, (format, suffix) in (
        ("weight", (BLOCKS, "_scale_inv")),
        ("weight_scale_inv", (BLOCKS, "_scale_inv")),
        ("weight_scale", (CHANNELS, "_scale")),
    ):
        model, at = converted(built()), nn.Module()
        model.get_submodule("model.layers.0").add_module("block_sparse_moe", at)
        for part in ("experts", "0", "w1"):
            at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_buffer(own, torch.ones(2, 1))
        with pytest.raises(ValueError, match=rf"{expert}.{own}: got .* \('{suffix}' is added"):
            save_float8_checkpoint(model, tmp_path / "new", format)
    assert not (tmp_path / "new").exists()
