"""The `Trainer` of Hugging Face's transformers."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from float8.sync import Attachment, attach_to_optimizer


class Float8Callback(TrainerCallback):
    """Runs at every optimizer step what the scaling of a converted model needs once per step.

    With whatever optimizer the `Trainer` makes: `Trainer(model, ..., callbacks=[Float8Callback()])`
    for a model that `convert_to_float8_training` converted. Needed for delayed scaling and for
    `Float8Weights.HELD`, and for the speed of weights that FSDP2 gathers in float8; harmless else.

    Args:
        group: of the sync, as in `attach_to_optimizer`.
    """

    def __init__(self, *, group: Any = None) -> None:
        self._group = group
        self._attachment: Attachment | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Attach the model to the optimizer, which exists by now."""
        self.on_train_end(args, state, control)  # of a training that ended in an error
        self._attachment = attach_to_optimizer(model, optimizer, group=self._group)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the attachment."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None
