"""Float8 training with the `Trainer` of Lightning."""

from typing import Any

from lightning.pytorch import Callback

from float8.convert.convert import convert_to_float8_training
from float8.step import Attachment, attach_to_optimizer


class Float8Callback(Callback):
    """Lightning callback that converts a `LightningModule` to float8 before optimizers are made.

    Pass it as `Trainer(..., callbacks=[Float8Callback(config=...)])`. Its hooks update scales and
    float8 weights at each optimizer step. Under delayed scaling, `validate`, `test` and `predict`
    with `ckpt_path` need it too: checkpoints have buffers that an unconverted module lacks.

    Args:
        convert: set False if you convert the module yourself, for example in `configure_model`.
        group: the process group over which delayed scaling all-reduces amaxes. None: the ranks of
            the device mesh of weights, or of other Parameters under their `fully_shard`, or all.
        **conversion: arguments of `convert_to_float8_training`; without `config`, "tensorwise".
    """

    def __init__(self, *, convert: bool = True, group: Any = None, **conversion: Any) -> None:
        self._convert, self._group, self._conversion = convert, group, conversion
        self._attachments: list[Attachment] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Convert layers of `pl_module` to float8, unless the callback has `convert=False`."""
        if self._convert:
            convert_to_float8_training(pl_module, **self._conversion)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register hooks that update scales and float8 weights at steps of `trainer.optimizers`."""
        for optimizer in trainer.optimizers:
            self._attachments.append(attach_to_optimizer(pl_module, optimizer, group=self._group))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the hooks that `on_train_start` registered on optimizers."""
        while self._attachments:
            self._attachments.pop().remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hooks on optimizers: Lightning does not call `teardown` after an exception."""
        self.teardown(trainer, pl_module, "fit")
