"""The `Trainer` of transformers trains a converted model, saves it and resumes it."""

import copy
import gc
import importlib
import json
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from float8 import convert_to_float8_training, float8_state_dict, high_precision_state_dict
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import same_bits
from support.fresh import ONE_WORKER, in_fresh_process
from support.models import fp8_state

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")
hf = importlib.import_module("support.hugging_face")
Float8Callback = hf.Float8Callback

SETTINGS = {
    "plain": {},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "checkpointing in bf16": {"gradient_checkpointing": True, "bf16": True},
    "sgd, callbacks anew": {"optim": "sgd", "restore_callback_states_from_checkpoint": True},
}


@ONE_WORKER
@pytest.mark.parametrize(
    ("recipe", "settings"), [("tensorwise", "plain"), *(("delayed", each) for each in SETTINGS)]
)
def test_a_run_is_resumed_bit_by_bit(recipe: str, settings: str, tmp_path: Path) -> None:
    more = SETTINGS[settings]
    model = hf.converted(recipe)
    before = copy.deepcopy(model.state_dict())
    # Wrapped as compiled models are, but not traced, which takes long.
    with torch.compiler.set_stance("force_eager" if settings == "compiled" else "default"):
        hf.trainer(model, tmp_path / "whole", **more).train()
        rest = (hf.resumed, recipe, tmp_path / "whole/checkpoint-2", tmp_path / "rest", more)
        state = rest[0](*rest[1:]) if settings == "compiled" else in_fresh_process(*rest)
    assert not any(
        layer._float8_attached for layer in model.modules() if hasattr(layer, "_float8_attached")
    )
    if recipe == "delayed":
        histories = [x for name, x in fp8_state(model).items() if "history" in name]
        assert all((x > 0).sum() == 4 for x in histories)  # one of each step, not microbatch
    assert state.keys() == model.state_dict().keys()
    for name, x in model.state_dict().items():
        assert same_bits(state[name], x), name
    assert not same_bits(state["lm_head.weight"], before["lm_head.weight"])


def loaded(folder: Path) -> torch.nn.Module:
    model, found = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model


def test_what_is_saved_after_a_training_is_of_the_plain_model(tmp_path: Path) -> None:
    model = hf.converted("delayed")
    trainer = hf.trainer(model, tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "by the trainer"))
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "in shards", max_shard_size="100KB")
    assert len([*(tmp_path / "in shards").glob("*.safetensors")]) > 1
    for name in ("checkpoint-4", "by the trainer", "whole", "in shards"):
        for (key, p), q in zip(
            model.named_parameters(), loaded(tmp_path / name).parameters(), strict=True
        ):
            assert same_bits(p, q), key
    other = convert_to_float8_training(
        hf.llama(), config="delayed", module_filter_fn=lambda mod, fqn: fqn.endswith("q_proj")
    )
    trainer = hf.trainer(other, tmp_path / "rest")
    with pytest.warns(UserWarning, match="delayed scaling in different layers"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_lora_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def lora() -> torch.nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(hf.converted("delayed"), config)

    whole, rest = lora(), lora()
    hf.trainer(whole, tmp_path).train()
    trainer = hf.trainer(rest, tmp_path / "rest")
    for _ in range(2):  # the second time from the state of the last step back to that of step 2
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        state = rest.state_dict()
        assert all(same_bits(x, state[name]) for name, x in whole.state_dict().items())
    assert any((x > 0).sum() == 4 for name, x in fp8_state(rest).items() if "history" in name)


def test_state_is_found_whatever_wraps_the_model_and_however_often_it_was_saved(
    tmp_path: Path,
) -> None:
    model = hf.converted("delayed")

    def is_mlp(module: torch.nn.Module) -> bool:
        return type(module).__name__.endswith("MLP")

    apply_activation_checkpointing(model, check_fn=is_mlp)  # wraps them, in their names, too
    trainer = hf.trainer(model, tmp_path)
    trainer.add_callback(Float8Callback())  # a second one
    trainer.train()
    model.save_pretrained(tmp_path / "whole")
    assert loaded(tmp_path / "whole") is not None
    rest = hf.converted("delayed")
    hf.trainer(rest, tmp_path / "rest").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    state = rest.state_dict()
    assert all(same_bits(x, state[name]) for name, x in model.state_dict().items())


def test_experts_are_resumed_bit_by_bit_from_the_checkpoint(tmp_path: Path) -> None:
    """Experts are saved one by one, under names that the `Trainer` does not load."""

    def convert(model: torch.nn.Module) -> torch.nn.Module:
        head = ("lm_head", "gate")
        chosen = {"config": "rowwise", "module_filter_fn": lambda mod, fqn: not fqn.endswith(head)}
        return convert_to_float8_training(model, **chosen)

    def mixtral(seed: int) -> torch.nn.Module:
        return convert(hf.llama(seed, "Mixtral", num_local_experts=4))

    whole = mixtral(0)
    hf.trainer(whole, tmp_path).train()
    checkpoint = tmp_path / "checkpoint-2"
    rest = convert(transformers.MixtralForCausalLM.from_pretrained(checkpoint))
    hf.trainer(rest, tmp_path / "rest").train(resume_from_checkpoint=str(checkpoint))
    for (name, p), q in zip(whole.named_parameters(), rest.parameters(), strict=True):
        assert same_bits(p, q), name


def test_the_state_that_is_saved_last_is_the_last(tmp_path: Path) -> None:
    model = hf.converted("delayed")
    trainer = hf.trainer(model, tmp_path, save_strategy="no")
    trainer.train()
    trainer.save_state()
    entry = json.loads((tmp_path / "trainer_state.json").read_text())["stateful_callbacks"]
    saved = entry["Float8Callback"]["attributes"]["delayed"]
    ours = fp8_state(model)
    found = {f"{name}.{key}": x for name, state in saved.items() for key, x in state.items()}
    assert found == {name: x.tolist() for name, x in ours.items()}


def test_a_run_begun_without_the_callback_is_resumed_with_it(tmp_path: Path) -> None:
    first = hf.trainer(hf.converted("tensorwise"), tmp_path)
    first.remove_callback(Float8Callback)
    first.train()
    second = hf.trainer(hf.converted("tensorwise"), tmp_path / "rest")
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
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


def test_the_state_to_go_on_with_is_published_beside_the_weights(tmp_path: Path) -> None:
    model = hf.converted("delayed")
    ids = hf.tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    sync(model)
    model.save_pretrained(tmp_path, state_dict=high_precision_state_dict(model))
    safetensors.save_file(float8_state_dict(model), tmp_path / "float8.safetensors")
    again = loaded(tmp_path)
    convert_to_float8_training(again, config=model.model.layers[0].mlp.up_proj.config)
    again.load_state_dict(safetensors.load_file(tmp_path / "float8.safetensors"), strict=False)
    for one in (model, again):
        one.zero_grad()
        one.train()(input_ids=ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert same_bits(p.grad, q.grad), name
    assert all(same_bits(x, fp8_state(again)[name]) for name, x in fp8_state(model).items())
