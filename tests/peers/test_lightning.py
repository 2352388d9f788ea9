"""The `Trainer` of Lightning with our callback, and its checkpoints."""

import importlib
from pathlib import Path

import pytest

from float8 import Float8Linear
from sqnr import same_bits
from support.fresh import ONE_WORKER, in_fresh_process

pytest.importorskip("lightning")
lightning_run = importlib.import_module("support.lightning_run")


def histories(module) -> list[int]:
    """How many steps each history has seen."""
    return [int((x > 0).sum()) for name, x in module.named_buffers() if "history" in name]


@ONE_WORKER
def test_a_run_is_resumed_bit_by_bit_in_a_fresh_process(tmp_path: Path) -> None:
    whole = lightning_run.run(tmp_path, accumulate_grad_batches=2)
    rest = in_fresh_process(lightning_run.resumed, tmp_path / "rest", tmp_path / "epoch=0.ckpt")
    assert rest.keys() == whole.keys()
    assert all(same_bits(x, rest[name]) for name, x in whole.items())


@pytest.mark.parametrize(
    ("by_hand", "more"),
    [
        (False, {"precision": "bf16-mixed"}),
        (False, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
        (True, {}),
    ],
)
def test_each_step_is_synced_once(by_hand: bool, more: dict, tmp_path: Path) -> None:
    module = lightning_run.Module(by_hand=by_hand)
    lightning_run.trainer(tmp_path, 1, **more).fit(module, lightning_run.data())
    layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
    assert len(layers) == 6
    assert not any(layer._float8_attached for layer in layers)
    steps = 4 // more.get("accumulate_grad_batches", 1)
    assert histories(module) == [steps] * 12
    assert not any(layer._float8_has_unsynced_amax() for layer in layers)


def test_a_checkpoint_is_tested_in_a_module_that_is_not_converted_yet(tmp_path: Path) -> None:
    """And it loads without Lightning's trainer."""
    state = lightning_run.run(tmp_path)
    path = str(tmp_path / "epoch=1.ckpt")
    results = [
        lightning_run.trainer(tmp_path, 1).validate(
            lightning_run.Module(seed), lightning_run.data(), ckpt_path=path, verbose=False
        )
        for seed in range(2)
    ]
    assert results[0] == results[1]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*fp8_"):
        lightning_run.Module.load_from_checkpoint(path, weights_only=True)
    plain = lightning_run.Module.load_from_checkpoint(path, strict=False, weights_only=True)
    assert all(same_bits(p, state[name]) for name, p in plain.named_parameters())


def test_a_training_that_fails_ends_the_attachments(tmp_path: Path) -> None:
    class Failing(lightning_run.Module):
        def training_step(self, batch, index):
            if index == 1:
                raise OSError("no data")
            return super().training_step(batch, index)

    module, trainer = Failing(), lightning_run.trainer(tmp_path, 1)
    with pytest.raises(OSError, match="no data"):
        trainer.fit(module, lightning_run.data())
    layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
    assert len(layers) == 6
    assert not any(layer._float8_attached for layer in layers)
    loaded = lightning_run.Module(1)
    trainer = lightning_run.trainer(tmp_path, 1)
    trainer.fit(loaded, lightning_run.data())
    assert histories(loaded) == [4] * 12


def test_the_conversion_can_be_left_to_the_user(tmp_path: Path) -> None:
    callback = type(lightning_run.trainer(tmp_path, 1).callbacks[0])(convert=False)
    module = lightning_run.Module()
    callback.setup(None, module, "fit")
    assert not any(isinstance(layer, Float8Linear) for layer in module.modules())
