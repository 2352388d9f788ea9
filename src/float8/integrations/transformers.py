"""Float8 training with the `Trainer` of Hugging Face's transformers."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from float8.config import ConfigOrRecipe, as_config
from float8.convert.convert import convert_to_float8_training
from float8.convert.report import conversion_report
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.runtime.private import warn
from float8.linear import Float8Linear, Float8Module
from float8.names import plain_name
from float8.step import Attachment, attach_to_optimizer


class Float8Callback(TrainerCallback, ExportableState):
    """`Trainer` callback that converts the model to float8, and saves the state of delayed scaling.

    `Trainer(model, ..., callbacks=[Float8Callback("tensorwise")])` converts `model` before it makes
    an optimizer or wraps `model` by DDP, FSDP or DeepSpeed, and prints a report on rank 0.
    A model from `model_init` is converted when training begins; with several ranks, convert it in
    `model_init`, and use `Float8Callback()`. Hooks on the optimizer update scales at each step.

    Once training begins, `save_pretrained` omits buffers of delayed scaling; `trainer_state.json`
    has these, and a few values of each plain weight. Resuming raises `ValueError` if the model has
    others: the `Trainer` does not load weights that have other names in files, such as experts'.

    Args:
        config: a `Float8LinearConfig`, or the name of a recipe; None: do not convert the model.
        group: the process group over which delayed scaling all-reduces amaxes. None: the ranks of
            the device mesh of weights or, if none is sharded, of other Parameters; or else all.
            Resuming with `restore_callback_states_from_checkpoint=True` loses it and `config`.
        **conversion: other arguments of `convert_to_float8_training`. If the `Trainer`'s arguments
            have `max_length` (trl), the default `tokens_per_step` is batch size times `max_length`.

    Raises:
        ValueError: the recipe is unknown, or there is `conversion` without `config`. By `Trainer`:
            the model cannot be converted, or torchao, TransformerEngine or accelerate convert it.
    """

    def __init__(
        self, config: ConfigOrRecipe | None = None, *, group: Any = None, **conversion: Any
    ) -> None:
        if conversion and config is None:
            got = f"got {', '.join(conversion)} without config, which converts nothing"
            raise ValueError(f"Float8Callback: {got}; name a recipe, such as 'tensorwise'")
        self._config = None if config is None else as_config(config)
        self._group, self._conversion = group, conversion
        self._attachment: Attachment | None = None
        self._model: Callable[[], nn.Module | None] = nn.Module  # returns an empty one for now
        self._converted_count: int | None = None  # of modules in float8 after a conversion

    def on_init_end(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """With a `config`, convert `model`, and report on rank 0; raise if accelerate has fp8."""
        if AcceleratorState().mixed_precision == "fp8":
            got = "got mixed_precision='fp8', by which accelerate converts the model, too"
            do = "set it to 'bf16' in `accelerate config` or ACCELERATE_MIXED_PRECISION"
            raise ValueError(f"Float8Callback: {got}; {do}")
        if self._config is not None:
            self._convert(model, args, optimizer)
            if state.is_world_process_zero:
                print(conversion_report(model))  # noqa: T201

    def _convert(self, model: nn.Module, args: Any, optimizer: Any) -> None:
        others = "torchao.float8", "transformer_engine"
        if found := [x for x in map(type, model.modules()) if x.__module__.startswith(others)]:
            raise ValueError(f"Float8Callback: got a layer {found[0]}, expected none in float8 yet")
        if as_config(self._config).enable_fsdp_float8_all_gather and optimizer is not None:
            got = "got enable_fsdp_float8_all_gather=True, and an optimizer made before the weights"
            raise ValueError(f"Float8Callback: {got}; let the Trainer make it, and no model_init")
        tokens = args.per_device_train_batch_size * (getattr(args, "max_length", None) or 0)
        defaults = {"tokens_per_step": tokens} if tokens else {}
        convert_to_float8_training(model, config=self._config, **defaults | self._conversion)
        self._converted_count = _float8_count(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Convert `model` if it is not yet; resuming, check weights and load scales; add hooks."""
        self._remove_hooks()  # from a model whose training ended in an error
        if self._config is not None and self._converted_count != _float8_count(model):
            if args.world_size > 1:
                got = "got a model made after the Trainer, on several ranks; hand the callback to"
                do = "Trainer(callbacks=[...]), or convert in model_init and use Float8Callback()"
                raise ValueError(f"Float8Callback: {got} {do}")
            self._convert(model, args, optimizer)
        if not _float8_count(model):
            warn("float8: Float8Callback: no layer of the model is in float8; name a recipe")
        self._model = weakref.ref(model)
        # A checkpoint that was written without this callback has no entry: take the current state.
        entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step > 0:  # training resumes
            entry = entry[-1] if isinstance(entry, list) else entry  # a list if added twice
            changed = [self._changed(entry) if state.is_world_process_zero else None]
            if args.world_size > 1 and dist.is_initialized():
                dist.broadcast_object_list(changed)  # from rank 0: either all ranks raise or none
            if names := changed[0]:
                got = f"{len(names)} weights are not those of the checkpoint: {names[0]!r}"
                why = "the Trainer loads none with another name there, such as those of experts"
                do = "Make the model from it by `from_pretrained`, convert it, and resume with it"
                raise ValueError(f"Float8Callback: {got}, for one; {why}. {do}")
            self._load_scales(entry["attributes"]["delayed"])
        keys = {f"{name}.{key}" for name, x in self._delayed().items() for key in x._float8_state()}
        keys |= {*map(plain_name, keys), *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
        model._keys_to_ignore_on_save = keys  # type: ignore[assignment]
        self._attachment = attach_to_optimizer(model, optimizer, group=self._group)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the optimizer's hooks; store scales in `state`, for `trainer.save_state()`."""
        self._remove_hooks()
        state.stateful_callbacks[type(self).__name__] = self.state()

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Warn if `model` is evaluated before this callback has converted it to float8."""
        if self._config is not None and self._converted_count is None and not _float8_count(model):
            got = "got an evaluation in high precision, as training has yet to convert the model"
            warn(f"float8: Float8Callback: {got}; hand it to Trainer(callbacks=[...])")

    on_predict = on_evaluate

    def state(self) -> dict[str, Any]:
        """Return {"args": {}, "attributes": {"delayed": buffers by layer, "weights": samples}}."""
        saved = {
            plain_name(name): {key: x.tolist() for key, x in layer._float8_state().items()}
            for name, layer in self._delayed().items()
        }
        weights = {name: values.tolist() for name, values in self._samples().items()}
        return {"args": {}, "attributes": {"delayed": saved, "weights": weights}}

    def _remove_hooks(self) -> None:
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    def _load_scales(self, saved: dict[str, dict[str, Any]]) -> None:
        """Load `saved`, {layer: {buffer: values}}; warn if delayed scaling is in other layers."""
        layers = {plain_name(name): layer for name, layer in self._delayed().items()}
        if differ := sorted(layers.keys() ^ saved.keys()):
            got = "got delayed scaling in different layers of the checkpoint and the model"
            example = f"{len(saved)} and {len(layers)}, and {differ[0]!r} in one of them only"
            warn(f"float8: {got}: {example}; its state is lost: convert the model as it was")
        like: Any = {"dtype": torch.float32, "device": "cpu"}
        for name in layers.keys() & saved.keys():
            values = {key: torch.tensor(x, **like) for key, x in saved[name].items()}
            layers[name].load_state_dict(values, strict=False)

    def _changed(self, saved_state: dict[str, Any]) -> list[str]:
        """Return "name [shape]" of weights whose samples differ from those saved by `state`."""
        saved = saved_state["attributes"].get("weights", {})
        items = ((name, x, saved.get(name, x.tolist())) for name, x in self._samples().items())
        return [n for n, x, old in items if not x.allclose(x.new_tensor(old), 0, 0, equal_nan=True)]

    def _samples(self) -> dict[str, Tensor]:
        """Return {"name [shape]": few values} of plain high-precision Parameters, none on meta."""
        return {
            f"{plain_name(name)} {[*x.shape]}": x.detach().flatten()[:: x.numel() // 4 or 1].cpu()
            for name, x in (self._model() or nn.Module()).named_parameters()
            if type(x) is nn.Parameter and x.dtype in HIGH_PRECISION_DTYPES and not x.is_meta
        }

    def _delayed(self) -> dict[str, Float8Linear]:
        modules = (self._model() or nn.Module()).named_modules(remove_duplicate=False)
        return {fqn: x for fqn, x in modules if isinstance(x, Float8Linear) and x._float8_stateful}


def _float8_count(model: nn.Module) -> int:
    return sum(isinstance(module, Float8Module) for module in model.modules())
