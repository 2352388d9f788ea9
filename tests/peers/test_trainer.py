"""The `Trainer` of transformers: what it saves, how it is resumed, and what it must refuse."""

import functools
import gc
import importlib
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from float8 import Float8Linear, convert_to_float8_training
from sqnr import same_bits
from support import libraries
from support.configs import tensorwise
from support.lazily import Lazily, needs_installed
from support.models import fp8_state
from support.ranks import Ranks

needs_installed("accelerate")
transformers, hf = Lazily("transformers"), Lazily("support.hugging_face")
ours = Lazily("float8.integrations.transformers")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model after a training under delayed scaling, and its folder."""
    model, folder = hf.converted("delayed"), tmp_path_factory.mktemp("whole")
    trainer = hf.trainer(model, folder)
    trainer.train()
    trainer.save_model(str(folder / "by the trainer"))
    return model, folder


def loaded(folder: Path) -> nn.Module:
    model, found = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model


def resume(model: nn.Module, checkpoint: Path, folder: Path) -> nn.Module:
    hf.trainer(model, folder).train(resume_from_checkpoint=str(checkpoint))
    return model


def different(one: nn.Module, other: nn.Module) -> list[str]:
    """Return what two models have not in common, bit by bit."""
    state = other.state_dict()
    assert state.keys() == one.state_dict().keys()
    return [name for name, x in one.state_dict().items() if not same_bits(x, state[name])]


def test_what_is_saved_after_a_training_is_of_the_plain_model(whole: Any, tmp_path: Path) -> None:
    model, folder = whole
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "in shards", max_shard_size="100KB")
    assert len([*(tmp_path / "in shards").glob("*.safetensors")]) > 1
    saved = [tmp_path / "whole", tmp_path / "in shards"]
    for path in (*saved, folder / "checkpoint-4", folder / "by the trainer"):
        for (key, p), q in zip(model.named_parameters(), loaded(path).parameters(), strict=True):
            assert same_bits(p, q), key


def test_a_model_converted_otherwise_is_resumed_with_a_warning(whole: Any, tmp_path: Path) -> None:
    other = convert_to_float8_training(
        libraries.llama(),
        config="delayed",
        module_filter_fn=lambda mod, fqn: fqn.endswith("q_proj"),
    )
    with pytest.warns(UserWarning, match="delayed scaling in different layers"):
        resume(other, whole[1] / "checkpoint-2", tmp_path)


def test_lora_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    first, rest = (hf.with_lora(hf.converted("delayed")) for _ in range(2))
    hf.trainer(first, tmp_path).train()
    for _ in range(2):  # the second time from the state of the last step back to that of step 2
        assert different(first, resume(rest, tmp_path / "checkpoint-2", tmp_path / "rest")) == []
    assert any((x > 0).sum() == 4 for name, x in fp8_state(rest).items() if "history" in name)


def test_state_is_found_whatever_wraps_the_model_and_however_often_it_was_saved(
    tmp_path: Path,
) -> None:
    model = hf.converted("delayed")
    apply_activation_checkpointing(  # wraps them, in their names, too
        model, check_fn=lambda module: type(module).__name__.endswith("MLP")
    )
    trainer = hf.trainer(model, tmp_path)
    trainer.add_callback(ours.Float8Callback())  # a second one
    trainer.train()
    model.save_pretrained(tmp_path / "whole")
    assert loaded(tmp_path / "whole") is not None
    rest = resume(hf.converted("delayed"), tmp_path / "checkpoint-2", tmp_path / "rest")
    state = {
        name.replace("_checkpoint_wrapped_module.", ""): x for name, x in model.state_dict().items()
    }
    assert all(same_bits(x, state[name]) for name, x in rest.state_dict().items())


@pytest.mark.parametrize("size", ["100KB", pytest.param("1GB", marks=pytest.mark.exhaustive)])
def test_experts_are_resumed_bit_by_bit_from_the_checkpoint_or_not_at_all(
    tmp_path: Path, size: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts are saved one by one, under names that the `Trainer` does not load."""

    def convert(model: nn.Module) -> nn.Module:
        head = ("lm_head", "gate")
        chosen = {"config": "rowwise", "module_filter_fn": lambda mod, fqn: not fqn.endswith(head)}
        return convert_to_float8_training(model, **chosen)

    def mixtral(seed: int) -> nn.Module:
        return convert(hf.llama(seed, "Mixtral", num_local_experts=4, num_hidden_layers=1))

    whole = mixtral(0)
    save = functools.partial(whole.save_pretrained, max_shard_size=size)
    with mock.patch.object(whole, "save_pretrained", save):
        hf.trainer(whole, tmp_path).train()
    checkpoint = tmp_path / "checkpoint-2"
    assert (len([*checkpoint.glob("*.safetensors")]) > 1) == (size == "100KB")
    with pytest.raises(ValueError, match=r"weights are not those .*model.layers.0.mlp") as caught:
        resume(mixtral(5), checkpoint, tmp_path / "other")
    assert "from_pretrained" in str(caught.value)
    rest = convert(transformers.MixtralForCausalLM.from_pretrained(checkpoint))
    assert different(whole, resume(rest, checkpoint, tmp_path / "rest")) == []
    if size == "100KB":
        best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
        transformers.utils.logging.enable_propagation()  # to caplog
        hf.trainer(mixtral(0), tmp_path / "best", **best).train()
        transformers.utils.logging.disable_propagation()
        assert re.search("missing keys in the checkpoint .*mlp.experts", caplog.text)


def test_the_state_that_is_saved_last_is_the_last(tmp_path: Path) -> None:
    model = hf.converted("delayed")
    trainer = hf.trainer(model, tmp_path, save_strategy="no")
    trainer.train()
    trainer.save_state()
    entry = json.loads((tmp_path / "trainer_state.json").read_text())["stateful_callbacks"]
    saved = entry["Float8Callback"]["attributes"]["delayed"]
    found = {f"{name}.{key}": x for name, state in saved.items() for key, x in state.items()}
    assert found == {name: x.tolist() for name, x in fp8_state(model).items()}


def resume_with_other_weights() -> str:
    rank = torch.distributed.get_rank()
    callback, saved = ours.Float8Callback(), hf.converted("tensorwise")
    callback._model = weakref.ref(saved)
    args, control = SimpleNamespace(world_size=2), None
    state = SimpleNamespace(global_step=1, is_world_process_zero=rank == 0)
    state.stateful_callbacks = {"Float8Callback": callback.state()}
    model = hf.converted("tensorwise", seed=1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="weights are not those of the checkpoint") as caught:
        ours.Float8Callback().on_train_begin(args, state, control, model=model, optimizer=optimizer)
    return str(caught.value)


@pytest.mark.xdist_group("ranks")
def test_all_ranks_raise_what_the_first_finds(two: Ranks) -> None:
    first, second = two.run(resume_with_other_weights)
    assert first == second


def test_a_run_begun_without_the_callback_is_resumed_with_it(tmp_path: Path) -> None:
    first = hf.trainer(hf.converted("tensorwise"), tmp_path)
    first.remove_callback(ours.Float8Callback)
    first.train()
    resume(hf.converted("tensorwise"), tmp_path / "checkpoint-2", tmp_path / "rest")
    assert (tmp_path / "rest" / "checkpoint-4").exists()


def test_a_training_that_fails_leaves_nothing_attached(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, *args, **more):
            raise OSError("disk full")

    model = hf.converted("delayed")
    layers = [layer for layer in model.modules() if hasattr(layer, "_float8_attached")]
    trainer = hf.trainer(model, tmp_path)
    trainer.add_callback(Fails())
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    trainer.remove_callback(Fails)
    trainer.train()  # the same callback again
    assert not any(layer._float8_attached for layer in layers)
    trainer.add_callback(Fails())
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    assert all(layer._float8_attached for layer in layers)  # its optimizer is still there
    del trainer
    gc.collect()
    assert not any(layer._float8_attached for layer in layers)


# ---------------------------------------------------------------- conversion by the callback


def converting(recipe: Any = "delayed") -> Any:
    return ours.Float8Callback(recipe, module_filter_fn=lambda mod, fqn: fqn != "lm_head")


def test_one_line_converts_and_reports_once(
    whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """As the model that was converted by hand, also after an evaluation, and when resumed."""
    trainer = hf.trainer(libraries.llama(), tmp_path, callback=converting())
    assert trainer.optimizer is None
    assert len(fp8_state(trainer.model)) > 0
    trainer.evaluate()
    trainer.train()
    assert capsys.readouterr().out.count("7 of 8 linear layers run in float8") == 1
    assert different(trainer.model, whole[0]) == []
    rest = hf.trainer(libraries.llama(1), tmp_path / "rest", callback=converting())
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert different(rest.model, whole[0]) == []


def test_models_made_later_are_converted_on_one_rank(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hf.trainer(None, tmp_path, callback=converting(), init=lambda: libraries.llama())
    by_hand = hf.trainer(None, tmp_path, init=lambda: hf.converted("delayed"))
    for trainer in (first, by_hand):
        trainer.train()
    assert different(first.model, by_hand.model) == []
    late = hf.trainer(libraries.llama(), tmp_path)
    late.remove_callback(ours.Float8Callback)
    late.add_callback(converting())
    with pytest.warns(
        UserWarning, match="an evaluation in high precision, as training has yet to c"
    ):
        late.evaluate()
    monkeypatch.setattr(type(late.args), "world_size", 2)
    with pytest.raises(ValueError, match=r"after the Trainer, on several ranks; hand the callback"):
        late.callback_handler.on_train_begin(late.args, late.state, late.control)
    monkeypatch.undo()
    late.train()
    assert different(late.model, whole[0]) == []


def test_lora_is_converted_but_for_its_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = hf.with_lora(libraries.llama())
    base = ours.Float8Callback("delayed", module_filter_fn=lambda mod, fqn: "base_layer" in fqn)
    hf.trainer(model, tmp_path, callback=base).train()
    by_hand = hf.with_lora(hf.converted("delayed"))
    hf.trainer(by_hand, tmp_path).train()
    assert different(by_hand, model) == []


@pytest.mark.parametrize(("length", "gains"), [(64, False), (4096, True)])
def test_the_default_filter_counts_the_tokens_of_trl(length: int, gains: bool) -> None:
    model = nn.Sequential(nn.Linear(4096, 4096, device="meta"))
    args = SimpleNamespace(per_device_train_batch_size=2, max_length=length)
    ours.Float8Callback("tensorwise", gpu="H100")._convert(model, args, None)
    assert isinstance(model[0], Float8Linear) == gains


def test_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got head without config"):
        ours.Float8Callback(head=True)
    with pytest.raises(ValueError, match="tensorwize"):
        ours.Float8Callback("tensorwize")
    model = libraries.llama()
    optimizer = torch.optim.SGD(model.parameters())
    callback = converting(tensorwise(enable_fsdp_float8_all_gather=True))
    init, needs = ours.Float8Callback.on_init_end, (callback, SimpleNamespace(), None, None)
    with pytest.raises(ValueError, match="an optimizer made before the weights"):
        init(*needs, model=model, optimizer=optimizer)
    model.theirs = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch"})(8, 8)
    with pytest.raises(ValueError, match=r"got a layer .*transformer_engine.pytorch.Linear"):
        init(*needs, model=model, optimizer=None)
    assert not any(isinstance(x, Float8Linear) for x in model.modules())
    state = importlib.import_module("accelerate.state").AcceleratorState
    monkeypatch.setattr(state, "mixed_precision", "fp8")
    with pytest.raises(ValueError, match=r"got mixed_precision='fp8', .* set it to 'bf16'"):
        hf.trainer(libraries.llama(), tmp_path, callback=converting())
