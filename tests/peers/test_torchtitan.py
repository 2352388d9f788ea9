"""Our converter in torchtitan: debug models, built, sharded, initialised and trained on the CPU.

Their attention needs a GPU for backward: here it is PyTorch's own. Its training program is run as
users run it: see `support.titan_trainer`.
"""

import copy
import itertools
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import tolerances
from float8 import (
    Float8Linear,
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8.experts import Float8Experts
from sqnr import sqnr
from support.configs import RECIPES
from support.forks import COMPILER, run_program
from support.lazily import Lazily, needs_installed
from support.models import fp8_state, seeded
from support.ranks import RankError, Ranks

needs_installed("torchtitan")
titan, titan_run = Lazily("float8.integrations.torchtitan"), Lazily("support.titan_run")
deepseek_v3, gpt_oss = Lazily("torchtitan.models.deepseek_v3"), Lazily("torchtitan.models.gpt_oss")
QUANTIZED = "torchtitan.components.quantization.float8"
titan_float8 = Lazily(QUANTIZED)
pytestmark = pytest.mark.exhaustive


def built(*args: Any, **how: Any) -> tuple[nn.Module, Any]:
    return titan_run.built(*args, **how)


def step(*args: Any) -> dict[str, Tensor]:
    return titan_run.step(*args)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_in_high_precision(recipe: str) -> None:
    (plain, optimizers), (model, ours) = built(), built(recipe_name=recipe)
    report = conversion_report(model)
    assert len(report.converted) == 10
    assert [layer.fqn for layer in report.skipped] == ["lm_head"]
    assert all(
        type(x) is titan.ConvertedLinear for x in model.modules() if hasattr(x, "_float8_plan")
    )
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name
    wanted, got = step(plain, optimizers, 0), step(model, ours, 0)
    assert got["loss"] == pytest.approx(wanted["loss"].item(), abs=0.02)
    for name, grad in wanted.items():
        assert sqnr(grad, got[name]) > tolerances.MODEL, name
    step(model, ours, 1)
    histories = [x for name, x in fp8_state(model).items() if "history" in name]
    assert len(histories) == {"tensorwise": 0, "delayed": 20}[recipe]
    assert all((x > 0).sum() == 2 for x in histories)


def test_the_way_back_and_conversion_without_our_converter() -> None:
    (plain, _), (model, _) = built(), built(recipe_name="delayed")
    kinds = [*map(type, plain.modules())]
    assert [*map(type, convert_to_high_precision(model).modules())] == kinds
    convert_to_float8_training(plain, config="delayed")
    assert len(conversion_report(plain).converted) == 10
    linear = plain.layers["0"].feed_forward.w1
    assert isinstance(linear, Float8Linear)
    assert isinstance(linear, titan.Linear)
    assert [*map(type, convert_to_high_precision(plain).modules())] == kinds


def test_layers_are_left_out_by_name_and_weights_gathered_in_float8() -> None:
    model, _ = built(
        recipe_name="tensorwise", filter_fqns=["attention"], enable_fsdp_float8_all_gather=True
    )
    layers = {name: x for name, x in model.named_modules() if isinstance(x, Float8Linear)}
    assert len(layers) == 6
    assert not any("attention" in name for name in layers)
    assert all(type(x.weight.data) is not Tensor for x in layers.values())
    assert all(x.config.enable_fsdp_float8_all_gather for x in layers.values())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("tp", "recipe", "compiled"),
    [(1, "tensorwise", False), (1, "delayed", True), (2, "delayed", False)],
)
def test_it_trains_under_fsdp2_and_tensor_parallel(
    two: Ranks, tp: int, recipe: str, compiled: bool
) -> None:
    """By torchtitan's own `parallelize_fn`, weights gathered in float8, against one device."""
    steps = 2 if tp == 1 else 1  # other sums move weights to the neighbouring float8 value
    model, optimizers = built(recipe_name=recipe)
    titan_run.fill(model)
    for seed in range(steps):
        wanted = step(model, optimizers, seed)
    wanted |= fp8_state(model)
    how = {"recipe_name": recipe, "enable_fsdp_float8_all_gather": True, "compiled": compiled}
    for got in two.run(on_ranks, tp, steps, "partial_dtensor", how):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            same = torch.equal(got[name], value)
            other_sums = compiled or tp > 1
            assert same or (other_sums and sqnr(value, got[name]) > tolerances.COMPILED), name


@pytest.mark.xdist_group("ranks")
def test_parts_of_weights_that_are_plain_tensors_are_refused(two: Ranks) -> None:
    with pytest.raises(RankError, match=r"got tensor parallel with spmd_backend='spmd_types'"):
        two.run(on_ranks, 2, 1, "spmd_types", {"recipe_name": "tensorwise"})


def on_ranks(tp: int, steps: int, backend: str, how: dict) -> dict[str, Tensor]:
    torch._dynamo.reset()  # these processes have seen other models
    return titan_run.on_ranks(tp, steps, backend, **how)


MOE = {"name": "deepseek_v3", "recipe_name": "rowwise"}
EXPERTS = "layers.1.moe.routed_experts.inner_experts"
WEIGHTS = [f"{EXPERTS}.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD")]


def converted_experts(model: nn.Module) -> list[str]:
    return [each.fqn for each in conversion_report(model).experts if each.skip_reason is None]


def test_experts_are_converted_and_train() -> None:
    (plain, optimizers), (model, ours) = built(name="deepseek_v3"), built(**MOE)
    assert converted_experts(model) == WEIGHTS
    skipped = [layer.fqn for layer in conversion_report(model).skipped]
    assert skipped == ["layers.1.moe.router.gate", "lm_head"]
    by_hand = convert_to_float8_training(copy.deepcopy(plain), config="rowwise")
    assert [*map(type, by_hand.get_submodule(EXPERTS).modules())] == [type(experts_of(model))]
    convert_to_float8_training(convert_to_high_precision(by_hand), config="rowwise", gpu="H100")
    reasons = {each.skip_reason for each in conversion_report(by_hand).experts}
    assert ["each of 8 experts (8192 tokens go to 3 each)" in str(x) for x in reasons] == [True]
    wanted, got = step(plain, optimizers, 0), step(model, ours, 0)
    assert all(sqnr(grad, got[name]) > tolerances.MODEL for name, grad in wanted.items())
    losses = [got["loss"], *(step(model, ours, 0)["loss"] for _ in range(2))]
    assert losses[0] > losses[1] > losses[2]
    plain.load_state_dict(model.state_dict())
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        assert sqnr(plain(tokens), model(tokens)) > tolerances.FFN
        convert_to_high_precision(model)
        assert model(tokens).equal(plain(tokens))
    assert [*map(type, model.modules())] == [*map(type, plain.modules())]


def experts_of(model: nn.Module) -> Any:
    return model.get_submodule(EXPERTS)


def test_experts_have_a_recipe_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = built(**MOE | {"recipe_name": "delayed"})
    assert "got delayed scaling" in caplog.text
    assert f"5 modules of experts, the first being {EXPERTS}, stay in high" in caplog.text
    assert type(experts_of(model)) is titan.GroupedExperts
    model, optimizers = built(**MOE | {"recipe_name": "delayed"}, experts_recipe_name="rowwise")
    assert converted_experts(model) == WEIGHTS
    losses = [step(model, optimizers, 0)["loss"] for _ in range(2)]
    assert losses[0] > losses[1]
    model, _ = built(**MOE, filter_fqns=["inner_experts"])
    assert type(experts_of(model)) is titan.GroupedExperts
    assert len(conversion_report(model).converted) == 14
    with pytest.raises(ValueError, match="experts_recipe_name='delayed': delayed scaling"):
        built(**MOE, experts_recipe_name="delayed")


def test_experts_of_gpt_oss() -> None:
    converter = titan.Float8Converter.Config(recipe_name="rowwise")
    spec = gpt_oss.model_registry("debugmodel", attn_backend="flex", converters=[converter])
    config = spec.model.layers[0].moe.routed_experts.inner_experts
    config.hidden_dim = 128
    experts = config.build()
    assert isinstance(experts, gpt_oss.GptOssGroupedExperts)
    for seed, parameter in enumerate(experts.parameters()):
        parameter.data.copy_(seeded(seed, *parameter.shape) / 16)
    x = seeded(9, 100, 256)
    numbers = torch.tensor([0, 17, 16, 1, 40, 0, 6, 20])
    in_float8 = experts(x, numbers)
    plain = convert_to_high_precision(experts)
    assert type(plain) is gpt_oss.GptOssGroupedExperts
    assert tolerances.LINEAR_OUTPUT < sqnr(plain(x, numbers), in_float8) < 60


def test_experts_that_another_converter_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{QUANTIZED}.has_cuda_capability", lambda *_: True)
    theirs, ours = titan_float8.Float8GroupedExpertsConverter.Config(), titan.Float8Converter.Config
    with pytest.raises(ValueError, match="another converter quantized"):
        deepseek_v3.model_registry("debugmodel", converters=[theirs, ours()])
    spec = deepseek_v3.model_registry("debugmodel", converters=[theirs])
    experts = spec.model.layers[1].moe.routed_experts.inner_experts.build()
    with pytest.warns(UserWarning, match="w1_EFD, a weight of class .*, which is quantised"):
        convert_to_float8_training(experts, module_filter_fn=all_linears)


@pytest.mark.xdist_group("ranks")
def test_experts_train_under_fsdp2_and_expert_parallel(two: Ranks) -> None:
    """Each rank with a row of tokens, against one rank with both; of experts the same bits."""
    model, optimizers = built(**MOE)
    titan_run.fill(model)
    wanted = step(model, optimizers, 0, slice(2))
    loss = wanted.pop("loss")
    results = two.run(experts_on_ranks)
    assert sum(got["loss"] for got in results) / 2 == pytest.approx(loss.item(), rel=1e-5)
    for got, (name, grad) in itertools.product(results, wanted.items()):
        assert got[name].equal(grad) if name in WEIGHTS else sqnr(grad, got[name]) > 50, name


def experts_on_ranks() -> dict[str, Tensor]:
    model, optimizers = built(2, ep=2, **MOE)
    titan_run.fill(model)
    experts, rank = experts_of(model), dist.get_rank()
    assert isinstance(experts, Float8Experts)
    assert experts.w1_EFD.to_local().shape == (4, 256, 256)
    return step(model, optimizers, 0, slice(rank, rank + 1))


SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A tokenizer and documents of random words."""
    words = [f"w{index}" for index in range(500)]
    vocabulary = {word: index for index, word in enumerate(["<unknown>", "<eos>", *words])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"},
    }
    folder = tmp_path / "assets"
    (folder / "data").mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    choice = random.Random(0)
    texts = (" ".join(choice.choices(words, k=100)) for _ in range(64))
    (folder / "data" / "texts.json").write_text("\n".join(json.dumps({"text": x}) for x in texts))
    return folder


def losses(assets: Path, out: Path) -> list[float]:
    """Return those of four steps."""
    arguments = "--dump_folder", str(out), "--training.steps", "4"
    program = (
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r}); import pathlib, titan_trainer\n"
        f"titan_trainer.main(pathlib.Path({str(assets)!r}), *{arguments})"
    )
    done = run_program(program, COMPILER)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown[-2000:]
    return [float(loss) for loss in re.findall(r"loss: +([0-9.]+)", shown)]


def state(out: Path, step: int, tmp_path: Path) -> dict[str, Tensor]:
    dcp_to_torch_save(out / "checkpoint" / f"step-{step}", tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=False)
    return {name: x for name, x in saved.items() if isinstance(x, Tensor)}


@pytest.mark.xdist_group("programs")
def test_a_run_is_resumed_bit_by_bit(assets: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    first = losses(assets, whole)
    assert len(first) == 4
    shutil.copytree(whole / "checkpoint" / "step-2", rest / "checkpoint" / "step-2")
    assert losses(assets, rest) == first[2:]
    wanted, got = state(whole, 4, tmp_path), state(rest, 4, tmp_path)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(x, got[name]) for name, x in wanted.items())
    histories = [x for name, x in wanted.items() if "fp8_amax_history" in name]
    assert len(histories) == 20
    assert all((x > 0).sum() == 4 for x in histories)
