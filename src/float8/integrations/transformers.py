"""The `Trainer` of Hugging Face's transformers."""

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from float8.convert.filters import WRAPPERS
from float8.linear import Float8Layer
from float8.sync import Attachment, attach_to_optimizer

_HIDDEN = {name for name in WRAPPERS if name.startswith("_")}  # not in the names of checkpoints


class Float8Callback(TrainerCallback, ExportableState):
    """Runs at every optimizer step what the scaling of a converted model needs once per step.

    With whatever optimizer the `Trainer` makes: `Trainer(model, ..., callbacks=[Float8Callback()])`
    for a model that `convert_to_float8_training` converted. Needed for delayed scaling and for
    `Float8Weights.HELD`, and for the speed of weights that FSDP2 gathers in float8; harmless else.

    After a training has begun, a `PreTrainedModel` saves the weights alone, as the plain model
    does: `model.save_pretrained`, and the `Trainer`. Checkpoints have the state of delayed scaling
    in `trainer_state.json`, from where `train(resume_from_checkpoint=...)` takes it.

    Args:
        group: of the sync, as in `attach_to_optimizer`. `restore_callback_states_from_checkpoint`
            makes callbacks anew, without it.
    """

    def __init__(self, *, group: Any = None) -> None:
        self._group = group
        self._attachment: Attachment | None = None
        self._model: weakref.ref[nn.Module] | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Attach the model to the optimizer, which exists by now, and take the state, if any."""
        self._detach()  # from a training that ended in an error
        self._model = weakref.ref(model)
        # A checkpoint written without this callback has no entry of ours, but is saved with one.
        entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step > 0:  # resumed
            # Given twice, a callback has a list, of which the last was written last.
            entry = entry[-1] if isinstance(entry, list) else entry
            self._take(entry["attributes"]["delayed"])
        ours = {
            f"{each}.{key}"
            for name, layer in self._delayed().items()
            for each in (name, _plain(name))
            for key in _buffers(layer)
        }
        theirs = getattr(model, "_keys_to_ignore_on_save", None) or ()
        model._keys_to_ignore_on_save = {*theirs, *ours}  # type: ignore[assignment]
        self._attachment = attach_to_optimizer(model, optimizer, group=self._group)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the attachment; what `trainer.save_state()` writes from now on is the last state."""
        self._detach()
        entries, name = state.stateful_callbacks, type(self).__name__
        if isinstance(entries.get(name), list):
            entries[name][-1] = self.state()
        else:
            entries[name] = self.state()

    def state(self) -> dict[str, Any]:
        """Return the state that the `Trainer` writes into `trainer_state.json`."""
        saved = {
            _plain(name): {key: layer.get_buffer(key).tolist() for key in _buffers(layer)}
            for name, layer in self._delayed().items()
        }
        return {"args": {}, "attributes": {"delayed": saved}}

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    def _take(self, saved: dict[str, dict[str, Any]]) -> None:
        layers = {_plain(name): layer for name, layer in self._delayed().items()}
        if others := sorted(layers.keys() ^ saved.keys()):
            warnings.warn(
                f"float8: the checkpoint and the model have delayed scaling in different layers: "
                f"{len(saved)} and {len(layers)}; {others[0]!r}, for one, is in one of them only. "
                f"State without a layer is dropped, and layers without one begin anew; convert the "
                f"model as it was when the checkpoint was written",
                stacklevel=2,
            )
        for name in layers.keys() & saved.keys():
            values = {
                key: torch.tensor(value, dtype=torch.float32, device="cpu")
                for key, value in saved[name].items()
            }
            layers[name].load_state_dict(values, strict=False)

    def _delayed(self) -> dict[str, Float8Layer]:
        """Return the layers with delayed scaling, by all of their names."""
        model = None if self._model is None else self._model()
        modules = () if model is None else model.named_modules(remove_duplicate=False)
        return {
            name: layer
            for name, layer in modules
            if isinstance(layer, Float8Layer) and layer.delayed
        }


def _plain(name: str) -> str:
    """Return the name of a module without its wrappers, as state dicts have it."""
    return ".".join(part for part in name.split(".") if part not in _HIDDEN)


def _buffers(layer: Float8Layer) -> list[str]:
    return [key for site in layer.delayed for key in site.buffers]
