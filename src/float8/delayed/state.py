"""Keep the buffers of delayed scaling while a layer is moved, copied, saved, loaded and synced.

Each GEMM operand `<site>` with delayed scaling has three float32 buffers that share no storage:
`fp8_amax_<site>` [], the largest amax since the last sync; `fp8_amax_history_<site>` [history_len],
the amaxes of the last steps, most recent first; `fp8_scale_<site>` [], the scale, 0 if not set.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.config import CAST_SITES, CastConfig, CastSite, Float8LinearConfig
from float8.delayed.cast import UNKNOWN_SCALE, DelayedScale
from float8.kernels.runtime.ops import NO_ONNX, register
from float8.kernels.runtime.private import in_reentrant_checkpoint, warn
from float8.linear.base import Float8Module
from float8.linear.plan import Casts
from float8.quantize import Cast
from float8.tensor import local_tensor
from float8.tensor.ranks import amax_over, sharding_groups


class Site(NamedTuple):
    """Name of a GEMM operand ("weight", ...) and names of its amax, history and scale buffers."""

    name: str
    amax: str
    history: str
    scale: str


SITES = {
    site: Site(site.value, *(f"fp8_{x}_{site.value}" for x in ("amax", "amax_history", "scale")))
    for site in CAST_SITES
}
WEIGHT, GRAD_OUTPUT = SITES[CastSite.WEIGHT], SITES[CastSite.GRAD_OUTPUT]


class StatefulLayer(Float8Module):
    """Base class of `Float8Linear`: keeps amaxes and scales for delayed scaling in buffers."""

    weight: Tensor
    _float8_stateful: tuple[Site, ...]
    _float8_compared: frozenset[Any] = frozenset()  # (layer count, *group names) whose ranks agree
    _float8_known: frozenset[str] = frozenset()  # operands known to have a scale, on all ranks
    _float8_versions: dict[int, int] | None = None
    """{id: `_version`} of trained Parameters at the first checked forward since the last sync."""
    _float8_sample: tuple[Any, Any, Any] = None, None, None
    """Identity of the weight, version of grad_output's amax and weight diagonal, sampled last."""
    _float8_synced_version = -1  # `_float8_amax_version()` at the last sync
    _float8_not_copied = frozenset({"_float8_compared", "_float8_versions", "_float8_sample"})

    @classmethod
    def _float8_buffer_names(cls, config: Float8LinearConfig) -> set[str]:
        return {name for site in config.delayed_sites for name in SITES[site][1:]}

    def _float8_start_state(self) -> None:
        super()._float8_start_state()
        self._float8_stateful = tuple(SITES[site] for site in self._float8_config.delayed_sites)
        self._float8_of_this_rank += tuple(site.amax for site in self._float8_stateful)
        self._float8_register_buffers()

    def _float8_register_buffers(self) -> None:
        for site in self._float8_stateful:
            for name, value in self._float8_fresh_state(site, self.weight.device).items():
                self.register_buffer(name, value)
        self._float8_state_was_written()

    def _float8_drop_state(self) -> None:
        for name in self._float8_state():
            del self._buffers[name]
        self._float8_compared = frozenset()
        super()._float8_drop_state()

    def _float8_state(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for site in self._float8_stateful for name in site[1:]}

    def _float8_fresh_state(self, site: Site, device: torch.device) -> dict[str, Tensor]:
        """Return new {name: buffer} of operand `site`: 0, but scale 1 if not `enable_amax_init`."""
        first = _first_scale(self._float8_config)
        scale = torch.full((), first, dtype=torch.float32, device=device)
        history = scale.new_zeros(self._float8_config.delayed_scaling_config.history_len)
        return {site.amax: torch.zeros_like(scale), site.history: history, site.scale: scale}

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook; make buffers local first, if `distribute_module` made them DTensors."""
        for name, buffer in self._float8_state().items():
            self._buffers[name] = local_tensor(buffer)  # each rank records its own amaxes
        return super().register_forward_pre_hook(*args, **kwargs)

    def _float8_replace_meta_buffers(self) -> bool:
        """Create all buffers anew if one is on meta and the weight is not; return whether so."""
        replaces = not self.weight.is_meta and any(x.is_meta for x in self._float8_state().values())
        if replaces:
            self._float8_register_buffers()
        return replaces

    @torch.no_grad()
    def _float8_reset_state(self) -> None:
        """Zero amaxes and histories; set scales to 0 (unset) or, if not `enable_amax_init`, 1."""
        for site in self._float8_stateful:  # in place: buffers may be DTensors
            self.get_buffer(site.amax).zero_()
            self.get_buffer(site.history).zero_()
            self.get_buffer(site.scale).fill_(_first_scale(self._float8_config))
        self._float8_state_was_written()

    def _float8_state_was_written(self) -> None:
        """Note that buffers were written: scales may be unset; no amax was recorded after that."""
        self._float8_known = frozenset()
        self._float8_mark_synced()

    def reset_parameters(self) -> None:
        """Initialize weight and bias as the unconverted layer does; reset amaxes and scales."""
        super().reset_parameters()  # type: ignore[misc]
        self._float8_reset_state()

    def _float8_cast_of_shard(self, cast_config: CastConfig, shard: Tensor) -> Cast:
        """Return the `Cast` by which this rank quantizes its weight `shard` for FSDP2's all-gather.

        It has the format of `cast_config`, and records the amax in a new tensor, which forwards in
        grad mode merge into the layer's buffer. Its scale is that in the buffer; in eval mode, if
        all Parameters are frozen, or if no scale is set yet, it is computed from the amax of all
        shards by an all-reduce. Grad mode is ignored: FSDP2 gathers under `no_grad`.
        """
        amax = shard.new_zeros((), dtype=torch.float32)
        if self._float8_trains():
            scale = self.get_buffer(WEIGHT.scale)
            if WEIGHT.name not in self._float8_known:  # a loaded checkpoint may have set it
                self._float8_note_known(WEIGHT, scale.item())
            if WEIGHT.name in self._float8_known:
                return Cast(cast_config, DelayedScale(scale.to(amax.device), amax, recording=True))
        unknown_scale = torch.full_like(amax, UNKNOWN_SCALE)
        reduce = amax_over(sharding_groups(self.weight))  # all shards get one scale
        return Cast(cast_config, DelayedScale(unknown_scale, amax, recording=True), reduce)

    def _float8_trains(self) -> bool:
        """Return `self.training`, but False if the layer has Parameters and all are frozen."""
        if not self.training or getattr(self._parameters.get("weight"), "requires_grad", False):
            return self.training  # the common case, without a list of Parameters
        requires_grad = [parameter.requires_grad for parameter in self.parameters()]
        return any(requires_grad) or not requires_grad  # FSDP1 takes Parameters away

    def _float8_note_known(self, site: Site, scale: float) -> None:
        if scale != UNKNOWN_SCALE:  # Dynamo (torch 2.11) fails at `|=`
            self._float8_known = self._float8_known | {site.name}

    def _float8_has_unsynced_amax(self) -> bool:
        return self._float8_amax_version() != self._float8_synced_version

    def _float8_mark_synced(self) -> None:
        if self._float8_versions is not None:  # setting an attribute of a module takes long
            self._float8_versions = None
        if not torch.compiler.is_compiling():
            self._float8_synced_version = self._float8_amax_version()

    def _float8_detach(self) -> None:
        """Count one attached optimizer less; restart the check for missing updates of scales."""
        super()._float8_detach()
        self._float8_versions = None

    def _float8_amax_version(self) -> int:
        """Return `_version`, raised by casts, of the weight's or else first amax; -1 if none."""
        amax = self._buffers.get(WEIGHT.amax)
        if amax is None and self._float8_stateful:
            amax = self._buffers[self._float8_stateful[0].amax]
        return -1 if amax is None or amax.is_inference() else amax._version

    def _float8_check_synced(self) -> None:
        """Raise `RuntimeError` if Parameters were written after a forward, but scales not synced.

        Does nothing under `no_grad`, in compiled code, without `enable_pre_and_post_forward`, or
        while an optimizer is attached (`attach_to_optimizer`), which syncs. Compares the version
        counters of trained Parameters with those at the first forward since the last sync. Fused
        optimizers and writes to `.data` do not increment them, so if a backward ran in between and
        `weight.grad` is None, also compares the weight's diagonal, which waits for the device; but
        not if `torch.distributed` is initialized, a CUDA graph is captured, the weight is frozen,
        or grad_output is scaled dynamically. Under FSDP, misses all writes.
        """
        checks = self._float8_config.enable_pre_and_post_forward and not self._float8_attached
        if not checks or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        # Parameters only: other tensors may be computed, and gone by the next forward.
        versions = {
            id(p): p._version
            for p in self.parameters()
            if isinstance(p, nn.Parameter) and p.requires_grad and not p.is_inference()
        }
        old_versions: Any = self._float8_versions
        is_first = old_versions is None  # since the last sync
        written = not is_first and any(old_versions.get(key, v) != v for key, v in versions.items())
        # The diagonal is sampled in the first forward, then after a backward once `grad` is None.
        weight: Any = self._parameters.get("weight")
        amax: Any = self._buffers.get(GRAD_OUTPUT.amax)  # written by each backward
        old_identity, old_amax_version, old_diagonal = self._float8_sample
        trained = type(weight) is nn.Parameter and id(weight) in versions
        sample_due = trained and amax is not None and not (amax.is_meta or amax.is_inference())
        if sample_due and not is_first:  # due if a step may have followed the last one
            after_backward = bool(old_identity) and amax._version != old_amax_version
            sample_due = after_backward and weight.grad is None
        new_sample: Any = None, None, None
        if sample_due:
            # With several ranks, `weight.grad` may be None between microbatches, too.
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            if not (distributed or (amax.is_cuda and torch.cuda.is_current_stream_capturing())):
                identity = id(weight), weight.dtype, weight.device, weight.shape
                diagonal = weight.detach().diagonal().clone()
                new_sample = identity, amax._version, diagonal
                if not is_first and identity == old_identity:
                    written |= not torch.equal(diagonal.nan_to_num(), old_diagonal.nan_to_num())
        if sample_due or is_first:
            self._float8_sample = new_sample
        if is_first:  # after the sample, which may run out of memory
            self._float8_versions = versions
        if written:
            raise RuntimeError(
                "Float8Linear: the optimizer stepped, or a weight was written by hand, but delayed "
                "scaling was not synced; call sync_float8_amax_and_scale_history(model) once per "
                "optimizer step, or attach_to_optimizer(model, optimizer) once before training"
            )

    def _float8_with_state(self, casts: Casts) -> Casts:
        """Return `casts`, where those with delayed scaling use scales and amaxes of this layer.

        In training mode, unless all Parameters are frozen, scales in its buffers are used: in grad
        mode, and in the first forward of reentrant checkpointing, which is repeated with grad. Else
        casts compute scales from their data, as a sync need not follow. Grad mode records amaxes; a
        cast by a scale known to be set on all ranks then loses its all-reduce. Raises
        `RuntimeError` if a sync is found missing, or in `torch.jit.trace` if it uses buffers.
        """
        self._float8_check_synced()
        records, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
        trains = self._float8_trains()
        if not (records or (trains and (compiling or in_reentrant_checkpoint()))):
            return casts  # which compute scales from the data
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            got = "got torch.jit.trace with delayed scaling, expected no gradients"
            no_trace = f"Float8Linear: {got}; trace it under torch.no_grad()"
            raise RuntimeError(NO_ONNX if torch.onnx.is_in_onnx_export() else no_trace)
        delayed = {}
        for site in self._float8_stateful:
            cast: Cast = getattr(casts, site.name)
            amax, scale = getattr(self, site.amax), getattr(self, site.scale)
            if not trains:
                scale = torch.full_like(scale, UNKNOWN_SCALE)
            elif compiling and not records:  # whether a checkpoint runs is known at run time only
                scale = torch.ops.float8.scale_without_gradients.default(scale)
                amax = torch.empty_like(amax)  # not recorded, but `cast_delayed` declares a write
            if cast.reduce is not None and trains and records and site.name in self._float8_known:
                cast = cast._replace(reduce=None)  # the scale is set, on all ranks
            delayed[site.name] = cast._replace(source=DelayedScale(scale, amax, records))
        return casts._replace(**delayed)

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        super().__setstate__(pickled)  # type: ignore[no-untyped-call]
        self._float8_state_was_written()  # version counters of the new buffers start anew

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a Parameter, and restart the check for missing updates of scales."""
        super().register_parameter(name, param)
        self._float8_versions = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StatefulLayer":
        weight: Any = self._parameters.get("weight")
        replaced = weight is not None and self._float8_replace_meta_buffers()
        before: dict[str, Tensor] = self._float8_state()
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self.get_buffer(name)
            if new.dtype != torch.float32:  # `.half()` and the like move buffers, but keep all bits
                self._buffers[name] = old.to(new.device)
        if replaced or any(old.is_meta for old in before.values()):
            self._float8_reset_state()  # `to_empty()` leaves values undefined
        self._float8_state_was_written()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        _strict, missing_keys, _unexpected_keys, error_msgs = rest
        before = self._float8_state()
        state_dict = _as_loadable(self, state_dict, prefix, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if not self._float8_replace_meta_buffers():  # else all buffers are new
            for name, new in self._float8_state().items():
                if new is not before[name]:  # by assign=True; copy, as its storage may be shared
                    self._buffers[name] = new.detach().to(torch.float32, copy=True)
        buffer_keys = {prefix + name for name in before}
        if buffer_keys.isdisjoint(state_dict):  # a checkpoint of the plain model, or a part of one
            missing_keys[:] = [key for key in missing_keys if key not in buffer_keys]
            if any(prefix + x in state_dict for x, _ in self.named_parameters() if x != "bias"):
                self._float8_reset_state()  # the old scales were of the old weight
        self._float8_state_was_written()  # loading wrote them


def _first_scale(config: Float8LinearConfig) -> float:
    return UNKNOWN_SCALE if config.enable_amax_init else 1.0


def _scale_without_gradients(scale: Tensor) -> Tensor:
    """Return `scale` in the first forward of reentrant checkpointing, else 0 (`UNKNOWN_SCALE`).

    That forward is recomputed with gradients, by `scale`; other forwards without gradients compute
    scales from the data. An op, since compiled code learns only at run time which forward runs.
    """
    return scale.clone() if in_reentrant_checkpoint() else torch.full_like(scale, UNKNOWN_SCALE)


register("scale_without_gradients", _scale_without_gradients, fake=torch.empty_like)


def _as_loadable(
    layer: StatefulLayer, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> dict[str, Any]:
    """Return a copy of `state_dict` whose buffers of delayed scaling suit the config of `layer`.

    Unchanged if none are at `prefix`. Else buffers of operands without delayed scaling in `layer`
    are dropped, new ones added for operands that have none, and histories cut or zero-padded to
    `history_len`, with a warning of all but padding. An amax or scale that is not 0-dim is replaced
    by that of `layer`, and a message added to `error_msgs`, so `load_state_dict` will raise.
    """
    loaded, changes = dict(state_dict), []
    buffers = {site: [prefix + name for name in site[1:]] for site in SITES.values()}
    keys_of = {site: [key for key in keys if key in loaded] for site, keys in buffers.items()}
    if not any(keys_of.values()):
        return loaded  # from a model without delayed scaling
    for site, keys in sorted(keys_of.items()):
        delayed = site in layer._float8_stateful
        if keys and not delayed:
            changes.append(f"dropped the state of {site.name}, which is not delayed here")
            for key in keys:
                del loaded[key]
        elif delayed and not keys:
            changes.append(f"found no state of {site.name}, which starts anew")
            # On the device of what is loaded, since a layer on meta takes tensors by assign=True.
            some_key = next(key for keys in keys_of.values() for key in keys)
            fresh = layer._float8_fresh_state(site, state_dict[some_key].device)
            loaded.update({prefix + name: value for name, value in fresh.items()})
        elif keys:
            for name in (site.amax, site.scale):
                # Torch would load the first element of a vector into a scalar buffer.
                if shape := list(getattr(loaded.get(prefix + name), "shape", ())):
                    error_msgs.append(
                        f"size mismatch for {prefix + name}: got shape {shape} in the checkpoint, "
                        "expected []; without the state of float8_experimental or torchao (all "
                        "keys with fp8_) the checkpoint loads, and delayed scaling starts anew"
                    )
                    loaded[prefix + name] = layer.get_buffer(name)
            history = loaded.get(prefix + site.history)
            if not isinstance(history, Tensor) or history.dim() != 1:
                continue
            steps, length = layer._float8_config.delayed_scaling_config.history_len, len(history)
            if length > steps:
                changes.append(f"dropped all but the last {steps} of {length} steps of {site.name}")
            padding = history.new_zeros(max(steps - length, 0))
            loaded[prefix + site.history] = torch.cat([history[:steps], padding])
    if changes:
        got = "float8: the checkpoint has delayed scaling of another configuration"
        warn(f"{got}: {'; '.join(changes)}")
    return loaded
