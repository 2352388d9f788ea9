"""The `Trainer` of Hugging Face's transformers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from float8.linear import Float8Layer
from float8.sync import Attachment, attach_to_optimizer


class Float8Callback(TrainerCallback, ExportableState):
    """Runs at every optimizer step what the scaling of a converted model needs once per step.

    With whatever optimizer the `Trainer` makes: `Trainer(model, ..., callbacks=[Float8Callback()])`
    for a model that `convert_to_float8_training` converted. Needed for delayed scaling and for
    `Float8Weights.HELD`, and for the speed of weights that FSDP2 gathers in float8; harmless else.

    From the first training on `model.save_pretrained` and the `Trainer` save the weights alone, as
    of the plain model. Checkpoints have the state of delayed scaling in `trainer_state.json`, from
    where `train(resume_from_checkpoint=...)` takes it.

    Args:
        group: of the sync, as in `attach_to_optimizer`. `restore_callback_states_from_checkpoint`
            makes callbacks anew, without it.
    """

    def __init__(self, *, group: Any = None) -> None:
        self._group = group
        self._attachment: Attachment | None = None
        self._model: nn.Module | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Attach the model to the optimizer, which exists by now, and take the state, if any."""
        self.on_train_end(args, state, control)  # of a training that ended in an error
        self._model = model
        # A checkpoint written without this callback has no entry of ours, but is saved with one.
        entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step > 0:  # resumed
            for name, buffers in entry["attributes"]["delayed"].items():
                values = {key: torch.tensor(value) for key, value in buffers.items()}
                model.get_submodule(name).load_state_dict(values, strict=False)
        ours = (f"{name}.{key}" for name, buffers in self._delayed() for key in buffers)
        theirs = getattr(model, "_keys_to_ignore_on_save", None) or ()
        model._keys_to_ignore_on_save = {*theirs, *ours}  # type: ignore[assignment]
        self._attachment = attach_to_optimizer(model, optimizer, group=self._group)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the attachment."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    def state(self) -> dict[str, Any]:
        """What the `Trainer` writes into `trainer_state.json`."""
        saved = {
            name: {key: x.tolist() for key, x in buffers.items()}
            for name, buffers in self._delayed()
        }
        return {"args": {}, "attributes": {"delayed": saved}}

    def _delayed(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The names of layers with delayed scaling, and their buffers by name."""
        modules = () if self._model is None else self._model.named_modules(remove_duplicate=False)
        for name, layer in modules:
            if isinstance(layer, Float8Layer) and layer.delayed:
                names = (key for site in layer.delayed for key in site.buffers)
                yield name, {key: layer.get_buffer(key) for key in names}
