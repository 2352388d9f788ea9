"""The `Trainer` of Lightning with our callback: other ways to train, and its checkpoints."""

from pathlib import Path

import pytest

from sqnr import same_bits
from support import libraries
from support.lazily import Lazily, needs_installed
from support.microbatches import layers_of
from support.models import fp8_state

needs_installed("lightning")
lightning_run = Lazily("support.lightning_run")


@pytest.mark.parametrize("by_hand", [False, True])
def test_each_step_is_synced_once(by_hand: bool, tmp_path: Path) -> None:
    """By two optimizers or one, each attached; and nothing is attached in the end."""
    attached = set()

    class Counting(lightning_run.Module):
        def training_step(self, batch, index):
            attached.update(layer._float8_attached for layer in layers_of(self))
            return super().training_step(batch, index)

    module = Counting(by_hand=by_hand)
    more = {} if by_hand else {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
    lightning_run.trainer(tmp_path, 1, **more).fit(module, lightning_run.data())
    steps = [int((x > 0).sum()) for name, x in fp8_state(module).items() if "history" in name]
    assert steps == [4] * 12
    assert attached == {2 if by_hand else 1}
    assert len(layers := layers_of(module)) == 6
    assert not any(x._float8_attached or x._float8_has_unsynced_amax() for x in layers)


def test_a_checkpoint_is_tested_in_a_module_that_is_not_converted_yet(tmp_path: Path) -> None:
    state = libraries.by_lightning(libraries.feed_forwards(), tmp_path, False).state_dict()
    path = str(tmp_path / "epoch=1.ckpt")
    results = [
        lightning_run.trainer(tmp_path, 1).validate(
            lightning_run.Module(libraries.feed_forwards(seed)),
            lightning_run.data(),
            ckpt_path=path,
            verbose=False,
        )
        for seed in range(2)
    ]
    assert results[0] == results[1]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*fp8_"):
        lightning_run.Module.load_from_checkpoint(path, weights_only=True)
    plain = lightning_run.Module.load_from_checkpoint(path, strict=False, weights_only=True)
    assert all(same_bits(p, state[name]) for name, p in plain.model.named_parameters())


def test_a_training_that_fails_ends_the_attachments(tmp_path: Path) -> None:
    class Failing(lightning_run.Module):
        def training_step(self, batch, index):
            if index == 1:
                raise OSError("no data")
            return super().training_step(batch, index)

    module, trainer = Failing(), lightning_run.trainer(tmp_path, 1)
    with pytest.raises(OSError, match="no data"):
        trainer.fit(module, lightning_run.data())
    assert len(layers := layers_of(module)) == 6
    assert not any(layer._float8_attached for layer in layers)


def test_the_conversion_can_be_left_to_the_user(tmp_path: Path) -> None:
    callback = type(lightning_run.trainer(tmp_path, 1).callbacks[0])(convert=False)
    module = lightning_run.Module()
    callback.setup(None, module, "fit")
    assert not layers_of(module)
