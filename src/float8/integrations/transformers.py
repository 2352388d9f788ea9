"""The `Trainer` of Hugging Face's transformers."""

import json
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from float8.checkpoints.names import plain_name
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.runtime.private import warn
from float8.linear import Float8Linear
from float8.step import Attachment, attach_to_optimizer


class Float8Callback(TrainerCallback, ExportableState):
    """Runs at every optimizer step what the scaling of a converted model needs once per step.

    `Trainer(model, ..., callbacks=[Float8Callback()])`, for a converted model. Needed for delayed
    scaling and for `Float8Weights.HELD`, and for the speed of weights that FSDP2 gathers in float8.

    After a training has begun, the model saves the weights alone, as the plain one does. The state
    of delayed scaling is in `trainer_state.json`, where `train(resume_from_checkpoint=...)` finds
    it, and a few values of each weight: the `Trainer` passes over weights that a checkpoint has
    under other names, as those of experts. A training that is resumed so raises a `ValueError`
    before its first step; where `load_best_model_at_end` has left some out, a warning says so.

    Args:
        group: the process group of the sync, as in `attach_to_optimizer`. Callbacks that
            `restore_callback_states_from_checkpoint` makes anew are without it.
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
            entry = _last(entry)
            told = [self._not_loaded(entry) if state.is_world_process_zero else None]
            if args.world_size > 1 and dist.is_initialized():
                dist.broadcast_object_list(told)  # from rank 0: all of them raise, and none waits
            if told[0]:
                do = "Make the model from that checkpoint by its `from_pretrained`, convert it, and"
                raise ValueError(f"Float8Callback: {told[0]}. {do} resume with it")
            self._take(entry["attributes"]["delayed"])
        ours = [f"{name}.{key}" for name, x in self._delayed().items() for key in x._float8_state()]
        theirs = getattr(model, "_keys_to_ignore_on_save", None) or ()
        model._keys_to_ignore_on_save = {*theirs, *ours, *map(plain_name, ours)}  # type: ignore[assignment]
        self._attachment = attach_to_optimizer(model, optimizer, group=self._group)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the attachment; what `trainer.save_state()` writes from now on is the last state."""
        self._detach()
        name = type(self).__name__
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best and (file := Path(best, "trainer_state.json")).exists():
            saved = json.loads(file.read_text())["stateful_callbacks"].get(name)
            if state.is_world_process_zero and (problem := self._not_loaded(saved)):
                do = f"load the best model from {best} by its `from_pretrained`"
                warn(f"float8: load_best_model_at_end: {problem}; {do}")
        state.stateful_callbacks[name] = self.state()

    def state(self) -> dict[str, Any]:
        """Return the state that the `Trainer` writes into `trainer_state.json`."""
        saved = {
            plain_name(name): {key: x.tolist() for key, x in layer._float8_state().items()}
            for name, layer in self._delayed().items()
        }
        weights = {name: values.tolist() for name, values in self._samples().items()}
        return {"args": {}, "attributes": {"delayed": saved, "weights": weights}}

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    def _take(self, saved: dict[str, dict[str, Any]]) -> None:
        layers = {plain_name(name): layer for name, layer in self._delayed().items()}
        if others := sorted(layers.keys() ^ saved.keys()):
            warn(
                f"float8: the checkpoint and the model have delayed scaling in different layers: "
                f"{len(saved)} and {len(layers)}; {others[0]!r}, for one, is in one of them only. "
                f"What has no counterpart is dropped, or begins anew; convert the model as it was"
            )
        like: Any = {"dtype": torch.float32, "device": "cpu"}
        for name in layers.keys() & saved.keys():
            values = {key: torch.tensor(value, **like) for key, value in saved[name].items()}
            layers[name].load_state_dict(values, strict=False)

    def _not_loaded(self, entry: Any) -> str | None:
        """Say that weights differ from those of the checkpoint of `entry`; None: they do not.

        What is not there in the same shape, as on other ranks, is passed over.
        """
        saved = _last(entry)["attributes"].get("weights", {}) if entry else {}
        wrong = []
        for name, values in self._samples().items():
            then = torch.tensor(saved.get(name, values.tolist()), dtype=torch.float64)
            if not torch.equal(then.to(values.dtype).nan_to_num(), values.nan_to_num()):
                wrong.append(name)
        if not wrong:
            return None
        why = "the Trainer loads none that have another name there, such as those of experts"
        return f"{len(wrong)} weights are not those of the checkpoint, as {wrong[0]!r}: {why}"

    def _samples(self) -> dict[str, Tensor]:
        """Return a few values of each plain Parameter, by its name and shape."""
        model = None if self._model is None else self._model()
        return {
            f"{plain_name(name)} {[*x.shape]}": x.detach().flatten()[:: x.numel() // 4 or 1].cpu()
            for name, x in ([] if model is None else model.named_parameters())
            if type(x) is nn.Parameter and x.dtype in HIGH_PRECISION_DTYPES and not x.is_meta
        }

    def _delayed(self) -> dict[str, Float8Linear]:
        """Return the layers with delayed scaling, by all of their names."""
        model = None if self._model is None else self._model()
        modules = () if model is None else model.named_modules(remove_duplicate=False)
        delayed = {name: x for name, x in modules if isinstance(x, Float8Linear)}
        return {name: layer for name, layer in delayed.items() if layer._float8_delayed}


def _last(entry: Any) -> Any:
    """Return what was written last: given twice, a callback has a list."""
    return entry[-1] if isinstance(entry, list) else entry
