"""Float8 training with the `Trainer` of Lightning."""

from typing import Any

from lightning.pytorch import Callback

from float8.convert.convert import convert_to_float8_training
from float8.step import Attachment, attach_to_optimizer


class Float8Callback(Callback):
    """Converts the module before its optimizers are made, and attaches it to them.

    Use it as `Trainer(..., callbacks=[Float8Callback(config=...)])`. Checkpoints have the state of
    delayed scaling: load them into a module that this callback converted, in any stage.

    Args:
        convert: False to convert the module yourself, for example in `configure_model`.
        group: the process group that syncs scales, as in `attach_to_optimizer`.
        **conversion: arguments of `convert_to_float8_training`, for example `config`.
    """

    def __init__(self, *, convert: bool = True, group: Any = None, **conversion: Any) -> None:
        self._convert, self._group, self._conversion = convert, group, conversion
        self._attachments: list[Attachment] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Convert the layers of `pl_module`."""
        if self._convert:
            convert_to_float8_training(pl_module, **self._conversion)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Call `attach_to_optimizer` for each optimizer of `trainer`."""
        for optimizer in trainer.optimizers:
            attached = attach_to_optimizer(pl_module, optimizer, group=self._group)
            self._attachments.append(attached)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the attachments, since Lightning calls no `teardown` after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the attachments."""
        for attachment in self._attachments:
            attachment.remove()
        self._attachments = []
